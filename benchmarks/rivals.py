"""The picture of lossy and exact methods in docs/comparison.md, drawn from the saved results.

python -m benchmarks.rivals
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.kinds.quality import QualityCost
from benchmarks.names import label
from benchmarks.results import RESULTS, read

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
SHOWN = {
    "sequential": ("grey", "s"),
    "default": ("crimson", "o"),
    "reflection-nearest": ("#9fb8d0", "D"),
    "blocks-parent": ("#2f6690", "D"),
    "paradigms": ("C1", "^"),
    "parasolver": ("C2", "v"),
    "parataa": ("C4", "<"),
    "ddpm": ("C8", "p"),
    "ddim": ("C5", "P"),
    "dpmpp-2m": ("C6", "X"),
}


def main(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = PICTURES,
) -> None:
    """Draw `rivals.png`: one row for each model, its distances against calls and against milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    clocked = [r for r in QualityCost.joined(read(RESULTS).of(QualityCost)) if r.floor.alone_ms]
    figure, panels = plt.subplots(
        len(clocked), 2, figsize=(12, 4.3 * len(clocked)), layout="constrained", sharey="row", squeeze=False
    )
    for result, (calls, clock) in zip(clocked, panels, strict=True):
        for axes, quantity in ((calls, "calls"), (clock, "alone_ms")):
            for method, (colour, marker) in SHOWN.items():
                rows = [row for row in result.rows if row.method == method]
                axes.plot(
                    [getattr(row, quantity) for row in rows],
                    [row.distance / result.floor.distance for row in rows],
                    color=colour,
                    marker=marker,
                    markersize=9 if method == "default" else 6,
                    markerfacecolor=colour if rows and rows[0].exact else "white",
                    linewidth=1,
                    label=label(method) if rows else None,
                )
            axes.axhline(1, color="grey", linewidth=1, linestyle=":")
            axes.set(xscale="log", yscale="log")
            axes.set_ylim(top=min(100, axes.get_ylim()[1]))  # a distance beyond is as bad as any
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_locator(ticker.NullLocator())
            axes.spines[["top", "right"]].set_visible(False)
        where = "GPU" if result.settings.device == "cuda" else "CPU"
        name = f"{result.settings.target}, {result.settings.steps} steps"
        calls.set_title(name, loc="left", fontsize=10)
        clock.set_title(f"{name}, {where}, eager", loc="left", fontsize=10)
        calls.set(xlabel="network calls a sample", ylabel="distance to the sequential sampler, over the floor")
        clock.set(xlabel="milliseconds of a sample drawn alone")
    panels[0][1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1), title="filled: exact")
    figure.savefig(out / "rivals.png", dpi=110)


if __name__ == "__main__":
    typer.run(main)
