"""The evidence that samples have the distribution of the chain."""

from __future__ import annotations

from html import escape

from benchmarks.kinds.clock import GpuTests
from benchmarks.kinds.robots import Policy
from benchmarks.report import evidence
from benchmarks.report.calls import machine_of
from benchmarks.report.markup import Section, paragraph, table
from benchmarks.result_files import CheckResult, Results


def exactness(results: Results) -> Section | None:
    """Why anyone should believe it."""
    checks, policies, gpu = results.of(CheckResult), results.of(Policy), results.of(GpuTests)
    if not (checks or policies or gpu):
        return None
    body = [_suite(), *map(_check, checks), *map(_policy, policies), *map(_gpu_tests, gpu)]
    return Section("exactness", "Evidence that it is exact", body, [], [*checks, *policies, *gpu])


def _suite() -> str:
    """The distribution tests."""
    e = evidence
    settings = len(e.CHAINS) * len(e.DRAFTERS) * len(e.BLOCKS) * 2
    facts = (
        f"{settings} settings: {len(e.CHAINS)} chains ({', '.join(e.CHAINS)}) × {len(e.DRAFTERS)} drafters × "
        f"{len(e.BLOCKS)} block lengths × noise recycled or fresh, {e.SAMPLES} samples each; a few again with "
        f"{e.MANY_SAMPLES}.",
        "Tested in each: the joint distribution of consecutive states along the chain, and the noise that each step "
        "must have seen, (next state − mean)/std, which has to be N(0, I) and independent of the state.",
        "One budget: a correct sampler fails anywhere in the suite with probability at most "
        f"{e.SUITE_LEVEL:g}; each of up to {e.SHARES} cases may use an equal part. Seeds are fixed.",
        "The recycling theorem by itself: noise left by a round is fresh, given how many drafts were kept.",
        f"{len(e.BROKEN | e.PEEKING)} deliberately broken twins that must be caught, or the suite fails:",
    )
    twins = list((e.BROKEN | e.PEEKING).items())
    return (
        paragraph(
            "Whatever the draft, the samples have exactly the distribution of the sequential sampler run with the same "
            "network: that is a theorem. The suite tests the code against it where tests have power, in one "
            "and two dimensions."
        )
        + f'<ul class="facts">{"".join(f"<li>{escape(fact)}</li>" for fact in facts)}</ul>'
        + table(["broken twin", "what it does wrong"], twins, "A test that cannot fail proves nothing")
    )


def _check(result: CheckResult) -> str:
    """Each question and its answer."""
    rows = [(f.question, "yes" if f.passed else "NO", f.detail) for f in result.findings]
    caption = f"{result.name}: what foresample check says of a target"
    return table(["question", "passed", "numbers"], rows, caption)


def _policy(result: Policy) -> str:
    """Does the accelerated robot policy behave as the sequential one?"""
    return table(
        ["policy", "distance to a demonstration, p", "distance to the goal, p"],
        [
            (row.label, row.p_values.distance, row.p_values.to_goal)
            for row in result.rows
            if row.window is not None
        ],
        "Closed-loop behaviour of the accelerated robot policy against the sequential one: two-sample "
        "Kolmogorov–Smirnov tests",
    )


def _gpu_tests(result: GpuTests) -> str:
    """Tests that passed and failed on a GPU."""
    wrong = {"failed": result.failed, "unfinished": result.unfinished}
    shown = f"{len(result.passed)} tests passed, {len(result.failed)} failed"
    if result.unfinished:
        shown += f", {len(result.unfinished)} were not finished"
    listed = ""
    for how, names in wrong.items():
        if names:
            items = "".join(f"<li><code>{escape(name)}</code></li>" for name in names)
            listed += f"<details><summary>The {how} tests</summary><ul>{items}</ul></details>"
    return (
        f'<div class="note{" bad" if listed else ""}"><h3>The fused rounds on a GPU</h3>'
        f"{paragraph(shown + machine_of(result) + '.')}{listed}</div>"
    )
