"""Change the source in small ways, run the tests that should notice, and list the changes that no test noticed.

    make mutants                                              # the nasty ones below, then 150 at random
    python -m tests.mutants --sample 0                        # the nasty ones alone
    python -m tests.mutants --room core --sample 100000       # everything in a room

By hand, at low priority: a mutant takes seconds, a room an hour or more. The working tree is not touched: mutants live
in a copy. A process that has imported torch forks once a mutant, so that imports cost no time. Tests that pin bits
(`test_golden`) do not take part: they notice everything and understand nothing.

A mutant that hangs counts as noticed. What survives is either a missing test, or has its reason in `SPARED`.

Last run by hand: all nasty ones, of which one survived at first, and 500 at random, 450 of them in `coupling`,
`verify`, `round`, `noise` (most that there are of these) and the drafters, of which 72 did; each is killed by a test,
gone with code that was not needed, or spared with a reason. Of `engine` 89 were tried in file order, up to the middle
of `slots`, and of what was written since all of `drafters/prior` and 60 of `priors`, of which 8 survived at first; 50
more of `slots`; of `report` 60 and of `baseline` 26, of which 35 survived at first.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("core", "baseline.py", "backends", "drafters", "engine", "datasets")

_LAW = [
    "tests/law/test_law.py::test_extra_noise_and_third_order_have_the_law",
    "tests/law/test_law.py::test_no_correction_is_made_over_a_distance_that_rounding_spoils",
    "tests/law/test_law.py::test_fresh_noise_is_fresh_in_a_first_window",
    "tests/law/test_law.py::test_a_constant_mismatch_of_one_std[1-blocks of 4]",
]
TESTS = {
    "core/coupling.py": ["tests/core/test_coupling.py", "tests/core/test_verify.py"],
    "core/verify.py": [
        "tests/core/test_verify.py",
        *_LAW,
        "tests/law/test_law.py::test_noise_left_by_a_round_is_fresh_given_the_number_of_drafts_kept",
    ],
    "core/noise.py": [
        "tests/core/test_noise.py",
        "tests/core/test_extra.py",
        "tests/test_contracts.py",
        "tests/core/test_round.py",
        "tests/engine/test_sampling.py",
    ],
    "core/look.py": ["tests/core/test_look.py"],
    "core/report.py": ["tests/core/test_report.py", "tests/engine/test_engine.py"],
    "baseline.py": [
        "tests/core/test_report.py",
        "tests/engine/test_sampling.py",
        "tests/engine/test_engine.py",
    ],
    "backends": [
        "tests/backends/test_cpu.py",
        "tests/backends/test_interpreted.py",
        "tests/targets/test_frequencies.py",
    ],
    "core": [
        "tests/core/test_round.py",
        "tests/test_faults.py",
        "tests/engine/test_leaving.py",
        "tests/core/test_extra.py",
        "tests/engine/test_sampling.py",
        *_LAW,
    ],
    "drafters": [
        "tests/drafters",
        "tests/targets/test_frequencies.py",
        "tests/core/test_round.py",
        "tests/engine/test_sampling.py",
    ],
    "engine/tuning.py": ["tests/engine/test_tuning.py", "tests/core/test_look.py"],
    "engine/priors.py": [
        "tests/drafters/test_prior.py",
        "tests/targets/test_frequencies.py",
        "tests/engine/test_engine.py",
    ],
    "engine": [
        "tests/engine/test_leaving.py",
        "tests/engine/test_engine.py",
        "tests/engine/test_sampling.py",
        "tests/core/test_look.py",
    ],
    "datasets": ["tests/datasets"],
}
"""The tests of a file, or of all other files in its room: the quickest to notice first."""


def files_of(room: str) -> list[str]:
    """A room may be one file; kernels below a backend have mutants of their own (tests/backends)."""
    if room.endswith(".py"):
        return [room]
    return sorted(f"{room}/{path.name}" for path in (ROOT / "foresample" / room).glob("*.py"))


def tests_of(file: str) -> list[str]:
    return TESTS.get(file, TESTS[file.split("/")[0]])


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    text: str
    """The line as it was."""
    change: str
    source: str
    """The whole file with it."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.change}  in  {self.text}"


# ------------------------------------------------------------------ by hand

NASTY: tuple[tuple[str, str, str], ...] = (
    ("core/round.py", "draw=rows.round + 1)", "draw=rows.round)"),
    ("core/round.py", "rows.step.unsqueeze(1) + source\n", "rows.step.unsqueeze(1) + position\n"),
    (
        "core/round.py",
        "torch.cat([rows.previous.unsqueeze(1), predictions], dim=1)",
        "torch.cat([predictions[:, :1], predictions], dim=1)",
    ),
    ("core/round.py", "previous = remember(target, guess, previous)", "remember(target, guess, previous)"),
    (
        "core/round.py",
        "previous=history[:, -width - 1 :][index, accepted],",
        "previous=history[:, -width - 1],",
    ),
    (
        "core/round.py",
        "torch.cat([rows.previous.flip(1), predictions]",
        "torch.cat([rows.previous, predictions]",
    ),
    (
        "core/round.py",
        "None if draft.extra is None else draft.extra.flatten(0, 1)",
        "0 * draft.extra.flatten(0, 1)",
    ),
    ("core/noise.py", "stream=EXTRA, step=at,", "stream=STEP, step=at,"),
    ("core/noise.py", "stream=EXTRA, step=at,", "stream=EXTRA, step=0 * at,"),
    ("core/round.py", "note_fault(rows.fault, network, state, step, used)", "rows.fault"),
    (
        "core/round.py",
        "used = torch.arange(width + 1, device=step.device) <=",
        "used = torch.arange(width + 1, device=step.device) <",
    ),
    ("core/round.py", "examined - lost.long(), step[:, 0])", "examined, step[:, 0])"),
    ("core/round.py", "torch.where(std == 0,", "torch.where(std < 0,"),
    (
        "core/round.py",
        "begin_memory(speculation.drafter, speculation.window, sample, x[0])",
        "begin_memory(speculation.drafter, speculation.window, 0 * sample, x[0])",
    ),
    ("core/verify.py", "FAR = 1e5", "FAR = 1e9"),
    ("core/verify.py", "FAR = 1e5", "FAR = 1e2"),
    ("core/verify.py", "moved - s, 0.0)", "0.0 * s, 0.0)"),
    ("core/verify.py", "(index < failing) | (index == failing) & passed", "(index < failing)"),
    ("core/verify.py", "if i % block:", "if i:"),
    ("core/verify.py", "expand(examined, noise), fresh, noise)", "expand(corrected, noise), fresh, noise)"),
    ("core/verify.py", "moved - _along(direction, fresh), 0.0)", "moved - s, 0.0)"),
    ("core/noise.py", "(element, round.unsqueeze(1), zero,", "(element, 0 * round.unsqueeze(1), zero,"),
    ("core/noise.py", "torch.full_like(pair, stream)", "torch.full_like(pair, STEP)"),
    ("core/noise.py", "torch.full_like(element, TEST)", "torch.full_like(element, STEP)"),
    (
        "drafters/replay.py",
        "position + committed.unsqueeze(1), path.length",
        "position + committed.unsqueeze(1) - 1, path.length",
    ),
    ("drafters/replay.py", 'torch.where(expand(position < memory["horizon"], x), within, beyond)', "within"),
    (
        "drafters/replay.py",
        '(position < memory["visited"].unsqueeze(1))\n        slope',
        "(position >= 0)\n        slope",
    ),
    (
        "drafters/replay.py",
        "nearest = torch.where(telling, position, -1).cummax(1)",
        "nearest = torch.where(telling, position, -1).flip(1).cummax(1)",
    ),
    (
        "drafters/replay.py",
        "diverges = seen_twice & (swept > DIVERGED * away)",
        "diverges = seen_twice & (swept < 0)",
    ),
    (
        "drafters/replay.py",
        "torch.where(diverges, position, width).amin(1) - 1",
        "torch.where(diverges, position, width).amin(1) - 2",
    ),
    ("drafters/prior.py", "row.to(self.states.device) % len(self.states)", "0 * row.to(self.states.device)"),
    ("engine/slots.py", "== self.runner.steps) | (self.rows.fault != NO_FAULT)", "== self.runner.steps)"),
    ("engine/slots.py", "[slot for slot in busy if fault[slot] != NO_FAULT]", "[]"),
    ("engine/slots.py", "rows.step[slot] = step[slot] = steps", "step[slot] = steps"),
    ("engine/slots.py", "x = rows.x.clone() if", "x = rows.x if"),
    ("engine/slots.py", "min(certain, max(1, int(wide)))", "max(1, int(wide))"),
    ("engine/slots.py", "if drafts < self.widths[-1]:", "if False:"),
    ("engine/slots.py", "if width >= longest)", "if width >= longest - 1)"),
    ("engine/engine.py", "if stop is not None and stop():", "if False:"),
    ("engine/priors.py", "seeds_of(_SEED + seed_number(seed), pilots)", "seeds_of(seed, pilots)"),
    ("datasets/manifest.py", 'manifest.get("law") if checked else None', 'manifest.get("law")'),
    ("datasets/manifest.py", 'min(manifest.get("fair", 0), in_order)', 'manifest.get("fair", 0)'),
    ("datasets/generation.py", "if whole and was_fair and", "if whole and"),
    ("datasets/generation.py", "if whole and was_fair and", "if was_fair and"),
    ("datasets/workers.py", "shard.left = 0  #", "pass  #"),
    ("datasets/manifest.py", 'and shards == manifest.get("shards")', ""),
    (
        "datasets/workers.py",
        "seeds_of(plan.seed, count, plan.count)",
        "seeds_of(plan.seed, count, 0)",
    ),
    ("datasets/generation.py", "if law and not run.unfinished() else", "if law else"),
)
"""(file, text, the mutant's text): mistakes that are easy to make, and some that were made."""


LEFT_OUT = {
    "backends/graphs.py": "captures CUDA graphs, which only a GPU has (tests/gpu)",
    "datasets/cluster.py": "noticed by real clusters only, a minute a test (tests/datasets/test_cluster.py)",
}
"""Files of which no mutants are made, and why."""


ANY = "any change"
SPARED: tuple[tuple[str, str, str, str], ...] = (
    ("core/coupling.py", "NEWTON_STEPS = 8", "'8' → '9'", "one more step from the root stays there"),
    *(
        (
            "core/coupling.py",
            line,
            "'.clamp(max=SMALL)' → ''",
            "spares a branch that is not taken from overflow",
        )
        for line in ("narrow = mismatch.clamp(max=SMALL)", "narrow = width.clamp(max=SMALL)")
    ),
    *(
        ("core/coupling.py", line, "'<' → '<='", "at the very border both forms are right")
        for line in (
            "value = torch.where(mismatch < SMALL, small, large.clamp(min=0.0))",
            "between = torch.where(mismatch < SMALL, small, normal_cdf(s) - normal_cdf(s - mismatch))",
            "return torch.where(width < SMALL, _mills_drop(x, narrow), _mills(x) - _mills(x + width))",
        )
    ),
    *(
        (
            "core/coupling.py",
            "near = (level > NEAR) & (y_near > 0) & (y_near < y_right) & (y_near * (mismatch + t) < 1)",
            change,
            "where Newton's method starts; it comes to the same root from there",
        )
        for change in ("'1' → '2'", "'>' → '>='", "'<' → '<='")
    ),
    *(
        (
            "core/coupling.py",
            "y = torch.where((step > 0) & (step <= y_right), step, y)  # outside: rounding at the root, stay",
            change,
            "a step to the very border is as much rounding as one beyond it",
        )
        for change in ("'>' → '>='", "'<=' → '<'")
    ),
    (
        "core/coupling.py",
        "y_near = 1.2 * (2 * (1 - level) * S / (_density(t) * mismatch)).sqrt()",
        "'2' → '3'",
        "where Newton's method starts",
    ),
    *(
        (
            "core/coupling.py",
            "return torch.where(log_p < 0, value, torch.erf(mismatch / (2 * math.sqrt(2))))",
            change,
            "at p = 1 both forms agree to rounding",
        )
        for change in ("'<' → '<='", "'0' → '1'")
    ),
    (
        "core/coupling.py",
        "w_right = -ndtri(aim.exp().clamp(TINY, 1 - ULP))",
        "'.clamp(TINY, 1 - ULP)' → ''",
        "only rounding could bring an argument of 1 or more",
    ),
    (
        "core/coupling.py",
        "w_right = -ndtri(aim.exp().clamp(TINY, 1 - ULP))",
        "'-' → '+'",
        "matters at levels within rounding of 1, which are met once in 10¹⁵ corrections",
    ),
    (
        "core/noise.py",
        "if isinstance(seeds, Tensor) and seeds.dtype == torch.int64 and seeds.ndim == 1 and not (seeds < 0).any():",
        "'0' → '1'",
        "the longer way gives the same",
    ),
    (
        "core/noise.py",
        "count: int | None = None, seed: int = 0, seeds: Sequence[int] | Tensor | None = None",
        "'0' → '1'",
        "stands for none where seeds are given; whoever derives them gives one",
    ),
    (
        "core/verify.py",
        "near = (gap <= FAR * std.double()) & (position < length.unsqueeze(1))",
        "'<=' → '<'",
        "decided before the noise is looked at, for this δ as for any other",
    ),
    (
        "core/verify.py",
        "return torch.where(log_p < 0, coupling.residual(level, mismatch, log_p), mismatch - s)",
        "'0' → '1'",
        "at p = 1 the residual is the reflection (tests/core/test_coupling.py)",
    ),
    (
        "core/round.py",
        "return _stream(speculation, rows.seed, step, rows.noise, draw=rows.round + 1)",
        "'1' → '2'",
        "as fresh; that kernels count alike is their tests'",
    ),
    (
        "core/round.py",
        "spread = torch.zeros_like(states)",
        "'zeros_like' → 'ones_like'",
        "nobody looks at what stands where nothing was evaluated",
    ),
    (
        "core/round.py",
        "new = new & (step < steps)",
        "'<' → '<='",
        "noise of a step behind the chain costs a little and is never spent",
    ),
    (
        "core/round.py",
        "return max(1, int(length.max()))",
        "'1' → '2'",
        "a draft beyond what is needed is not evaluated, nor verified",
    ),
    ("engine/priors.py", "MATRIX_ELEMENTS = 128", ANY, "a matter of cost; the law depends on no prior"),
    (
        "engine/priors.py",
        "before = no_history(target, states[:, 0])",
        "'0' → '1'",
        "zeros of the same shape",
    ),
    (
        "engine/priors.py",
        "_SEED = 2**61  # of the pilots, far from the seeds that users choose",
        "'61' → '62'",
        "as far away",
    ),
    (
        "engine/priors.py",
        "self.predictions = torch.zeros_like(self.states)",
        "'zeros_like' → 'ones_like'",
        "every place is written before it is read",
    ),
    *(
        (
            "engine/priors.py",
            "kept = steps if _has_jacobian(target) else min(window + 1, steps)",
            change,
            "more is remembered than is needed",
        )
        for change in ("'min' → 'max'", "'1' → '2'")
    ),
    (
        "engine/priors.py",
        "self.states = target.std.new_zeros((samples, steps + 1, *target.shape))",
        "'1' → '2'",
        "more is remembered than is needed",
    ),
    (
        "engine/priors.py",
        "seeds = seeds_of(_SEED + seed_number(seed), pilots)",
        "'+' → '-'",
        "seeds that are nobody else's, too",
    ),
    (
        "engine/priors.py",
        "engine = Engine(recorded, window=window, slots=slots or pilots, look=False)",
        "'False' → 'True'",
        "a call more",
    ),
    (
        "engine/priors.py",
        "(v[:, :table] - mean[which]).flatten(2) for v, mean in zip((states, predictions), means, strict=True)",
        "'True' → 'False'",
        "both have two",
    ),
    (
        "engine/slots.py",
        "STATES = (2, 4, 6, 8, 12, 16, 20, 26, 32, 40, 50, 64, 80, 104, 128)",
        ANY,
        "a matter of cost: samples do not depend on widths",
    ),
    (
        "engine/slots.py",
        "self.rows = runner.begin(*self.asked[:2].to(device)).map(_own)",
        ANY,
        "rows that nobody draws",
    ),
    (
        "engine/slots.py",
        "asked[:, slot] = *begun, 1",
        "'1' → '2'",
        "as true",
    ),
    ("engine/tuning.py", "WINDOWS = (2, 4, 8, 16, 32, 64)", ANY, "others could be tried as well"),
    (
        "datasets/folder.py",
        'found = os.pread(file, 200, 0).decode(errors="replace").strip()',
        "'200' → '201'",
        "enough of a process and its machine to name them",
    ),
    (
        "datasets/shards.py",
        "if ((costs < 1) | (costs > 2**40)).any():  # more is an error, and could overflow sums",
        "'>' → '>='",
        "nobody means that very number, either",
    ),
    (
        "datasets/workers.py",
        'with ThreadPoolExecutor(1, thread_name_prefix="shards") as writer:',
        "'1' → '2'",
        "two writers would do as well",
    ),
    (
        "datasets/workers.py",
        "_WRITING = 2  # full shards that may wait for the disk before drawing stops to wait",
        "'2' → '3'",
        "a matter of memory",
    ),
    (
        "datasets/shards.py",
        'metadata = {"foresample": json.dumps({**about, "sha256": sha256}, sort_keys=True)}',
        "'True' → 'False'",
        "any order would do that is always the same, and this dictionary's is",
    ),
)
"""(file, line, change or ANY, reason) of survivors that are no missing test."""


def spared(mutant: Mutant) -> str | None:
    """The reason why no test needs to notice it."""
    for file, text, change, reason in SPARED:
        if (file, text) == (mutant.file, mutant.text) and change in (ANY, mutant.change):
            return reason
    return None


def nasty(rooms: list[str]) -> Iterator[Mutant]:
    for file, old, new in NASTY:
        if file.split("/")[0] not in rooms:
            continue
        source = (ROOT / "foresample" / file).read_text()
        if source.count(old) != 1:
            raise SystemExit(f"{file} has {source.count(old)} times {old!r}: NASTY is out of date")
        at = source.index(old)
        line = source.count("\n", 0, at) + 1
        text = source.splitlines()[line - 1].strip()
        yield Mutant(file, line, text, f"{old!r} → {new!r}", source.replace(old, new))


# ------------------------------------------------------------------ by machine

_SWAPS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
_CALLS = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin",
    "cummin": "cummax", "cummax": "cummin", "any": "all", "all": "any", "ones_like": "zeros_like",
    "zeros_like": "ones_like", "clamp": "", "clamp_": "", "exp": "expm1", "floor": "ceil",
}  # fmt: skip


def generated(file: str) -> Iterator[Mutant]:
    """Every small change of a file: comparisons, signs, integers, logic, extremes, clamps, booleans."""
    source = (ROOT / "foresample" / file).read_text()
    raw = source.encode()
    starts = [0]
    for each in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(each))

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, right: ast.expr, op: ast.AST) -> Iterator[tuple[int, int, bytes]]:
        if type(op) in _SWAPS:
            old, new = (word.encode() for word in _SWAPS[type(op)])
            first, last = span(left)[1], span(right)[0]
            at = raw.find(old, first, last)
            if at >= 0:
                yield at, at + len(old), new

    def edits(node: ast.AST) -> Iterator[tuple[int, int, bytes]]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
            yield span(node)[0], span(node.operand)[0], b""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield *span(node), str(not node.value).encode()
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield *span(node), str(node.value + 1).encode()
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in _CALLS:
                return
            end = span(node.func)[1]
            if _CALLS[name]:
                yield end - len(name), end, _CALLS[name].encode()
            elif isinstance(node.func, ast.Attribute):
                yield span(node.func.value)[1], span(node)[1], b""

    lines = source.splitlines()
    for node in _walk(ast.parse(source)):
        for first, last, new in edits(node):
            mutated = raw[:first] + new + raw[last:]
            try:
                compile(mutated, file, "exec")
            except SyntaxError:
                continue
            number = raw.count(b"\n", 0, first) + 1
            change = f"{raw[first:last].decode()!r} → {new.decode()!r}"
            yield Mutant(file, number, lines[number - 1].strip(), change, mutated.decode())


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but what only speaks to people or types: annotations, messages, `__repr__`."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom
            ):
                continue
            if isinstance(child, ast.FunctionDef) and child.name == "__repr__":
                continue
            yield child
            yield from _walk(child)


# ------------------------------------------------------------------ running


def copy_of(root: Path) -> Path:
    """The repository without what no test here reads."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-")) / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "out", "assets", "results", "docs")
    return Path(shutil.copytree(root, folder, ignore=ignored))


def noticed(copy: Path, tests: list[str], log: Path, seconds: float) -> str | None:
    """Run the tests in a fork: how they noticed, or None if they did not."""
    child = os.fork()
    if child == 0:
        _run_and_exit(copy, tests, log, seconds)
    deadline = (
        time.monotonic() + 20 * seconds
    )  # for those that sleep; the others are stopped by their own clock
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGXCPU:
                return "hung"
            return None if code == 0 else "failed" if code == 1 else f"broke ({code})"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def _run_and_exit(copy: Path, tests: list[str], log: Path, seconds: float) -> None:
    code = 3
    try:
        os.setpgid(0, 0)
        used = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds), int(used + seconds) + 5))
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.chdir(copy)
        sys.dont_write_bytecode = True  # a mutant of the same second and size would run the last one's
        sys.path[:] = [str(copy), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(copy)
        os.environ["FORESAMPLE_PLAIN"] = "1"  # else compiled rounds would run instead of the mutant
        for name in [m for m in sys.modules if m.split(".")[0] in ("tests", "foresample")]:
            del sys.modules[name]
        import hypothesis
        import pytest

        # Found is enough: no time for the smallest example.
        hypothesis.settings.register_profile(
            "found is enough", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
        )
        hypothesis.settings.load_profile("found is enough")
        chosen = "not (slow or ray or browser or gpu)"
        quiet = [
            "-q",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
        ]
        code = int(pytest.main(["-x", "-m", chosen, *quiet, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", choices=ROOMS, action="append", help="all by default")
    parser.add_argument("--file", default="", help="only files whose name has this in it")
    parser.add_argument("--sample", type=int, default=150, help="generated mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-nasty", action="store_true")
    parser.add_argument("--seconds", type=float, default=120, help="of processor time for one mutant")
    options = parser.parse_args()
    rooms = options.room or list(ROOMS)

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import hypothesis, mpmath, pytest, scipy.stats, torch  # noqa: E401, F401, I001  (before forking)

    torch.set_num_threads(1)
    machine = [
        mutant
        for room in rooms
        for file in files_of(room)
        if file not in LEFT_OUT
        for mutant in generated(file)
        if options.file in mutant.file
    ]
    drawn = random.Random(options.seed).sample(machine, min(options.sample, len(machine)))
    mutants = [
        *(m for m in nasty(rooms) if options.file in m.file and not options.no_nasty),
        *sorted(drawn, key=lambda m: (m.file, m.line)),
    ]
    copy = copy_of(ROOT)
    log = copy.parent / "log"
    try:
        for tests in {tuple(tests_of(mutant.file)) for mutant in mutants}:
            found = noticed(copy, list(tests), log, 5 * options.seconds)
            if found is not None:
                raise SystemExit(
                    f"these do not pass without a mutant ({found}): {tests}\n{log.read_text()[-3000:]}"
                )
        counts, survivors = Counter[str](), []
        for number, mutant in enumerate(mutants, 1):
            path = copy / "foresample" / mutant.file
            honest = path.read_text()
            path.write_text(mutant.source)
            try:
                how = noticed(copy, tests_of(mutant.file), log, options.seconds)
            finally:
                path.write_text(honest)
            reason = spared(mutant)
            verdict = how or (f"spared: {reason}" if reason else "SURVIVED")
            counts["noticed" if how else "spared" if reason else "survived"] += 1
            if verdict == "SURVIVED":
                survivors.append(mutant)
            print(f"{number}/{len(mutants)} {verdict:9} {mutant}", flush=True)
        print(f"\n{len(mutants)} of {len(machine) + len(NASTY)} mutants: {dict(counts)}")
        for mutant in survivors:
            print(f"SURVIVED {mutant}")
    finally:
        shutil.rmtree(copy.parent, ignore_errors=True)
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
