"""The demo's drawings: a shape with two pens, a picture twice, and many plans for the check.

The two samplers run in turns and never at once, so neither takes time from the other. Both are warmed up first.

Threads of one operation wait for each other, so a second program that keeps a core busy slows several threads down by
much more than its share, and unevenly. The pens use one thread; the picture uses as many as make one state fastest now.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

import foresample as fs
from foresample import pretrained
from foresample.baseline import Sequential
from foresample.checks.samples import SamplesLaw, samples_law
from foresample.cli.pictures import grid
from foresample.contracts import Target
from foresample.core.noise import seeds_of
from foresample.core.report import Commit
from foresample.engine.clock import Comparison, Times, time_in_turns
from foresample.engine.tuning import call_seconds
from foresample.pretrained import policy as handwriting

SHAPE, PLANS, PLAN_WINDOW = 0, 14, 16  # 14 plans of 8 points draw the whole shape
STEPS, TURNS, PICTURE_WINDOW = 100, 9, 8
CHECKED = 400  # plans drawn each way for the check


class Pen:
    """Draws a shape in closed loop: plans from where it is, executes half of the plan, and plans again."""

    def __init__(self, *, speculative: bool) -> None:
        self.policy, self.speculative = handwriting.load(), speculative
        self.marks: list[float] = []  # the clock before (negative) and after each call of the plain network
        if speculative:
            fs.accelerate(self.policy, window=PLAN_WINDOW)
        else:
            unet = self.policy.diffusion.unet
            unet.register_forward_pre_hook(lambda *_: self.marks.append(-perf_counter()))
            unet.register_forward_hook(lambda *_: self.marks.append(perf_counter()))

    def begin(self, seed: int) -> None:
        """Put the pen at the start of the shape, and forget what it drew."""
        self.position, self.velocity = torch.tensor([handwriting.STARTS[SHAPE]]), torch.zeros(1, 2)
        self.generator = torch.Generator().manual_seed(seed)
        self.times = Times()
        self.paths: list[Any] = []

    def plans(self, position: Tensor, velocity: Tensor) -> Tensor:
        """One plan from each position, [n, 8, 2]."""
        shape = torch.full((len(position),), SHAPE)
        return self.policy.predict_action_chunk(position, velocity, shape, self.generator)

    def move(self) -> None:
        """Plan and execute."""
        self.marks.clear()
        began = perf_counter()
        actions = self.plans(self.position, self.velocity)
        seconds, network, calls = perf_counter() - began, sum(self.marks), len(self.marks) // 2
        if self.speculative:
            report = cast(Any, self.policy).foresample_report
            network, calls = report.target_seconds, report.rounds
        self.times.add(seconds, network, calls)
        path = self.position + actions[0].cumsum(0)
        self.paths.append(path.tolist())
        self.position, self.velocity = path[-1:], actions[:, -1]


def draw_with_pens(seed: int) -> tuple[Pen, Pen]:
    """Draw the shape with both pens, plan by plan in turns."""
    pens = Pen(speculative=False), Pen(speculative=True)
    with threads(1):  # a network as small as the policy's is fastest so, most of all sequentially
        for pen in pens:
            pen.begin(seed + 1)
            for _ in range(3):  # compiles, traces, and checks the network
                pen.move()
            pen.begin(seed)
        for _ in range(PLANS):
            for pen in pens:
                pen.move()
    return pens


def shown(pens: tuple[Pen, Pen]) -> dict[str, Any]:
    """Data of the pens for the page: where the pens begin, each plan's points and milliseconds."""
    sides = [{"paths": pen.paths, "ms": [1000 * s for s in pen.times.seconds]} for pen in pens]
    return {"start": handwriting.STARTS[SHAPE], "sides": sides}


def check_plans(pens: tuple[Pen, Pen], seed: int) -> SamplesLaw:
    """Compare the distributions of both pens' plans, from a moment in the middle of what they drew."""
    before, here = torch.tensor(pens[0].paths[PLANS // 2 - 1])[-2:]
    drawn = []
    with threads(1):
        for k, pen in enumerate(pens):
            pen.generator = torch.Generator().manual_seed(seed + 2 + k)
            drawn.append(pen.plans(here.expand(CHECKED, 2), (here - before).expand(CHECKED, 2)))
    return samples_law(drawn[0], drawn[1:])


@dataclass
class Picture:
    """One picture drawn both ways, with every round of either sampler."""

    comparison: Comparison = field(default_factory=Comparison)
    frames: list[list[str]] = field(default_factory=list)
    """For each sampler the picture after every round, as addresses of PNG images."""
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    """(first step, transitions drafted, transitions committed) of every speculative round."""

    def shown(self) -> dict[str, Any]:
        """Data of the picture for the page."""
        ms = [1000 * median(times.seconds) for times in (self.comparison.plain, self.comparison.ours)]
        return {"steps": STEPS, "ms": ms, "frames": self.frames, "rounds": self.rounds}


def draw_picture(seed: int) -> Picture:
    """Draw a boot both ways: once watched, which warms both samplers, then unwatched in turns for the clock."""
    model = pretrained.load()
    target = model.target(STEPS, [len(model.labels) - 1])
    with threads(fastest_threads(target)):
        window = min(PICTURE_WINDOW, STEPS - 1)
        plain, ours = Sequential(target, 1), fs.Engine(target, window=window, slots=1)
        picture, seeds = Picture(), seeds_of(seed, 1)
        for sample in (plain.sample, ours.sample):
            frames: list[str] = []

            def watch(commit: Commit, frames: list[str] = frames) -> None:
                frames.append(png(commit.x))
                picture.rounds.append((int(commit.step), int(commit.drafted), int(commit.committed)))

            picture.rounds.clear()
            sample(seeds, watch)
            picture.frames.append(frames)
        runs = (lambda: plain.sample(seeds).report), (lambda: ours.sample(seeds).report)
        time_in_turns(*runs, turns=TURNS, found=picture.comparison)
        if picture.comparison.tie:  # or the machine is busy: as many turns again
            time_in_turns(*runs, turns=TURNS, found=picture.comparison)
    return picture


def fastest_threads(target: Target) -> int:
    """One thread or as many as torch has by default: whichever makes calls on one state faster now."""
    counts = sorted({1, torch.get_num_threads()})
    seconds = dict.fromkeys(counts, 0.0)
    for turn in range(4 if len(counts) > 1 else 0):
        for count in counts:
            with threads(count):
                began = perf_counter()
                call_seconds(target, 1)
                seconds[count] += (perf_counter() - began) * (turn > 0)  # the first warms up
    return min(counts, key=lambda count: seconds[count])


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this number of threads, and restore the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def png(states: Tensor) -> str:
    """A picture as the address of an image."""
    out = io.BytesIO()
    grid(states, scale=1).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
