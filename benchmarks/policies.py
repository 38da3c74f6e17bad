"""The handwriting policy in closed loop: does it draw as well when accelerated, and how long does a plan take?

python -m benchmarks.policies

Roll-outs from the demonstrations' start points, shaken a little: plan 16 velocities, execute 8, plan again.
The policies draw with different random numbers, so their distributions are compared: means with standard errors.
All windows are timed and reported, in turns with the sequential policy (`benchmarks.timing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.kinds.robots import Mean, PlanClock, PolicyRow, PValues
from benchmarks.results import RESULTS, save
from benchmarks.timing import Timing, take_turns
from foresample.checks.kolmogorov import ks_two_sample
from recipes import lasa

WARM_UP = 3
PLANS_A_DRAWING = 14  # of 8 velocities: 112 points for demonstrations of 100


@dataclass(frozen=True)
class Drawing:
    """Roll-outs of one policy and how they went."""

    paths: Tensor
    """[R, points, 2]"""
    distance: Tensor
    """[R]: Fréchet distance to the nearest demonstration of the shape."""
    to_goal: Tensor
    """[R]: where the pen came to rest."""
    calls: Tensor
    """Mean network calls of each plan, [plans]."""


def draw(policy: lasa.LasaPolicy, paths: Tensor, repeats: int, seed: int) -> Drawing:
    """Draw `repeats` roll-outs from every demonstration's start, in one batch; all seeds have the same starts."""
    shapes, count = paths.shape[:2]
    which = torch.arange(shapes).repeat_interleave(count * repeats)
    position = paths[:, :, 0].repeat_interleave(repeats, 1).flatten(0, 1)
    position = position + 0.02 * torch.randn(position.shape, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    velocity, trace, calls = torch.zeros_like(position), [position], []
    for _ in range(PLANS_A_DRAWING):
        actions = policy.predict_action_chunk(position, velocity, which, generator)
        trace += list((position.unsqueeze(1) + actions.cumsum(1)).unbind(1))
        position, velocity = trace[-1], actions[:, -1]
        calls.append(_calls(policy))
    drawn = torch.stack(trace, 1)
    each = [warped_distance(drawn, paths[which, demo]) for demo in range(count)]
    nearest = torch.stack(each).amin(0)
    goal = paths[which, 0, -1]
    return Drawing(drawn, nearest, (drawn[:, -1] - goal).norm(dim=1), torch.tensor(calls, dtype=torch.float64))


def _calls(policy: lasa.LasaPolicy) -> float:
    """Mean network calls of the last plan."""
    report = getattr(policy, "foresample_report", None)
    return policy.diffusion.num_inference_steps if report is None else report.calls_mean


def warped_distance(one: Tensor, two: Tensor) -> Tensor:
    """Discrete Fréchet distance of paths [B, n, 2] and [B, m, 2]: the largest gap of the best alignment."""
    cost = torch.cdist(one, two).numpy()
    best = cost.copy()
    for i in range(cost.shape[1]):
        for j in range(cost.shape[2]):
            before = [best[:, a, b] for a, b in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if a >= 0 and b >= 0]
            if before:
                best[:, i, j] = np.maximum(cost[:, i, j], np.minimum.reduce(before))
    return torch.from_numpy(best[:, -1, -1])


def clock(
    policies: Mapping[int | None, lasa.LasaPolicy], paths: Tensor, plans: int, seed: int
) -> dict[int | None, PlanClock]:
    """Milliseconds a plan at batch 1 of every policy, the sequential one first, in turns over moments of
    demonstrations."""
    data = lasa.moments(paths, policies[None].config.horizon)
    chosen = torch.randint(
        len(data.position), (plans + WARM_UP,), generator=torch.Generator().manual_seed(seed)
    )
    calls, network = ({window: list[float]() for window in policies} for _ in range(2))

    def plan(window: int | None, turn: int) -> None:
        policy, one = policies[window], chosen[[turn]]
        generator = torch.Generator().manual_seed(10_000 * seed + turn)
        policy.predict_action_chunk(data.position[one], data.velocity[one], data.shape[one], generator)
        calls[window].append(_calls(policy))
        if window is not None:
            network[window].append(cast(Any, policy).foresample_report.target_seconds)

    sides = {f"{window}": partial(plan, window) for window in policies}
    timing = take_turns(sides, warm=WARM_UP, least=plans, most=plans)
    return {
        window: PlanClock(
            ms=1000 * timing.median(f"{window}"),
            ms_90=1000 * timing.quantile(f"{window}", 0.9),
            calls=fmean(calls[window][WARM_UP:]),
            network_ms=None if window is None else 1000 * median(network[window][WARM_UP:]),
            faster=None if window is None else timing.ratio(f"{window}"),
        )
        for window in policies
    }


@torch.no_grad()
def call_clock(policy: lasa.LasaPolicy, *states: int) -> Timing:
    """The time of one network call by its number of states, in turns."""
    config, most = policy.config, max(states)
    sample, timestep = torch.randn(most, config.horizon, config.action_dim), torch.full((most,), 50)
    condition = torch.zeros(most, config.condition_dim)

    def call(count: int, turn: int) -> Tensor:
        return policy.diffusion.unet(sample[:count], timestep[:count], global_cond=condition[:count])

    return take_turns({f"{count}": partial(call, count) for count in states}, warm=5, least=50, most=400)


def calls_by_steps(policy: lasa.LasaPolicy, paths: Tensor, window: int = 16) -> dict[str, float]:
    """Mean network calls of a plan where the scheduler takes fewer steps, over moments of demonstrations."""
    data = lasa.moments(paths, policy.config.horizon)
    every = slice(None, None, 11)
    full, calls = policy.diffusion.num_inference_steps, {}
    with fs.accelerate(policy, window=window):
        for steps in (10, 16, 25, 50, full):
            policy.diffusion.num_inference_steps = steps
            generator = torch.Generator().manual_seed(steps)
            policy.predict_action_chunk(
                data.position[every], data.velocity[every], data.shape[every], generator
            )
            calls[str(steps)] = cast(Any, policy).foresample_report.calls_mean
    return calls


def same_law(one: Drawing, two: Drawing) -> PValues:
    """Two-sample Kolmogorov–Smirnov p-values of what was measured (1 against itself)."""
    return PValues(
        distance=ks_two_sample(one.distance.numpy(), two.distance.numpy()),
        to_goal=ks_two_sample(one.to_goal.numpy(), two.to_goal.numpy()),
    )


def with_error(values: Tensor) -> Mean:
    return Mean(mean=float(values.mean()), error=float(values.std() / math.sqrt(len(values))))


def main(
    repeats: Annotated[int, typer.Option(help="roll-outs from each start point")] = 8,
    windows: Annotated[list[int] | None, typer.Option("--window", help="windows to try")] = None,
    plans: Annotated[int, typer.Option(help="plans timed at batch 1")] = 100,
    seed: int = 0,
    folder: Annotated[Path | None, typer.Option("--data", help="folder of .mat files [.data/lasa]")] = None,
    out: Annotated[Path, typer.Option(help="folder for the result file and the picture")] = RESULTS,
) -> None:
    """Closed-loop quality, calls and latency of the sequential and the accelerated policy."""
    torch.set_num_threads(1)
    paths = lasa.demonstrations(folder)
    policies = {window: lasa.load() for window in (None, *(windows or [8, 16, 32]))}
    for window, policy in policies.items():
        if window is not None:
            fs.accelerate(policy, window=window)
    drawings = {
        window: draw(policy, paths, repeats, 1000 * seed + (window or 0)) for window, policy in policies.items()
    }
    rows = [
        PolicyRow(
            window=window,
            distance=with_error(drawings[window].distance),
            to_goal=with_error(drawings[window].to_goal),
            arrived=with_error((drawings[window].to_goal < 0.1).double()),
            p_values=same_law(drawings[None], drawings[window]),
            calls=float(drawings[window].calls.mean()),
            batch_1=timed,
        )
        for window, timed in clock(policies, paths, plans, seed).items()
    ]
    print("\n".join(map(_line, rows)), flush=True)
    policy = policies[None]
    settings = {
        "policy": asdict(policy.config),
        "parameters": sum(p.numel() for p in policy.parameters()),
        "repeats": repeats,
        "roll_outs": len(drawings[None].paths),
        "plans": plans,
        "seed": seed,
    }
    call = call_clock(policy, 1, 9, 17, 33)
    call_ms = {states: 1000 * call.median(states) for states in call.seconds}
    call_ratio = {states: call.ratio(states) for states in list(call.seconds)[1:]}
    print("network call, ms by states:", call_ms)
    fewer = calls_by_steps(policy, paths)
    print("calls a plan by scheduler steps, window 16:", fewer)
    path = out / "policy-lasa.json"
    content = {"network_call_ms": call_ms, "network_call_ratio": call_ratio, "calls_by_steps": fewer}
    save(path, "policy", settings, rows=rows, **content)
    last = rows[-1]
    drawn = {"sequential": drawings[None].paths, last.label: drawings[last.window].paths}
    picture(path.with_suffix(".png"), paths, drawn)


def _line(row: PolicyRow) -> str:
    means = {"distance": row.distance, "to goal": row.to_goal, "arrived": row.arrived}
    quality = "  ".join(f"{name} {value.mean:.4f} ± {value.error:.4f}" for name, value in means.items())
    return f"{row.label:24s} {quality}  {row.calls:.1f} calls, batch 1: {row.batch_1.ms:.1f} ms a plan" + (
        f", faster: {row.batch_1.faster}" if row.batch_1.faster else ""
    )


def picture(path: Path, paths: Tensor, drawn: dict[str, Tensor]) -> None:
    """Demonstrations and roll-outs side by side, one shape a row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = len(paths)
    columns = [("demonstrations", paths), *((name, _by_shape(lines, shapes)) for name, lines in drawn.items())]
    figure, axes = plt.subplots(shapes, 3, figsize=(9, 2.9 * shapes), layout="constrained", squeeze=False)
    for row, shape in enumerate(lasa.SHAPES[:shapes]):
        for (title, lines), axis in zip(columns, axes[row], strict=True):
            for line in lines[row]:
                alpha = 0.9 if lines is paths else 0.25
                axis.plot(*line.T.tolist(), color="black" if lines is paths else "crimson", lw=1, alpha=alpha)
            axis.plot(*paths[row, :, 0].T.tolist(), "o", color="steelblue", markersize=3)
            axis.plot(*paths[row, 0, -1].tolist(), "*", color="goldenrod", markersize=9)
            axis.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), xticks=[], yticks=[], aspect="equal")
            axis.spines[:].set_color("lightgrey")
            if row == 0:
                axis.set_title(title)
        axes[row, 0].set_ylabel(shape)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _by_shape(lines: Tensor, shapes: int) -> Tensor:
    return lines.view(shapes, -1, *lines.shape[1:])


if __name__ == "__main__":
    typer.run(main)
