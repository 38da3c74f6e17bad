"""The handwriting policy in closed loop: does it draw as well when accelerated, and how long does a plan take?

python -m benchmarks.policies

Roll-outs from the demonstrations' start points, shaken a little: plan 16 velocities, execute 8, plan again.
Both policies draw with different random numbers, so their distributions are compared: means with standard errors.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.results import RESULTS, Mean, PlanClock, PolicyRow, PValues, save
from foresample.checks.kolmogorov import ks_two_sample
from recipes import lasa

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
        report = getattr(policy, "foresample_report", None)
        calls.append(policy.diffusion.num_inference_steps if report is None else report.calls_mean)
    drawn = torch.stack(trace, 1)
    each = [warped_distance(drawn, paths[which, demo]) for demo in range(count)]
    nearest = torch.stack(each).amin(0)
    goal = paths[which, 0, -1]
    return Drawing(drawn, nearest, (drawn[:, -1] - goal).norm(dim=1), torch.tensor(calls, dtype=torch.float64))


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


def latency(policy: lasa.LasaPolicy, paths: Tensor, plans: int, seed: int) -> PlanClock:
    """Milliseconds a plan at batch 1, over the course of demonstrations."""
    generator = torch.Generator().manual_seed(seed)
    data = lasa.moments(paths, policy.config.horizon)
    chosen = torch.randint(len(data.position), (plans + 3,), generator=generator)
    times, calls, network = [], [], []
    for one in chosen.split(1):
        began = perf_counter()
        policy.predict_action_chunk(data.position[one], data.velocity[one], data.shape[one], generator)
        times.append(1000 * (perf_counter() - began))
        report = getattr(policy, "foresample_report", None)
        calls.append(policy.diffusion.num_inference_steps if report is None else report.calls_mean)
        network.append(math.nan if report is None else 1000 * report.target_seconds)
    times, calls, network = times[3:], calls[3:], network[3:]  # the first are slower
    return PlanClock(
        ms=median(times),
        ms_90=sorted(times)[int(0.9 * plans)],
        calls=sum(calls) / plans,
        network_ms=None if report is None else median(network),
    )


@torch.no_grad()
def call_ms(policy: lasa.LasaPolicy, states: int, calls: int = 50) -> float:
    """Milliseconds of one network call with that many states."""
    config = policy.config
    sample = torch.randn(states, config.horizon, config.action_dim)
    timestep, condition = torch.full((states,), 50), torch.zeros(states, config.condition_dim)
    times = []
    for _ in range(calls):
        began = perf_counter()
        policy.diffusion.unet(sample, timestep, global_cond=condition)
        times.append(1000 * (perf_counter() - began))
    return median(times)


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
    plans: Annotated[int, typer.Option(help="plans timed at batch 1")] = 60,
    seed: int = 0,
    folder: Annotated[Path | None, typer.Option("--data", help="folder of .mat files [.data/lasa]")] = None,
    out: Annotated[Path, typer.Option(help="folder for the result file and the picture")] = RESULTS,
) -> None:
    """Closed-loop quality, calls and latency of the sequential and the accelerated policy."""
    policy, paths = lasa.load(), lasa.demonstrations(folder)
    rows: list[PolicyRow] = []
    drawings: dict[int | None, Drawing] = {}
    for window in [None, *(windows or [8, 16, 32])]:
        with nullcontext() if window is None else fs.accelerate(policy, window=window):
            drawings[window] = drawing = draw(policy, paths, repeats, 1000 * seed + (window or 0))
            timed = latency(policy, paths, plans, seed)
        rows.append(
            PolicyRow(
                window=window,
                distance=with_error(drawing.distance),
                to_goal=with_error(drawing.to_goal),
                arrived=with_error((drawing.to_goal < 0.1).double()),
                p_values=same_law(drawings[None], drawing),
                calls=float(drawing.calls.mean()),
                batch_1=timed,
            )
        )
        print(_line(rows[-1]), flush=True)
    settings = {
        "policy": asdict(policy.config),
        "parameters": sum(p.numel() for p in policy.parameters()),
        "repeats": repeats,
        "roll_outs": len(drawings[None].paths),
        "plans": plans,
        "seed": seed,
    }
    call = {str(states): call_ms(policy, states) for states in (1, 9, 17, 33)}
    print("network call, ms by states:", call)
    fewer = calls_by_steps(policy, paths)
    print("calls a plan by scheduler steps, window 16:", fewer)
    path = out / "policy-lasa.json"
    save(path, "policy", settings, rows=rows, network_call_ms=call, calls_by_steps=fewer)
    last = rows[-1]
    drawn = {"sequential": drawings[None].paths, last.label: drawings[last.window].paths}
    picture(path.with_suffix(".png"), paths, drawn)


def _line(row: PolicyRow) -> str:
    means = {"distance": row.distance, "to goal": row.to_goal, "arrived": row.arrived}
    quality = "  ".join(f"{name} {value.mean:.4f} ± {value.error:.4f}" for name, value in means.items())
    return f"{row.label:24s} {quality}  {row.calls:.1f} calls, batch 1: {row.batch_1.ms:.1f} ms a plan"


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
