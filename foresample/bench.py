"""Methods × windows on one target, with the figures people compare: `foresample bench`."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foresample import __version__
from foresample.contracts import Target
from foresample.core.report import Run
from foresample.drafters import Frozen, Replay
from foresample.engine.sampling import sample

METHODS: dict[str, dict[str, Any]] = {
    "reflection, head": {"drafter": Frozen("head"), "block": 1},
    "reflection, nearest": {"drafter": Frozen("nearest"), "block": 1},
    "per step, parent, fresh noise": {"drafter": Frozen("parent"), "block": 1, "recycle": False},
    "block, parent, fresh noise": {"drafter": Frozen("parent"), "recycle": False},
    "replay, per step": {"drafter": Replay(secant=False), "block": 1},
    "replay, block": {"drafter": Replay(secant=False)},
    "replay, block, secant": {},
}
"""Arguments of `sample`, from the earliest method to the default."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    method: str
    window: int
    speedup: float
    speedup_error: float
    calls: float
    evaluations: float
    accepted: float
    seconds: float

    @classmethod
    def of(cls, method: str, window: int, run: Run) -> Row:
        r = run.report
        return cls(
            method,
            window,
            r.speedup,
            r.speedup_error,
            r.calls_mean,
            r.evaluations_mean,
            r.accepted_mean,
            r.seconds,
        )


def bench(
    target: Target,
    windows: list[int],
    samples: int,
    seed: int,
    methods: dict[str, dict[str, Any]] = METHODS,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Draw `samples` with every method and window, all from the same seeds."""
    rows = []
    for window in windows:
        for name, arguments in methods.items():
            if progress is not None:
                progress(f"{name}, window {window}")
            rows.append(Row.of(name, window, sample(target, samples, window=window, seed=seed, **arguments)))
    return rows


def provenance() -> dict[str, Any]:
    """What a saved result must say of its origin: command, commit, versions, machine.

    The commit is `-dirty` if tracked files differ from it, other than results, which runs write themselves.
    """

    def git(*arguments: str) -> str:
        told = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent)
        return told.stdout.strip()

    changed = git("status", "--porcelain", "-uno", ":/", ":(top,exclude)benchmarks/results")
    commit = git("describe", "--always") + ("-dirty" if changed else "")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": re.sub(r" --out[ =]\S+", "", " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "commit": os.environ.get("GIT_COMMIT") or commit,
        "versions": {
            "foresample": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "gpu": device,
        },
    }


def as_json(settings: dict[str, Any], rows: list[Row]) -> str:
    """The result with its origin, as saved."""
    return json.dumps({**provenance(), "settings": settings, "rows": [asdict(r) for r in rows]}, indent=2)


def plot(path: Path, title: str, rows: list[Row]) -> None:
    """Speed-up against window, one line per method, labelled at its end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    names = list(dict.fromkeys(row.method for row in rows))
    windows = sorted({row.window for row in rows})
    colours = plt.get_cmap("viridis_r")
    for i, name in enumerate(names):
        ours = [row for row in rows if row.method == name]
        axes.errorbar(
            [row.window for row in ours],
            [row.speedup for row in ours],
            [row.speedup_error for row in ours],
            label=name,
            color="crimson" if i == len(names) - 1 else colours((i + 1) / len(names)),
            linewidth=2.6 if i == len(names) - 1 else 1.4,
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
