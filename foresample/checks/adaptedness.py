"""The test of adaptedness: no guess, and no reach of a window, may change with states of later steps."""

from __future__ import annotations

import torch
from torch import Tensor

from foresample.checks.findings import Finding
from foresample.contracts import Drafter, DraftPath, PreviousDraft, Target, begin_memory, expand

_ROWS = 64  # rows compared: half of them the first, half spread over all
_MANY = 160  # rows of the largest batch, at least
_ELEMENTS = 2**20  # numbers of a path held at a time
_STARTS_AT = 8, 16  # places along the chain where windows begin, at least and at most

History = tuple[tuple[int, ...], int]
"""The transitions committed by each round before a window, and the window's first step."""


def drafter_is_adapted(
    drafter: Drafter, target: Target, window: int, seed: int = 0, rows: int = _ROWS
) -> Finding:
    """Change the noise from some step on: no guess and no reach that is decided before that step may change.

    After some rounds, every guess of the next window, and its reach, is compared with that of a memory whose rounds
    differ only in the noise of that step and later, and in the states that follow from it. To find drafters that depend
    on them, sizes vary over decades and rows are spread over 0 … rows − 1. Windows begin along the whole chain, after
    none to eight rounds that committed one or many transitions, in batches of 1, 2 and many rows.
    """
    few = torch.arange(min(rows, _ROWS // 2))
    spread = torch.cat([few, torch.linspace(0, rows - 1, _ROWS - len(few)).long()]).unique()
    at_a_time = max(1, _ELEMENTS // (target.shape.numel() * (window + 1)))
    many = torch.arange(min(max(rows, _MANY), 512, at_a_time)) % rows
    generator = torch.Generator().manual_seed(seed)
    histories = _histories(len(target.std), window)
    cases = [(part, histories[0], 16) for part in spread.split(at_a_time)]
    cases += [(batch, history, 5) for history in histories[1:] for batch in (many, many[:1], many[:2])]
    for row, history, steps in cases:
        detail = _looks_ahead(drafter, target, window, row.to(target.std.device), history, steps, generator)
        if detail is not None:
            return Finding("drafter is adapted", False, detail)
    longest = max(len(committed) for committed, _ in histories)
    detail = (
        f"no guess of a window of {window} depends on later steps, nor does its reach ({len(spread)} rows, after up to "
        f"{longest} rounds, along the whole chain, in batches of 1, 2 and {len(many)})"
    )
    return Finding("drafter is adapted", True, detail)


def _histories(steps: int, window: int) -> list[History]:
    """Histories to try: two rounds at the start, then windows along the chain after rounds of several kinds."""
    kinds = [(2, 1, min(3, window + 1), 1, 1, 1), (window + 1, 1, 1, window, 1), (1,), (1,) * 5]
    found: list[History] = [((1, 1), 2)] if steps > 3 else []
    places = min(_STARTS_AT[1], max(_STARTS_AT[0], -(-steps // window)))
    for i, start in enumerate(torch.linspace(0, max(0, steps - 2), places).long().unique().tolist()):
        for kind in ((1,) * 8, kinds[i % len(kinds)]):
            committed = list(kind)
            while sum(committed) > start:  # a chain has no rounds before its first step
                committed[committed.index(max(committed))] -= 1
                committed = [c for c in committed if c]
            found.append((tuple(committed), start))
    return list(dict.fromkeys(found))


@torch.no_grad()
def _looks_ahead(
    drafter: Drafter,
    target: Target,
    window: int,
    row: Tensor,
    history: History,
    steps: int,
    generator: torch.Generator,
) -> str | None:
    """A sentence if these rows' next window depends on later steps, else None; at most `steps` cuts are tried."""
    rows, device, dtype = len(row), target.std.device, target.std.dtype
    (committed, start), last_step = history, len(target.std) - 1
    firsts = [start - sum(committed[i:]) for i in range(len(committed))]  # first steps of the rounds
    positions = min(window, max(1, last_step - start))

    def states(*lead: int) -> Tensor:
        return torch.randn(*lead, *target.shape, generator=generator, dtype=dtype).to(device)

    def path() -> tuple[Tensor, Tensor, Tensor]:
        size = 10 ** torch.randn(rows, window + 1, generator=generator, dtype=dtype).to(device)
        x, prediction, innovation = states(rows, window + 1), states(rows, window + 1), states(rows, window)
        return x, expand(size, prediction) * prediction, innovation

    paths, other = ([path() for _ in committed] for _ in range(2))
    current, noise = states(positions, rows), states(positions, rows)
    full = torch.full((rows,), window, device=device)

    def next_window(changed_from: int, positions: int) -> tuple[Tensor, list[Tensor]]:
        """Reach and first guesses of the window; the noise of its rounds is changed from that step on."""
        memory = begin_memory(drafter, window, row, current[0, 0])
        for first, many, old, new in zip(firsts, committed, paths, other, strict=True):
            # The noise of a step makes the state at the next; an innovation is that noise.
            x, prediction, innovation = (
                _where_later(first + offset, changed_from, b, a)
                for a, b, offset in zip(old, new, (0, 0, 1), strict=True)
            )
            length = full.clamp(max=max(1, last_step - first))
            learned = DraftPath(x, prediction, innovation, length, torch.full_like(full, first))
            memory = drafter.learn(memory, learned, torch.full_like(full, many))
        found: list[Tensor] = []
        for j in range(positions):
            before = PreviousDraft(found[-1], noise[j]) if found else None
            step = torch.full_like(row, min(start + j, last_step))
            found.append(drafter.guess(memory, current[j], j, step, row, before))
        return drafter.reach(memory, window), found

    reach, guesses = next_window(len(target.std) + window, positions)
    changes = torch.linspace(1, positions, min(positions, steps)).long().tolist()
    for known in changes:  # positions of the window decided before the noise of step start + known − 1
        other_reach, other_guesses = next_window(start + known - 1, known)
        if not torch.equal(other_reach.clamp(max=known), reach.clamp(max=known)):
            return (
                "the reach of a window changes when only later steps change; whether a transition is drafted may "
                "depend only on noise of the steps before it"
            )
        for j, (one, two) in enumerate(zip(other_guesses, guesses, strict=False)):
            if not torch.equal(one, two):
                return (
                    f"the guess at position {j} of a window changes when only later steps change (step {start + j}, "
                    f"after {len(paths)} rounds, {rows} rows at once); use only states and predictions of that step "
                    "and before"
                )
    return None


def _where_later(first: int, step: int, new: Tensor, old: Tensor) -> Tensor:
    """`new` at the positions of a path from `first` on that come after `step`, else `old`."""
    later = first + torch.arange(old.shape[1], device=old.device) > step
    return torch.where(later.view(-1, *(1,) * (old.ndim - 2)), new, old)
