"""Every cell of every notebook runs, with smaller numbers; nothing is downloaded."""

from __future__ import annotations

import ast
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support import lerobots

plt = pytest.importorskip("matplotlib.pyplot")

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
SMALL: dict[str, dict[str, int]] = {
    "first_steps": {"count": 2, "steps": 10, "window": 4, "turns": 2, "check_samples": 200},
    "own_network": {
        "training_steps": 60,
        "steps": 16,
        "count": 100,
        "window": 6,
        "turns": 2,
        "check_samples": 200,
    },
    "robot_plan": {"plans": 3, "window": 16},
    "langevin_posterior": {"steps": 40, "count": 100, "window": 10, "turns": 2, "check_samples": 200},
}


def cells(text: str) -> list[tuple[str, str]]:
    """(the rest of the line of `# %%`, the text of the cell) in jupytext's percent format."""
    parts = re.split(r"^# %%(.*)$", text, flags=re.MULTILINE)
    return [(kind.strip(), body) for kind, body in zip(parts[1::2], parts[2::2], strict=True)]


def execute(name: str, small: dict[str, int]) -> dict[str, Any]:
    """The names a notebook leaves, its parameters replaced."""
    names: dict[str, Any] = {"__name__": name}
    for kind, body in cells((FOLDER / f"{name}.py").read_text()):
        if kind.startswith("[markdown]"):
            continue
        exec(compile(body, name, "exec"), names)
        if "parameters" in kind:
            assert set(small) == {n.id for n in ast.walk(ast.parse(body)) if isinstance(n, ast.Name)}
            names |= small
    return names


@pytest.fixture(autouse=True)
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    plt.switch_backend("Agg")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SMALL)
    table = (FOLDER / "README.md").read_text()
    assert all(f"({name}.ipynb)" in table for name in SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_the_saved_notebook_has_the_cells_of_its_source_and_their_results(name: str) -> None:
    saved = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    found = cells((FOLDER / f"{name}.py").read_text())
    assert [cell["cell_type"] == "markdown" for cell in saved] == ["[markdown]" in kind for kind, _ in found]
    for cell, (kind, body) in zip(saved, found, strict=True):
        text = re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE) if "[markdown]" in kind else body.strip()
        assert "".join(cell["source"]) == text
        assert ("print(" in text or "plt.show()" in text) <= bool(cell.get("outputs", True))


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_source_has_the_right_format(name: str) -> None:
    """A title comes first, one cell holds the parameters, and cells of text hold text alone."""
    text = (FOLDER / f"{name}.py").read_text()
    found = cells(text)
    assert text.startswith("# ---\n# jupyter:")
    assert found[0][0] == "[markdown]"
    assert found[0][1].startswith("\n# # ")
    assert [kind for kind, _ in found if "parameters" in kind] == ['tags=["parameters"]']
    for kind, body in found:
        if kind == "[markdown]":
            assert all(line.startswith("#") for line in body.split("\n") if line.strip()), body


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "first_steps":
        pytest.importorskip("diffusers")
    with lerobots.importing() if name == "robot_plan" else nullcontext():
        names = execute(name, SMALL[name])
    printed = capsys.readouterr().out
    if "run" in names:
        assert names["run"].speedup > 1
        assert "ok    distribution" in printed
    else:
        assert all(max(one[1]) < 60 for one in names["speculative"])
        assert names["lerobot_calls"] < 60
    assert not plt.get_fignums()
