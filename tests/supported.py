"""Tables of what is supported, made by the tests: `python -m tests.supported` writes them into the pages.

Every row has a test: pipelines come from the cases of `tests.support.pipelines`, policies from the families
of `tests.support.policies`, packages name the test that replays them; commands give their help texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
from typer.main import get_command

from benchmarks import tables
from benchmarks.kinds.packages import Copies
from benchmarks.results import load
from benchmarks.tables.markdown import table
from foresample.cli.app import app
from tests.support.pipelines import EXACT, REFUSED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

PACKAGES = {
    "diffusers": (
        "pipelines, and schedulers around your own network",
        "`fs.accelerate(pipe)`, `fs.targets.from_scheduler`",
        "tests/chains/test_schedulers.py::test_replaying_step_with_the_same_noise",
    ),
    "denoising-diffusion-pytorch": (
        "`GaussianDiffusion` (also with learned variances or guidance), `GaussianDiffusion1D`, "
        "`ContinuousTimeGaussianDiffusion`, `VParamContinuousTimeGaussianDiffusion`, `ElucidatedDiffusion`",
        "`fs.accelerate(diffusion)`",
        "tests/integrations/test_packages.py::test_their_loop_with_the_same_noise",
    ),
    "monai": (
        "`DiffusionInferer`",
        "`fs.accelerate(inferer)`",
        "tests/integrations/test_packages.py::test_monai_s_sample_with_the_same_noise",
    ),
    "boltz": (
        "`AtomDiffusion`, versions 1 and 2",
        "`fs.accelerate(diffusion)`",
        "tests/integrations/test_packages.py::test_boltz_s_loop_with_the_same_noise",
    ),
    "deepinv": (
        "`PosteriorDiffusion` and `DPS`, Euler and ancestral solvers",
        "`fs.accelerate(model)`",
        "tests/integrations/test_deepinv.py::test_their_loop_with_the_same_noise",
    ),
    "OpenAI's diffusion class": (
        "`GaussianDiffusion`, `SpacedDiffusion`",
        "`fs.accelerate(diffusion)`",
        "tests/integrations/test_openai.py::test_its_loop_with_the_same_noise",
    ),
    "sbi": (
        "posteriors from score estimators (NPSE)",
        "`fs.accelerate(posterior)`",
        "tests/integrations/test_sbi.py::test_its_loop_with_the_same_noise",
    ),
    "lerobot": (
        "`DiffusionPolicy`",
        "`fs.accelerate(policy)`",
        "tests/integrations/test_lerobot.py::test_actions_come_as_they_did",
    ),
    "k-diffusion": (
        "its stochastic samplers, same names and arguments",
        "`fs.samplers`",
        "tests/test_samplers.py::test_samples_have_the_distribution_of_theirs",
    ),
}
"""Packages whose sampler a test replays step by step: what is supported, the call, and the test."""

_LOOPS = "tests/integrations/test_loops.py::test_plans_have_the_sequential_distribution_with_fewer_calls"
_FAMILIES = "tests/integrations/test_policies.py::test_plans_have_the_sequential_distribution_with_fewer_calls"
POLICIES = {
    "LeRobot's `DiffusionPolicy`": (
        "the installed class",
        "tests/integrations/test_lerobot.py::test_plans_have_lerobot_s_distribution_with_fewer_calls",
    ),
    "`diffusion_policy`: U-Net and transformer policies": ("its interface and loop", _FAMILIES),
    "robomimic's diffusion policy, and its `RolloutPolicy`": ("its interface and loop", _LOOPS),
    "ManiSkill's diffusion policy": ("its interface and loop", _LOOPS),
    "LeRobot's multi-task DiT, diffusion objective": ("its interface and loop", _LOOPS),
}
"""Robot policies: what the test of the distribution uses, and that test."""


def pipelines() -> str:
    """Pipelines with their schedulers: exact, or the message of the refusal."""
    order = list(dict.fromkeys(case.pipeline for case in EXACT))
    rows = [
        [
            f"`{case.pipeline}`" + (f", {case.note}" if case.note else ""),
            f"{case.scheduler}",
            f"refused: “… {case.refused} …”" if case.refused else "exact",
        ]
        for case in (*sorted(EXACT, key=lambda case: order.index(case.pipeline)), *REFUSED)
    ]
    return f"Tested with diffusers {diffusers.__version__}.\n\n{table(['pipeline', 'scheduler', ''], rows)}"


def schedulers() -> str:
    """Schedulers by pipelines: which are exact, and which are refused."""
    rows = []
    for name in dict.fromkeys(case.scheduler for case in (*EXACT, *REFUSED)):
        exact, refused = (
            ", ".join(dict.fromkeys(f"`{case.pipeline}`" for case in cases if case.scheduler == name))
            for cases in (EXACT, REFUSED)
        )
        rows.append([name, exact or "none", refused])
    counts = f"{len(EXACT)} exact and {len(REFUSED)} refused configurations, with diffusers `{diffusers.__version__}`:"
    return f"{counts}\n\n{table(['scheduler', 'exact in', 'refused in some configuration'], rows)}"


def packages() -> str:
    """Packages, the versions they are tested with, and the test."""
    pinned = "\n".join((ROOT / name).read_text() for name in ("constraints.txt", "tests/packages.txt"))
    versions = {name: f"`{version}`" for name, version in re.findall(r"^([\w-]+)==(\S+)", pinned, re.MULTILINE)}
    rows = [
        [name, versions.get(name, "copies, below"), what, call, f"[test](../{test.partition('::')[0]})"]
        for name, (what, call, test) in PACKAGES.items()
    ]
    return table(["package", "version", "supported", "call", "replayed by"], rows)


def copies() -> str:
    """Copies of OpenAI's class, and the outcome of their tests."""
    rows = [
        [row.repository, f"`{row.commit[:10]}`", f"{row.passed}", f"{row.skipped}"]
        for row in load(Copies, "openai").rows
    ]
    return table(["repository", "commit", "tests passed", "skipped, for missing features"], rows)


def policies() -> str:
    """Robot policies, and what was tested."""
    rows = [[name, what, f"[test](../{test.partition('::')[0]})"] for name, (what, test) in POLICIES.items()]
    return table(["policy", "tested with", "distribution tested by"], rows)


def commands() -> str:
    """Every command with its arguments and options."""
    return "\n\n".join(_command(f"foresample {name}", command) for name, command in _leaves(get_command(app)))


def _leaves(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, f"{before}{name} ")
        else:
            yield before + name, command


def _command(name: str, command: Any) -> str:
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        option = parameter.param_type_name == "option"
        names = (
            parameter.opts + parameter.secondary_opts
            if option
            else [parameter.metavar or parameter.name.upper()]
        )
        default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
        flag = default is None or default is False or callable(default)
        default_text = "required" if parameter.required else "" if flag else f"`{default}`"
        rows.append([", ".join(f"`{text}`" for text in names), parameter.help or "", default_text])
    return f"## {name}\n\n{command.help}\n\n{table(['option', 'meaning', 'default'], rows)}"


TABLES: dict[str, Callable[[], str]] = {
    "pipelines": pipelines,
    "schedulers": schedulers,
    "packages": packages,
    "copies": copies,
    "policies": policies,
    "commands": commands,
}


def filled(text: str) -> str:
    """The page with its tables made again."""
    return tables.filled(text, "table", TABLES)


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        page.write_text(filled(page.read_text()))
