"""Result files that are older than the code they measure.

A result depends on the code in `SOURCES`. It is stale when that code differs from the code at the commit that the file
names; refusals, docstrings, comments and messages do not count (`code.essence`). Results that cannot be measured again
on the machine at hand are listed with reasons (`standing`). Such a result is stale only when its code has changed since
the list was last judged.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache

from benchmarks.checks.code import essence
from benchmarks.checks.standing import JUDGED, STANDING
from benchmarks.result_files import Result
from benchmarks.results import RESULTS, read

ROOT = RESULTS.parent.parent
SHOWN = 3

RULE = (
    *(f"foresample/core/{name}.py" for name in ("coupling", "noise", "round", "verify")),
    *("foresample/drafters/replay.py", "foresample/chains/chain.py", "foresample/targets/chained.py"),
)
"""Code that decides how many calls a sample takes."""
PICTURES = (*RULE, "foresample/chains/schedulers.py", "foresample/pretrained/model.py")
MIXTURE = (*RULE, "foresample/chains/flow.py", "foresample/targets/mixture.py")
ENGINE = (
    *RULE,
    *("foresample/core/look.py", "foresample/core/report.py", "foresample/baseline.py", "foresample/backends"),
    *(f"foresample/engine/{name}.py" for name in ("engine", "sequential", "slots")),
)
"""Code that decides how long a sample takes."""
POLICY = (*ENGINE, "foresample/drafters/prior.py", "foresample/integrations/policies")
OF_CPUS = "foresample/backends/numba/", "LooseSlots"
OF_GPUS = "foresample/backends/triton/", "FixedSlots"
"""Code that runs on one kind of device only: a folder, and a class."""
DATASET = (*ENGINE, "foresample/datasets")
PEERS = tuple(f"benchmarks/peers/{name}.py" for name in ("common", "chains", "ranks", "trees"))
"""The exact methods of others."""
SOURCES: dict[str, Sequence[str]] = {
    "bench": (*MIXTURE, "benchmarks/mixture.py::bench"),
    "calls": (*PICTURES, "benchmarks/models.py::calls"),
    "curves": (*RULE, *PEERS, "benchmarks/curves.py::measure", "benchmarks/curves.py::tuned"),
    "published": (*MIXTURE, *PEERS, "benchmarks/published.py"),
    "ranked": (*RULE, *PEERS, "benchmarks/ranked.py"),
    "mcmc": (*ENGINE, "benchmarks/mcmc.py", "benchmarks/timing.py"),
    "growth": (*PICTURES, "benchmarks/clock.py::growth"),
    "warm": (*PICTURES, "foresample/drafters/prior.py", "benchmarks/clock.py::warm"),
    "order": (*RULE, "foresample/engine/slots.py", "benchmarks/order.py"),
    "quality": (*PICTURES, "benchmarks/models.py::quality"),
    "quality-cost": (*PICTURES, "benchmarks/peers", "benchmarks/quality_cost.py::draw"),
    "agreement": (*PICTURES, "benchmarks/agreement.py"),
    "check": (*PICTURES, "foresample/checks"),
    "cpu-clock": (*ENGINE, "benchmarks/cpu.py", "benchmarks/timing.py"),
    "cpu-rounds": (*ENGINE, "benchmarks/clock.py::cpu"),
    "latency": (*ENGINE, "benchmarks/clock.py::latency", "benchmarks/clock.py::_latencies"),
    "throughput": (*ENGINE, "benchmarks/clock.py::throughput", "benchmarks/clock.py::_throughput"),
    "memory": (*ENGINE, "benchmarks/clock.py::memory"),
    "frontier": (*ENGINE, "foresample/engine/tuning.py"),
    "gpu-tests": (*RULE, "foresample/backends", "tests/gpu"),
    "gpu-soak": (*RULE, "foresample/backends", "benchmarks/soak.py::draw"),
    "gpu-sanitizer": ("foresample/backends", "benchmarks/soak.py::sanitize"),
    "policy": (*POLICY, "benchmarks/policies.py", "benchmarks/timing.py"),
    "policy-warm": (*POLICY, "benchmarks/robots.py::handwriting"),
    "policy-learned": (
        *POLICY,
        "foresample/drafters/learned.py",
        "benchmarks/learning.py",
        "benchmarks/robot_plans.py",
    ),
    "robot-clock": (
        *POLICY,
        "foresample/drafters/learned.py",
        *(f"benchmarks/{name}.py" for name in ("robot_clock", "robot_plans", "timing")),
    ),
    "robot-profile": (
        "benchmarks/robot_profile.py",
        *(f"benchmarks/robot_clock.py::{name}" for name in ("Bfloat16", "ChannelsLast")),
    ),
    "robot-success": (
        *POLICY,
        *(f"benchmarks/robots.py::{name}" for name in ("success", "roll_out", "method_of")),
        *(f"benchmarks/robot_plans.py::{name}" for name in ("episodes", "fit")),
    ),
    "robot-deadlines": (
        *POLICY,
        *(f"benchmarks/robots.py::{name}" for name in ("deadlines", "method_of")),
        *(f"benchmarks/robot_plans.py::{name}" for name in ("episodes", "along")),
        "benchmarks/timing.py",
    ),
    "packages": (*ENGINE, "foresample/integrations/packages", "benchmarks/packages.py", "benchmarks/timing.py"),
    "package-counts": (*ENGINE, "foresample/integrations/packages", "benchmarks/packages.py::by_count"),
    "openai": ("foresample/integrations/packages", "tests/openai.py"),
    "generate-overhead": (*DATASET, "benchmarks/generate.py::overhead", "benchmarks/generate.py::_overhead"),
    "generate-memory": (*DATASET, "benchmarks/generate.py::memory"),
    "generate-law": (*DATASET, "benchmarks/generate.py::law"),
    "dataset": DATASET,
    "training": ("recipes/train.py", "recipes/config.py"),
    "training-classifier": ("recipes/classifier.py",),
}
"""Folders, files, and functions of files that results of a kind depend on; kinds not named here depend on `ENGINE`."""


def table() -> str:
    """One line a result: its commit, and what has changed since."""
    rows = [("result", "machine", "commit", "standing", "changed since")]
    for result in read().found:
        machine = "GPU" if _on_gpu(result) else "CPU"
        listed = "listed" if result.name in STANDING else ""
        rows.append((result.name, machine, (commit_of(result) or "none")[:7], listed, _shown(result)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join([*(f"{row[i]:{widths[i]}}" for i in range(4)), row[4]]) for row in rows)


def commit_of(result: Result) -> str | None:
    """The commit at which the result was measured: the file's own, or the one that the list names for it."""
    standing = STANDING.get(result.name)
    return standing.commit if standing and standing.commit else result.origins[0].commit


def in_history(commit: str) -> bool:
    """True if the commit is an ancestor of the current one."""
    return _git("merge-base", "--is-ancestor", commit, "HEAD") is not None


def whole_history() -> bool:
    """True in a clone with all commits; False in a shallow one, and where git does not answer."""
    return (_git("rev-parse", "--is-shallow-repository") or "").strip() == "false"


def stale(result: Result) -> list[str]:
    """Code of the result that changed and has not been judged since: files, and functions of files."""
    return changed(result, JUDGED if result.name in STANDING else None)


def changed(result: Result, since: str | None = None) -> list[str]:
    """Code of the result that is another one today than at a commit, the result's own by default."""
    commit = since or commit_of(result)
    assert commit is not None, f"{result.name} names no commit"
    folder, other = OF_CPUS if _on_gpu(result) else OF_GPUS
    found = []
    for source in SOURCES.get(result.kind, ENGINE):
        path, _, function = source.partition("::")
        before, now = _files(commit, path), _files("HEAD", path)
        for file in sorted({*before, *now}):
            if not file.startswith(folder) and (old := before.get(file)) != (new := _working(file)):
                one, two = (
                    None if text is None else essence(text, function or None, other) for text in (old, new)
                )
                if one != two:
                    found.append(source if function else file)
    return found


def _shown(result: Result) -> str:
    try:
        files = changed(result)
    except LookupError as error:
        return str(error)
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return f"{len(files)}: {', '.join(files[:SHOWN])}{more}" if files else "nothing"


def _on_gpu(result: Result) -> bool:
    return result.origins[0].machine.gpu is not None


@cache
def _files(commit: str, path: str) -> dict[str, str]:
    """Text of the Python files at or below a path."""
    listed = _git("ls-tree", "-r", commit, "--", path)
    if listed is None:
        raise LookupError(f"commit {commit} is not in this clone; fetch the whole history")
    entries = [line.split(maxsplit=3) for line in listed.splitlines()]
    return {file: _blob(blob) for _, _, blob, file in entries if file.endswith(".py")}


@cache
def _blob(blob: str) -> str:
    return _git("cat-file", "blob", blob) or ""


@cache
def _working(file: str) -> str | None:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.exists() else None


def _git(*arguments: str) -> str | None:
    """The output of git; None if it fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    return None if done.returncode else done.stdout
