"""LeRobot's diffusion policy on Meta-World: how long does a plan take, and does the robot do as well?

    python -m benchmarks.robots clock --policy FOLDER --device cuda     # milliseconds a plan, recorded observations
    python -m benchmarks.robots success                                 # closed loop, needs metaworld
    python -m benchmarks.robots episode                                 # one of them, as a moving picture
    python -m benchmarks.robots handwriting                             # the small handwriting policy started warm

Both use the real class through `foresample.accelerate`. The clock plans at batch 1 on the experts' episodes, a new plan
every 8 steps, so that consecutive plans are a robot's; the policy is reset between episodes.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.policies import draw
from benchmarks.results import RESULTS, PolicyWarmRow, RobotClockRow, Spread, SuccessRow, save
from foresample.baseline import Sequential
from foresample.engine.tuning import call_seconds
from foresample.integrations.policies.planner import Planner
from recipes import lasa, metaworld

Observation = dict[str, Tensor]
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
WINDOWS = (32, 64, 99, 16, 8)
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
        """On one core of a CPU processor time, which others on the machine do not lengthen by taking turns."""
        if self.device.type != "cuda":
            return process_time() if torch.get_num_threads() == 1 else perf_counter()
        torch.cuda.synchronize()
        return perf_counter()

    def run(
        self, plans: int, draw: Callable[[Observation], object], calls: Callable[[], float]
    ) -> tuple[Spread, Spread]:
        """Milliseconds and calls of this many plans, after five that are not counted."""
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

    def planner(self) -> Planner:
        """A planner for plans at batch 1."""
        with fs.accelerate(self.policy, window=1, trace=False):
            self.policy.diffusion.generate_actions(self.courses[0][0])
            return planner_of(self.policy)

    def captured(self, plans: int, run: str, planner: Planner) -> None:
        """The sequential chain with each transition replayed from a CUDA graph: the fastest sequential plan here."""
        planner.network = self.policy.diffusion.unet
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
            self.policy, window=window, warm=warm, prior=prior, trace=False, graph="graph" in run, **how
        ):
            report = lambda: self.policy.foresample_report  # noqa: E731
            ms, calls = self.run(plans, self.policy.diffusion.generate_actions, lambda: report().calls_mean)
            planner = planner_of(self.policy)
            width: int = planner.window or 0
            more: dict[str, Any] = {"auto": window == "auto"}
            if "graph" in run:
                rounds = planner.engine._idle[-1].graphs[width]
                more["round_ms"] = 1000 * self._seconds(rounds.replay)
                more["network_ms"] = 1000 * call_seconds(planner.target, width + 1, graph=True, repeats=20)
        self.note(_row("accelerated", run, width, warm, prior is not None, plans, ms, calls, **more))

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
    **more: Any,
) -> RobotClockRow:
    return RobotClockRow(
        method=method, run=run, window=window, warm=warm, prior=prior, plans=plans, ms=ms, calls=calls, **more
    )


def planner_of(policy: Any) -> Planner:
    """The planner of an accelerated policy that has planned."""
    return next(iter(policy.diffusion.conditional_sample.plans.planners.values()))


def fit(policy: Any, courses: list[list[Observation]], pilots: int) -> fs.Prior:
    """A prior from plans of these episodes, all of an episode at once."""
    accelerated: Any = fs.accelerate(policy, window=99, pilots=pilots, trace=False)
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
def compiled_network(policy: Any, *, dynamic: bool) -> Iterator[None]:
    """The policy with its U-Net compiled, for any number of states or for one."""
    torch._dynamo.reset()
    plain = policy.diffusion.unet
    policy.diffusion.unet = torch.compile(plain, dynamic=dynamic)
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
    pilots: Annotated[int, typer.Option(help="plans the prior is fitted on; 0: none")] = 256,
    name: Annotated[str, typer.Option(help="of the result file")] = "robot-clock",
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Milliseconds a plan at batch 1."""
    torch.manual_seed(0)
    cuda = torch.device(device).type == "cuda"
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True  # as LeRobot's scripts do
    loaded, recorded = metaworld.load(policy, device), metaworld.Demonstrations.load(data)
    count = int(recorded.episode[-1]) + 1
    clocked = episodes(loaded, recorded, range(0, count, max(1, count // 20)))
    other = episodes(loaded, recorded, range(1, count, max(1, count // 60)))
    it, began, failed = Clock(loaded, clocked, device), perf_counter(), list[str]()
    settings = {
        "policy": policy.name,
        "parameters": sum(p.numel() for p in loaded.policy.parameters()),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "steps": loaded.policy.diffusion.num_inference_steps,
        "pilots": pilots,
        "clocked_episodes": len(clocked),
        "tf32": cuda,
        "failed": failed,
    }

    def stage(what: str) -> None:
        print(f"[{perf_counter() - began:6.1f} s] {what}", flush=True)

    def measure(what: str, work: Callable[..., None], *args: Any, **how: Any) -> None:
        """Measure one row and save it at once; a failure is printed and recorded, and the other rows go on."""
        stage(what)
        try:
            work(*args, **how)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{what}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        if it.rows:
            save(out / f"{name}.json", "robot-clock", settings, rows=it.rows)

    stage("one traced plan" + (", and the prior" if pilots else ""))
    with fs.accelerate(loaded.policy, window=16):
        loaded.policy.diffusion.generate_actions(clocked[0][0])
    prior = fit(loaded.policy, other, pilots) if pilots else None
    planner, chosen = it.planner(), windows or list(WINDOWS)
    best: dict[str, Any] = {"warm": True, "prior": prior}
    # What is measured first is there if the time is up.
    measure("sequential, eager", it.sequential, "eager", slow_plans)
    if compiled:
        with compiled_network(loaded.policy, dynamic=False):
            if cuda:
                measure("compiled, captured", it.captured, slow_plans, "compiled + graph", planner)
            measure("compiled", it.sequential, "compiled", slow_plans)
        with compiled_network(loaded.policy, dynamic=True):
            for window in compiled:
                how = "compiled + graph" if cuda else "compiled"
                measure(f"window {window}, {how}", it.accelerated, how, window, plans, **best)
    run = "graph" if cuda else "eager"
    for wanted in (*chosen, "auto"):
        measure(f"window {wanted}, {run}", it.accelerated, run, wanted, plans, **best)
    if 32 in chosen:
        for warm, table in [(False, None), *([(True, None), (False, prior)] if prior else [])]:
            what = f"window 32, warm {warm}, prior {table is not None}"
            measure(what, it.accelerated, run, 32, plans, warm=warm, prior=table)
    if cuda:
        measure("sequential, captured", it.captured, slow_plans, "graph", planner)
        for window in chosen:
            measure(f"window {window}, eager", it.accelerated, "eager", window, plans // 4, **best)
    stage("done" if not failed else f"done, without {'; '.join(failed)}")
    if failed:
        raise typer.Exit(1)


# ---------------------------------------------------------------- closed loop

TRIALS = 10_000  # seed of the situations, which no demonstration has seen
LEVEL = 1.959963984540054  # of Wilson's intervals: 95 %


def _serve(pipe: Any, begins: list[Callable[[Any], tuple[Any, np.ndarray]]]) -> None:
    """A process with one environment for each of these situations."""
    import warnings

    warnings.filterwarnings("ignore")
    environments: list[Any] = [begin(None)[0] for begin in begins]
    seen = np.zeros((len(begins), 2, 39))
    while True:
        order = pipe.recv()
        if order is None:
            return
        if order == "begin":
            for i, begin in enumerate(begins):
                seen[i] = begin(environments[i])[1]
            pipe.send(seen)
            continue
        actions, active = order
        done = np.zeros(len(begins), dtype=bool)
        for i in active.nonzero()[0]:
            for action in actions[i]:
                after, _, _, _, info = environments[i].step(action)
                seen[i] = np.stack([seen[i, 1], after])
                if info["success"]:
                    done[i] = True
                    break
        pipe.send((seen, done))


class Physics:
    """Episodes of several tasks, shared among processes; start it before a GPU is touched."""

    def __init__(self, tasks: tuple[str, ...], count: int, workers: int) -> None:
        self.tasks = tasks
        begins = [begin for task in tasks for begin in metaworld.situations(task, TRIALS, count)]
        self.task = torch.arange(len(tasks)).repeat_interleave(count)
        self.parts = [list(range(i, len(begins), workers)) for i in range(min(workers, len(begins)))]
        context, self.pipes = multiprocessing.get_context("fork"), []
        for part in self.parts:
            mine, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, [begins[i] for i in part]), daemon=True).start()
            self.pipes.append(mine)

    def begin(self) -> np.ndarray:
        """The first observations, twice each: [E, 2, 39]."""
        for pipe in self.pipes:
            pipe.send("begin")
        seen = np.zeros((len(self.task), 2, 39))
        for part, pipe in zip(self.parts, self.pipes, strict=True):
            seen[part] = pipe.recv()
        return seen

    def step(self, actions: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Execute plans [E, n, 4] of the active episodes, until success: the last two observations, and who has it."""
        for part, pipe in zip(self.parts, self.pipes, strict=True):
            pipe.send((actions[part], active[part]))
        seen, done = np.zeros((len(self.task), 2, 39)), np.zeros(len(self.task), dtype=bool)
        for part, pipe in zip(self.parts, self.pipes, strict=True):
            seen[part], done[part] = pipe.recv()
        return seen, done

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)


def observation(loaded: metaworld.LoadedPolicy, seen: np.ndarray, task: Tensor) -> Observation:
    """The policy's observation, [E, n_obs_steps, …], normalised."""
    values = torch.from_numpy(seen).float()
    which = torch.nn.functional.one_hot(task, len(loaded.tasks)).float().unsqueeze(1).expand(-1, 2, -1)
    hand, scene = (
        values[..., metaworld.HAND],
        [values[..., metaworld.OBJECTS], values[..., metaworld.GOAL], which],
    )
    features = {"observation.state": hand, "observation.environment_state": torch.cat(scene, -1)}
    return {name: value for name, value in loaded.before(features).items() if name in features}


def roll_out(loaded: metaworld.LoadedPolicy, physics: Physics, seed: int) -> tuple[np.ndarray, int, float]:
    """All episodes at once: who succeeded, plans made, mean calls of a plan."""
    torch.manual_seed(seed)
    policy = loaded.policy
    policy.reset()
    seen, succeeded, plans, calls = physics.begin(), np.zeros(len(physics.task), dtype=bool), 0, []
    for _ in range(metaworld.LONGEST // policy.config.n_action_steps):
        with torch.no_grad():
            actions = policy.diffusion.generate_actions(observation(loaded, seen, physics.task))
        report = getattr(policy, "foresample_report", None)
        calls.append(policy.diffusion.num_inference_steps if report is None else report.calls_mean)
        plans += int((~succeeded).sum())
        actions = loaded.after(actions.flatten(0, 1)).view(actions.shape).clamp(-1, 1)
        seen, done = physics.step(actions.float().cpu().numpy(), ~succeeded)
        succeeded |= done
        if succeeded.all():
            break
    return succeeded, plans, sum(calls) / len(calls)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share."""
    share, z = successes / count, LEVEL**2 / count
    centre = (share + z / 2) / (1 + z)
    half = math.sqrt(z * (share * (1 - share) + z / 4)) / (1 + z)
    return max(0.0, centre - half), min(1.0, centre + half)


@contextmanager
def method_of(policy: Any, name: str, window: int, prior: Any) -> Iterator[None]:
    """The policy, planning this way: DDPM, accelerated, learned (with a learned prior), or DDIM-<steps>."""
    model = policy.diffusion
    if name in ("accelerated", "learned"):
        with fs.accelerate(policy, window=window, warm=True, prior=prior):
            yield
    elif name == "DDPM":
        yield
    else:
        from diffusers import DDIMScheduler

        kept = model.noise_scheduler, model.num_inference_steps
        model.noise_scheduler = DDIMScheduler.from_config(kept[0].config)
        model.num_inference_steps = int(name.split("-")[1])
        try:
            yield
        finally:
            model.noise_scheduler, model.num_inference_steps = kept


@app.command()
def success(
    policy: Annotated[Path, typer.Option(help="a folder of `recipes.metaworld train`")] = metaworld.ASSET,
    data: Annotated[Path, typer.Option(help="demonstrations, for the prior")] = metaworld.DATA,
    device: str = "cpu",
    count: Annotated[int, typer.Option(help="episodes a task")] = 100,
    workers: Annotated[int, typer.Option(help="processes for the physics")] = 1,
    window: int = 16,
    pilots: Annotated[int, typer.Option(help="plans the prior is fitted on")] = 256,
    methods: Annotated[list[str] | None, typer.Option("--method")] = None,
    learned: Annotated[
        Path | None, typer.Option(help="a prior kept by `benchmarks.learning`, for the method `learned`")
    ] = None,
    seed: int = 0,
    name: Annotated[str, typer.Option(help="of the result file")] = "robot-success",
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Success rates in closed loop, the same situations for every method."""
    facts = json.loads((policy / "training.json").read_text())
    physics = Physics(tuple(facts["tasks"]), count, workers)
    loaded = metaworld.load(policy, device)
    recorded = metaworld.Demonstrations.load(data)
    last = int(recorded.episode[-1]) + 1
    courses = episodes(loaded, recorded, range(1, last, max(1, last // 60)))
    chosen = methods or ["DDPM", "accelerated", "DDIM-10", "DDIM-5"]
    if "learned" in chosen and learned is None:
        raise typer.BadParameter("the method learned needs --learned, a prior kept by benchmarks.learning")
    prior = fit(loaded.policy, courses, pilots) if "accelerated" in chosen else None
    rows, plan_ms = [], {}
    for method in chosen:
        began = perf_counter()
        with method_of(loaded.policy, method, window, learned if method == "learned" else prior):
            succeeded, plans, calls = roll_out(loaded, physics, seed)
            ms, _ = Clock(loaded, courses, device).run(
                10, loaded.policy.diffusion.generate_actions, lambda: 1.0
            )
        plan_ms[method] = ms.median
        for number, task in enumerate(physics.tasks):
            mine = succeeded[(physics.task == number).numpy()]
            low, high = wilson(int(mine.sum()), len(mine))
            rows.append(
                SuccessRow(
                    task=task,
                    method=method,
                    episodes=len(mine),
                    successes=int(mine.sum()),
                    low=low,
                    high=high,
                    plans=plans,
                    calls=calls,
                )
            )
            print(
                f"{method:12s} {task:20s} {int(mine.sum())} of {len(mine)} ({low:.2f} to {high:.2f})",
                flush=True,
            )
        print(f"{method:12s} {calls:.2f} calls a plan, {perf_counter() - began:.1f} s", flush=True)
        settings = {
            "policy": policy.name,
            "parameters": facts["parameters"],
            "count": count,
            "window": window,
            "pilots": pilots,
            "seed": seed,
            "device": device,
            "longest": metaworld.LONGEST,
        }
        save(out / f"{name}.json", "robot-success", settings, rows=rows, plan_ms=plan_ms)
    physics.end()


@app.command()
def episode(
    task: Annotated[str, typer.Option(help="one of the policy's")] = "peg-insert-side-v3",
    situation: Annotated[int, typer.Option(help="which of the trials'")] = 0,
    window: int = 16,
    policy: Annotated[Path, typer.Option(help="a folder of `recipes.metaworld train`")] = metaworld.ASSET,
    out: Annotated[Path, typer.Option(help="the picture")] = PICTURES / "robot-episode.gif",
) -> None:
    """One episode of the accelerated policy, from above and from the side: hand, object, and each plan."""
    loaded = metaworld.load(policy)
    environment, seen = metaworld.situations(task, TRIALS, situation + 1)[situation](None)
    frames, recent = list[Frame](), np.stack([seen, seen])
    which = torch.tensor([loaded.tasks.index(task)])
    torch.manual_seed(0)
    done = False
    with fs.accelerate(loaded.policy, window=window, warm=True):
        while not done and len(frames) < metaworld.LONGEST:
            with torch.no_grad():
                actions = loaded.policy.diffusion.generate_actions(observation(loaded, recent[None], which))
            plan = loaded.after(actions.flatten(0, 1)).clamp(-1, 1).numpy()
            calls = int(loaded.policy.foresample_report.calls_mean)
            for i, action in enumerate(plan):
                frames.append(Frame(seen[:3], seen[4:7], seen[36:39], plan[i:, :3], calls))
                seen, _, _, _, info = environment.step(action)
                recent = np.stack([recent[1], seen])
                done = bool(info["success"])
                if done:
                    break
    frames += 8 * [Frame(seen[:3], seen[4:7], seen[36:39], plan[:0, :3], 0)]
    _animate(frames, f"{task}: {'done' if done else 'not done'} after {len(frames) - 8} steps", out)
    print(f"{out}: {len(frames)} frames, {out.stat().st_size} bytes")


class Frame(NamedTuple):
    """A moment of an episode."""

    hand: np.ndarray
    thing: np.ndarray
    goal: np.ndarray
    left: np.ndarray
    """[n, 3]: actions of the plan not yet executed."""
    calls: int
    """Network calls the plan took."""


STRIDE = 0.01  # metres that an action of 1 moves the hand


def _animate(frames: list[Frame], title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    everything = np.concatenate([np.stack([f.hand, f.thing, f.goal]) for f in frames])
    low, high = everything.min(0) - 0.04, everything.max(0) + 0.04
    pictures = []
    for number in range(0, len(frames), 2):
        frame, past = frames[number], frames[: number + 1]
        figure, axes = plt.subplots(1, 2, figsize=(6.4, 3.0), layout="constrained")
        for axis, (a, b), name in zip(axes, ((0, 1), (0, 2)), ("from above", "from the side"), strict=True):
            for which, colour in (("hand", "steelblue"), ("thing", "goldenrod")):
                path = np.stack([getattr(f, which) for f in past])
                axis.plot(path[:, a], path[:, b], color=colour, lw=1)
                axis.plot(*path[-1, [a, b]], "o", color=colour, ms=5)
            plan = frame.hand + STRIDE * np.concatenate([np.zeros((1, 3)), frame.left]).cumsum(0)
            axis.plot(plan[:, a], plan[:, b], color="crimson", lw=2, alpha=0.8)
            axis.plot(*frame.goal[[a, b]], "*", color="black", ms=9)
            axis.set(
                xlim=(low[a], high[a]), ylim=(low[b], high[b]), xticks=[], yticks=[], aspect="equal", title=name
            )
        heading = f"{title} | this plan: {frame.calls} of 100 network calls" if frame.calls else title
        figure.suptitle(heading, fontsize=9)
        figure.canvas.draw()
        picture = Image.frombuffer("RGBA", figure.canvas.get_width_height(), figure.canvas.buffer_rgba())  # type: ignore[attr-defined]
        pictures.append(picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=32))
        plt.close(figure)
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(out, save_all=True, append_images=pictures[1:], duration=120, loop=0, optimize=True)


# ---------------------------------------------------------------- the handwriting policy


@app.command()
def handwriting(
    repeats: Annotated[int, typer.Option(help="roll-outs from each start point")] = 2,
    pilots: Annotated[int, typer.Option(help="plans the prior is fitted on")] = 256,
    data: Annotated[Path | None, typer.Option(help="folder of .mat files [.data/lasa]")] = None,
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Calls of a plan in closed loop: cold, warm, with a prior fitted on other roll-outs, and both."""
    policy, paths = lasa.load(), lasa.demonstrations(data)
    accelerated: Any = fs.accelerate(policy, window=99, pilots=pilots)
    draw(policy, paths, max(1, repeats // 2), 1)
    prior = accelerated.prior
    fs.restore(policy)
    assert prior is not None, "too few roll-outs for so many pilots"
    rows = []
    for window in (16, 32, 64):
        for warm, table in ((False, None), (True, None), (False, prior), (True, prior)):
            with fs.accelerate(policy, window=window, warm=warm, prior=table):
                calls = draw(policy, paths, repeats, 0).calls
            rows.append(
                PolicyWarmRow(
                    window=window,
                    warm=warm,
                    prior=table is not None,
                    calls=float(calls.mean()),
                    error=float(calls.std() / math.sqrt(len(calls))),
                )
            )
            print(rows[-1], flush=True)
    settings = {"roll_outs": repeats * paths.shape[0] * paths.shape[1], "pilots": pilots, "steps": 100}
    save(out / "policy-warm.json", "policy-warm", settings, rows=rows)


if __name__ == "__main__":
    app()
