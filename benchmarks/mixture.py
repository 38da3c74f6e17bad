"""Methods × windows on the Gaussian mixture of the draft-tree papers: calls and evaluations of each.

python -m benchmarks.mixture --dim 500 --steps 30 --out benchmarks/results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from tqdm import tqdm

from benchmarks.names import label
from benchmarks.result_files import BenchRow
from foresample.cli import options
from foresample.cli.console import echo, plain_table, require_folder, require_modules, show
from foresample.contracts import Target
from foresample.core.report import Run
from foresample.drafters import Frozen, Replay
from foresample.engine.engine import sample
from foresample.provenance import make_result, result_json, write_result
from foresample.sizes import require_memory, round_bytes
from foresample.targets.mixture import GaussianMixture

app = typer.Typer(add_completion=False)

METHODS: dict[str, dict[str, Any]] = {
    "reflection-head": {"drafter": Frozen("head"), "block": 1},
    "reflection-nearest": {"drafter": Frozen("nearest"), "block": 1},
    "per-step-parent-fresh": {"drafter": Frozen("parent"), "block": 1, "recycle": False},
    "block-parent-fresh": {"drafter": Frozen("parent"), "recycle": False},
    "replay-per-step": {"drafter": Replay(secant=False), "block": 1},
    "replay-block": {"drafter": Replay(secant=False)},
    "default": {},
}
"""Arguments of `sample`, from the earliest method to the default; `results.LABELS` has their names for people."""


@app.command()
def main(
    dim: Annotated[int, typer.Option(min=1, help="Dimension of the mixture.")] = 500,
    churn: Annotated[float, typer.Option(help="Noise of the flow, ε.")] = 0.1,
    steps: Annotated[int, typer.Option(min=2, max=10**6, help="Transitions of the chain.")] = 30,
    window: Annotated[list[int], typer.Option(min=1, help="May be given several times.")] = [5, 9, 14],  # noqa: B006
    samples: Annotated[int, typer.Option(min=2, help="Of each method and window.")] = 100,
    reuse: Annotated[str, typer.Option(help="Prediction that is reused: v, x0 or eps.")] = "v",
    seed: options.Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for a result file and a plot.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """The Gaussian mixture of the draft-tree papers: closed form, so that anyone can compare."""
    windows = sorted({min(one, steps - 1) for one in window})  # a longer one drafts no more
    require_memory(
        round_bytes(samples, windows[-1], 8 * dim),
        f"{samples} samples of dimension {dim} at a time, each with a window of {windows[-1]},",
        "ask for fewer --samples, a smaller --dim or a smaller --window",
    )
    target = GaussianMixture.of_draft_trees(dim).flow(steps, churn, reuse=options.require_kind(reuse))
    if out is not None:
        require_modules("matplotlib")
        require_folder(out)
    with tqdm(total=len(windows) * len(METHODS), disable=as_json or None, leave=False) as bar:

        def progress(what: str) -> None:
            bar.update(1)
            bar.set_description(what)

        rows = bench(target, windows, samples, seed, progress=progress)

    settings = {
        "target": "mixture of the draft-tree papers, churned flow",
        "dim": dim,
        "churn": churn,
        "steps": steps,
        "samples": samples,
        "reuse": reuse,
        "seed": seed,
    }
    title = f"Gaussian mixture, d = {dim}, churn {churn:g}, {steps} steps, {reuse} reused"
    result = make_result("bench", settings, rows=[asdict(row) for row in rows])
    if as_json:
        echo(result_json(result))
    else:
        show(_table(title, rows))
    if out is not None:
        path = out / f"mixture-d{dim}-T{steps}-{reuse}"
        write_result(path.with_suffix(".json"), result)
        plot(path.with_suffix(".png"), title, rows)
        if not as_json:
            echo(f"wrote {path}.json and {path}.png")


def _table(title: str, rows: list[BenchRow]) -> Table:
    table = plain_table(
        *("method", "window", "speed-up", "calls", "evals", "kept"),
        left=1,
        title=title,
        caption="speed-up: transitions of the chain / calls; evals: states evaluated a sample\n"
        "kept: drafts accepted a round",
    )
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].window != row.window
        table.add_row(
            label(row.method),
            str(row.window),
            f"{row.speedup:.2f} ± {row.speedup_error:.2f}",
            f"{row.calls:.2f}",
            f"{row.evaluations:.1f}",
            f"{row.accepted:.2f}",
            style="bold" if last else "",
            end_section=last,
        )
    return table


# ---------------------------------------------------------------- the work


def row_of(method: str, window: int, run: Run) -> BenchRow:
    """One line of the table."""
    report = run.report
    return BenchRow(
        method=method,
        window=window,
        speedup=report.speedup,
        speedup_error=report.speedup_error,
        calls=report.calls_mean,
        evaluations=report.evaluations_mean,
        accepted=report.accepted_mean,
    )


def bench(
    target: Target,
    windows: Sequence[int],
    samples: int,
    seed: int,
    progress: Callable[[str], None] | None = None,
) -> list[BenchRow]:
    """Draw `samples` with every method and window, all from the same seeds."""
    rows = []
    for window in windows:
        for method, arguments in METHODS.items():
            if progress is not None:
                progress(f"{label(method)}, window {window}")
            rows.append(row_of(method, window, sample(target, samples, window=window, seed=seed, **arguments)))
    return rows


def plot(path: Path, title: str, rows: list[BenchRow]) -> None:
    """Speed-up against window, one line per method, labelled at its end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    methods = list(dict.fromkeys(row.method for row in rows))
    windows = sorted({row.window for row in rows})
    colours = plt.get_cmap("viridis_r")
    for i, method in enumerate(methods):
        ours = [row for row in rows if row.method == method]
        axes.errorbar(
            [row.window for row in ours],
            [row.speedup for row in ours],
            [row.speedup_error for row in ours],
            label=label(method),
            color="crimson" if i == len(methods) - 1 else colours((i + 1) / len(methods)),
            linewidth=2.6 if i == len(methods) - 1 else 1.4,
            marker="o",
            capsize=3,
        )
    axes.axhline(1, color="grey", linewidth=1, linestyle=":")
    axes.annotate("sequential", (windows[0], 1), (2, -13), textcoords="offset points", color="grey")
    axes.set(
        xlabel="window: transitions drafted in a round", ylabel="transitions per network call", title=title
    )
    axes.set_xticks(windows)
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    app()
