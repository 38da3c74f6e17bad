"""The share of pictures in which the classifier sees the right label, for the sequential and the speculative sampler.

python -m benchmarks.agreement --device cuda

Fashion-MNIST, the embedded model, its network in float32 and in bfloat16. Every set of pictures has seeds of its own,
fixed in SEEDS before anything was drawn, and one test covers all sets (`Agreement.p_value`). One effect that could make
a difference although the distribution is the same is measured too: whether the network's output for a state depends on
the number of states in the call.

The file is saved after every set, and a second run goes on from it, so the command can be run in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.kinds.quality import Agreement, AgreementRow, AgreementSettings, CallSizeRow
from benchmarks.results import RESULTS, load, save
from foresample import pretrained
from foresample.core.noise import seeds_of
from foresample.engine import Engine
from foresample.targets import ChainTarget
from recipes.classifier import load_classifier

NETWORKS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEEDS = {
    ("float32", "sequential"): 151,
    ("float32", "speculative"): 152,
    ("bfloat16", "sequential"): 153,
    ("bfloat16", "speculative"): 154,
}
SIZES = (1, 9, 64, 1024)
"""States in a call, for one and the same states."""


def pictures(target: ChainTarget, sampler: str, seed: int, settings: AgreementSettings) -> fs.Run:
    """The pictures of a set; sequential ones in equal parts, with no more states a call than speculative ones."""
    seeds, graph = seeds_of(seed, settings.count), target.std.is_cuda
    if sampler == "sequential":
        parts = -(-settings.count // (settings.slots * (settings.window + 1)))
        return fs.sequential(target, seeds=seeds, slots=-(-settings.count // parts), graph=graph)
    return Engine(target, window=settings.window, slots=settings.slots, graph=graph).sample(seeds)


@torch.no_grad()
def agreeing(images: Tensor, classes: int) -> int:
    """The number of pictures in which the classifier sees the right label: sample i has the label i % classes."""
    judge = load_classifier(images.device)
    seen = torch.cat([judge(part).argmax(1) for part in images.clamp(-1, 1).split(1000)])
    return int((seen == torch.arange(len(images), device=images.device) % classes).sum())


def visited(target: ChainTarget, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """States that sampling visits, [count, *shape], with their steps and rows: sample i at step i % N."""
    steps, row = len(target.std), torch.arange(count, device=target.std.device)
    step = row % steps
    x = torch.zeros(count, *target.shape, device=target.std.device)

    def observe(commit: fs.Commit) -> None:
        here = commit.step + 1 == step[commit.sample]
        x[commit.sample[here]] = commit.x[here]

    fs.sequential(target, count, seed=155, observe=observe)
    x[step == 0] = torch.randn(x[step == 0].shape, generator=torch.Generator().manual_seed(155)).to(x)
    return x, step, row


def call_sizes(target: ChainTarget, network: str, sizes: tuple[int, ...] = SIZES) -> Iterator[CallSizeRow]:
    """The same states in calls of several sizes, against calls of one."""
    x, step, row = visited(target, max(sizes))

    @torch.no_grad()
    def answers(states: int) -> Tensor:
        parts = zip(x.split(states), step.split(states), row.split(states), strict=True)
        return torch.cat([target.predict(*part) for part in parts]).double()

    alone = answers(1)
    for states in sizes:
        away = answers(states) - alone
        error = away.flatten(1).mean(1).std() / len(away) ** 0.5
        yield CallSizeRow(
            network=network,
            states=states,
            most=float(away.abs().max()),
            rms=float(away.square().mean().sqrt()),
            mean=float(away.mean()),
            mean_error=float(error),
            answer=float(alone.square().mean().sqrt()),
        )


def main(
    count: Annotated[int, typer.Option(min=1, help="Pictures of each set.")] = 40_000,
    steps: int = 100,
    window: int = 8,
    slots: Annotated[int, typer.Option(min=1, help="Speculative samples under way.")] = 1024,
    only: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16; both by default.")] = None,
    sampler: Annotated[
        list[str] | None, typer.Option(help="sequential or speculative; both by default.")
    ] = None,
    most: Annotated[int, typer.Option(min=2, help="States in the largest call that is compared.")] = SIZES[-1],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = RESULTS,
) -> None:
    """Draw the sets that are missing and save `fashion_mnist-agreement.json`."""
    settings = AgreementSettings(steps=steps, window=window, slots=slots, count=count)
    rows: list[AgreementRow] = []
    calls: list[CallSizeRow] = []
    if (out / "fashion_mnist-agreement.json").exists():
        before = load(Agreement, "fashion_mnist-agreement", out)
        if before.settings == settings:
            rows, calls = before.rows, before.calls
    for network in only or list(NETWORKS):
        model = pretrained.load(device=device, dtype=NETWORKS[network])
        target = model.target(steps)
        if not any(row.network == network for row in calls):
            sizes = tuple(size for size in SIZES if size <= most)
            for size in call_sizes(target, network, sizes):
                print(f"{network}, {size.states} states a call: {size.most:.2e} at most", flush=True)
                calls.append(size)
            if rows:
                save(out / "fashion_mnist-agreement.json", "agreement", settings, rows=rows, calls=calls)
        for name in sampler or ["sequential", "speculative"]:
            if any((row.network, row.sampler) == (network, name) for row in rows):
                continue
            started, seed = perf_counter(), SEEDS[network, name]
            run = pictures(target, name, seed, settings)
            row = AgreementRow(
                network=network,
                sampler=name,
                seed=seed,
                pictures=count,
                agree=agreeing(run.samples, len(model.labels)),
                calls=run.report.calls_mean,
                seconds=perf_counter() - started,
            )
            print(f"{network} {name}: {row.agree} of {count}, {row.seconds:.0f} s", flush=True)
            rows.append(row)
            save(out / "fashion_mnist-agreement.json", "agreement", settings, rows=rows, calls=calls)


if __name__ == "__main__":
    typer.run(main)
