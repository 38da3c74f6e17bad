"""Figures about pictures and counted calls: models, mixtures, training, growth, priors, several devices."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

from benchmarks.kinds.calls import Calls, Growth, Order
from benchmarks.kinds.clock import (
    Latency,
    Warm,
)
from benchmarks.kinds.datasets import (
    ClassifierTraining,
    Training,
)
from benchmarks.kinds.quality import Agreement, Quality
from benchmarks.names import MODELS
from benchmarks.result_files import BenchResult
from benchmarks.results import load
from benchmarks.tables.markdown import only, speedup, table, table_of

Row = TypeVar("Row")


def models() -> str:
    """Trained models: the default against the chains before it."""
    cells = []
    for name, title in MODELS.items():
        saved = load(Calls, f"{name}-calls-w50")
        for steps in (100, 250, 1000):
            ours, nearest, blocks = (
                only(saved.rows, steps=steps, method=method, reuse="x0")
                for method in ("default", "reflection-nearest", "block-parent-fresh")
            )
            ratio = ours.speedup / max(nearest.speedup, blocks.speedup)
            shown = [speedup(row) for row in (ours, nearest, blocks)]
            cells.append([title, f"{steps}", f"**{shown[0]}**", *shown[1:], f"{ratio:.2f}×"])
    heads = [
        "model",
        "steps",
        "default",
        "nearest, per step",
        "blocks, fresh noise",
        "against the better of these",
    ]
    return table(heads, cells)


def mixture() -> str:
    """The closed-form benchmark."""
    cells = []
    cases = [("d500-T30", w, r) for r in ("v", "x0") for w in (5, 14)]
    cases += [("d500-T300", 50, "v"), ("d500-T300", 50, "x0"), ("d64-T300", 50, "v")]
    for chain, window, reuse in cases:
        saved = load(BenchResult, f"mixture-{chain}-{reuse}")
        settings = saved.settings
        title = f"d = {settings.dim}, ε = {settings.churn:g}, {settings.steps} steps"
        ours, nearest, blocks = (
            speedup(only(saved.rows, window=window, method=method))
            for method in ("default", "reflection-nearest", "block-parent-fresh")
        )
        cells.append([title, reuse, f"{window}", f"**{ours}**", nearest, blocks])
    return table(["chain", "reused", "window", "default", "nearest, per step", "blocks, fresh noise"], cells)


def quality() -> str:
    """Are the pictures the same?"""
    saved = load(Quality, "fashion_mnist-quality")
    shown = ", ".join(f"{run.replace('-', ' ')} {100 * r.agreement:.1f} %" for run, r in saved.runs.items())
    calls = [run.calls for run in saved.runs.values() if run.sampler == "speculative"]
    settings = saved.settings
    distances = [
        (" and ".join(pair), ", ".join(f"{v:.4f}" for v in values)) for pair, values in saved.pairs.items()
    ]
    return (
        table(["Fréchet distance between", "values"], distances)
        + f"\n\n{settings.count} samples a run, {settings.steps} steps, window {settings.window}: "
        f"{settings.steps} calls a sample sequentially, {sum(calls) / len(calls):.1f} speculatively. "
        f"Pictures in which the classifier sees the requested label: {shown}."
    )


def agreement() -> str:
    """Labels that the classifier sees, and what the size of a call does to the network's answers."""
    saved = load(Agreement, "fashion_mnist-agreement")
    settings, rows = saved.settings, []
    for row in saved.rows:
        low, high = row.interval
        rows.append(
            {
                "network": row.network,
                "sampler": row.sampler,
                "seed": f"{row.seed}",
                "pictures": f"{row.pictures}",
                "label seen (Wilson, 95 %)": f"{100 * row.share:.2f} % ({100 * low:.2f} … {100 * high:.2f})",
                "calls a picture": f"{row.calls:.1f}",
            }
        )
    apart = ", ".join(
        f"{100 * d:+.2f} ± {100 * e:.2f} % in {network}" for network, (d, e) in saved.differences().items()
    )
    sizes = table_of(
        {
            "network": row.network,
            "states a call": f"{row.states}",
            "largest difference": f"{row.most:.1e}",
            "root mean square": f"{row.rms:.1e}",
            "mean": f"{row.mean:+.1e} ± {row.mean_error:.0e}",
        }
        for row in saved.calls
    )
    return (
        f"{settings.steps} steps, window {settings.window}, {settings.slots} slots:\n\n{table_of(rows)}\n\n"
        f"Speculative minus sequential, with its standard error: {apart}. The p-value of no difference is "
        f"{saved.p_value:.2f}.\n\nThe network's outputs, of root mean square {saved.calls[0].answer:.2f}, for the "
        f"same {max(row.states for row in saved.calls)} states, compared with those of calls with one state:\n\n"
        f"{sizes}"
    )


def warm() -> str:
    """Calls started cold and from a prior."""
    return table_of(
        {
            "model": MODELS.get(row.model, row.model),
            "steps": f"{row.steps}",
            "window": f"{row.window}",
            "prior": "table and bands" if row.bands else "table",
            "calls, cold": f"{row.cold:.2f} ± {row.cold_error:.2f}",
            "calls, warm": f"{row.warm:.2f} ± {row.warm_error:.2f}",
            "fewer": f"{100 * row.fewer:.1f} ± {100 * row.fewer_error:.1f} %",
        }
        for model in ("cifar10", "fashion_mnist")
        for row in load(Warm, f"warm-{model}").rows
    )


def growth() -> str:
    """Calls against the length of the chain."""
    saved = load(Growth, "cifar10-growth")
    calls = ["calls", *(f"{row.calls:.1f} ± {row.calls_error:.1f}" for row in saved.rows)]
    return (
        table(["steps", *(f"{row.steps}" for row in saved.rows)], [calls])
        + f"\n\nThe fit over all of them: calls ∝ N^{saved.exponent:.3f} (window {saved.settings.window}, "
        f"{saved.settings.samples} samples each, bfloat16)."
    )


def devices() -> str:
    """One sample on k devices, predicted from the latency measured on one, where every call had the whole window."""
    saved = load(Latency, "earlier/cifar10-latency-whole")
    curve = sorted((row.window + 1, row.network_us) for row in saved.rounds)

    def network(states: int) -> float:
        """Microseconds of a call, linear between the measured points."""
        (low, slow), (high, fast) = next(pair for pair in pairwise(curve) if states <= pair[1][0])
        return slow + (fast - slow) * max(0, states - low) / (high - low)

    shares, cells = (1, 2, 4, 8), []
    for row in saved.rows:
        window = row.window
        if not window:
            continue
        base = only(saved.rows, steps=row.steps, window=0)
        other = only(saved.rounds, window=window)
        saving = [row.calls * (other.network_us - network(-(-(window + 1) // k))) / 1e3 for k in shares]
        gains = (f"{base.ms / (row.ms - saved_ms):.2f}×" for saved_ms in saving)
        cells.append([f"{row.steps}", f"{window}", *gains])
    return table(["steps", "window", *(f"{k} device" + "s" * (k > 1) for k in shares)], cells)


def training() -> str:
    """Training of the two models."""
    saved = [load(Training, f"training-{name}") for name in ("fashion-mnist", "cifar10")]
    folders = (
        "`foresample/pretrained/fashion_mnist`, inside the package",
        "`assets/cifar10`, in the repository only",
    )
    data = "60 000 pictures 28×28, not mirrored", "50 000 pictures 32×32, mirrored at random"
    found = {
        "folder": folders,
        "parameters, size": [f"{_spaced(r.parameters)}, {r.bytes / 1e6:.1f} MB" for r in saved],
        "data": data,
        "training": [f"{r.steps} steps of {r.batch}, {r.seconds:.0f} s" for r in saved],
        "loss (MSE of v), training": [f"{r.loss:.3f}" for r in saved],
        "loss, 2000 held-out pictures": [f"{r.test_loss:.3f}" for r in saved],
        "quality": ("below", "by eye: see the sheet"),
    }
    lines = ["| | Fashion-MNIST | CIFAR-10 |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in found.items())])


def classifier() -> str:
    """Accuracy of the classifier."""
    saved = load(ClassifierTraining, "training-classifier")
    return (
        f"A six-layer convolutional network ({saved.parameters / 1e6:.2f} M parameters, "
        f"{saved.bytes / 1e6:.1f} MB, `assets/fashion_mnist_classifier.safetensors`), "
        f"{100 * saved.test_accuracy:.1f} % correct on the test pictures of Fashion-MNIST."
    )


def response() -> str:
    """The gain from following the noise beyond the horizon, on a model that was not used to choose it."""
    names = ("earlier/cifar10-calls-w50-gain-only", "cifar10-calls-w50")
    files = [load(Calls, name) for name in names]
    moves = []
    for steps in (1000, 250, 100):
        old, new = (only(saved.rows, steps=steps, method="default", reuse="x0") for saved in files)
        moves.append(f"from {speedup(old)} to {speedup(new)} at {steps}")
    return (
        "On the CIFAR-10 model, which was not used for these choices, the slope κ beyond the horizon changed the "
        f"speed-up {moves[0]} steps, {moves[1]} and {moves[2]} (same seed, 64 samples): a small gain, about two "
        "standard errors at best."
    )


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def order() -> str:
    """Samples chosen by when they were done, and by their index."""
    saved = load(Order, "order")
    settings = saved.settings
    cells = [["all of them (sequential)", f"{settings.sequential}", f"{saved.right:.3f} ± {saved.error:.3f}"]]
    for row in saved.rows:
        rule = row.rule if row.rounds is None else f"stopped after {row.rounds} rounds: {row.rule}"
        cells.append([rule, f"{row.kept:.1f}", f"{row.right:.3f} ± {row.error:.3f}"])
    where = f"{settings.steps} steps, window {settings.window}, {settings.slots} slots"
    return (
        f"{where}, {settings.runs} runs of each rule:\n\n{table(['taken', 'samples a run', 'P(x > 0)'], cells)}"
    )
