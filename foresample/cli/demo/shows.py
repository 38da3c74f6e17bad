"""What the demo shows, as events: dictionaries that `send` is given while the work runs.

Two samplers are never run at once, so neither takes time from the other. What is watched is slowed by the watching:
the pictures are drawn once to be seen and once again, unseen, for the clock. A pen's plans are clocked as made.

`send` raises where nobody listens any more, which ends the work.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import foresample
from foresample.baseline import sequential
from foresample.cli.pictures import are_pictures, grid
from foresample.core.noise import seeds_of
from foresample.core.report import Commit, Run
from foresample.engine import sample
from foresample.pretrained import Pretrained
from foresample.pretrained import policy as handwriting

Send = Callable[[dict[str, Any]], None]
LIMITS = {"window": (1, 64), "steps": (2, 1000), "count": (1, 9), "seed": (0, 10**9), "label": (-1, 999)}
PEN = {"window": (1, 64), "shape": (0, len(handwriting.SHAPES) - 1), "seed": (0, 10**9), "plans": (1, 40)}
_PAUSE = 0.08  # seconds between two pictures, at least


class Shows:
    """The model and the policy, loaded once."""

    def __init__(self, model: Pretrained) -> None:
        if not are_pictures(model.shape):
            raise ValueError(
                f"the demo shows pictures, and this model's states are {tuple(model.shape)}: name one with "
                "1 or 3 channels with --model"
            )
        self.model = model
        self.policy = handwriting.load()
        self._fast: tuple[int, handwriting.LasaPolicy] | None = None

    def about(self) -> dict[str, Any]:
        """What the page offers to choose from."""
        return {
            "labels": self.model.labels,
            "shapes": list(handwriting.SHAPES),
            "device": str(self.model.device),
        }

    def draw(self, asked: Mapping[str, int], send: Send) -> None:
        """Pictures of the same seeds, sequentially and speculatively. They are other draws, of one law."""
        label = asked["label"]
        chain = self.model.target(asked["steps"], None if label < 0 or not self.model.labels else [label])
        seeds, window = seeds_of(asked["seed"], asked["count"]), min(asked["window"], asked["steps"] - 1)
        send({"kind": "begin", **asked, "window": window})

        def plain(observe: Callable[[Commit], None] | None) -> Run:
            return sequential(chain, seeds=seeds, observe=observe)

        def ours(observe: Callable[[Commit], None] | None) -> Run:
            return sample(chain, seeds=seeds, window=window, observe=observe)

        for name, drawn in (("sequential", plain), ("speculative", ours)):
            painter = Painter(name, asked["count"], chain.shape, send)
            run = drawn(painter)
            painter.paint(run.samples.cpu())
            pulse = Pulse({"kind": "clocking", "of": name}, send)
            # On a GPU rounds that are watched wait for the host: there nobody may look, not even whether to go on.
            seconds = drawn(pulse if chain.std.device.type == "cpu" else None).report.seconds
            cost = {"calls": run.report.calls_mean, "evaluations": run.report.evaluations_mean}
            send({"kind": "done", "of": name, "seconds": seconds, **cost})

    def plan(self, asked: Mapping[str, int], send: Send) -> None:
        """Two pens draw a shape in closed loop, plan by plan in turns, each from where it is."""
        start = torch.tensor([handwriting.STARTS[asked["shape"]]])
        policies = {"sequential": self.policy, "speculative": self._accelerated(asked["window"])}
        pens = {name: Pen(policy, start, asked["shape"], asked["seed"]) for name, policy in policies.items()}
        for (
            policy
        ) in policies.values():  # what a first plan compiles, traces and looks at is not a plan's latency
            Pen(policy, start, asked["shape"], 0).plan()
        send({"kind": "begin", **asked, "start": start[0].tolist()})
        for _ in range(asked["plans"]):
            for name, pen in pens.items():
                send({"kind": "plan", "of": name, **pen.plan()})

    def _accelerated(self, window: int) -> handwriting.LasaPolicy:
        """The same policy in a second object; the last window's is kept."""
        if self._fast is None or self._fast[0] != window:
            policy = handwriting.load()
            foresample.accelerate(policy, window=window)
            self._fast = window, policy
        return self._fast[1]


class Pen:
    """Draws a shape: where it is, how it moves, and what plans for it."""

    def __init__(self, policy: handwriting.LasaPolicy, start: Tensor, shape: int, seed: int) -> None:
        self.policy, self.shape = policy, torch.tensor([shape])
        self.position, self.velocity = start, torch.zeros_like(start)
        self.generator = torch.Generator().manual_seed(seed)

    def plan(self) -> dict[str, Any]:
        """Plan and execute: the points it comes by, and what the plan took."""
        began = perf_counter()
        actions = self.policy.predict_action_chunk(self.position, self.velocity, self.shape, self.generator)
        seconds = perf_counter() - began
        report = getattr(self.policy, "foresample_report", None)
        calls = self.policy.config.num_train_timesteps if report is None else report.rounds
        path = self.position + actions[0].cumsum(0)
        self.position, self.velocity = path[-1:], actions[:, -1]
        return {"path": path.tolist(), "calls": calls, "ms": 1000 * seconds}


class Painter:
    """Tells of a run under way: its pictures now and then, the first sample's rounds, what it did so far."""

    def __init__(self, name: str, count: int, shape: torch.Size, send: Send) -> None:
        self.name, self.send = name, send
        self.states = torch.zeros(count, *shape)
        self.calls, self.due = 0, 0.0
        self.rounds: list[tuple[int, int, int]] = []

    def __call__(self, commit: Commit) -> None:
        self.calls += 1
        self.states[commit.sample.cpu()] = commit.x.float().cpu()
        first = (commit.sample == 0).nonzero().flatten().tolist()
        for r in first:
            self.rounds.append((int(commit.step[r]), int(commit.drafted[r]), int(commit.committed[r])))
        if perf_counter() >= self.due:
            self.paint(self.states)
            self.due = perf_counter() + _PAUSE

    def paint(self, states: Tensor) -> None:
        """The pictures as they are, and the rounds since the last time."""
        rounds, self.rounds = self.rounds, []
        self.send({"kind": "round", "of": self.name, "calls": self.calls, "rounds": rounds, "png": png(states)})


class Pulse:
    """Says the same now and then, so that a run ends where nobody listens; costs a run nothing else."""

    def __init__(self, event: dict[str, Any], send: Send) -> None:
        self.event, self.send = event, send
        send(event)
        self.due = perf_counter() + 0.5

    def __call__(self, commit: Commit) -> None:
        if perf_counter() >= self.due:
            self.send(self.event)
            self.due = perf_counter() + 0.5


def png(states: Tensor) -> str:
    """Pictures side by side, as the address of an image."""
    out = io.BytesIO()
    grid(states, columns=min(3, len(states)), scale=2).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
