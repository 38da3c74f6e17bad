"""The recorded run as one still picture, for paper and for browsers without scripts."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from benchmarks.report.recording import Recording, Round

Place = Callable[[float], float]
"""Maps a step or a state to a coordinate of the picture."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 330, 40, 60, 16, 76


def still(recording: Recording) -> str:
    """All rounds at once: drafts not kept in grey, what was committed in full, one bar a call below."""
    values = [v for r in recording.rounds for v in (*r.states, r.x)] + [v for v, _ in recording.density]
    low, high = min(values) - 0.1, max(values) + 0.1

    def across(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / recording.steps

    def up(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    def path(points: list[tuple[int, float]], name: str) -> str:
        line = " ".join(f"{across(k):.1f},{up(v):.1f}" for k, v in points)
        return f'<polyline class="{name}" points="{line}"/>'

    parts = [_axes(recording, across, up)]
    for r in recording.rounds:
        tail = list(enumerate(r.states))[r.accepted :]
        parts.append(path([(r.step + j, v) for j, v in tail], "ghost"))
    for i, r in enumerate(recording.rounds):
        kept = committed(r)
        parts.append(path(kept, "kept"))
        for k, v in kept[1:]:
            corrected = k == r.step + r.accepted + 1 and r.accepted < r.length
            name = "corrected" if corrected else "kept"
            parts.append(f'<circle class="{name}" cx="{across(k):.1f}" cy="{up(v):.1f}" r="4"/>')
        parts.append(_call(i, r, across))
    return (
        f'<svg class="still" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(summary(recording))}">'
        f"{''.join(parts)}</svg>"
    )


def committed(r: Round) -> list[tuple[int, float]]:
    """(step, state) of the round's first state and of all that it committed."""
    states = [*r.states[: r.accepted + 1], r.x]
    return [(r.step + j, v) for j, v in enumerate(states)]


def summary(recording: Recording) -> str:
    """The run in a sentence."""
    shown = ", ".join(f"{r.accepted} of {r.length}" for r in recording.rounds if r.length)
    return (
        f"A path of {recording.steps} steps in {len(recording.rounds)} calls; after a first plain step, the "
        f"rounds kept {shown} drafts and committed one state more each"
    )


def _axes(recording: Recording, across: Place, up: Place) -> str:
    bottom = HEIGHT - BOTTOM
    lines = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    for step in range(0, recording.steps + 1, 4):
        lines.append(
            f'<text class="tick" x="{across(step):.1f}" y="{bottom + 15}" text-anchor="middle">{step}</text>'
        )
    lines.append(f'<text class="tick" x="{WIDTH - RIGHT + 8}" y="{bottom + 15}">step</text>')
    lines.append(f'<text class="tick" x="4" y="{TOP + 2}">state</text>')
    top = max(density for _, density in recording.density)
    shape = " ".join(
        f"{WIDTH - RIGHT + 6 + (RIGHT - 12) * density / top:.1f},{up(value):.1f}"
        for value, density in recording.density
    )
    lines.append(f'<polyline class="density" points="{shape}"/>')
    return "".join(lines)


def _call(i: int, r: Round, across: Place) -> str:
    """One bar along the steps it committed, with its number."""
    y, last = HEIGHT - BOTTOM + 30, r.step + r.accepted + 1
    middle = (across(r.step) + across(last)) / 2
    return (
        f'<rect class="call" x="{across(r.step) + 1:.1f}" y="{y}" '
        f'width="{across(last) - across(r.step) - 2:.1f}" '
        f'height="20" rx="3"/><text class="label" x="{middle:.1f}" y="{y + 14}" '
        f'text-anchor="middle">{i + 1}</text>'
    )
