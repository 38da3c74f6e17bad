"""Published figures beside our measurements of the same methods."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.kinds.rivals import Claim, Gain, Published, PublishedRow, Setting
from benchmarks.names import label
from benchmarks.peers import nodes
from benchmarks.report.calls import SPEEDUP, bench_point
from benchmarks.report.markup import Axis, Plot, Point, Section, Series, by_name, grid, paragraph
from benchmarks.result_files import BenchResult, Result, Results


def published(results: Results) -> Section | None:
    """Figures of papers beside the measurements of our implementations of their methods."""
    saved = results.of(Published)
    plots: list[Plot] = []
    used: list[Result] = list(saved)
    for result in saved:
        published = [row for row in result.rows if row.published is not None]
        ours = [
            bench for bench in results.of(BenchResult) if published and _same_chain(result, published[0], bench)
        ]
        used += ours
        plots += [_side_by_side(published, ours), *_gain_plots(result.gains)]
    if not saved:
        return None
    body = [grid(*(plot.html() for plot in plots)), *(paragraph(result.growth) for result in saved)]
    return Section("published", "Published figures, measured again", body, plots, used)


def _same_chain(saved: Published, row: PublishedRow, bench: BenchResult) -> bool:
    one, two = row.setting, bench.settings
    return (one.dim, one.churn, one.steps, saved.settings.reuse) == (two.dim, two.churn, two.steps, two.reuse)


def _side_by_side(published: Sequence[PublishedRow], ours: Sequence[BenchResult]) -> Plot:
    names = {id(row): f"{label(row.method)}, {_where(row.setting)}" for row in published}
    default = [row for bench in ours for row in bench.rows if row.method == "default"]
    labels = [f"foresample, window {row.window}" for row in default]
    series = [
        Series("published", [_claim(names[id(r)], r.published) for r in published if r.published], line=False),
        Series(
            "measured here",
            [Point(names[id(r)], r.speedup, r.error, f"{r.samples} samples") for r in published],
            line=False,
        ),
        Series(
            "foresample's default",
            [bench_point(row, name) for row, name in zip(default, labels, strict=True)],
            "ours",
            line=False,
        ),
    ]
    return Plot(
        "plot-published",
        "Published beside measured",
        Axis("method"),
        Axis(SPEEDUP, zero=True),
        [one for one in series if one.points],
        "The mixture of the draft-tree papers (d = 500, ε = 0.1, 30 steps): papers, and our implementations "
        "of them.",
        kind="dots",
        categories=[*names.values(), *labels],
    )


def _where(setting: Setting) -> str:
    """The tree or the window."""
    if setting.tree is None:
        return f"window {setting.window}"
    return f"{nodes(tuple(map(int, setting.tree.split('-'))))} nodes, {setting.tree}"


def _claim(x: str | float, claim: Claim, unit: str = "") -> Point:
    """A range as its middle ± half its width, a number as itself."""
    low = claim.high if claim.low is None else claim.low
    return Point(x, (low + claim.high) / 2, (claim.high - low) / 2 or None, f"published: {claim}{unit}")


def _gain_plots(gains: Sequence[Gain]) -> list[Plot]:
    """Gains of ranks over turns on trees, and of blocks over single steps on chains."""
    trees = [row for row in gains if row.setting.tree is not None]
    blocks = [row for row in gains if row.setting.window is not None]
    plots = []
    if trees:
        first, measured = trees[0], [row.fewer_calls for row in trees]
        names = [_where(row.setting) for row in trees]
        pairs = list(zip(names, trees, strict=True))
        plots.append(
            Plot(
                "plot-trees",
                f"{label(first.method)} against {label(first.against)}",
                Axis("tree"),
                Axis("% fewer calls", zero=True),
                [
                    Series(
                        "published",
                        [_claim(name, row.published, " % fewer calls") for name, row in pairs],
                        line=False,
                    ),
                    Series(
                        "measured here",
                        [Point(name, row.fewer_calls, row.error) for name, row in pairs],
                        line=False,
                    ),
                ],
                f"Measured on this chain: {min(measured):.1f} to {max(measured):.1f} % fewer calls. "
                f"Published: {first.published} % fewer calls.",
                kind="dots",
                categories=names,
            )
        )
    if blocks:
        claim, windows = blocks[0].published, sorted({row.setting.window or 0 for row in blocks})
        limit = Series(
            f"published: {claim} % faster",
            [_claim(window, claim, " % faster") for window in (windows[0], windows[-1])],
            "reference",
        )
        chains = by_name(
            blocks,
            lambda row: row.setting.chain,
            lambda row: Point(row.setting.window or 0, row.faster, row.error),
            lambda row: "exact",
        )
        plots.append(
            Plot(
                "plot-blocks",
                "Block verification alone, against the per-step test",
                Axis("window", log=True),
                Axis("% faster in calls", zero=True),
                [*chains, limit],
                "Fresh noise, the last accepted state's prediction reused.",
            )
        )
    return plots
