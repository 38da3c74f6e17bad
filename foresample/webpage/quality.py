"""Quality against cost, and the pictures themselves."""

from __future__ import annotations

from pathlib import Path

from foresample.webpage.common import by_method
from foresample.webpage.markup import Axis, Plot, Point, Section, Series, grid, paragraph, picture, table
from foresample.webpage.results import Results, is_number


def quality(results: Results) -> Section | None:
    """Quality against cost."""
    plots, body, used = [], [], []
    saved = results.get("fashion_mnist-quality")
    if saved is not None:
        used.append(saved)
        pairs = saved.rows(text=("a", "b"), numbers=("distance",), key="distances")
        cost = saved.field("calls", dict)
        points: dict[str, list[Point]] = {}
        for pair in pairs:
            names = {pair["a"], pair["b"]}
            if "real" in names and len(names) == 2:
                (other,) = names - {"real"}
                if is_number(cost.get(other)):
                    points.setdefault(other.split()[0], []).append(
                        Point(cost[other], pair["distance"], None, other)
                    )
        plots.append(
            Plot(
                f"plot-{saved.name}",
                "Fashion-MNIST: distance to real pictures against calls",
                Axis("network calls a sample", log=True),
                Axis("Fréchet distance to real pictures", zero=True),
                [
                    Series(n, p, "ours" if n == "speculative" else "exact", line=False)
                    for n, p in points.items()
                ],
                "Features of our own classifier, so not comparable with FIDs elsewhere. Two runs of each "
                "sampler: the difference between runs is the scale to judge by.",
            )
        )
        groups: dict[str, list[str]] = {}
        for pair in pairs:
            key = " and ".join(sorted(pair[side].split()[0] for side in ("a", "b")))
            groups.setdefault(key, []).append(f"{pair['distance']:.4f}")
        agreement = saved.data.get("agreement")
        body.append(
            table(
                ["Fréchet distance between", "values"],
                [(key, ", ".join(values)) for key, values in groups.items()],
                "If the law is one, two samplers are no further apart than two runs of either",
            )
        )
        if isinstance(agreement, dict):
            shares = [(name, value) for name, value in agreement.items() if is_number(value)]
            told = ", ".join(f"{name} {100 * value:.1f} %" for name, value in shares)
            body.append(paragraph(f"Pictures in which the classifier sees the label asked for: {told}."))
    for result in results.matching("quality-cost*"):
        used.append(result)
        rows = result.rows(text=("method",), numbers=("distance",), positive=("calls",))
        target = result.settings.get("target", result.name)
        plots.append(
            Plot(
                f"plot-{result.name}",
                f"{target}: distance against calls",
                Axis("network calls a sample", log=True),
                Axis("distance to the target's law"),
                by_method(rows, "calls", "distance", "distance_error", lambda row: ""),
                "Open marks are methods that are not exact.",
            )
        )
    if not plots:
        return None
    figures = [*(p.html() for p in plots), f"<div>{''.join(body)}</div>" if body else ""]
    return Section("quality", "Quality against cost", [grid(*figures)], plots, used)


SHEETS = (
    (
        "compare.png",
        "Two grids of twenty garments; most places show nearly the same garment left and right",
        "Fashion-MNIST, the embedded model, drawn by make demo: sequential left, speculative right, 100 "
        "steps, window 8. The seeds are the same on both sides, and accepted noise is shared, so many "
        "pictures are alike; what is the same by proof is the law.",
        True,
    ),
    (
        "fashion-mnist-samples.png",
        "Ten rows of ten garments, one class a row, all recognisable",
        "Fashion-MNIST, sequential, 100 steps, one class a row: what the embedded model can do.",
        False,
    ),
    (
        "cifar10-samples.png",
        "Ten rows of ten small photographs, one class a row; vehicles and horses are clear, animals often not",
        "CIFAR-10, sequential, 100 steps, one class a row. Eight minutes of training: a benchmark for "
        "samplers, not for pictures.",
        False,
    ),
    (
        "run.png",
        "Bars along the chain, one a round, most of them several steps long, some ending in a red corrected "
        "step",
        "One run of make demo: each bar is a round, that is one call, and the steps it committed.",
        False,
    ),
)


def sheets(results: Results, pictures: Path | None) -> Section | None:
    """Sample sheets, as far as the pictures are there."""
    body, used = [], []
    if pictures is not None:
        body = [
            picture(pictures / name, alt, caption, wide=wide)
            for name, alt, caption, wide in SHEETS
            if (pictures / name).is_file()
        ]
    policy, drawn = results.get("policy-lasa"), results.folder / "policy-lasa.png"
    if policy is not None and drawn.is_file():
        used.append(policy)
        body.append(
            picture(
                drawn,
                "Four handwritten shapes: demonstrations, and roll-outs of the sequential and the "
                "accelerated policy, which look alike",
                "A robot policy draws handwriting in closed loop: demonstrations, the sequential policy, "
                "the accelerated one.",
            )
        )
    if not body:
        return None
    return Section("pictures", "Pictures", [f'<div class="sheets">{"".join(body)}</div>'], [], used)
