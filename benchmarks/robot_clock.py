"""Milliseconds of a robot's plan at batch 1: LeRobot's loop and the accelerated one, in turns.

All sides share one network, which is compiled once for one state and once for several. cuDNN's search is on, as in
LeRobot's scripts.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

import foresample as fs
from benchmarks.kinds.robots import RobotClockRow
from benchmarks.results import RESULTS, save
from benchmarks.robot_plans import (
    WARM_UP,
    Observation,
    along,
    episodes,
    learn,
    other_episodes,
    planner_of,
    spread,
    timed_episodes,
)
from benchmarks.timing import Timing, take_turns
from foresample.baseline import Sequential
from foresample.drafters import LearnedPrior
from foresample.engine.tuning import call_seconds
from foresample.faults import first_line
from recipes import metaworld

PILOT_TURNS = 6  # on episodes that are not clocked, where the fastest sides are found
OTHERS = 60  # such episodes
COUNTED = 100  # plans whose rounds are counted, by width
WINDOWS = (32, 64, 99)
MOST_TURNS = 10  # for each turn that is asked for, until errors are small
PRECISIONS = ("float32", "bfloat16")
AUTOTUNE = "max-autotune-no-cudagraphs"


class Bfloat16(nn.Module):
    """LeRobot's network in bfloat16, around which everything stays in float32."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.plans = nn.Parameter(
            torch.zeros(()), requires_grad=False
        )  # a policy plans in its first one's dtype
        self.network = network.bfloat16()
        time, *rest = network.diffusion_step_encoder
        self.network.diffusion_step_encoder = nn.Sequential(time, _Rounded(), *rest)

    def forward(self, x: Tensor, timestep: Tensor, global_cond: Tensor) -> Tensor:
        return self.network(x.bfloat16(), timestep, global_cond=global_cond.bfloat16()).float()


class _Rounded(nn.Module):
    """Takes the embedded time, which is float32 in a network of any precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


class ChannelsLast(nn.Module):
    """A convolution over time as one over pictures of one line, for which torch has channels-last weights."""

    def __init__(self, own: nn.Conv1d | nn.ConvTranspose1d) -> None:
        super().__init__()
        lines = own.weight.detach().unsqueeze(2).contiguous(memory_format=torch.channels_last)
        self.weight, self.bias = nn.Parameter(lines, requires_grad=False), own.bias
        padding = own.padding
        assert not isinstance(padding, str)
        self.options: dict[str, Any] = {
            "stride": (1, *own.stride),
            "padding": (0, *padding),
            "dilation": (1, *own.dilation),
            "groups": own.groups,
        }
        self.run: Callable[..., Tensor] = functional.conv2d
        if isinstance(own, nn.ConvTranspose1d):
            self.run = functional.conv_transpose2d
            self.options["output_padding"] = (0, *own.output_padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x.unsqueeze(2), self.weight, self.bias, **self.options).squeeze(2)


def in_channels_last(network: nn.Module) -> None:
    """Replace all convolutions over time by such ones, in place."""
    for module in network.modules():
        for name, part in module.named_children():
            if isinstance(part, nn.Conv1d | nn.ConvTranspose1d):
                setattr(module, name, ChannelsLast(part))


def sharing(policy: Any, network: Any) -> Any:
    """A copy of the policy with this network instead; no weight is copied."""
    own = policy.diffusion.unet
    made = copy.deepcopy(policy, {id(own): own})
    made.diffusion.unet = network
    return made


@dataclass
class Side:
    """One way of planning at batch 1."""

    policy: Any
    plan: Callable[[Observation], object]
    run: str
    window: int | None = None
    learned_from: int | None = None
    """Plans that its prior was learned from; None where plans are drafted from the last one."""
    counts: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        if self.window is None:
            return f"sequential, {self.run}"
        start = "last plan" if self.learned_from is None else f"learned from {self.learned_from} plans"
        return f"window {self.window}, {start}, {self.run}"

    def along(self, courses: list[list[Observation]]) -> Callable[[int], None]:
        """One plan a turn along these episodes, and its calls counted."""
        turn, steps = along(self.policy, courses, self.plan), self.policy.diffusion.num_inference_steps
        self.counts.clear()

        def counted(number: int) -> None:
            turn(number)
            if number >= 0:
                self.counts.append(
                    float(steps) if self.window is None else self.policy.foresample_report.calls_mean
                )

        return counted

    def row(self, timing: Timing, chosen: bool, courses: list[list[Observation]]) -> RobotClockRow:
        seconds, more = timing.seconds[self.name], dict[str, Any]()
        if self.window and "graph" in self.run:
            try:
                more |= self.of_rounds(courses)
            except RuntimeError:  # the plans have been timed, and are kept
                traceback.print_exc()
        if self.name != timing.baseline:
            more["faster"] = timing.ratio(self.name)
        return RobotClockRow(
            method="sequential" if self.window is None else "accelerated",
            run=self.run,
            window=self.window,
            warm=self.window is not None and self.learned_from is None,
            prior=self.learned_from is not None,
            learned_from=self.learned_from or 0,
            plans=len(seconds),
            ms=spread([1000 * one for one in seconds]),
            calls=spread(self.counts),
            chosen=chosen,
            **more,
        )

    def of_rounds(self, courses: list[list[Observation]]) -> dict[str, float]:
        """Milliseconds, replayed: a full-width round, the network alone on as many states, all rounds of a plan."""
        planner = planner_of(self.policy)
        slots = planner.engine._idle[-1]
        if not slots.graphs or planner.window is None:
            return {}
        graphs = {width: graph for width, graph in slots.graphs.items() if graph is not None}
        replayed = take_turns({str(width): _replay(graph) for width, graph in graphs.items()}, least=20)
        ms = {width: 1000 * replayed.median(str(width)) for width in graphs}
        run, turn, rounds = slots._run, along(self.policy, courses, self.plan), list[int | None]()

        def noted(width: int | None, *observe: Any) -> None:
            rounds.append(width)
            run(width, *observe)

        with patch.object(slots, "_run", noted):
            for number in range(COUNTED):
                turn(number)
        network = call_seconds(planner.target, planner.window + 1, graph=True, repeats=20)
        return {
            "round_ms": ms[planner.window],
            "network_ms": 1000 * network,
            "rounds_ms": sum(ms[width] for width in rounds) / COUNTED,
        }


def _replay(graph: Any) -> Callable[[int], None]:
    return lambda turn: graph.replay()


@dataclass(frozen=True)
class Sides:
    """Makes the sides of one policy: `policy` has the network as it is, `network` is that one compiled or the same."""

    policy: Any
    network: Any
    run: str
    first: Observation

    def sequential(self, network: Any, run: str) -> Side:
        own = sharing(self.policy, self.policy.diffusion.unet)
        if "graph" in run:
            return Side(own, captured(own, network, self.first), run)
        own.diffusion.unet = network
        return Side(own, own.diffusion.generate_actions, run)

    def accelerated(self, window: int, prior: LearnedPrior | None, learned_from: int | None) -> Side:
        own = sharing(self.policy, self.network)
        fs.accelerate(
            own, window=window, warm=prior is None, prior=prior, trace=False, graph="graph" in self.run
        )
        return Side(own, own.diffusion.generate_actions, self.run, window, learned_from)


def captured(policy: Any, network: Any, first: Observation) -> Callable[[Observation], Tensor]:
    """The sequential chain with each transition replayed from a CUDA graph: the fastest sequential plan here."""
    with fs.accelerate(policy, window=1, trace=False):
        policy.diffusion.generate_actions(first)
        planner = planner_of(policy)
    planner.network = network
    engine, generator = Sequential(planner.target, 1, graph=True), torch.Generator().manual_seed(0)

    def draw(observation: Observation) -> Tensor:
        condition = policy.diffusion._prepare_global_conditioning(observation)
        planner.conditions["global_cond"].copy_(condition)  # type: ignore[union-attr]
        return engine.sample(torch.randint(2**62, (1,), generator=generator)).samples

    return draw


def load(folder: Path, device: str, precision: str, channels_last: bool = False) -> metaworld.LoadedPolicy:
    """The policy with its network in this precision and layout."""
    if precision not in PRECISIONS:
        raise typer.BadParameter(f"--precision is one of {', '.join(PRECISIONS)}, not {precision}")
    loaded = metaworld.load(folder, device)
    model = loaded.policy.diffusion
    if channels_last:
        in_channels_last(model.unet)
    if precision == "bfloat16":
        model.unet = Bfloat16(model.unet).to(device)
    return loaded


@dataclass(frozen=True)
class Wanted:
    """Which sides are to be timed."""

    windows: list[int]
    compiled: bool
    autotune: bool
    eager: bool
    graph: bool

    def run(self, how: str) -> str:
        """The name of a run whose network is compiled so, or not at all (""), with graphs where there are any."""
        return " + ".join([*([how] if how else []), *["graph"] * self.graph]) or "eager"


def prepared(
    wanted: Wanted, policy: Any, first: Observation, prior: tuple[LearnedPrior, int] | None, failed: list[str]
) -> list[Side]:
    """All sides, each after its first plan, which compiles and captures; those that fail are named in `failed`."""
    plain = policy.diffusion.unet
    # Called for one state first, so that the code for several is compiled for any number of them at once.
    network = torch.compile(plain) if wanted.compiled else plain
    sides = Sides(policy, network, wanted.run("compiled" if wanted.compiled else ""), first)
    makers: list[tuple[str, Callable[[], Side]]] = []
    if wanted.eager and sides.run != "eager":
        makers.append(("sequential, eager", lambda: sides.sequential(plain, "eager")))
    makers.append((f"sequential, {sides.run}", lambda: sides.sequential(network, sides.run)))
    if wanted.autotune:
        tuned, run = torch.compile(plain, mode=AUTOTUNE), wanted.run("max-autotune")
        makers.append((f"sequential, {run}", lambda: sides.sequential(tuned, run)))
    for window in wanted.windows:
        makers.append((f"window {window}", partial(sides.accelerated, window, None, None)))
        if prior is not None:
            makers.append((f"window {window}, learned", partial(sides.accelerated, window, *prior)))
    made, began = list[Side](), perf_counter()
    for name, make in makers:
        try:
            side = make()
            side.plan(first)
            made.append(side)
            print(f"{perf_counter() - began:.0f} s: prepared {side.name}", flush=True)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{name}: {first_line(error)}")
    return made


def timed(
    sides: list[Side],
    other: list[list[Observation]],
    clocked: list[list[Observation]],
    *,
    turns: int,
    repeats: int,
    seconds: float,
) -> list[RobotClockRow]:
    """A row for each side, the baseline first; it and the fastest accelerated side were found on `other`."""
    often = {side.name: 1 if side.window is None else repeats for side in sides}
    tried = take_turns(
        {side.name: side.along(other) for side in sides},
        warm=WARM_UP,
        least=PILOT_TURNS,
        most=PILOT_TURNS,
        repeats=often,
    )
    fastest = [
        min((s.name for s in sides if (s.window is None) is plain), key=tried.median) for plain in (True, False)
    ]
    sides = sorted(sides, key=lambda side: side.name != fastest[0])  # the baseline comes first
    timing = take_turns(
        {side.name: side.along(clocked) for side in sides},
        warm=WARM_UP,
        least=turns,
        most=MOST_TURNS * turns,
        seconds=seconds,
        repeats=often,
    )
    rows = [side.row(timing, side.name in fastest, clocked) for side in sides]
    for side, row in zip(sides, rows, strict=True):
        ms = f"{row.ms.median:8.2f} ms, p99 {row.ms.p99:.2f}"
        print(f"{side.name:55s} {ms}, {row.calls.mean:.2f} calls, {row.plans} plans, {row.faster}", flush=True)
    return rows


def clock(
    policy: Annotated[Path, typer.Option(help="a folder of `recipes.metaworld train`")] = metaworld.ASSET,
    data: Annotated[Path, typer.Option(help="what `recipes.metaworld record` wrote")] = metaworld.DATA,
    device: str = "cpu",
    precision: Annotated[str, typer.Option(help="of the network alone: float32 or bfloat16")] = "float32",
    channels_last: Annotated[bool, typer.Option(help="the layout of the network's convolutions")] = False,
    windows: Annotated[list[int] | None, typer.Option("--window", help="windows to try")] = None,
    learned: Annotated[int, typer.Option(help="plans to learn a prior from; 0: none")] = 0,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--uncompiled", help="the network [compiled on a GPU]")
    ] = None,
    autotune: Annotated[
        bool, typer.Option(help="also the sequential plan in torch.compile's max-autotune")
    ] = False,
    eager: Annotated[bool, typer.Option(help="also LeRobot's loop as it is")] = True,
    plans: Annotated[
        int, typer.Option(help="accelerated plans of each kind, at least; then until errors are small")
    ] = 300,
    repeats: Annotated[int, typer.Option(help="accelerated plans of each kind in a turn")] = 10,
    seconds: Annotated[float, typer.Option(help="after which no turn is added")] = 100.0,
    name: Annotated[str, typer.Option(help="of the result file")] = "robot-clock",
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Milliseconds a plan at batch 1, all ways in turns.

    The baseline and the window that figures quote are the fastest on episodes that are not clocked; the prior is
    learned from plans on such episodes, too.
    """
    torch.manual_seed(0)
    cuda = torch.device(device).type == "cuda"
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True  # as LeRobot's scripts do
    loaded, recorded = load(policy, device, precision, channels_last), metaworld.Demonstrations.load(data)
    other = episodes(loaded, recorded, other_episodes(recorded, OTHERS))
    prior, failed = None, list[str]()
    if learned:
        courses = episodes(loaded, recorded, other_episodes(recorded))
        began = perf_counter()
        prior = learn(loaded.policy, courses, learned)
        print(f"learned from {prior[1]} plans in {perf_counter() - began:.0f} s", flush=True)
    clocked = episodes(loaded, recorded, timed_episodes(recorded))
    settings = {
        "policy": policy.name,
        "parameters": sum(p.numel() for p in loaded.policy.parameters()),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "steps": loaded.policy.diffusion.num_inference_steps,
        "learned": learned,
        "clocked_episodes": len(clocked),
        "precision": precision,
        "channels_last": channels_last,
        "tf32": cuda and precision == "float32",
        "failed": failed,
    }
    wanted = Wanted(list(windows or WINDOWS), cuda if compiled is None else compiled, autotune, eager, cuda)
    sides = prepared(wanted, loaded.policy, other[0][0], prior, failed)
    rows = timed(
        sides, other, clocked, turns=max(2, math.ceil(plans / repeats)), repeats=repeats, seconds=seconds
    )
    save(out / f"{name}.json", "robot-clock", settings, rows=rows)
    if failed:
        raise typer.Exit(1)
