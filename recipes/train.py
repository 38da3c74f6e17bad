"""Train one of the models: `python -m recipes.train fashion-mnist`, `python -m recipes.train cifar10`.

The length of a run is a number of steps. `--minutes` sets it from the clock: the speed is measured during the
warm-up, whose learning rates do not depend on the length, and the number found is kept in the run, so that
`--steps` with that number repeats the same training. A run that is stopped (Ctrl-C, the end of its minutes, a
crash) goes on from its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor
from torch.nn.functional import mse_loss
from tqdm import tqdm

from recipes import checkpoint, data, pictures
from recipes.config import RECIPES, Recipe
from recipes.export import draw, export

LOG_EVERY = 50  # steps between two entries of the loss curve: reading the loss waits for the GPU


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one sentence with the remedy."""


def seeded(device: torch.device, seed: int, *key: int | str) -> torch.Generator:
    """A generator for one purpose at one step: the same numbers whether or not the run was interrupted."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)


def batch_indices(count: int, batch: int, seed: int, device: torch.device) -> Callable[[int], Tensor]:
    """Step -> indices of its pictures: each epoch a fresh shuffle, its ragged end left out."""
    per_epoch = max(1, count // batch)
    shuffles: dict[int, Tensor] = {}

    def indices(step: int) -> Tensor:
        epoch, place = divmod(step, per_epoch)
        if epoch not in shuffles:
            shuffles.clear()
            generator = seeded(device, seed, "order", epoch)
            shuffles[epoch] = torch.randperm(count, generator=generator, device=device)
        return shuffles[epoch][place * batch : (place + 1) * batch]

    return indices


def learning_rate(step: int, run: checkpoint.Run) -> float:
    """Linear warm-up, then half a cosine down to 0 at the last step."""
    if step < run.warmup or run.total is None:
        return run.lr * min(1.0, (step + 1) / max(1, run.warmup))
    done = (step - run.warmup) / max(1, run.total - run.warmup)
    return run.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_loss(
    unet: UNet2DModel, scheduler: DDPMScheduler, flip: bool, device: torch.device
) -> Callable[..., Tensor]:
    """MSE on v = α ε − σ x₀ at x = α x₀ + σ ε, one noise level for each picture."""
    alpha = scheduler.alphas_cumprod.sqrt().to(device).view(-1, 1, 1, 1)
    sigma = (1 - scheduler.alphas_cumprod).sqrt().to(device).view(-1, 1, 1, 1)
    mixed = device.type == "cuda"

    def loss(images: Tensor, labels: Tensor, t: Tensor, noise: Tensor, mirrored: Tensor) -> Tensor:
        clean = images.float() / 127.5 - 1
        if flip:
            clean = torch.where(mirrored.view(-1, 1, 1, 1), clean.flip(-1), clean)
        noisy = alpha[t] * clean + sigma[t] * noise
        if mixed:
            noisy = noisy.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            v = unet(noisy, t, class_labels=labels, return_dict=False)[0]
        return mse_loss(v.float(), alpha[t] * noise - sigma[t] * clean)

    return loss


def draws(images: Tensor, timesteps: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noise level, noise and mirror of each picture. Levels are stratified: one in each slice of the range."""
    count, device = len(images), images.device
    u = torch.rand(2, count, generator=generator, device=device)
    t = ((torch.arange(count, device=device) + u[0]) * (timesteps / count)).long().clamp(max=timesteps - 1)
    noise = torch.randn(images.shape, generator=generator, device=device)
    return t, noise, u[1] < 0.5


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are noted, not raised: the step in hand is finished and saved first."""
    seen: list[int] = []
    try:
        before = {
            s: signal.signal(s, lambda number, _: seen.append(number)) for s in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not the main thread
        before = {}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def begin(
    recipe: Recipe, out: Path, fresh: checkpoint.Run, steps: int | None
) -> tuple[checkpoint.Run, dict | None]:
    """The run of an output folder: its last checkpoint if that is the same training, else a new one."""
    path = checkpoint.latest(out)
    if path is None:
        return fresh, None
    run, state = checkpoint.load(path)
    wanted = (fresh.name, fresh.seed, fresh.batch, fresh.lr, fresh.warmup, steps or run.total)
    if wanted != (run.name, run.seed, run.batch, run.lr, run.warmup, run.total):
        raise TrainingError(
            f"{path} holds another training ({run.name}, seed {run.seed}, batch {run.batch}, lr {run.lr}, "
            f"warm-up {run.warmup}, {run.total} steps): give the same options to go on, or another --out."
        )
    return run, state


def train(
    recipe: Recipe,
    split: data.Split,
    out: Path,
    *,
    steps: int | None = None,
    minutes: float | None = None,
    pause_at: int | None = None,
    seed: int = 0,
    batch: int | None = None,
    init: Path | None = None,
    device: str | torch.device = "cpu",
    compiled: bool = False,
    save_minutes: float = 3.0,
    quiet: bool = False,
) -> tuple[UNet2DModel, checkpoint.Run]:
    """Train (or go on training) a recipe's network on a split; returns the averaged network and the run.

    The run is finished where `run.step == run.total`; otherwise it was stopped, with a checkpoint. `steps` is
    the length of the training; `minutes` bounds this call and, where `steps` is None, sets the length. `init`
    starts from the weights of an exported model.
    """
    began = time.monotonic()
    device = torch.device(device)
    total = steps or (None if minutes else recipe.steps)
    fresh = checkpoint.Run(recipe.name, seed, batch or recipe.batch, recipe.lr, recipe.warmup, total)
    run, state = begin(recipe, out, fresh, steps)
    if len(split.images) < run.batch:
        raise TrainingError(
            f"{len(split.images)} pictures are fewer than one batch: use --batch up to that number."
        )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet, scheduler = recipe.build()
    if init is not None:
        unet.load_state_dict(UNet2DModel.from_pretrained(init / "unet").state_dict())
    unet.to(device, memory_format=torch.channels_last if device.type == "cuda" else torch.contiguous_format)
    ema = copy.deepcopy(unet).requires_grad_(False).eval()
    weights, averages = list(unet.parameters()), list(ema.parameters())
    optimizer = torch.optim.AdamW(
        weights, lr=run.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=device.type == "cuda"
    )
    if state is not None and run.step > 0:
        checkpoint.restore(state, run.step, unet, ema, optimizer)

    images, labels = split.images.to(device), split.labels.to(device)
    indices = batch_indices(len(images), run.batch, seed, device)
    loss_of = make_loss(unet, scheduler, recipe.flip, device)
    if compiled:
        loss_of = torch.compile(loss_of)
    timesteps = scheduler.config.num_train_timesteps

    def one_step(step: int) -> Tensor:
        chosen = indices(step)
        batch_images = images[chosen]
        t, noise, mirrored = draws(batch_images, timesteps, seeded(device, seed, "noise", step))
        loss = loss_of(batch_images, labels[chosen], t, noise, mirrored)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, run)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        decay = min(recipe.ema, (1 + step) / (10 + step))  # short memory at first: forget the random start
        with torch.no_grad():  # else the average would hold the graph of every step
            torch._foreach_lerp_(averages, weights, 1 - decay)
        return loss.detach()

    def save() -> None:
        checkpoint.save(out, run, checkpoint.flatten(unet, ema, optimizer))
        pictures.loss_curve(run.history, out, f"{recipe.name}: loss on v")

    out.mkdir(parents=True, exist_ok=True)
    unet.train()
    before, first, saved = run.seconds, run.step, began
    clock: tuple[int, float] | None = None  # where the measurement of speed began
    summed, counted, smooth = torch.zeros((), device=device), 0, None
    bar = tqdm(total=run.total, initial=run.step, desc=recipe.name, unit="step", disable=quiet, mininterval=2.0)
    with stop_signals() as signals, bar:
        while run.total is None or run.step < run.total:
            summed += one_step(run.step)
            counted += 1
            run.step += 1
            bar.update()
            if run.total is None and clock is None and run.step >= first + max(1, run.warmup // 3):
                _wait(device)
                clock = (run.step, time.monotonic())
            if run.total is None and clock is not None and run.step >= max(run.warmup, clock[0] + 1):
                _wait(device)
                run.total = _plan(run.step, clock, began, minutes or 0.0)
                bar.total = run.total
            at_end = run.step == run.total
            out_of_time = minutes is not None and time.monotonic() - began > 60 * minutes
            stopping = at_end or out_of_time or run.step == pause_at or bool(signals)
            if counted and (stopping or run.step % LOG_EVERY == 0):
                mean = summed.item() / counted
                if not math.isfinite(mean):
                    raise TrainingError(
                        f"the loss is {mean} at step {run.step}: use another --seed or a lower --lr."
                    )
                smooth = mean if smooth is None else 0.9 * smooth + 0.1 * mean
                run.history.append((run.step, mean))
                run.seconds = before + time.monotonic() - began
                bar.set_postfix(
                    loss=f"{mean:.4f}", smooth=f"{smooth:.4f}", lr=f"{learning_rate(run.step, run):.1e}"
                )
                summed.zero_()
                counted = 0
                if not stopping and time.monotonic() - saved > 60 * save_minutes:
                    save()
                    saved = time.monotonic()
            if stopping:
                break
    save()
    return ema, run


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _plan(step: int, clock: tuple[int, float], began: float, minutes: float) -> int:
    """Number of steps that fit the rest of the budget, less a reserve for the export, at the measured speed."""
    now = time.monotonic()
    seconds_a_step = (now - clock[1]) / (step - clock[0])
    left = 60 * minutes - (now - began) - min(15.0, 6 * minutes)
    return step + max(1, int(0.97 * left / seconds_a_step))


@torch.no_grad()
def held_out_loss(
    unet: UNet2DModel, scheduler: DDPMScheduler, split: data.Split, device: torch.device
) -> float:
    """The training loss on 2000 pictures never trained on (noise fixed, no mirror images)."""
    loss_of = make_loss(unet, scheduler, False, device)
    losses = []
    for i, (images, labels) in enumerate(
        zip(split.images[:2000].split(500), split.labels[:2000].split(500), strict=True)
    ):
        images, labels = images.to(device), labels.to(device)
        t, noise, mirrored = draws(
            images, scheduler.config.num_train_timesteps, seeded(device, 0, "held out", i)
        )
        losses.append(loss_of(images, labels, t, noise, mirrored).item())
    return sum(losses) / len(losses)


def finish(
    recipe: Recipe,
    ema: UNet2DModel,
    run: checkpoint.Run,
    out: Path,
    test: data.Split | None,
    device: torch.device,
) -> dict[str, Any]:
    """Export the averaged weights and leave a sheet of samples and a summary beside them."""
    _, scheduler = recipe.build()
    size = export(ema, scheduler, recipe.labels, out / "export")
    labels = torch.arange(10, device=device).repeat_interleave(10)
    pictures.contact_sheet(draw(ema, scheduler, labels, steps=100, seed=1), out / "samples.png", columns=10)
    summary = {
        "kind": "training",
        "model": recipe.name,
        "parameters": sum(p.numel() for p in ema.parameters()),
        "bytes": size,
        "steps": run.step,
        "planned": run.total,
        "batch": run.batch,
        "lr": run.lr,
        "warmup": run.warmup,
        "seed": run.seed,
        "seconds": round(run.seconds, 1),
        "loss": run.history[-1][1] if run.history else None,
        "test_loss": held_out_loss(ema, scheduler, test, device) if test is not None else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def main(
    model: Annotated[str, typer.Argument(help="fashion-mnist or cifar10")],
    steps: Annotated[int | None, typer.Option(help="length of the training in steps")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="time for this command; sets the length unless --steps")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="pictures a step")] = None,
    seed: Annotated[int, typer.Option(help="of the first weights, the data's order and the noise")] = 0,
    lr: Annotated[float | None, typer.Option(help="highest learning rate")] = None,
    warmup: Annotated[int | None, typer.Option(help="steps of warm-up")] = None,
    out: Annotated[Path | None, typer.Option(help="run folder [default: out/train/MODEL]")] = None,
    folder: Annotated[
        Path | None, typer.Option("--data", help="folder of the data [default: .data/MODEL]")
    ] = None,
    init: Annotated[Path | None, typer.Option(help="start from an exported model's weights")] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile, on a GPU only")
    ] = True,
    export_only: Annotated[bool, typer.Option(help="export the last checkpoint without training")] = False,
) -> None:
    """Train a model, or go on training it where --out holds a checkpoint; export it as a diffusers folder."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if cuda:
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    try:
        if model not in RECIPES:
            raise TrainingError(f"there is no recipe {model!r}: choose one of {', '.join(RECIPES)}.")
        changes: dict[str, Any] = {
            name: value for name, value in (("lr", lr), ("warmup", warmup)) if value is not None
        }
        recipe = dataclasses.replace(RECIPES[model], **changes)
        out = out or Path("out/train") / model
        if export_only:
            ema, run = _last(recipe, out, device)
        else:
            split = data.load(model, folder)
            ema, run = train(
                recipe,
                split,
                out,
                steps=steps,
                minutes=minutes,
                seed=seed,
                batch=batch,
                init=init,
                device=device,
                compiled=compiled and cuda,
            )
        summary = finish(recipe, ema, run, out, _test_split(model, folder), device)
    except (TrainingError, data.DataError, checkpoint.CheckpointError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if run.step != run.total:
        typer.echo(f"Stopped at step {run.step} of {run.total}: give the same command again to go on.")
    typer.echo(
        f"{out / 'export'}: {summary['bytes'] / 1e6:.2f} MB, loss {summary['loss']}, {run.seconds:.0f} s"
    )


def _last(recipe: Recipe, out: Path, device: torch.device) -> tuple[UNet2DModel, checkpoint.Run]:
    """The averaged network of a run folder's last checkpoint."""
    path = checkpoint.latest(out)
    if path is None:
        raise TrainingError(f"{out} holds no checkpoint: train first, without --export-only.")
    run, state = checkpoint.load(path)
    unet, _ = recipe.build()
    unet.load_state_dict({name[4:]: value for name, value in state.items() if name.startswith("ema.")})
    return unet.to(device).eval(), run


def _test_split(model: str, folder: Path | None) -> data.Split | None:
    """The test pictures, if they are here: a training machine may not have been given them."""
    try:
        return data.load(model, folder, train=False)
    except data.DataError:
        return None


if __name__ == "__main__":
    typer.run(main)
