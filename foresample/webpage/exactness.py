"""The evidence that samples have the law of the chain."""

from __future__ import annotations

from html import escape
from typing import Any

from foresample.webpage import evidence
from foresample.webpage.common import machine_of
from foresample.webpage.markup import Section, paragraph, table
from foresample.webpage.results import Result, Results, is_number


def exactness(results: Results) -> Section | None:
    """Why anyone should believe it."""
    checks = results.matching("check*")
    policy, gpu = results.get("policy-lasa"), results.get("gpu-tests")
    used = [*checks, *(result for result in (policy, gpu) if result is not None)]
    if not used:
        return None
    body = [_suite(), *(_check(result) for result in checks)]
    if policy is not None:
        body.append(_policy(policy))
    if gpu is not None:
        body.append(_gpu_tests(gpu))
    return Section("exactness", "Evidence that it is exact", body, [], used)


def _suite() -> str:
    """What the law suite tests."""
    e = evidence
    settings = len(e.CHAINS) * len(e.DRAFTERS) * len(e.BLOCKS) * 2
    facts = (
        f"{settings} settings: {len(e.CHAINS)} chains ({', '.join(e.CHAINS)}) × {len(e.DRAFTERS)} drafters × "
        f"{len(e.BLOCKS)} block lengths × noise recycled or fresh, {e.SAMPLES} samples each; a few again with "
        f"{e.MANY_SAMPLES}.",
        "Tested in each: the joint law of consecutive states along the chain, and the noise that each step "
        "must have seen, (next state − mean)/std, which has to be N(0, I) and independent of the state.",
        "One budget: a correct sampler fails anywhere in the suite with probability at most "
        f"{e.SUITE_LEVEL:g}; each of up to {e.SHARES} cases may use an equal part. Seeds are fixed.",
        "The recycling theorem by itself: noise left by a round is fresh, given how many drafts were kept.",
        f"{len(e.BROKEN | e.PEEKING)} deliberately broken twins that must be caught, or the suite fails:",
    )
    twins = list((e.BROKEN | e.PEEKING).items())
    return (
        paragraph(
            "Whatever the draft, the samples have exactly the law of the sequential sampler run with the same "
            "network: that is a theorem. The suite tests the code against it where tests have power, in one "
            "and two dimensions."
        )
        + f'<ul class="facts">{"".join(f"<li>{escape(fact)}</li>" for fact in facts)}</ul>'
        + table(["broken twin", "what it does wrong"], twins, "A test that cannot fail proves nothing")
    )


def _check(result: Result) -> str:
    """What `foresample check` found."""
    findings = result.rows(text=("question", "detail"), key="findings")
    rows = [(f["question"], "yes" if f.get("passed") else "NO", f["detail"]) for f in findings]
    return table(
        ["question", "passed", "numbers"], rows, f"{result.name}: what foresample check says of a target"
    )


def _policy(result: Result) -> str:
    """Does the accelerated robot policy behave as the sequential one?"""
    told = [row for row in result.rows(text=("policy",)) if isinstance(row.get("p_values"), dict)]
    rows = [
        (row["policy"], *(_number(row["p_values"].get(key)) for key in ("distance", "to_goal")))
        for row in told
        if row["policy"] != "sequential"
    ]
    caption = (
        "Closed-loop behaviour of the accelerated robot policy against the sequential one: two-sample "
        "Kolmogorov–Smirnov tests"
    )
    return table(["policy", "distance to a demonstration, p", "distance to the goal, p"], rows, caption)


def _number(value: Any) -> float | None:
    return value if is_number(value) else None


def _gpu_tests(result: Result) -> str:
    """What passed and failed on a GPU."""
    passed, failed = result.field("passed", list), result.field("failed", list)
    count = f"{len(passed)} tests passed, {len(failed)} failed{machine_of(result)}."
    names = "".join(f"<li><code>{escape(str(name))}</code></li>" for name in failed)
    listed = f"<details><summary>The failed tests</summary><ul>{names}</ul></details>" if failed else ""
    return (
        f'<div class="note{" bad" if failed else ""}"><h3>The fused rounds on a GPU</h3>'
        f"{paragraph(count)}{listed}</div>"
    )


def law_finding(result: Result) -> str:
    """What a check says of the law."""
    rows = result.rows(text=("question", "detail"), key="findings")
    return next((row["detail"] for row in rows if row["question"] == "law"), "")
