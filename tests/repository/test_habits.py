"""Tests of the repository's own files: workflows call existing targets, and each tool has one version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import dist

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, *TEMPLATES, ROOT / ".pre-commit-config.yaml"], ids=lambda p: p.name
)
def test_a_workflow_or_template_is_valid_yaml(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_of_the_makefile_and_nothing_else(path: Path) -> None:
    commands = re.findall(r"- run: (.*?)(?:  #.*)?$", path.read_text(), flags=re.MULTILINE)
    assert commands
    for command in commands:
        if not command.endswith("--version"):
            words = command.split()
            assert words[0] == "make", command
            assert words[1] in targets(), command


def test_every_public_target_is_declared() -> None:
    """A folder of its name must not keep it from running: `dist` has one."""
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert targets() == set(" ".join(phony).split())


def test_the_linter_is_the_same_everywhere() -> None:
    (pinned,) = re.findall(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert f"rev: v{pinned}" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_issues_ask_for_the_doctor() -> None:
    asking = [path.name for path in TEMPLATES if "foresample doctor" in path.read_text()]
    assert asking == ["bug.yml", "not_exact.yml", "support.yml"]


# ------------------------------------------------------------------ what the wheel is tried with


def test_the_oldest_versions_tested_are_those_promised() -> None:
    oldest = dist.lower_bounds()
    assert "torch==2.7.*" in oldest
    assert "diffusers==0.35.*" in oldest
    assert len(oldest) == len({line.partition("==")[0] for line in oldest}) >= 10


def test_every_promised_python_version_is_tested() -> None:
    promised = re.findall(r"Python :: (3\.\d+)", " ".join(dist.PROJECT["classifiers"]))
    assert sorted({case.python for case in dist.cases()}) == sorted(promised)
    assert dist.PROJECT["requires-python"] == f">={min(promised, key=lambda v: int(v[2:]))}"


def test_all_extras_are_in_all() -> None:
    extras = dist.PROJECT["optional-dependencies"]
    (line,) = extras["all"]
    assert set(line[len("foresample[") : -1].split(",")) == set(extras) - {"all", "test", "docs"}


def test_a_missing_interpreter_is_reported(tmp_path: Path) -> None:
    outcome = dist.try_case(dist.Case("odd", "3.99", ()), tmp_path / "no.whl", tmp_path / "env")
    assert (outcome.state, outcome.detail) == ("skipped", "there is no Python 3.99 here")
    assert "skipped: there is no Python 3.99 here" in dist.table([outcome])
