"""The evidence that samples have the law of the chain."""

from __future__ import annotations

from html import escape

from foresample.webpage import evidence
from foresample.webpage.common import machine_of
from foresample.webpage.markup import Section, paragraph, table
from foresample.webpage.results import Result, Results


def exactness(results: Results) -> Section | None:
    """Why anyone should believe it."""
    e = evidence
    settings = len(e.CHAINS) * len(e.DRAFTERS) * len(e.BLOCKS) * 2
    body = [
        paragraph(
            "Whatever the draft, the samples have exactly the law of the sequential sampler run with the same "
            "network:",
            "that is a theorem. The suite tests the code against it where tests have power, in one and two "
            "dimensions.",
        ),
        '<ul class="facts">'
        + "".join(
            f"<li>{escape(text)}</li>"
            for text in (
                f"{settings} settings: {len(e.CHAINS)} chains ({', '.join(e.CHAINS)}) × {len(e.DRAFTERS)} "
                "drafters × "
                f"{len(e.BLOCKS)} block lengths × noise recycled or fresh, {e.SAMPLES} samples each; a few "
                "again with "
                f"{e.MANY_SAMPLES}.",
                "Tested in each: the joint law of consecutive states along the chain, and the innovations "
                "(x_{k+1} − "
                "mean_k(x_k))/std_k, which must be N(0, I) and independent of x_k.",
                "One budget: a correct sampler fails anywhere in the suite with probability at most "
                f"{e.SUITE_LEVEL:g}; "
                f"each of up to {e.SHARES} cases may use an equal part. Seeds are fixed.",
                "The recycling theorem by itself: noise left by a round is fresh, given how many drafts were "
                "kept.",
                f"{len(e.BROKEN) + len(e.PEEKING)} deliberately broken twins that must be caught, or the suite "
                "fails:",
            )
        )
        + "</ul>",
        table(
            ["broken twin", "what it does wrong"],
            list((e.BROKEN | e.PEEKING).items()),
            "A test that cannot fail proves nothing",
        ),
    ]
    used = []
    for result in results.matching("check*"):
        used.append(result)
        findings = result.rows(text=("question", "detail"), key="findings")
        body.append(
            table(
                ["question", "passed", "numbers"],
                [(f["question"], "yes" if f.get("passed") else "NO", f["detail"]) for f in findings],
                f"{result.name}: what foresample check says of a target",
            )
        )
    policy = results.get("policy-lasa")
    if policy is not None:
        used.append(policy)
        rows = policy.rows(text=("policy",))
        body.append(
            table(
                ["policy", "distance to a demonstration, p", "distance to the goal, p"],
                [
                    (row["policy"], row["p_values"].get("distance"), row["p_values"].get("to_goal"))
                    for row in rows
                    if isinstance(row.get("p_values"), dict) and row["policy"] != "sequential"
                ],
                "Closed-loop behaviour of the accelerated robot policy against the sequential one: two-sample "
                "Kolmogorov–Smirnov tests",
            )
        )
    gpu = results.get("gpu-tests")
    if gpu is not None:
        used.append(gpu)
        passed, failed = gpu.field("passed", list), gpu.field("failed", list)
        note = str(gpu.data.get("note", ""))
        listed = "".join(f"<li><code>{escape(str(name))}</code></li>" for name in failed)
        body.append(
            f'<div class="note{" bad" if failed else ""}"><h3>The fused rounds on a GPU</h3>'
            + paragraph(f"{len(passed)} tests passed, {len(failed)} failed{machine_of(gpu)}.", note)
            + (f"<details><summary>The failed tests</summary><ul>{listed}</ul></details>" if failed else "")
            + "</div>"
        )
    if not used:
        return None
    return Section("exactness", "Evidence that it is exact", body, [], used)


def law_finding(result: Result) -> str:
    rows = result.rows(text=("question", "detail"), key="findings")
    return next((row["detail"] for row in rows if row["question"] == "law"), "")
