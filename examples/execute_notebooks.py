"""Runs the notebooks and saves them with their results, as `examples/notebooks/*.ipynb`.

python examples/execute_notebooks.py [name ...]

A notebook is written in jupytext's percent format: `# %%` begins a cell of code, `# %% [markdown]` one of text. Printed
text and figures become the results of the cell they come from.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"


def cells(text: str) -> list[tuple[str, str]]:
    """(the rest of the line of `# %%`, the text of the cell) for every cell."""
    parts = re.split(r"^# %%(.*)$", text, flags=re.MULTILINE)
    return [(kind.strip(), body) for kind, body in zip(parts[1::2], parts[2::2], strict=True)]


def execute(path: Path) -> dict[str, Any]:
    """A notebook of format 4 with the results of its cells."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    names: dict[str, Any] = {"__name__": path.stem}
    made: list[dict[str, Any]] = []
    for number, (kind, body) in enumerate(cells(path.read_text())):
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        if kind.startswith("[markdown]"):
            text = re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)
            made.append({**cell, "cell_type": "markdown", "source": lines(text)})
            continue
        if "parameters" in kind:
            cell["metadata"] = {"tags": ["parameters"]}
        figures: list[str] = []
        plt.show = lambda figures=figures: figures.append(png(plt))  # type: ignore[assignment]
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(body, path.name, "exec"), names)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
        for figure in figures:
            data = {"image/png": figure}
            outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        count = 1 + sum(one["cell_type"] == "code" for one in made)
        made.append(
            {
                **cell,
                "cell_type": "code",
                "execution_count": count,
                "source": lines(body.strip()),
                "outputs": outputs,
            }
        )
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def lines(text: str) -> list[str]:
    """Text as notebooks hold it."""
    return text.splitlines(keepends=True)


def png(plt: Any) -> str:
    """The current figure, which is closed, as text."""
    out = io.BytesIO()
    plt.savefig(out, format="png", dpi=70, bbox_inches="tight")
    plt.close("all")
    return base64.b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.py")):
        if len(sys.argv) == 1 or path.stem in sys.argv:
            notebook = execute(path)
            path.with_suffix(".ipynb").write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
            print(path.with_suffix(".ipynb"))
