"""LeRobot's diffusion policy on Meta-World: the time of a plan, and the success of the robot.

    python -m benchmarks.robots clock --policy FOLDER --device cuda     # milliseconds a plan, recorded observations
    python -m benchmarks.robots profile --policy FOLDER --device cuda   # where a network call's time goes
    python -m benchmarks.robots deadlines                               # plans that come too late, by method
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.kinds.robots import DeadlineRow, Deadlines, PolicyWarmRow, SuccessRow
from benchmarks.names import wilson
from benchmarks.policies import draw
from benchmarks.results import RESULTS, load, save
from benchmarks.robot_clock import clock
from benchmarks.robot_plans import (
    WARM_UP,
    Observation,
    along,
    episodes,
    fit,
    other_episodes,
    spread,
    timed_episodes,
)
from benchmarks.robot_profile import profile
from benchmarks.timing import take_turns
from recipes import lasa, metaworld

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
PRIOR_EPISODES = 60  # on whose plans a pooled prior is fitted, at most
METHODS = ("DDPM", "accelerated", "DDIM-16", "DDIM-10", "DDIM-5")
app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def commands() -> None:
    """LeRobot's diffusion policy on Meta-World."""


app.command()(clock)
app.command()(profile)


# ---------------------------------------------------------------- closed loop

TRIALS = 10_000  # seed of the situations, which no demonstration has seen


def _serve(pipe: Any, begins: list[Callable[[Any], tuple[Any, np.ndarray]]]) -> None:
    """The loop of a process with one environment for each of these situations."""
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
        """Execute plans [E, n, 4] of active episodes until success; returns the last two observations and successes."""
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


def roll_out(
    loaded: metaworld.LoadedPolicy,
    physics: Physics,
    seed: int,
    longest: int = metaworld.LONGEST,
    wait: int = 0,
) -> tuple[np.ndarray, int, float]:
    """All episodes at once: those that succeeded, the number of plans, and the mean calls of a plan.

    While a plan is computed, physics stands still, or goes on for `wait` steps in which the robot holds still.
    """
    torch.manual_seed(seed)
    policy = loaded.policy
    policy.reset()
    seen, succeeded, plans, calls = physics.begin(), np.zeros(len(physics.task), dtype=bool), 0, []
    still = np.zeros((len(physics.task), wait, 4), dtype=np.float32)
    still[..., 3] = -1  # an open gripper
    for _ in range(longest // (wait + policy.config.n_action_steps)):
        with torch.no_grad():
            actions = policy.diffusion.generate_actions(observation(loaded, seen, physics.task))
        report = getattr(policy, "foresample_report", None)
        calls.append(policy.diffusion.num_inference_steps if report is None else report.calls_mean)
        plans += int((~succeeded).sum())
        actions = loaded.after(actions.flatten(0, 1)).view(actions.shape).clamp(-1, 1).float().cpu().numpy()
        seen, done = physics.step(np.concatenate([still, actions], 1), ~succeeded)
        still[..., 3] = actions[:, -1:, 3]  # the gripper stays as it is
        succeeded |= done
        if succeeded.all():
            break
    return succeeded, plans, sum(calls) / len(calls)


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
def deadlines(
    policy: Annotated[Path, typer.Option(help="a folder of `recipes.metaworld train`")] = metaworld.ASSET,
    data: Annotated[Path, typer.Option(help="what `recipes.metaworld record` wrote")] = metaworld.DATA,
    device: str = "cpu",
    plans: Annotated[int, typer.Option(help="plans of each method, in turns")] = 200,
    window: int = 16,
    methods: Annotated[list[str] | None, typer.Option("--method", help="the first is the baseline")] = None,
    name: Annotated[str, typer.Option(help="of the result file")] = "robot-deadlines",
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Milliseconds of a plan at batch 1, all methods in turns, and how many plans miss the deadline.

    The deadline is the time that the robot needs to execute the actions of a plan.
    """
    torch.manual_seed(0)
    loaded, recorded = metaworld.load(policy, device), metaworld.Demonstrations.load(data)
    courses = episodes(loaded, recorded, timed_episodes(recorded))
    deadline = 1000 * metaworld.STEP * loaded.policy.config.n_action_steps
    with ExitStack() as stack:
        sides = {}
        for method in methods or METHODS:
            own = metaworld.load(policy, device).policy
            stack.enter_context(method_of(own, method, window, None))
            sides[method] = along(own, courses)
        timing = take_turns(sides, warm=WARM_UP, least=plans, most=plans)
    rows = []
    for method, seconds in timing.seconds.items():
        ms = [1000 * one for one in seconds]
        late = sum(one > deadline for one in ms)
        faster = None if method == timing.baseline else timing.ratio(method)
        rows.append(DeadlineRow(method=method, plans=len(ms), ms=spread(ms), late=late, faster=faster))
        print(rows[-1], flush=True)
    settings = {
        "policy": policy.name,
        "parameters": sum(p.numel() for p in loaded.policy.parameters()),
        "device": torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "steps": loaded.policy.diffusion.num_inference_steps,
        "window": window,
        "deadline_ms": deadline,
    }
    save(out / f"{name}.json", "robot-deadlines", settings, rows=rows)


@app.command()
def success(
    policy: Annotated[Path, typer.Option(help="a folder of `recipes.metaworld train`")] = metaworld.ASSET,
    data: Annotated[Path, typer.Option(help="demonstrations, for the prior")] = metaworld.DATA,
    device: str = "cpu",
    count: Annotated[int, typer.Option(help="episodes a task")] = 100,
    workers: Annotated[int, typer.Option(help="processes for the physics")] = 1,
    window: int = 16,
    pilots: Annotated[int, typer.Option(help="plans the prior is fitted on; 0: none")] = 256,
    methods: Annotated[list[str] | None, typer.Option("--method")] = None,
    learned: Annotated[
        Path | None, typer.Option(help="a prior kept by `benchmarks.learning`, for the method `learned`")
    ] = None,
    timed: Annotated[
        Path | None,
        typer.Option(help="a result of `deadlines`: the robot holds still for the median time of each plan"),
    ] = None,
    longest: Annotated[int, typer.Option(help="steps of an episode")] = metaworld.LONGEST,
    seed: int = 0,
    name: Annotated[str, typer.Option(help="of the result file")] = "robot-success",
    out: Annotated[Path, typer.Option(help="folder for the result file")] = RESULTS,
) -> None:
    """Success rates in closed loop, the same situations for every method."""
    tasks = json.loads((policy / "training.json").read_text())["tasks"]
    physics = Physics(tuple(tasks), count, workers)
    loaded = metaworld.load(policy, device)
    chosen = methods or list(METHODS)
    if "learned" in chosen and learned is None:
        raise typer.BadParameter("the method learned needs --learned, a prior kept by benchmarks.learning")
    prior = None
    if pilots and "accelerated" in chosen:
        recorded = metaworld.Demonstrations.load(data)
        courses = episodes(loaded, recorded, other_episodes(recorded, PRIOR_EPISODES))
        prior = fit(loaded.policy, courses, pilots)
    waits = waits_of(timed, chosen) if timed else {}
    settings = {
        "policy": policy.name,
        "parameters": sum(p.numel() for p in loaded.policy.parameters()),
        "count": count,
        "window": window,
        "pilots": pilots,
        "seed": seed,
        "device": device,
        "longest": longest,
        "waits": waits,
    }
    rows = list[SuccessRow]()
    for method in chosen:
        with method_of(loaded.policy, method, window, learned if method == "learned" else prior):
            succeeded, plans, calls = roll_out(loaded, physics, seed, longest, waits.get(method, 0))
        for number, task in enumerate(physics.tasks):
            mine = succeeded[(physics.task == number).numpy()]
            rows.append(success_row(task, method, int(mine.sum()), len(mine), plans, calls))
            print(rows[-1], flush=True)
        save(out / f"{name}.json", "robot-success", settings, rows=rows)
    physics.end()


def waits_of(timed: Path, methods: list[str]) -> dict[str, int]:
    """Steps of the robot that the median plan of each method takes."""
    ms = {row.method: row.ms.median for row in load(Deadlines, timed.stem, timed.parent).rows}
    if missing := [method for method in methods if method not in ms]:
        raise typer.BadParameter(f"--timed {timed} has no times of {missing[0]}; it has {', '.join(ms)}")
    return {method: math.ceil(ms[method] / 1000 / metaworld.STEP) for method in methods}


def success_row(task: str, method: str, successes: int, count: int, plans: int, calls: float) -> SuccessRow:
    low, high = wilson(successes, count)
    return SuccessRow(
        task=task,
        method=method,
        episodes=count,
        successes=successes,
        low=low,
        high=high,
        plans=plans,
        calls=calls,
    )


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
