"""The two pictures a training run leaves: a contact sheet and its loss curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


def contact_sheet(images: Tensor, path: Path, columns: int, scale: int = 2) -> None:
    """Tile uint8 pictures [n, channels, height, width] row by row into one PNG, `scale` times enlarged."""
    count, channels, height, width = images.shape
    rows = -(-count // columns)
    blank = images.new_zeros(rows * columns - count, channels, height, width)
    grid = torch.cat([images, blank]).view(rows, columns, channels, height, width)
    grid = grid.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels)
    picture = Image.fromarray(grid.squeeze(-1).contiguous().cpu().numpy())
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)


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
