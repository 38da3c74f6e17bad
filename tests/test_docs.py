"""The documentation's code runs, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import foresample as fs
from benchmarks.tables import FIGURES, filled

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_the_examples_of_extending_run() -> None:
    """With a stand-in for the reader's own network, on the CPU and a smaller window."""
    names: dict[str, Any] = {
        "torch": torch,
        "fs": fs,
        "network": lambda x, time, labels: 0.1 * x + labels.view(-1, 1, 1, 1),
        "labels": torch.zeros(1000),
        "alpha_bar": torch.linspace(0.01, 0.99, 12),
        "timesteps": torch.arange(12).flip(0),
        "target": None,
        "model": lambda x, sigma, **given: x / (1 + sigma.view(-1, 1) ** 2),
        "x": 10 * torch.randn(2, 3),
        "sigmas": torch.tensor([10.0, 5.0, 2.0, 1.0, 0.3, 0.0]),
        "extra_args": {},
    }
    for code in blocks(ROOT / "docs" / "extending.md"):
        code = code.replace('device="cuda"', 'device="cpu"').replace("count=64", "count=4")
        exec(code.replace("fs.check(target, window=20)", "fs.check(target, window=5, samples=50)"), names)
    chain = names["OrnsteinUhlenbeck"]()
    result = fs.check(chain, window=5, drafter=names["Damped"](), samples=300)
    assert result.passed, str(result)
    assert fs.sample(chain, 10, window=10).speedup > 2
    tempered = names["Tempered"]()
    assert fs.check(tempered, window=5, samples=300).passed
    heun, zero = names["Heun"](), torch.zeros(4, dtype=torch.int64)
    heun.here, heun.there = torch.tensor([2.0]), torch.tensor([1.5])
    heun.denoise = lambda x, sigma: x / (1 + sigma**2)  # of unit Gaussian data, whose slope is σ/(1 + σ²)·x
    x = torch.ones(4, 3)
    slopes = 2 / 5 * x, 1.5 / 3.25 * (x - 0.5 * 2 / 5 * x)
    euler = x + (1.5 - 2) * (x - heun.predict(x, zero, zero)) / 2
    torch.testing.assert_close(euler, x - 0.5 * (slopes[0] + slopes[1]) / 2)


def test_the_examples_of_generate_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "generate.md"):
        exec(code, names)
    assert names["dataset"].complete
    assert names["dataset"].law.passed
    assert names["samples"].shape == (100, 2)


def test_the_example_of_the_readme_runs() -> None:
    names: dict[str, Any] = {}
    for code in blocks(ROOT / "README.md"):
        exec(code.replace("count=64", "count=2").replace("steps=100", "steps=10"), names)
    assert names["run"].speedup > 1


@pytest.mark.slow
def test_the_examples_of_performance_run() -> None:
    names: dict[str, Any] = {}
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


# ------------------------------------------------------------------ no number is typed by hand

NUMBER = re.compile(r"[×±] ?\d[\d.]*|(?<![\w.])\d[\d ]*\.\d+(?: ?[×%])?|(?<![\w.])\d+ ?[×%]")
"""What reads like a measurement: a decimal point, or a number with ×, ± or %."""

ALLOWED: dict[str, dict[str, str]] = {
    "README.md": {
        "3.11": "version of Python",
        "2.0": "of the licence",
        "1.96": "published (draft-tree papers)",
        "1.99": "published (draft-tree papers)",
        "2.14": "published (draft-tree papers)",
    },
    "diffusers.md": {"0.42": "version of diffusers"},
    "models.md": {"0.9995": "constant of the recipes"},
    "policies.md": {"±1": "scale of the data"},
    "robots.md": {
        "2.11": "version of torch",
        "2.13": "version of torch",
        "0.42": "version of diffusers",
        "0.4": "version of LeRobot",
    },
    "theory.md": {"1.2": "constant of a formula", "8.5": "constant of a formula"},
}
"""Numbers on a page that are no results of ours, and what they are."""


def typed_numbers(text: str) -> list[str]:
    """Numbers outside of figures, code, formulas (indented blocks) and addresses."""
    text = re.sub(r"<!-- figures: \w+ -->\n.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = "\n".join(line for line in text.split("\n") if not re.match(r" {4,}", line))
    return [found.strip() for found in NUMBER.findall(re.sub(r"`[^`]*`|\]\(http[^)]*\)", "", prose))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_number_comes_from_a_result_file(page: Path) -> None:
    """Make it in `benchmarks/tables.py`, from a result; or, if it is no result of ours, say above what."""
    allowed = ALLOWED.get(page.name, {})
    found = typed_numbers(page.read_text())
    assert [number for number in found if number not in allowed] == []
    assert [number for number in allowed if number not in found] == [], "no longer on the page"


def test_a_number_typed_by_hand_is_found() -> None:
    figures = "<!-- figures: models -->\n| 7.27 ± 0.12 |\n<!-- end -->"
    code = "```python\nx = 0.5\n```\n\n    y = 0.25 z\n\n`h=0.1`"
    assert typed_numbers(f"{figures}\n{code}\nstep 3 of 1000, 64 samples, T=100, v2.x") == []
    for text in ("2.33", "12 %", "3×", "4.5×", "± 3", "± 0.2", "1 234.5 ms"):
        assert typed_numbers(f"It is {text} now."), text
    assert typed_numbers("from 27.44 ± 0.21 to 28 %") == ["27.44", "± 0.21", "28 %"]


def test_every_figure_is_on_a_page() -> None:
    used = {name for page in PAGES for name in re.findall(r"<!-- figures: (\w+) -->", page.read_text())}
    assert used == set(FIGURES)
