"""Published figures beside our measurements of the same methods."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foresample.webpage.common import SPEEDUP, Row, bench_rows, counts
from foresample.webpage.markup import Axis, Plot, Point, Section, Series, grid, paragraph
from foresample.webpage.results import Results


def published(results: Results) -> Section | None:
    """What papers report beside what our implementations of their methods measure."""
    saved = results.get("published")
    if saved is None:
        return None
    used, plots = [saved], []
    rows = saved.rows(text=("method", "setting"), numbers=("speedup", "error"))
    told = [row for row in rows if isinstance(row.get("published"), str)]
    names = [f"{row['method']}, {row['setting']}" for row in told]
    series = [
        Series(
            "published", [_range(n, row["published"]) for n, row in zip(names, told, strict=True)], line=False
        ),
        Series(
            "measured here",
            [
                Point(n, r["speedup"], r["error"], f"{r['samples']} samples" if "samples" in r else "")
                for n, r in zip(names, told, strict=True)
            ],
            line=False,
        ),
    ]
    mixture = results.get("mixture-d500-T30-v")
    if mixture is not None:
        used.append(mixture)
        ours = [r for r in bench_rows(mixture, "window") if r["method"] == "replay, block, secant"]
        labels = [f"foresample, window {r['window']}" for r in ours]
        points = [
            Point(n, r["speedup"], r["speedup_error"], counts(r)) for n, r in zip(labels, ours, strict=True)
        ]
        series.append(Series("foresample's default", points, "ours", line=False))
        names += labels
    plots.append(
        Plot(
            "plot-published",
            "Published beside measured",
            Axis("method"),
            Axis(SPEEDUP, zero=True),
            series,
            "The mixture of the draft-tree papers (d = 500, ε = 0.1, 30 steps): papers, and our "
            "implementations of them.",
            kind="dots",
            categories=names,
        )
    )
    gains = saved.rows(
        text=("method", "against", "setting", "published"),
        numbers=("fewer_calls", "faster", "error"),
        key="gains",
    )
    plots += _gain_plots(gains)
    body = [grid(*(p.html() for p in plots))]
    if isinstance(saved.data.get("growth"), str):
        body.append(paragraph(saved.data["growth"]))
    return Section("published", "Published figures, measured again", body, plots, used)


def _range(category: str, text: str) -> Point:
    """'1.96–1.99' as its middle ± half its width, '2.14' as itself."""
    found = [float(v) for v in re.findall(r"\d+(?:\.\d+)?", text)]
    low, high = min(found, default=0.0), max(found, default=0.0)
    return Point(category, (low + high) / 2, (high - low) / 2 or None, f"published: {text}")


def _gain_plots(gains: Sequence[Row]) -> list[Plot]:
    trees = [row for row in gains if " against " not in row["method"] and "nodes" in row["setting"]]
    blocks = [row for row in gains if "window" in row["setting"]]
    plots = []
    if trees:
        names, measured = [row["setting"] for row in trees], [row["fewer_calls"] for row in trees]
        plots.append(
            Plot(
                "plot-trees",
                f"{trees[0]['method']} against {trees[0]['against']}",
                Axis("tree"),
                Axis("% fewer calls", zero=True),
                [
                    Series(
                        "published",
                        [_range(n, r["published"]) for n, r in zip(names, trees, strict=True)],
                        line=False,
                    ),
                    Series(
                        "measured here",
                        [Point(n, r["fewer_calls"], r["error"]) for n, r in zip(names, trees, strict=True)],
                        line=False,
                    ),
                ],
                f"Measured on this chain: {min(measured):.1f} to {max(measured):.1f} % fewer calls. "
                f"Published: {trees[0]['published']}.",
                kind="dots",
                categories=names,
            )
        )
    if blocks:
        chains: dict[str, list[Point]] = {}
        for row in blocks:
            chain, _, window = row["setting"].rpartition(", window ")
            if window.isdigit():
                chains.setdefault(chain, []).append(Point(int(window), row["faster"], row["error"]))
        ends = [p.x for points in chains.values() for p in points]
        limit = _range("", blocks[0]["published"]).y
        reference = Series(
            f"published: {blocks[0]['published']}",
            [Point(x, limit) for x in (min(ends), max(ends))],
            "reference",
        )
        plots.append(
            Plot(
                "plot-blocks",
                "Block verification alone, against the per-step test",
                Axis("window", log=True),
                Axis("% faster in calls", zero=True),
                [*(Series(chain, points) for chain, points in chains.items()), reference],
                "Fresh noise, the last accepted state's prediction reused.",
            )
        )
    return plots
