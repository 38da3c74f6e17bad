"""The two pictures a training run leaves: a contact sheet and its loss curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from foresample.cli.pictures import grid


def contact_sheet(images: Tensor, path: Path, columns: int) -> None:
    """Tile uint8 pictures [n, channels, height, width] row by row into one PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid(images.float() / 127.5 - 1, columns, scale=2).save(path)


def loss_curve(history: Sequence[tuple[int, float]], folder: Path, title: str) -> None:
    """Save (step, mean loss since the last entry) as `loss.json` and draw it as `loss.png`."""
    (folder / "loss.json").write_text(json.dumps([list(entry) for entry in history]) + "\n")
    if not history:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses = zip(*history, strict=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss", title=title, yscale="log")
    axes.grid(which="both", alpha=0.3)
    FigureCanvasAgg(figure).print_png(folder / "loss.png")
