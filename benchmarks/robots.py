"""LeRobot's diffusion policy on Meta-World: how long does a plan take, and does the robot do as well?

    python -m benchmarks.robots clock --policy FOLDER --device cuda     # milliseconds a plan, recorded observations
    python -m benchmarks.robots success                                 # closed loop, needs metaworld

Both use the real class through `foresample.accelerate`. The clock plans at batch 1 on the experts' episodes, a new plan
every 8 steps, so that consecutive plans are a robot's; the policy is reset between episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.results import RESULTS, RobotClockRow, Spread, save
from foresample.core.baseline import Sequential
from foresample.engine.tuning import call_seconds
from foresample.integrations.plans import Planner
from recipes import metaworld

Observation = dict[str, Tensor]
WINDOWS = (8, 16, 32, 64, 99)
app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def commands() -> None:
    """LeRobot's diffusion policy on Meta-World."""


# ---------------------------------------------------------------- the clock


def episodes(
    loaded: metaworld.LoadedPolicy, data: metaworld.Demonstrations, chosen: range
) -> list[list[Observation]]:
    """Observations of these episodes, normalised, each [1, n_obs_steps, …], every n_action_steps."""
    config = loaded.policy.config
    features = {name: value for name, value in data.features().items() if name != "action"}
    normal = loaded.before(features)
    found = []
    for number in chosen:
        place = (data.episode == number).nonzero().squeeze(1)
        first = int(place[0])
        moments = range(first, int(place[-1]) + 1, config.n_action_steps)
        back = range(1 - config.n_obs_steps, 1)
        found.append(
            [
                {n: torch.stack([normal[n][max(first, i + j)] for j in back]).unsqueeze(0) for n in features}
                for i in moments
            ]
        )
    return found


def spread(values: list[float]) -> Spread:
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]  # noqa: E731
    return Spread(mean=sum(ordered) / len(ordered), median=at(0.5), p99=at(0.99), most=ordered[-1])


class Clock:
    """Plans over recorded episodes, on one policy."""

    def __init__(self, loaded: metaworld.LoadedPolicy, courses: list[list[Observation]], device: str) -> None:
        self.policy, self.courses, self.device = loaded.policy, courses, torch.device(device)
        self.rows: list[RobotClockRow] = []

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    def run(
        self, plans: int, draw: Callable[[Observation], object], calls: Callable[[], float]
    ) -> tuple[Spread, Spread]:
        """So many plans, after five that are not counted; milliseconds and calls."""
        times: list[float] = []
        counts: list[float] = []
        warm_up = 5
        while len(times) < plans + warm_up:
            for course in self.courses:
                self.policy.reset()
                for observation in course:
                    began = self.now()
                    draw(observation)
                    times.append(1000 * (self.now() - began))
                    counts.append(calls())
                    if len(times) == plans + warm_up:
                        return spread(times[warm_up:]), spread(counts[warm_up:])
        raise AssertionError

    def note(self, row: RobotClockRow) -> None:
        self.rows.append(row)
        share = (
            ""
            if row.round_ms is None
            else f", round {row.round_ms:.2f} ms of which network {row.network_ms:.2f}"
        )
        how = f"{row.method} {row.run} window {row.window} warm {row.warm} prior {row.prior}"
        print(
            f"{how:60s} {row.ms.median:8.2f} ms (mean {row.ms.mean:.2f}, p99 {row.ms.p99:.2f}, "
            f"most {row.ms.most:.2f}), "
            f"calls {row.calls.mean:.2f} (p99 {row.calls.p99:.0f}, most {row.calls.most:.0f}){share}",
            flush=True,
        )

    def sequential(self, run: str, plans: int) -> None:
        """LeRobot's own loop."""
        steps = float(self.policy.diffusion.num_inference_steps)
        ms, calls = self.run(plans, self.policy.diffusion.generate_actions, lambda: steps)
        self.note(_row("sequential", run, None, False, False, plans, ms, calls))

    def captured(self, plans: int, run: str) -> None:
        """The sequential chain with each transition replayed from a CUDA graph: the fastest sequential plan here."""
        with fs.accelerate(self.policy, 1, trace=False):
            self.policy.diffusion.generate_actions(self.courses[0][0])
            planner = _planner(self.policy)
        engine = Sequential(planner.target, 1, graph=True)
        generator = torch.Generator().manual_seed(0)

        def draw(observation: Observation) -> Tensor:
            condition = self.policy.diffusion._prepare_global_conditioning(observation)
            planner.conditions["global_cond"].copy_(condition)  # type: ignore[union-attr]
            return engine.sample(torch.randint(2**62, (1,), generator=generator)).samples

        ms, calls = self.run(plans, draw, lambda: float(len(planner.target.std)))
        self.note(_row("sequential", run, None, False, False, plans, ms, calls))

    def accelerated(
        self, run: str, window: Any, plans: int, *, warm: bool, prior: fs.Prior | None, **how: Any
    ) -> None:
        with fs.accelerate(
            self.policy, window, warm=warm, prior=prior, trace=False, graph="graph" in run, **how
        ):
            report = lambda: self.policy.foresample_report  # noqa: E731
            ms, calls = self.run(plans, self.policy.diffusion.generate_actions, lambda: report().calls_mean)
            planner = _planner(self.policy)
            width, times = planner.window or 0, {}
            if "graph" in run:
                rounds = planner.engine._under_way.graphs[width]  # type: ignore[union-attr]
                times["round_ms"] = 1000 * self._seconds(rounds.replay)
                times["network_ms"] = 1000 * call_seconds(planner.target, width + 1, graph=True, repeats=20)
        self.note(_row("accelerated", run, width, warm, prior is not None, plans, ms, calls, **times))

    def _seconds(self, work: Callable[[], object]) -> float:
        found = []
        for _ in range(20):
            began = self.now()
            work()
            found.append(self.now() - began)
        return min(found)


def _row(
    method: str,
    run: str,
    window: int | None,
    warm: bool,
    prior: bool,
    plans: int,
    ms: Spread,
    calls: Spread,
    **more: float,
) -> RobotClockRow:
    return RobotClockRow(
        method=method, run=run, window=window, warm=warm, prior=prior, plans=plans, ms=ms, calls=calls, **more
    )


def _planner(policy: Any) -> Planner:
    return next(iter(policy.diffusion.conditional_sample.plans.planners.values()))


def fit(policy: Any, courses: list[list[Observation]], pilots: int) -> fs.Prior:
    """A prior from plans of these episodes, all of an episode at once."""
    accelerated: Any = fs.accelerate(policy, 99, pilots=pilots, trace=False)
    for course in courses:
        together = {name: torch.cat([one[name] for one in course]) for name in course[0]}
        policy.diffusion.generate_actions(together)
        if accelerated.prior is not None:
            break
    prior = accelerated.prior
    fs.restore(policy)
    if prior is None:
        raise typer.BadParameter("these episodes have too few observations for so many pilots")
    return prior


@contextmanager
def compiled_network(policy: Any) -> Iterator[None]:
    """The policy with its U-Net compiled, once for each number of states."""
    torch._dynamo.config.cache_size_limit = 64
    plain = policy.diffusion.unet
    policy.diffusion.unet = torch.compile(plain, dynamic=False)
    try:
        yield
    finally:
        policy.diffusion.unet = plain


@app.command()
def clock(
    policy: Annotated[Path, typer.Option(help="a folder of `recipes.metaworld train`")] = metaworld.ASSET,
    data: Annotated[Path, typer.Option(help="what `recipes.metaworld record` wrote")] = metaworld.DATA,
    device: str = "cpu",
    plans: Annotated[int, typer.Option(help="accelerated plans of each kind")] = 200,
    slow_plans: Annotated[int, typer.Option(help="sequential plans of each kind")] = 15,
    windows: Annotated[list[int] | None, typer.Option("--window", help="windows to try")] = None,
    compiled: Annotated[
        list[int] | None, typer.Option("--compiled", help="windows to try compiled, too")
    ] = None,
    pilots: Annotated[int, typer.Option(help="plans the prior is fitted on")] = 256,
    name: Annotated[str, typer.Option(help="of the result file")] = "robot-clock",
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Milliseconds a plan at batch 1."""
    torch.manual_seed(0)
    cuda = torch.device(device).type == "cuda"
    loaded, recorded = metaworld.load(policy, device), metaworld.Demonstrations.load(data)
    count = int(recorded.episode[-1]) + 1
    clocked = episodes(loaded, recorded, range(0, count, max(1, count // 20)))
    other = episodes(loaded, recorded, range(1, count, max(1, count // 60)))
    it, began = Clock(loaded, clocked, device), perf_counter()

    def stage(what: str) -> None:
        print(f"[{perf_counter() - began:6.1f} s] {what}", flush=True)

    stage("one traced plan, and the prior")
    with fs.accelerate(loaded.policy, 16):
        loaded.policy.diffusion.generate_actions(clocked[0][0])
    prior = fit(loaded.policy, other, pilots)
    stage("sequential")
    it.sequential("eager", slow_plans)
    chosen = windows or list(WINDOWS)
    best: dict[str, Any] = {"warm": True, "prior": prior}
    for window in chosen:
        stage(f"window {window}")
        it.accelerated("eager", window, plans // 4 if cuda else plans, **best)
        if cuda:
            it.accelerated("graph", window, plans, **best)
    run = "graph" if cuda else "eager"
    for window in (w for w in (32, 64) if w in chosen):
        stage(f"window {window}: what warm start and prior give")
        it.accelerated(run, window, plans, warm=False, prior=None)
        it.accelerated(run, window, plans, warm=True, prior=None)
        it.accelerated(run, window, plans, warm=False, prior=prior)
    stage("auto")
    it.accelerated(run, "auto", plans, **best)
    settings = {
        "policy": policy.name,
        "parameters": sum(p.numel() for p in loaded.policy.parameters()),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "steps": loaded.policy.diffusion.num_inference_steps,
        "pilots": pilots,
        "clocked_episodes": len(clocked),
    }

    def write() -> None:
        save(out / f"{name}.json", "robot-clock", settings, rows=it.rows)

    write()
    if compiled:
        with compiled_network(loaded.policy):
            stage("compiled, sequential")
            if cuda:
                it.captured(slow_plans, "compiled + graph")
            it.sequential("compiled", slow_plans)
            write()
            for window in compiled:
                stage(f"compiled, window {window}")
                it.accelerated(
                    "compiled + graph" if cuda else "compiled", window, plans, batch_pad=True, **best
                )
                write()
    stage("done")


if __name__ == "__main__":
    app()
