"""The documentation's code runs, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import foresample as fs
from benchmarks.tables import filled

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_the_examples_of_extending_run() -> None:
    """With a stand-in for the reader's own network, on the CPU and a smaller window."""
    names = {
        "torch": torch,
        "fs": fs,
        "network": lambda x, time, labels: 0.1 * x + labels.view(-1, 1, 1, 1),
        "labels": torch.zeros(1000),
        "alpha_bar": torch.linspace(0.01, 0.99, 12),
        "timesteps": torch.arange(12).flip(0),
        "target": None,
    }
    for code in blocks(ROOT / "docs" / "extending.md"):
        code = code.replace('device="cuda"', 'device="cpu"').replace("count=64", "count=4")
        exec(code.replace("fs.check(target, window=20)", "fs.check(target, window=5, samples=50)"), names)
    chain = names["OrnsteinUhlenbeck"]()
    result = fs.check(chain, window=5, drafter=names["Damped"](), samples=300)
    assert result.passed, str(result)
    assert fs.sample(chain, 10, window=10).speedup > 2


def test_the_examples_of_generate_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in blocks(ROOT / "docs" / "generate.md"):
        exec(code, names)
    assert names["dataset"].complete
    assert names["dataset"].law.passed
    assert names["samples"].shape == (100, 2)


def test_the_example_of_the_readme_runs() -> None:
    names: dict = {}
    for code in blocks(ROOT / "README.md"):
        exec(code.replace("count=64", "count=2").replace("steps=100", "steps=10"), names)
    assert names["run"].speedup > 1


def test_the_examples_of_performance_run() -> None:
    names: dict = {}
    for code in blocks(ROOT / "docs" / "performance.md"):
        exec(code.replace("steps=20", "steps=6"), names)
    assert names["run"].samples.isfinite().all()
    assert names["sample"].calls > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_result_files(page: Path) -> None:
    """`python -m benchmarks.tables` writes them."""
    text = page.read_text()
    assert filled(text) == text
