"""`foresample check`: tests that speculative sampling of a target is exact."""

from __future__ import annotations

import json
from typing import Any

import typer
from tqdm import tqdm

from foresample.checks.exactness import check
from foresample.cli.console import echo
from foresample.cli.options import Check
from foresample.cli.targets import choose_window, described, make_source
from foresample.contracts import Drafter
from foresample.drafters import Frozen, Replay
from foresample.provenance import make_result, result_json, write_result

DRAFTERS: dict[str, Drafter] = {
    "replay": Replay(),
    "replay-plain": Replay(secant=False),
    "head": Frozen("head"),
    "parent": Frozen("parent"),
    "nearest": Frozen("nearest"),
}


def run(options: Check) -> None:
    source, samples, quiet = make_source(options), options.samples, options.as_json
    chain, slots = source(), min(options.slots, samples)
    window, _ = choose_window(options, chain, samples=2 * samples, slots=slots)
    how: dict[str, Any] = {
        "window": window,
        "block": options.block,
        "recycle": options.recycle,
        "samples": samples,
        "slots": slots,
        "seed": options.seed,
        "level": options.level,
    }
    with tqdm(total=2 * samples * len(chain.std), unit="step", disable=quiet or None, leave=False) as bar:
        found = check(chain, drafter=DRAFTERS[options.drafter], progress=bar.update, **how)
    settings = {**described(options, source, chain), "drafter": options.drafter, **how}
    result = make_result("check", settings, **json.loads(found.to_json()))
    if options.out is not None:
        write_result(options.out, result)
    echo(result_json(result) if quiet else found)
    if options.out is not None and not quiet:
        echo(f"wrote {options.out}")
    if not found.passed:
        raise typer.Exit(1)
