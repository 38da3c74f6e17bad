"""LeRobot's own diffusion policy for tasks of Meta-World: demonstrations, training, the closed loop.

    python -m recipes.metaworld record                 # scripted experts on the CPU, real MuJoCo physics: minutes
    python -m recipes.metaworld record --task assembly-v3 --task box-close-v3    # other tasks than the usual five
    python -m recipes.metaworld train --size small     # the policy under assets/, which runs on a CPU
    python -m recipes.metaworld train --size full      # LeRobot's default network, 251 M parameters, for a GPU

The class, its configuration, its loss and its normalisation are those of the installed `lerobot` (0.4.4); a folder
written here is one that `DiffusionPolicy.from_pretrained` reads. Observations are states, not pictures: the hand and
its gripper are `observation.state`; the objects, the goal and which task it is are `observation.environment_state`.
Recording and the closed loop need `metaworld`, training and planning do not.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from recipes import checkpoint
from recipes.data import DataError

ASSET = Path(__file__).parent.parent / "assets" / "metaworld_policy"
DATA = Path(".data/metaworld/demonstrations.npz")
TASKS = ("push-v3", "pick-place-v3", "door-open-v3", "drawer-close-v3", "peg-insert-side-v3")
STEP = 0.0125  # seconds of a step: Meta-World's robot takes 80 actions a second
LONGEST = 200  # steps of an episode; experts need 50 to 120
AFTER = 8  # steps recorded after success, so that plans near the end have something to learn from
SHAKEN = (
    0.15  # std of what is added to the actions executed, but not to those recorded: so policies learn to return
)
HAND, OBJECTS, GOAL = slice(0, 4), slice(4, 18), slice(36, 39)  # in Meta-World's 39 numbers
NARROWEST = 0.02  # a coordinate that varies less is scaled as if it varied so much
MISSING = "Meta-World is not installed: `pip install metaworld==3.1.1 packaging`."
SIZES = {"tiny": (16, 32), "small": (64, 128, 256), "full": (512, 1024, 2048)}
"""Channels of the network, LeRobot's `down_dims`; `full` is its default, `tiny` is for tests."""


# ---------------------------------------------------------------- demonstrations


@dataclass(frozen=True)
class Demonstrations:
    """Successful episodes of scripted experts, one after the other."""

    hand: Tensor
    """[M, 4]: position and gripper."""
    scene: Tensor
    """[M, 17 + tasks]: objects, goal, which task (one-hot)."""
    action: Tensor
    """[M, 4]: what the expert would do here, within ±1."""
    episode: Tensor
    """[M]: number of the episode, rising."""
    tasks: tuple[str, ...]

    def features(self) -> dict[str, Tensor]:
        """The features under LeRobot's names."""
        return {
            "observation.state": self.hand,
            "observation.environment_state": self.scene,
            "action": self.action,
        }

    def save(self, path: Path) -> int:
        """Write the demonstrations; returns the bytes written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        task = self.scene[:, -len(self.tasks) :].argmax(1).to(torch.uint8)
        np.savez_compressed(
            path,
            hand=self.hand.numpy(),
            scene=self.scene[:, : -len(self.tasks)].numpy(),
            action=self.action.numpy(),
            episode=self.episode.to(torch.int16).numpy(),
            task=task.numpy(),
            tasks=np.array(self.tasks),
        )
        return path.stat().st_size

    @staticmethod
    def load(path: Path) -> Demonstrations:
        """The demonstrations that `save` wrote."""
        try:
            with np.load(path) as file:
                values = {name: file[name] for name in file.files}
            tasks = tuple(str(name) for name in values["tasks"])
            which = torch.nn.functional.one_hot(torch.from_numpy(values["task"]).long(), len(tasks))
            hand, scene, action = (torch.from_numpy(values[n]).float() for n in ("hand", "scene", "action"))
            episode = torch.from_numpy(values["episode"]).long()
            return Demonstrations(hand, torch.cat([scene, which.float()], 1), action, episode, tasks)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} holds no demonstrations ({error}): `python -m recipes.metaworld record` makes them."
            ) from None


def observe(observation: np.ndarray, task: int, tasks: int = len(TASKS)) -> dict[str, Tensor]:
    """Meta-World's 39 numbers under LeRobot's names."""
    values = torch.from_numpy(np.asarray(observation)).float()
    which = torch.nn.functional.one_hot(torch.tensor(task), tasks).float()
    return {
        "observation.state": values[HAND],
        "observation.environment_state": torch.cat([values[OBJECTS], values[GOAL], which]),
    }


def situations(task: str, seed: int, count: int) -> list[Callable[[Any], tuple[Any, np.ndarray]]]:
    """`count` situations of a task: each resets an environment (None: a new one) and returns it with its observation.

    Meta-World draws 50 situations (where objects and goals are) from a seed; more come from the seeds after it.
    """
    try:
        import metaworld
    except ImportError:
        raise DataError(MISSING) from None
    found: list[Callable[[Any], tuple[Any, np.ndarray]]] = []
    while len(found) < count:
        benchmark = metaworld.MT1(task, seed=seed + len(found))
        found += [partial(_begin, benchmark.train_classes[task], one) for one in benchmark.train_tasks]
    return found[:count]


def _begin(make: Callable[[], Any], situation: Any, environment: Any) -> tuple[Any, np.ndarray]:
    environment = make() if environment is None else environment
    environment.set_task(situation)
    return environment, environment.reset()[0]


def record(tasks: tuple[str, ...] = TASKS, count: int = 100, seed: int = 0) -> Demonstrations:
    """`count` successful episodes of each task. The trials of a policy use other situations."""
    try:
        from metaworld.policies import ENV_POLICY_MAP
    except ImportError:
        raise DataError(MISSING) from None
    if unknown := [task for task in tasks if task not in ENV_POLICY_MAP]:
        raise DataError(
            f"--task {unknown[0]}: Meta-World has no expert for it, only for {', '.join(ENV_POLICY_MAP)}."
        )
    hands, scenes, actions, episodes, number = [], [], [], [], 0
    for which, task in enumerate(tasks):
        rng, kept, environment = np.random.default_rng([seed, which]), 0, None
        for begin in situations(task, 1000 * seed, 2 * count):
            environment, observation = begin(environment)
            expert, left, episode = ENV_POLICY_MAP[task](), None, []
            for _ in range(LONGEST):
                action = np.clip(expert.get_action(observation), -1, 1)
                episode.append((observe(observation, which, len(tasks)), action))
                shaken = action + SHAKEN * rng.standard_normal(4) * (1, 1, 1, 0)  # a gripper is open or closed
                observation, _, _, _, info = environment.step(np.clip(shaken, -1, 1).astype(np.float32))
                if left is None and info["success"]:
                    left = AFTER
                if left is not None:
                    left -= 1
                    if left < 0:
                        break
            if left is None:
                continue
            hands += [o["observation.state"] for o, _ in episode]
            scenes += [o["observation.environment_state"] for o, _ in episode]
            actions += [torch.from_numpy(a).float() for _, a in episode]
            episodes += [number] * len(episode)
            number, kept = number + 1, kept + 1
            if kept == count:
                break
        typer.echo(f"{task}: {kept} episodes, {len(episodes)} moments so far")
    return Demonstrations(
        torch.stack(hands), torch.stack(scenes), torch.stack(actions), torch.tensor(episodes), tasks
    )


# ---------------------------------------------------------------- LeRobot


def lerobot_class() -> Any:
    """The installed `DiffusionPolicy`.

    A torchvision whose compiled operators do not go with the installed torch still imports once their names exist; a
    policy of states never calls them.
    """
    operators = torch.ops.torchvision
    try:
        import torchvision.extension  # noqa: F401

        known = hasattr(operators, "nms")
    except (ImportError, RuntimeError):
        known = False
    if not known:
        _define_vision_operators()
    try:
        from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
    except ImportError as error:
        raise DataError(
            f"LeRobot cannot be imported ({error}): docs/robots.md has the line that installs it beside this package."
        ) from None
    return DiffusionPolicy


_LIBRARY: list[Any] = []  # definitions live as long as what holds them


def _define_vision_operators() -> None:
    if _LIBRARY:
        return
    library = torch.library.Library("torchvision", "DEF")
    box = "Tensor dets, Tensor scores, float iou_threshold"
    for signature in (
        f"nms({box}) -> Tensor",
        f"qnms({box}) -> Tensor",
        "deform_conv2d(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, int f, int g, int h, int i, int j, int k, "
        "int l, int m, bool n) -> Tensor",
        "roi_align(Tensor a, Tensor b, float c, int d, int e, int f, bool g) -> Tensor",
    ):
        library.define(signature)
    _LIBRARY.append(library)


def build(size: str, tasks: int = len(TASKS), device: str = "cpu", steps: int = 100) -> Any:
    """LeRobot's policy with its defaults, except that it observes states and that ENV is normalised as STATE is."""
    policy_class = lerobot_class()
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    config = DiffusionConfig(
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (4,)),
            "observation.environment_state": PolicyFeature(FeatureType.ENV, (17 + tasks,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
        normalization_mapping=dict.fromkeys(("STATE", "ENV", "ACTION"), NormalizationMode.MIN_MAX),
        down_dims=SIZES[size],
        num_train_timesteps=steps,
        device=device,
    )
    return policy_class(config)


def processors(policy: Any, data: Demonstrations) -> tuple[Any, Any]:
    """LeRobot's pre- and post-processor, with the extremes of these demonstrations."""
    from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors

    stats = {}
    for name, values in data.features().items():
        low, high = values.amin(0), values.amax(0)
        missing = (NARROWEST - (high - low)).clamp(min=0) / 2
        stats[name] = {"min": low - missing, "max": high + missing}
    return make_diffusion_pre_post_processors(policy.config, dataset_stats=stats)


@dataclass(frozen=True)
class LoadedPolicy:
    """A trained policy with its pre- and postprocessing."""

    policy: Any
    before: Any
    after: Any
    tasks: tuple[str, ...]


def load(folder: Path = ASSET, device: str = "cpu") -> LoadedPolicy:
    """The policy in a folder written by `save`, read by LeRobot's own readers."""
    policy_class = lerobot_class()
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

    config = PreTrainedConfig.from_pretrained(folder)
    config.device = device
    policy = policy_class.from_pretrained(folder, config=config, strict=True).requires_grad_(False)
    before = PolicyProcessorPipeline.from_pretrained(
        folder,
        config_filename="policy_preprocessor.json",
        overrides={"device_processor": {"device": device}},
    )
    after = PolicyProcessorPipeline.from_pretrained(
        folder,
        config_filename="policy_postprocessor.json",
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    tasks = tuple(json.loads((folder / "training.json").read_text())["tasks"])
    return LoadedPolicy(policy, before, after, tasks)


def save(policy: Any, pipelines: tuple[Any, Any], folder: Path, facts: dict[str, Any]) -> int:
    """Write a folder that LeRobot reads, with weights in float16; returns the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    policy.config._save_pretrained(folder)
    for pipeline in pipelines:
        pipeline.save_pretrained(folder)
    weights = {name: value.half().cpu().contiguous() for name, value in policy.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


# ---------------------------------------------------------------- training


def moments(
    data: Demonstrations, normal: dict[str, Tensor], config: Any
) -> Callable[[Tensor], dict[str, Tensor]]:
    """A function from indices [B] to LeRobot's training batch: its observation steps and its horizon of actions.

    Outside an episode its first or last moment is repeated, as LeRobot's dataset does.
    """
    device = normal["action"].device
    episode = data.episode.to(device)
    place = torch.arange(len(episode), device=device)
    first = torch.searchsorted(episode, episode)
    last = torch.searchsorted(episode, episode, right=True) - 1
    back = torch.arange(1 - config.n_obs_steps, 1, device=device)
    ahead = torch.arange(1 - config.n_obs_steps, 1 - config.n_obs_steps + config.horizon, device=device)

    def batch(chosen: Tensor) -> dict[str, Tensor]:
        low, high = first[chosen].unsqueeze(1), last[chosen].unsqueeze(1)
        wanted = place[chosen].unsqueeze(1) + ahead
        seen = (place[chosen].unsqueeze(1) + back).clamp(min=low)
        done = wanted.clamp(min=low, max=high)
        found = {name: value[seen] for name, value in normal.items() if name != "action"}
        return found | {"action": normal["action"][done], "action_is_pad": wanted != done}

    return batch


def train(
    data: Demonstrations,
    size: str,
    out: Path,
    *,
    seconds: float | None = None,
    steps: int | None = None,
    batch: int = 256,
    seed: int = 0,
    device: str = "cpu",
    compiled: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Train, or continue from a checkpoint; returns the policy with averaged weights, also written to `out`, and facts.

    `seconds` sets the number of steps from the speed of the first ones; a checkpoint keeps the number it was given.
    """
    run = checkpoint.Run(f"metaworld-{size}", seed, batch, 5e-4 if size == "small" else 1e-4, 200, steps)
    began, state, path = time.monotonic(), None, checkpoint.latest(out)
    if path is not None:
        run, state = checkpoint.load(path)
        if (run.name, run.seed, run.batch) != (f"metaworld-{size}", seed, batch):
            raise DataError(
                f"{path} holds another training ({run.name}, seed {run.seed}): choose another --out."
            )
    torch.manual_seed(seed)
    policy = build(size, len(data.tasks), device).to(device)
    pipelines = processors(policy, data)
    averaged = copy.deepcopy(policy).requires_grad_(False).eval()
    weights, averages = list(policy.parameters()), list(averaged.parameters())
    cuda = torch.device(device).type == "cuda"
    optimizer = torch.optim.AdamW(weights, lr=run.lr, betas=(0.95, 0.999), weight_decay=1e-6, fused=cuda)
    if state is not None:
        checkpoint.restore(state, run.step, policy, averaged, optimizer)
    normal = {name: value for name, value in pipelines[0](data.features()).items() if name in data.features()}
    batch_at = moments(data, normal, policy.config)
    loss_of = torch.compile(policy.diffusion.compute_loss) if compiled else policy.diffusion.compute_loss
    torch.set_float32_matmul_precision("high")

    def one_step() -> Tensor:
        torch.manual_seed(seed * 2**32 + run.step)  # LeRobot draws its noise from the global generator
        chosen = torch.randint(len(data.episode), (batch,), device=device)
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = loss_of(batch_at(chosen))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        warm, total = min(1.0, (run.step + 1) / run.warmup), run.total or 10**9
        for group in optimizer.param_groups:
            group["lr"] = run.lr * warm * 0.5 * (1 + math.cos(math.pi * run.step / total))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        decay = min(0.999, (1 + run.step) / (10 + run.step))
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - decay)
        run.step += 1
        return loss.detach()

    bar = tqdm(initial=run.step, total=run.total, mininterval=5.0)
    timed: tuple[float, int] | None = None
    while run.total is None or run.step < run.total:
        loss = one_step()
        bar.update()
        if run.step % 50 == 0:
            run.history.append((run.step, float(loss)))
            if run.total is None and seconds is not None:
                now = time.monotonic()
                if timed is None:
                    timed = now, run.step  # compilers are done
                else:
                    speed = (run.step - timed[1]) / (now - timed[0])
                    if run.step >= timed[1] + 100:
                        run.total = run.step + max(1, int(speed * (seconds - (now - began))))
                        bar.total = run.total
        if seconds is not None and time.monotonic() - began > 1.1 * seconds:
            break
    run.seconds += time.monotonic() - began
    if size != "full" or run.step < (run.total or 0):  # a finished full-size run needs no 4 GB of moments
        checkpoint.save(out, run, checkpoint.flatten(policy, averaged, optimizer))
    last = [loss for _, loss in run.history[-20:]]
    facts = {
        "tasks": list(data.tasks),
        "size": size,
        "parameters": sum(w.numel() for w in weights),
        "moments": len(data.episode),
        "steps": run.step,
        "of": run.total,
        "batch": batch,
        "seed": seed,
        "seconds": round(run.seconds, 1),
        "loss": round(sum(last) / max(1, len(last)), 5),
    }
    save(averaged, pipelines, out, facts)
    return averaged, facts


# ---------------------------------------------------------------- commands


app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command("record")
def record_command(
    count: Annotated[int, typer.Option(help="successful episodes a task")] = 100,
    seed: Annotated[int, typer.Option(help="of situations and shaking")] = 0,
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help=f"a task; repeat for several [{', '.join(TASKS)}]")
    ] = None,
    out: Annotated[Path, typer.Option(help="where they go")] = DATA,
) -> None:
    """Record the scripted experts."""
    try:
        data = record(tuple(tasks or TASKS), count, seed)
    except DataError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{len(data.episode)} moments, {data.save(out)} bytes in {out}")


@app.command("train")
def train_command(
    size: Annotated[str, typer.Option(help="small or full")] = "small",
    data: Annotated[Path, typer.Option(help="what `record` wrote")] = DATA,
    out: Annotated[Path, typer.Option(help="where the policy goes")] = ASSET,
    seconds: Annotated[float | None, typer.Option(help="length of the training by the clock")] = None,
    steps: Annotated[int | None, typer.Option(help="length of the training")] = None,
    batch: Annotated[int, typer.Option(help="moments a step")] = 256,
    seed: Annotated[int, typer.Option(help="of weights, order and noise")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the loss")] = False,
) -> None:
    """Train the policy, or continue where training stopped."""
    try:
        if size not in SIZES:
            raise DataError(f"--size is one of {', '.join(SIZES)}, not {size}.")
        if steps is None and seconds is None:
            raise DataError("give --steps or --seconds.")
        _, facts = train(
            Demonstrations.load(data),
            size,
            out,
            seconds=seconds,
            steps=steps,
            batch=batch,
            seed=seed,
            device=device,
            compiled=compiled,
        )
    except (DataError, checkpoint.CheckpointError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(
        f"{facts['parameters']} parameters, {facts['steps']} of {facts['of']} steps, loss {facts['loss']}, in {out}"
    )


if __name__ == "__main__":
    app()
