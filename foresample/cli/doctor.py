"""`foresample doctor`: what this installation has, which rounds serve on it, and whether they are exact.

What serves is asked of the engine that would use it, not inferred from what is installed; and every kind of round that
serves here is put to the test, on each device: `check` on a small chain whose denoiser is known. A captured round is
not looked at from within, so its finished samples are compared with sequential ones.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from foresample.backends.rounds import round_for
from foresample.baseline import sequential
from foresample.checks.exactness import check
from foresample.checks.findings import LEVEL, Finding
from foresample.checks.samples import samples_law
from foresample.cli import options
from foresample.cli.console import echo, plain_table, show, wait_line
from foresample.contracts import Target
from foresample.engine import Engine, sample
from foresample.provenance import __version__
from foresample.targets import GaussianMixture, vp

WINDOW = 6
NOT_ASKED_FOR = ("test", "docs", "all")  # extras that add nothing to what the package can do
ROUNDS = {
    "foresample.core.round": "plain",
    "foresample.backends.triton.round": "Triton",
    "foresample.backends.numba.round": "Numba",
}


@dataclass(frozen=True, kw_only=True)
class Package:
    """One that an extra asks for."""

    name: str
    extra: str
    wanted: str
    """Versions, as the extra says it."""
    version: str | None
    """Installed here."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One to sample on."""

    name: str
    about: str
    round: str
    """Which one serves: plain, Numba or Triton; broken if none can be made."""
    remedy: str | None
    """Why the plain round serves, and what to do about it."""
    graphs: bool
    """Whether rounds can be captured in CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class Tested:
    """The self-test of one kind of round on one device."""

    device: str
    round: str
    passed: bool
    detail: str
    seconds: float


def doctor_command(
    test: Annotated[
        bool, typer.Option("--test/--no-test", help="Also test that sampling here is exact.")
    ] = True,
    samples: Annotated[int, typer.Option(min=100, help="Of the self-test, on each device.")] = 2000,
    as_json: options.AsJson = False,
) -> None:
    """Say what this installation has and which rounds serve, and test them. Exit status 1 if the test fails."""
    versions = {
        "foresample": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": metadata.version("numpy"),
        "CUDA": torch.version.cuda or "none",
        "system": platform.platform(),
    }
    found, optional = [look_at(name) for name in device_names()], packages()
    tests: list[Tested] = []
    if not as_json:
        _show(versions, found, optional)
    if test:
        with wait_line(quiet=as_json) as say:
            for device in found:
                say(f"testing {device.name}")
                tests += self_test(device, samples)
    if as_json:
        told: dict[str, Any] = {"versions": versions, "devices": found, "packages": optional, "tests": tests}
        echo(json.dumps(told, default=asdict, indent=1))
    for one in () if as_json else tests:
        verdict = "ok  " if one.passed else "FAIL"
        echo(f"{verdict}  {one.round} rounds on {one.device}: {one.detail} ({one.seconds:.1f} s)")
    if not all(one.passed for one in tests):
        raise typer.Exit(1)


def _show(versions: dict[str, str], devices: list[Device], optional: list[Package]) -> None:
    for name, version in versions.items():
        echo(f"{name:12} {version}")
    table = plain_table("device", "", "rounds", "CUDA graphs", left=4)
    for device in devices:
        table.add_row(device.name, device.about, device.round, "yes" if device.graphs else "no")
    package_table = plain_table("package", "extra", "wanted", "here", left=4)
    for one in optional:
        package_table.add_row(one.name, one.extra, one.wanted, one.version or "not installed")
    show(table, package_table)
    for device in devices:
        if device.remedy:
            echo(f"{device.name}: {device.remedy}")


# ---------------------------------------------------------------- what there is


def packages() -> list[Package]:
    """What the extras ask for, as the installed package's metadata says; nothing of a package that is not installed."""
    try:
        required = metadata.requires("foresample") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in required:
        named = re.fullmatch(r"([\w.-]+)(\[.*\])?\s*([^;]*?)\s*;\s*extra == ['\"]([\w-]+)['\"]", line)
        if named and named[1] != "foresample" and named[4] not in NOT_ASKED_FOR:
            found.append(Package(name=named[1], wanted=named[3], extra=named[4], version=_version(named[1])))
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_names() -> list[str]:
    """Devices that commands take."""
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def look_at(name: str) -> Device:
    """What a device is, and which round the engine takes there."""
    on_gpu = name != "cpu"
    about = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if on_gpu:
        card = torch.cuda.get_device_properties(name)
        about = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {card.major}.{card.minor}"
    try:
        serving, remedy = serving_round(small_chain(name)), None
    except Exception as error:  # of a compiler, of any kind; the test below says it, too
        serving, remedy = "broken", f"no round can be made here: {type(error).__name__}: {error}"
    if serving == "plain":
        remedy = _why_plain(on_gpu=on_gpu)
    return Device(name=name, about=about, round=serving, remedy=remedy, graphs=on_gpu)


def _why_plain(*, on_gpu: bool) -> str:
    if on_gpu:
        return "the plain round serves, Triton is not installed: pip install triton"
    if os.environ.get("FORESAMPLE_PLAIN") == "1":
        return "the plain round serves, as FORESAMPLE_PLAIN=1 asks"
    return "the plain round serves, Numba is not installed: pip install 'foresample[fast]'"


def small_chain(device: str) -> Target:
    """DDPM of a mixture in two dimensions, whose denoiser is known: 16 steps, in the dtype of networks."""
    mixture = GaussianMixture(
        *(value.to(device, torch.float32) for value in vars(GaussianMixture.of_draft_trees(2)).values())
    )
    levels = torch.linspace(0.01, 0.99, 16, dtype=torch.float64)
    return vp(
        lambda x, level, row: mixture.denoise(x, level.sqrt(), (1 - level).sqrt()),
        levels,
        (2,),
        predicts="x0",
        device=device,
    )


def serving_round(target: Target) -> str:
    """Which round the engine takes for a chain like this one."""
    engine = Engine(target, window=WINDOW, slots=1)
    return ROUNDS[round_for(target, engine.how).propose.__module__]


# ---------------------------------------------------------------- is it exact?


def self_test(device: Device, samples: int) -> list[Tested]:
    """Every kind of round that serves on a device, tested; what breaks is a failure with its sentence."""
    target = small_chain(device.name)

    def watched() -> Finding:
        result = check(target, window=WINDOW, samples=samples, level=LEVEL)
        failed = [one for one in result.findings if not one.passed]
        return failed[0] if failed else next(one for one in result.findings if one.question == "distribution")

    def captured() -> Finding:
        drawn = sample(target, samples, window=WINDOW, slots=min(500, samples), graph=True).samples
        plain = sequential(target, samples, seed=1, slots=min(500, samples)).samples
        law = samples_law(plain, [drawn])
        return Finding("distribution", law.passed, f"{law.tests} tests, smallest p-value {law.smallest_p:.1e}")

    kinds: dict[str, Callable[[], Finding]] = {device.round: watched}
    if device.graphs:
        kinds["captured"] = captured
    tests = []
    for kind, test in kinds.items():
        began = perf_counter()
        try:
            finding = test()
            passed, detail = finding.passed, f"{finding.question}: {finding.detail}"
        except Exception as error:  # whatever does not run here is what this command is to find
            passed, detail = False, f"{type(error).__name__}: {error}"
        tests.append(
            Tested(device=device.name, round=kind, passed=passed, detail=detail, seconds=perf_counter() - began)
        )
    return tests
