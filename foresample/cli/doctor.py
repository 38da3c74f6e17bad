"""`foresample doctor`: shows the installed packages and the rounds that run here, and tests that these are exact.

The engine itself chooses the round, as in any run; nothing is inferred from installed packages. On each device every
kind of round is tested by `check`, on a small chain whose denoiser is known. Captured rounds call no observer, so their
finished samples are compared with sequential ones.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from importlib import metadata
from time import perf_counter
from typing import Any

import torch
import typer

from foresample.backends.rounds import round_for
from foresample.baseline import sequential
from foresample.checks.exactness import check
from foresample.checks.findings import Finding
from foresample.checks.samples import samples_law
from foresample.cli.console import echo, plain_table, show, wait_line
from foresample.cli.options import Doctor
from foresample.contracts import Target
from foresample.engine import Engine, sample
from foresample.provenance import __version__, install
from foresample.targets import vp
from foresample.targets.mixture import GaussianMixture
from foresample.text import duration

WINDOW = 6
NOT_ASKED_FOR = ("test", "docs", "all")  # extras without optional features
ROUNDS = {
    "foresample.core.round": "plain",
    "foresample.backends.triton.round": "Triton",
    "foresample.backends.numba.round": "Numba",
}
Row = dict[str, Any]


def run(options: Doctor) -> None:
    versions = {
        "foresample": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": metadata.version("numpy"),
        "CUDA": torch.version.cuda or "none",
        "system": platform.platform(),
    }
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    found, optional, tests = [look_at(name) for name in names], packages(), list[Row]()
    if not options.as_json:
        _show(versions, found, optional)
    if options.test:
        with wait_line(quiet=options.as_json) as say:
            for device in found:
                say(f"testing {device['name']}")
                tests += self_test(device, options.samples)
    if options.as_json:
        everything = {"versions": versions, "devices": found, "packages": optional, "tests": tests}
        echo(json.dumps(everything, indent=1))
    else:
        for one in tests:
            verdict, took = "ok  " if one["passed"] else "FAIL", duration(one["seconds"])
            echo(f"{verdict}  {one['round']} rounds on {one['device']}: {one['detail']} ({took})")
    if not all(one["passed"] for one in tests):
        raise typer.Exit(1)
    if not options.as_json:
        echo("Next: foresample demo draws a plan and a picture both ways, in less than a minute.")


def _show(versions: dict[str, str], devices: list[Row], optional: list[Row]) -> None:
    for name, version in versions.items():
        echo(f"{name:12} {version}")
    table = plain_table("device", "", "rounds", "CUDA graphs", left=4)
    for device in devices:
        table.add_row(device["name"], device["about"], device["round"], "yes" if device["graphs"] else "no")
    package_table = plain_table("package", "extra", "wanted", "here", left=4)
    for one in optional:
        package_table.add_row(one["name"], one["extra"], one["wanted"], one["version"] or "not installed")
    show(table, package_table)
    for device in devices:
        if device["remedy"]:
            echo(f"{device['name']}: {device['remedy']}")


def packages() -> list[Row]:
    """The packages of the extras, from the metadata of foresample; none if foresample itself is not installed.

    Each with its name, its extra, the versions wanted and the version installed here.
    """
    try:
        required = metadata.requires("foresample") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in required:
        named = re.fullmatch(r"([\w.-]+)(\[.*\])?\s*([^;]*?)\s*;\s*extra == ['\"]([\w-]+)['\"]", line)
        if named and named[1] != "foresample" and named[4] not in NOT_ASKED_FOR:
            try:
                version = metadata.version(named[1])
            except metadata.PackageNotFoundError:
                version = None
            found.append({"name": named[1], "extra": named[4], "wanted": named[3], "version": version})
    return found


def look_at(name: str) -> Row:
    """A device: its round (plain, Numba, Triton or broken), and the reason if it is not a fast one."""
    on_gpu = name != "cpu"
    about = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if on_gpu:
        card = torch.cuda.get_device_properties(name)
        about = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {card.major}.{card.minor}"
    remedy = None
    try:
        target = small_chain(name)
        serving = ROUNDS[
            round_for(target, Engine(target, window=WINDOW, slots=1).speculation).propose.__module__
        ]
    except Exception as error:  # a compiler may raise anything; the test below reports it, too
        serving, remedy = "broken", f"no round works here: {type(error).__name__}: {error}"
    if serving == "plain":
        why = f"Numba is not installed: {install('numba')}"
        if on_gpu:
            why = "Triton is not installed: pip install triton"
        elif os.environ.get("FORESAMPLE_PLAIN") == "1":
            why = "as FORESAMPLE_PLAIN=1 asks"
        remedy = f"the plain round serves, {why}"
    return {"name": name, "about": about, "round": serving, "remedy": remedy, "graphs": on_gpu}


def small_chain(device: str) -> Target:
    """DDPM of a mixture in two dimensions, whose denoiser is known: 16 steps, in float32."""
    parts = vars(GaussianMixture.of_draft_trees(2)).values()
    mixture = GaussianMixture(*(value.to(device, torch.float32) for value in parts))

    def denoise(x: torch.Tensor, level: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return mixture.denoise(x, level.sqrt(), (1 - level).sqrt())

    levels = torch.linspace(0.01, 0.99, 16, dtype=torch.float64)
    return vp(denoise, levels, (2,), predicts="x0", device=device)


def self_test(device: Row, samples: int) -> list[Row]:
    """The test of every kind of round on a device; an exception is a failure with its message."""
    target, slots = small_chain(device["name"]), min(500, samples)

    def watched() -> Finding:
        findings = check(target, window=WINDOW, samples=samples).findings
        failed = [one for one in findings if not one.passed]
        return (failed or [one for one in findings if one.question == "distribution"])[0]

    def captured() -> Finding:
        drawn = sample(target, samples, window=WINDOW, slots=slots, graph=True).samples
        law = samples_law(sequential(target, samples, seed=1, slots=slots).samples, [drawn])
        return Finding("distribution", law.passed, f"{law.tests} tests, smallest p-value {law.smallest_p:.1e}")

    kinds: dict[str, Callable[[], Finding]] = {device["round"]: watched}
    if device["graphs"]:
        kinds["captured"] = captured
    tests = []
    for kind, test in kinds.items():
        began = perf_counter()
        try:
            finding = test()
            passed, detail = finding.passed, f"{finding.question}: {finding.detail}"
        except Exception as error:  # any exception is a finding
            passed, detail = False, f"{type(error).__name__}: {error}"
        seconds = perf_counter() - began
        tests.append(
            {"device": device["name"], "round": kind, "passed": passed, "detail": detail, "seconds": seconds}
        )
    return tests
