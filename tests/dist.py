"""The wheel stands alone: `make dist` builds it and uses it where nothing of this repository is.

    python -m tests.dist                      # everything below
    python -m tests.dist --only oldest        # one of the environments
    python -m tests.dist --build-only         # sdist, wheel, metadata

Built: sdist and wheel (the wheel from the sdist, so that the sdist is whole), looked through, judged by `twine check`.
Then, in an empty environment for each of the cases, outside of the repository: the bare wheel imports and samples, and
its command names the extra it lacks; with the extras `doctor`, `sample` and `check` run, and a diffusers pipeline is
accelerated. The oldest versions are the lower bounds of pyproject.toml, the newest what the index has. In one
environment `mypy --strict` reads a program that uses every public name.

A missing interpreter is reported, and counts as skipped; with `--all-required` it is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = "models,cli,fast"
QUIET = ["--quiet", "--disable-pip-version-check"]

BARE = """
import foresample as fs
target = fs.GaussianMixture.of_draft_trees(2).flow(16, 1.0)
assert fs.sample(target, 20, window=6).speedup > 1.2
print(fs.__file__)
"""

PIPELINE = """
import diffusers, torch, foresample
unet = diffusers.UNet2DModel(
    sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
)
pipe = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"))
pipe.set_progress_bar_config(disable=True)
with foresample.accelerate(pipe, window=4):
    pipe(batch_size=1, num_inference_steps=12, generator=torch.Generator().manual_seed(0), output_type="np")
    assert pipe.foresample_report.calls_mean < 12
"""

VERSIONS = """
import json
from importlib import metadata
print(json.dumps({name: metadata.version(name) for name in ("torch", "numpy", "diffusers", "numba")}))
"""


@dataclass(frozen=True)
class Case:
    """An environment to try."""

    name: str
    python: str
    constraints: tuple[str, ...]
    strict: bool = False
    """True if mypy --strict checks a program there."""


@dataclass(frozen=True)
class Outcome:
    """The result of a case."""

    case: str
    python: str
    state: str
    """ok, FAILED or skipped."""
    detail: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def lower_bounds() -> tuple[str, ...]:
    """The oldest versions that pyproject.toml promises, as constraints: `torch>=2.7` is `torch==2.7.*`."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(line for extra in EXTRAS.split(",") for line in extras[extra])]
    found = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in wanted]
    return tuple(f"{one[1]}=={one[2]}.*" for one in found if one)


def pinned() -> tuple[str, ...]:
    """The versions that `make` installs."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def cases() -> list[Case]:
    return [
        Case("pinned", "3.11", pinned(), strict=True),
        Case("oldest", "3.11", lower_bounds()),
        Case("newest-3.12", "3.12", ()),
        Case("newest", "3.13", ()),
    ]


# ---------------------------------------------------------------- building


def build(out: Path, tools: Path) -> Path:
    """The wheel, after everything that can be seen of it without using it."""
    run([sys.executable, "-m", "venv", tools])
    run([tools / "bin" / "pip", "install", *QUIET, "build", "twine"])
    shutil.rmtree(out, ignore_errors=True)
    run([tools / "bin" / "python", "-m", "build", "--outdir", out, ROOT])
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    run([tools / "bin" / "twine", "check", "--strict", sdist, wheel])
    look_through(sdist, wheel)
    return wheel


def look_through(sdist: Path, wheel: Path) -> None:
    """The package whole, and nothing else; what an index shows of it."""
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (about,) = [packed.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    package = ROOT / "foresample"
    kept = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert kept - names == set(), f"not in the wheel: {sorted(kept - names)}"
    strangers = {name for name in names - kept if ".dist-info/" not in name}
    assert strangers == set(), f"in the wheel, but not of the package: {sorted(strangers)}"
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.11", "Provides-Extra: all"):
        assert line in about, f"not in the metadata: {line}"
    assert any(name.endswith("LICENSE") for name in names)
    with tarfile.open(sdist) as packed_source:
        inside = {name.partition("/")[2] for name in packed_source.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md"} | kept <= inside, "the sdist is not whole"


# ---------------------------------------------------------------- using


def interpreter(version: str) -> Path | None:
    """A Python of this version: of this process, on the path, or of pyenv."""
    if sys.version.startswith(f"{version}."):
        return Path(sys.executable)
    roots = [os.environ.get("PYENV_ROOT"), str(Path.home() / ".pyenv")]
    of_pyenv = [
        p for root in roots if root for p in sorted(Path(root).glob(f"versions/{version}.*/bin/python"))
    ]
    on_path = shutil.which(f"python{version}")
    for found in [*of_pyenv, *([Path(on_path)] if on_path else [])]:
        told = subprocess.run([found, "--version"], capture_output=True, text=True)
        if told.stdout.startswith(f"Python {version}."):
            return found
    return None


def try_case(case: Case, wheel: Path, folder: Path) -> Outcome:
    """Install it in an empty environment and use it; a command that fails is the outcome."""
    python = interpreter(case.python)
    if python is None:
        return Outcome(case.name, case.python, "skipped", f"there is no Python {case.python} here")
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "constraints.txt").write_text("\n".join(case.constraints))
    env, pins = folder / "env", ["-c", str(folder / "constraints.txt")]
    try:
        run([python, "-m", "venv", env])
        run([env / "bin" / "python", "-m", "pip", "install", *QUIET, "--upgrade", "pip"], folder)
        use(case, wheel, env / "bin", pins, folder)
        versions = json.loads(run([env / "bin" / "python", "-c", VERSIONS], folder))
    except (subprocess.CalledProcessError, AssertionError) as error:
        told = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
        command = " ".join(map(str, getattr(error, "cmd", [])[-6:]))
        detail = f"{command[:200]}: {told.strip()[-1500:]}"
        return Outcome(case.name, case.python, "FAILED", detail, seconds=time.monotonic() - began)
    return Outcome(case.name, case.python, "ok", versions=versions, seconds=time.monotonic() - began)


def use(case: Case, wheel: Path, bin: Path, pins: list[str], folder: Path) -> None:
    """The first steps of a new user."""
    install = [bin / "pip", "install", *QUIET, *pins]
    run([*install, wheel], folder)
    where = run([bin / "python", "-c", BARE], folder).strip()
    assert Path(where).is_relative_to(folder), f"imported from {where}"
    lacking = subprocess.run([bin / "foresample"], capture_output=True, text=True, cwd=folder)
    assert lacking.returncode == 2, "without its extra the command should refuse"
    assert "which is not installed: pip install " in lacking.stderr, lacking.stderr
    run([*install, f"{wheel}[{EXTRAS}]"], folder)
    told = json.loads(run([bin / "foresample", "doctor", "--json"], folder))
    assert told["devices"][0]["round"] == "Numba", told["devices"]
    small = ["--steps", "12", "--window", "4"]
    run([bin / "foresample", "sample", "--count", "2", *small, "--out", "drawn", "--compare"], folder)
    for name in ("samples.png", "compare.png", "run.png", "report.json"):
        assert (folder / "drawn" / name).stat().st_size > 0, name
    assert json.loads((folder / "drawn" / "report.json").read_text())["speculative"]["calls_mean"] < 12
    run([bin / "foresample", "check", "vp", *small, "--samples", "500"], folder)
    run([bin / "python", "-W", "ignore", "-c", PIPELINE], folder)
    run([*install, "--dry-run", f"{wheel}[all]"], folder)
    if case.strict:
        run([*install, "mypy"], folder)
        shutil.copy(ROOT / "tests" / "outside.py", folder / "outside.py")
        run([bin / "mypy", "--strict", "outside.py"], folder)
        run([bin / "python", "outside.py"], folder)


def run(command: list[Any], folder: Path | None = None) -> str:
    """The output of a command, run elsewhere and with nothing in its environment that leads to this repository."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "FORESAMPLE"))}
    done = subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True, cwd=folder, env=env
    )
    return done.stdout


def table(outcomes: list[Outcome]) -> str:
    lines = ["| case | Python | torch | numpy | diffusers | numba | |", "|---|---|---|---|---|---|---|"]
    for one in outcomes:
        shown = [one.versions.get(name, "–") for name in ("torch", "numpy", "diffusers", "numba")]
        note = one.state if one.state != "skipped" else f"skipped: {one.detail}"
        lines.append(" | ".join([f"| {one.case}", one.python, *shown, f"{note} |"]))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[case.name for case in cases()])
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--all-required", action="store_true", help="a missing interpreter is a failure")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where sdist and wheel go")
    parser.add_argument(
        "--environments", type=Path, help="kept there, to look at; a folder that goes away by default"
    )
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build(options.out.resolve(), Path(scratch) / "tools")
        print(f"built and checked {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
        for case in [] if options.build_only else cases():
            if options.only and case.name not in options.only:
                continue
            place = (options.environments or Path(scratch)).resolve() / case.name
            outcomes.append(try_case(case, wheel, place))
            print(f"{case.name}: {outcomes[-1].state} {outcomes[-1].detail}", flush=True)
            if options.environments is None:
                shutil.rmtree(place, ignore_errors=True)
    if outcomes:
        print(table(outcomes))
        (options.out / "outcomes.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    bad = ("FAILED", "skipped") if options.all_required else ("FAILED",)
    return 1 if any(one.state in bad for one in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
