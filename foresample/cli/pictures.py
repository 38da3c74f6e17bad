"""Pictures: a grid of samples, and the rounds of a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foresample.core.report import Commit, Report
from foresample.datasets import Dataset


def are_pictures(shape: Sequence[int]) -> bool:
    """Whether states of this shape can be painted: grey or in colour."""
    return len(shape) == 3 and shape[0] in (1, 3)


def grid(samples: Tensor, columns: int | None = None, scale: int = 3) -> Any:
    """Pictures in [−1, 1], [n, channels, height, width], as one PIL image on a light background."""
    from PIL import Image

    count, _, height, width = samples.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows, gap = math.ceil(count / columns), 2
    size = (3, rows * (height + gap) + gap, columns * (width + gap) + gap)
    canvas = torch.full(size, 235, dtype=torch.uint8)
    pixels = ((samples.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
    for i, picture in enumerate(pixels):
        top, left = gap + i // columns * (height + gap), gap + i % columns * (width + gap)
        canvas[:, top : top + height, left : left + width] = picture
    image = Image.fromarray(canvas.permute(1, 2, 0).numpy())
    return image.resize((scale * image.width, scale * image.height), Image.Resampling.NEAREST)


def contact_sheet(dataset: Dataset, most: int) -> Any | None:
    """A grid of samples spread evenly over a dataset; None if it has no samples or they are not pictures.

    In a dataset that is not complete, only samples before the first missing one are shown.
    """
    shape, count = dataset.manifest["settings"]["shape"], dataset.in_order
    if not are_pictures(shape) or not count:
        return None
    chosen = torch.linspace(0, count - 1, min(most, count)).long()
    with warnings.catch_warnings(action="ignore"):  # the command prints its own warning
        parts = dataset.samples()
    first, found = 0, []
    for part in parts:
        inside = (chosen >= first) & (chosen < first + len(part))
        found.append(part[chosen[inside] - first].clone())
        first += len(part)
    return grid(torch.cat(found))


def side_by_side(left: tuple[str, Any], right: tuple[str, Any]) -> Any:
    """Two grids with a line of text above each."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(15)
    margin, top = 12, 30
    widths = [max(image.width, math.ceil(font.getlength(text))) for text, image in (left, right)]
    height = max(image.height for _, image in (left, right))
    canvas = Image.new("RGB", (sum(widths) + 3 * margin, height + top + margin), "white")
    pen = ImageDraw.Draw(canvas)
    for x, (text, image) in zip((margin, widths[0] + 2 * margin), (left, right), strict=True):
        pen.text((x, 7), text, fill="black", font=font)
        canvas.paste(image, (x, top))
    return canvas


class History:
    """An observer that records the rounds of a run's first sample."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int, int]] = []
        """(first step, transitions drafted, transitions committed) of every round."""

    def __call__(self, commit: Commit) -> None:
        for r in (commit.sample == 0).nonzero().flatten().tolist():
            self.rounds.append((int(commit.step[r]), int(commit.drafted[r]), int(commit.committed[r])))


def run_picture(path: Path, report: Report, history: History) -> None:
    """Draw one sample's rounds along the chain, the accepted lengths, and the mismatch step by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure = plt.figure(figsize=(11, 6.5), layout="constrained")
    main, lengths, mismatch = figure.subplot_mosaic(
        [["rounds", "lengths"], ["rounds", "mismatch"]], width_ratios=[1.7, 1]
    ).values()

    for y, (step, drafted, committed) in enumerate(history.rounds):
        main.barh(y, drafted + 1, left=step, height=0.8, color="#d9e2ec")
        main.barh(y, committed, left=step, height=0.8, color="#2f6690")
        if committed <= drafted:
            main.barh(y, 1, left=step + committed - 1, height=0.8, color="crimson")
    main.plot([], [], "s", color="#2f6690", label="committed")
    main.plot([], [], "s", color="crimson", label="corrected from the residual")
    main.plot([], [], "s", color="#d9e2ec", label="drafted, not kept")
    main.set(xlabel="step of the chain", ylabel="round (one network call each)", xlim=(0, report.steps))
    main.set_title(f"sample 0: {len(history.rounds)} calls for {report.steps} transitions", loc="left")
    main.yaxis.set_major_locator(MaxNLocator(integer=True))
    main.invert_yaxis()
    main.legend(frameon=False, loc="upper right")

    shares = [n / report.rounds for n in report.accepted_lengths]
    lengths.bar(range(len(shares)), shares, color="#2f6690", width=0.85)
    lengths.set_title(f"drafts kept in a round, mean {report.accepted_mean:.2f}", loc="left")
    lengths.set(xlabel="drafts kept", ylabel="share of rounds")

    mismatch.plot(range(report.steps), report.mismatch, color="crimson", linewidth=1.4)
    mismatch.set_title("mismatch of draft and target, in std", loc="left")
    mismatch.set(xlabel="step of the chain", ylabel="mean δ", xlim=(0, report.steps))
    if any(value > 0 for value in report.mismatch):  # all 0 if nothing was drafted or every draft was exact
        mismatch.set_yscale("log")
    for axes in (main, lengths, mismatch):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
