"""The main job, `foresample sample`: draw pictures from a model folder and keep everything about the run.

Into the output folder go the pictures (`samples.png`), the raw samples (`samples.safetensors`, with labels and
seeds), the report (`report.json`) and a picture of the run (`run.png`). If the run is interrupted, the samples
finished by then are written all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foresample.bench import provenance
from foresample.core.baseline import sequential
from foresample.core.noise import seeds_of
from foresample.core.report import Report, Run
from foresample.core.round import Commit
from foresample.engine.sampling import sample
from foresample.pictures import History, grid, run_picture, side_by_side
from foresample.pretrained import Pretrained
from foresample.targets import ChainTarget, Kind

Progress = Callable[[str, Commit], None]


@dataclass(frozen=True)
class Settings:
    """What to draw."""

    count: int = 64
    steps: int = 100
    window: int = 8
    seed: int = 0
    reuse: Kind = "x0"
    label: str | None = None
    compare: bool = False


@dataclass(frozen=True)
class Drawing:
    """What was drawn and what it cost; `interrupted` runs hold the finished samples and no report."""

    samples: Tensor
    report: Report | None
    sequential_seconds: float | None
    """Of the sequential sampler: measured with `compare`, else estimated from a few of its calls."""
    interrupted: bool
    files: list[Path]


def prepare_folder(out: Path) -> None:
    """Make the folder and see that it can be written, before any work."""
    out.mkdir(parents=True, exist_ok=True)
    probe = out / ".writable"
    probe.touch()
    probe.unlink()


def draw(model: Pretrained, settings: Settings, out: Path, progress: Progress | None = None) -> Drawing:
    """Draw `settings.count` pictures and write everything to `out`."""
    prepare_folder(out)
    seeds = seeds_of(settings.seed, settings.count)
    labels = _labels(model, settings)
    target = model.target(settings.steps, labels, reuse=settings.reuse)
    finished, history = _Finished(settings, target), History()

    def observe(commit: Commit) -> None:
        finished(commit)
        history(commit)
        if progress is not None:
            progress("speculative", commit)

    run: Run | None = None
    try:
        run = sample(target, seeds=seeds, window=settings.window, observe=observe)
        samples, kept = run.samples.cpu(), torch.arange(settings.count)
    except KeyboardInterrupt:
        kept = finished.done.nonzero().flatten()
        samples = finished.samples[kept]
    files = _write_samples(out, samples, seeds[kept], None if labels is None else labels[kept])
    if run is None:
        return Drawing(samples, None, None, True, files)

    run_picture(out / "run.png", run.report, history)
    plain: Run | None = None
    if settings.compare:
        watch = None if progress is None else lambda commit: progress("sequential", commit)
        plain = sequential(target, seeds=seeds, observe=watch)
        texts = [
            f"{name}: {calls:.4g} calls a sample"
            for name, calls in (
                ("sequential", plain.report.calls_mean),
                ("speculative", run.report.calls_mean),
            )
        ]
        pair = side_by_side((texts[0], grid(plain.samples)), (texts[1], grid(samples)))
        pair.save(out / "compare.png")
        files.append(out / "compare.png")
    seconds = plain.report.seconds if plain else _estimate_sequential(target, settings.count)
    saved = {
        **provenance(),
        "settings": {**vars(settings), "labels": model.labels},
        "speculative": json.loads(run.report.to_json()),
        "sequential": json.loads(plain.report.to_json())
        if plain
        else {"calls_mean": settings.steps, "seconds_estimated": seconds},
    }
    (out / "report.json").write_text(json.dumps(saved, indent=2) + "\n")
    return Drawing(samples, run.report, seconds, False, [*files, out / "report.json", out / "run.png"])


def _labels(model: Pretrained, settings: Settings) -> Tensor | None:
    """One class per sample: the one asked for, or all in turn."""
    if settings.label is not None:
        return torch.full((settings.count,), model.label_index(settings.label))
    return torch.arange(settings.count) % len(model.labels) if model.labels else None


def _write_samples(out: Path, samples: Tensor, seeds: Tensor, labels: Tensor | None) -> list[Path]:
    if not len(samples):
        return []
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {"samples": samples.contiguous(), "seeds": seeds.contiguous()}
    if labels is not None:
        tensors["labels"] = labels.contiguous()
    save_file(tensors, out / "samples.safetensors")
    grid(samples).save(out / "samples.png")
    return [out / "samples.png", out / "samples.safetensors"]


def _estimate_sequential(target: ChainTarget, count: int, calls: int = 3) -> float:
    """Seconds the sequential sampler would take: N times its mean call, measured on a few."""
    std = target.std
    x = torch.randn(count, *target.shape, dtype=std.dtype, device=std.device)
    row = torch.arange(count, device=std.device)
    with torch.no_grad():
        target.predict(x, torch.zeros_like(row), row)
        started = perf_counter()
        for k in torch.linspace(0, len(std) - 1, calls).long().tolist():
            float(target.predict(x, torch.full_like(row, k), row).sum())
    return (perf_counter() - started) / calls * len(std)


class _Finished:
    """Holds finished samples as they come: an observer."""

    def __init__(self, settings: Settings, target: ChainTarget) -> None:
        self.steps = len(target.std)
        self.samples = torch.zeros(settings.count, *target.shape)
        self.done = torch.zeros(settings.count, dtype=torch.bool)

    def __call__(self, commit: Commit) -> None:
        end = (commit.step + commit.committed == self.steps).nonzero().flatten()
        if len(end):
            which = commit.sample[end].cpu()
            self.samples[which] = commit.states[end, commit.committed[end] - 1].float().cpu()
            self.done[which] = True
