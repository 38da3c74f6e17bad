"""A dataset holds the samples of one target: another one is refused, wherever it comes from, and rounding is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import foresample as fs
from foresample.datasets.fingerprint import difference, fingerprint
from foresample.engine.tuning import Trial
from foresample.settings import Settings
from foresample.targets import ChainTarget
from tests.datasets.disturbing import inodes, run, shards
from tests.datasets.process import COUNT, SHARD, draw
from tests.datasets.test_generation import Asked
from tests.support.small_chains import CHAINS, NOISIER, flow, third_order

ALL: dict[str, Callable[[], Any]] = {**CHAINS, **NOISIER}


class Changed:
    """Another target, in one of its methods."""

    def __init__(self, base: Any, **changes: Callable[[Tensor], Tensor]) -> None:
        self.base, self.changes, self.shape, self.std = base, changes, base.shape, base.std
        for name in ("multistep", "extra", "calls_per_step"):
            if hasattr(base, name):
                setattr(self, name, getattr(base, name))

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return self.changes.get("start", torch.clone)(self.base.start(noise, row))

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        return self.changes.get("predict", torch.clone)(self.base.predict(x, step, row, **extra))

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, *previous: Tensor, **extra: Tensor) -> Tensor:
        return self.changes.get("mean", torch.clone)(self.base.mean(x, prediction, step, *previous, **extra))


@pytest.mark.parametrize("name", ALL)
def test_a_fingerprint_tells_targets_apart_and_ignores_rounding(name: str) -> None:
    base = ALL[name]()
    own = fingerprint(base, COUNT)
    assert difference(own, fingerprint(Changed(base), COUNT)) is None
    half = Changed(base, predict=lambda p: p.bfloat16().to(p.dtype))
    assert difference(own, fingerprint(half, COUNT)) is None
    narrow = Changed(base, mean=lambda m: m * (1 + torch.finfo(m.dtype).eps))
    assert difference(own, fingerprint(narrow, COUNT)) is None
    for part, sentence in (
        ("predict", "prediction at step"),
        ("mean", "mean at step"),
        ("start", "start of sample"),
    ):
        other = difference(own, fingerprint(Changed(base, **{part: lambda value: 1.3 * value + 0.1}), COUNT))
        assert other is not None
        if part != "mean":  # which moves the states of later predictions, too
            assert sentence in other
    assert difference(json.loads(json.dumps(own)), own) is None


@pytest.mark.parametrize("leaves", [0, 57, 99])
def test_a_mean_that_changes_at_one_step_of_many_is_noticed(leaves: int) -> None:
    base = fs.GaussianMixture.of_draft_trees(2).vp(torch.linspace(0.01, 0.99, 100, dtype=torch.float64))

    class Leaves(Changed):
        def mean(
            self, x: Tensor, prediction: Tensor, step: Tensor, *previous: Tensor, **extra: Tensor
        ) -> Tensor:
            return base.mean(x, prediction, step) + 1e-3 * (step == leaves).unsqueeze(1)

    other = difference(fingerprint(base, 9), fingerprint(Leaves(base), 9))
    assert other is not None
    assert "its mean at steps" in other


def test_nan_where_no_chain_goes_is_left_out_of_the_fingerprint() -> None:
    base = flow()
    broken = fingerprint(Changed(base, predict=lambda p: p * torch.nan), COUNT)
    assert not [name for name in broken if name.startswith("prediction")]
    assert difference(broken, fingerprint(base, COUNT)) is None


@dataclass(frozen=True)
class Conditioned:
    """The flow with an observation of each sample, from a table; only one entry for each sample there is."""

    drift: float = 0.0
    table: tuple[float, ...] = tuple(0.01 * i for i in range(COUNT))

    def __call__(self) -> ChainTarget:
        base, table = flow(), torch.tensor(self.table, dtype=torch.float64)
        network = lambda x, time, row: base.network(x, time, row) + table[row].unsqueeze(1) + self.drift  # noqa: E731
        return replace(base, network=network)


def fix_tuning(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """The window that auto measures; None where the sequential sampler is faster."""

    def measure(target: fs.Target, settings: Settings, **_: Any) -> fs.Tuning:
        slots = settings.slots or 1
        trial = Trial(window or 6, slots, 1e-3, 1e-3, 5.0, 2.0 if window else 0.5)
        return fs.Tuning(len(target.std), slots, 1e-3, [trial], window, window and 1.9)

    monkeypatch.setattr("foresample.datasets.workers.measure", measure)


@pytest.mark.slow
@pytest.mark.parametrize("window", ["auto, 6", "auto, sequential", 6])
@pytest.mark.parametrize("conditions", [False, True], ids=["alike", "conditions"])
@pytest.mark.parametrize("change", ["none", "drift", "table", "mean"])
def test_resuming_with_another_target_is_refused_and_with_the_same_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: str | int, conditions: bool, change: str
) -> None:
    """The target changes between two runs: its network, its conditions or its mean."""
    auto = isinstance(window, str)
    fix_tuning(monkeypatch, None if window == "auto, sequential" else 6)
    table = tuple(0.01 * i if conditions else 0.0 for i in range(COUNT))
    how: dict[str, Any] = {"seed": 5, "shard": SHARD, "slots": 16, "window": "auto" if auto else window}
    dataset = fs.generate(Conditioned(0.5, table), COUNT, out=tmp_path, **how)
    assert dataset.complete
    plain = torch.cat(list(dataset.samples()))
    gone = tmp_path / "shard-00002.safetensors"
    gone.unlink()
    kept = inodes(tmp_path)
    fix_tuning(monkeypatch, 5)  # another window, which is not measured again
    made: Any = Conditioned(0.5, table)
    if change == "drift":
        made = Conditioned(-3.2, table)
    elif change == "table":
        made = Conditioned(0.5, (1.0, *table[1:]))
    elif change == "mean":
        made = lambda: Changed(Conditioned(0.5, table)(), mean=lambda m: m + 0.01)  # noqa: E731
    if change == "none":
        assert fs.generate(made, COUNT, out=tmp_path, **how).complete
        assert torch.equal(torch.cat(list(fs.inspect_dataset(tmp_path).samples())), plain)
    else:
        with pytest.raises(
            ValueError,
            match=r"holds samples of another target \(its (mean|prediction) at step.* there and .* here",
        ):
            fs.generate(made, COUNT, out=tmp_path, **how)
        assert not gone.exists()
        (tmp_path / "manifest.json").unlink()  # the shards say it as well
        fix_tuning(monkeypatch, None if window == "auto, sequential" else 6)
        with pytest.raises(ValueError, match="is sound, but was drawn from another target"):
            fs.generate(made, COUNT, out=tmp_path, **how)
        assert not (tmp_path / "manifest.json").exists()
        assert not gone.exists()
    assert kept.items() <= inodes(tmp_path).items()


def test_a_dataset_without_a_fingerprint_can_be_inspected_but_not_resumed(tmp_path: Path) -> None:
    draw(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["fingerprint"]
    path.write_text(json.dumps(manifest))
    assert fs.inspect_dataset(tmp_path).complete
    with pytest.raises(ValueError, match="earlier version, which kept no fingerprint of its target"):
        draw(tmp_path)


# ------------------------------------------------------------------ drawn sequentially


@pytest.mark.parametrize("make", [flow, third_order, NOISIER["turned"]])
@pytest.mark.parametrize("slots", [7, 400])
def test_a_dataset_drawn_sequentially_has_the_samples_of_sequential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], slots: int
) -> None:
    fix_tuning(monkeypatch, None)
    dataset = fs.generate(make, 100, out=tmp_path, slots=slots, shard=30, seed=5, law=100)
    settings, costs = dataset.manifest["settings"], dataset.manifest["costs"]
    assert (settings["method"], settings["window"]) == ("sequential", 0)
    assert dataset.manifest["choice"].startswith("Sample sequentially")
    assert torch.equal(torch.cat(list(dataset.samples())), fs.sequential(make(), 100, seed=5).samples)
    assert costs["calls_mean"] == costs["evaluations_mean"] == settings["steps"]
    assert dataset.law is not None
    assert dataset.law.passed
    assert fs.inspect_dataset(tmp_path).fair == 100


def test_a_chain_with_nothing_to_draft_is_not_measured(tmp_path: Path) -> None:
    target = fs.GaussianMixture.of_draft_trees(2).flow(1, 0.5)
    dataset = fs.generate(target, 5, out=tmp_path)
    assert dataset.manifest["choice"] == "Sample sequentially: this chain has no transition that can be drafted"
    assert torch.equal(torch.cat(list(dataset.samples())), fs.sequential(target, 5).samples)


def test_sequential_draws_stop_fairly_name_what_breaks_and_refuse_what_mixes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_tuning(monkeypatch, None)
    base, stop = flow(), Asked(3)
    stopped = fs.generate(base, 100, out=tmp_path / "stopped", slots=8, shard=30, stop=stop)
    assert stopped.fair == stopped.in_order == stopped.manifest["costs"]["samples"] == 16

    assert base.chain.time is not None
    breaks_at = base.chain.time[9]

    def breaks(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        assert x.isfinite().all()  # what broke is given up
        bad = (row == 21) & (time == breaks_at)
        return torch.where(bad.unsqueeze(1), torch.nan, base.network(x, time, row))

    broken = fs.generate(replace(base, network=breaks), 40, out=tmp_path / "broken", slots=8, shard=30)
    assert [(f.index, f.step) for f in broken.failures] == [(21, 9)]
    index = torch.cat([load_file(path)["index"] for path in sorted((tmp_path / "broken").glob("shard-*"))])
    whole = fs.sequential(base, 40).samples
    assert torch.equal(torch.cat(list(broken.samples(everything=True))), whole[index])

    mixes = replace(base, network=lambda x, time, row: base.network(x, time, row) + x.mean(0))
    with pytest.raises(ValueError, match="mixes rows"):
        fs.generate(mixes, 40, out=tmp_path / "mixes", slots=8)
    assert fs.generate(base, 41, out=tmp_path / "mixes", slots=8).complete  # no sample there binds anybody


def test_the_default_window_is_measured_and_reported(tmp_path: Path) -> None:
    said: list[str] = []
    dataset = fs.generate(
        flow(), 5, out=tmp_path, progress=lambda status: said.append(status.doing or status.choice)
    )
    assert said[0] == "sequential"
    assert said[-1] == dataset.manifest["choice"]
    assert (dataset.manifest["settings"]["window"] == 0) == said[-1].startswith("Sample sequentially")


# ------------------------------------------------------------------ workers


@pytest.mark.slow
@pytest.mark.ray
def test_a_worker_that_makes_another_target_draws_nothing(tmp_path: Path) -> None:
    """Every process but the first makes a target with another drift, as with another version of its code."""
    out = tmp_path / "out"
    ended = run(out, {"ray": "local", "workers": 2, "cpus": 1, "slots": 8, "drifts": tmp_path / "first"})
    assert ended.returncode == 2
    assert "a worker made another target than the dataset's (its prediction at step" in ended.stderr
    assert "Traceback" not in ended.stderr
    means = [load_file(path)["samples"].mean() for path in sorted(out.glob("shard-*"))]
    assert all(abs(mean) < 2 for mean in means)  # of the first target alone
    assert len(shards(out)) < -(-COUNT // SHARD)


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_one_worker_measures_and_all_use_the_faster_sampler(tmp_path: Path) -> None:
    """Here and there: a run without Ray goes on with it."""
    ended = run(tmp_path, {"ray": "local", "workers": 2, "cpus": 1, "window": "auto"})
    assert ended.returncode == 0, ended.stderr
    dataset = fs.inspect_dataset(tmp_path)
    window = dataset.manifest["settings"]["window"]
    plain = fs.sample(flow(), COUNT, window=window, seed=5) if window else fs.sequential(flow(), COUNT, seed=5)
    assert (dataset.manifest["settings"]["method"] == "sequential") == (window == 0)
    (tmp_path / "shard-00003.safetensors").unlink()
    assert torch.equal(torch.cat(list(draw(tmp_path, window="auto").samples())), plain.samples)


def test_a_fingerprint_covers_conditions_beyond_the_first() -> None:
    """A table of conditions that changes behind its first entries is another target."""
    base, count = flow(), 200

    def conditioned(change: float) -> ChainTarget:
        table = torch.where(torch.arange(count) < 16, 0.0, change).double()
        network = lambda x, time, row: base.network(x, time, row) + table[row].unsqueeze(1)  # noqa: E731
        return replace(base, network=network)

    assert difference(fingerprint(conditioned(0.0), count), fingerprint(conditioned(0.0), count)) is None
    other = difference(fingerprint(conditioned(0.0), count), fingerprint(conditioned(3.0), count))
    assert other is not None
    assert "its prediction at step" in other


@pytest.mark.parametrize("count", [1, 2, 7, 16, 17, 10**15])
def test_a_fingerprint_uses_only_rows_of_the_dataset(count: int) -> None:
    base = flow()
    asked = set[int]()

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        asked.update(row.tolist())
        return base.network(x, time, row)

    marks = fingerprint(replace(base, network=network), count)
    assert asked <= set(range(count)) if count < 99 else max(asked) > 99
    assert len(asked) == min(count, 16)
    assert len([name for name in marks if name.startswith("prediction")]) == 16 if count > 1 else 8
