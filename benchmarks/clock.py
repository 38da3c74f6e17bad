"""Clock figures: seconds that fewer calls save on a GPU, the cost of a round on a CPU, and the first sample.

Every figure is against the sequential sampler with the same network, compiled and graph-captured like ours,
in the same process.

python -m benchmarks.clock latency assets/cifar10
python -m benchmarks.clock warm assets/cifar10 foresample/pretrained/fashion_mnist
python -m benchmarks.clock throughput assets/cifar10
python -m benchmarks.clock memory assets/cifar10
python -m benchmarks.clock growth assets/cifar10
python -m benchmarks.clock cpu
python -m benchmarks.clock start
python -m benchmarks.clock tests
python -m benchmarks.clock plot
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from time import thread_time
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import foresample as fs
from benchmarks.curves import PILOT_SEED
from benchmarks.kinds.calls import Growth, GrowthRow, GrowthSettings
from benchmarks.kinds.clock import (
    CpuRoundRow,
    CpuRoundSettings,
    Latency,
    LatencyRow,
    LatencySettings,
    MemoryRow,
    MemorySettings,
    RoundShare,
    ThroughputRow,
    ThroughputSettings,
    WarmRow,
    WarmSettings,
    WayRow,
)
from benchmarks.result_files import FrontierResult
from benchmarks.results import RESULTS, load, save
from benchmarks.start import start
from benchmarks.timing import Timing, take_turns
from benchmarks.ways import EAGER, WAYS, Way, networks
from foresample import pretrained
from foresample.backends.graphs import capture
from foresample.baseline import Sequential
from foresample.checks.samples import samples_law
from foresample.core.noise import seeds_of
from foresample.engine.slots import FixedSlots
from foresample.pretrained import Pretrained
from foresample.targets import ChainTarget

app = typer.Typer(add_completion=False, help=__doc__)
app.command()(start)
Model = Annotated[Path, typer.Argument(help="A diffusers DDPM folder.")]
Out = Annotated[Path, typer.Option(help="Folder for the result file.")]
PILOT_TURNS = 20
_SLOTS = 64  # samples under way at a time, where nothing is timed


def _load(model: Path, *, compiled: bool) -> Pretrained:
    return pretrained.load(model, "cuda", torch.bfloat16, compiled=compiled)


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    t = torch.tensor(values, dtype=torch.float64)
    return float(t.mean()), float(t.std() / math.sqrt(len(values)))


@app.command()
def latency(
    model: Model,
    steps: list[int] = [100, 250, 1000],  # noqa: B006
    window: Annotated[
        list[str], typer.Option(help="Of all chains, or STEPS:WINDOW for the chain of so many steps.")
    ] = ["100:15", "100:19", "100:25", "250:31", "250:39", "250:49", "1000:39", "1000:49", "1000:62"],  # noqa: B006
    samples: Annotated[int, typer.Option(help="At most, for each chain.")] = 120,
    seconds: Annotated[float, typer.Option(help="After which no turn is begun, for each chain.")] = 60.0,
    seed: int = 1,
    pilots: Annotated[int, typer.Option(help="Of the prior to start from; 0 starts cold.")] = 200,
    bands: Annotated[bool, typer.Option(help="By frequencies, so that a prior has a Jacobian.")] = True,
    eager: Annotated[bool, typer.Option(help="Neither compiled nor captured, as most people run it.")] = False,
    way: Annotated[list[str], typer.Option(help="A way to run the network, to be tried.")] = list(WAYS),  # noqa: B006
    out: Out = RESULTS,
) -> None:
    """One sample at a time: milliseconds a sample, and where a round's time goes.

    The network runs in the way that is fastest for each sampler, and the window is the fastest one, both found on
    pilot samples.
    """
    windows = {length: _windows(window, length) for length in steps}
    ways = [EAGER] if eager else [_way(name) for name in way]
    mode = "eager" if eager else "graph"
    settings = LatencySettings(
        model=model.name,
        network="bfloat16",
        mode=mode,
        samples=samples,
        seed=seed,
        pilots=pilots,
        bands=bands and pilots > 0,
    )
    path = out / f"{model.resolve().name}-latency-{mode}.json"
    rows: list[LatencyRow] = []
    tried: list[WayRow] = []
    sources = networks(model, ways)
    # Pilots by the network as it is: compiled, it would be compiled once more for 64 states.
    as_is = sources[EAGER] if eager else networks(model, [EAGER])[EAGER]
    several = [way for way in ways if not way.one_state]
    if not several:
        raise typer.BadParameter(f"--way {way[0]!r} is for one state alone: add --way compiled")
    base = best = ways[0]
    for length in sorted(steps):
        prior = None
        if pilots:
            target = _in_basis(as_is.target(length), settings.bands)
            prior = _prior(as_is, target, max(windows[length]), pilots)
        chain = _Chain(sources, length, settings.bands, prior, graph=not eager)
        if not rows:  # a step takes as long in every chain
            base, found = _quickest({way: chain.sequential(way) for way in ways})
            tried += found
        middle = windows[length][len(windows[length]) // 2]
        best, found = _quickest({way: chain.engine(way, middle) for way in several})
        tried += found
        for each in tried:
            print(each, flush=True)
        plain, engines = chain.sequential(base), {size: chain.engine(best, size) for size in windows[length]}
        for row in _latencies(plain, engines, seed, samples, seconds):
            rows.append(replace(row, way=(best if row.window else base).name))
            how = f"{row.calls:7.1f} calls {row.ms:8.2f} ms, {row.faster}"
            print(f"{length:5d} window {row.window:3d}: {how}", flush=True)
        save(path, "latency", settings, rows=rows, ways=tried)
    if not eager:  # rounds of the longest chain and the widest window, which are the last
        with base.chosen():
            rounds = [_step_share(plain)]
        with best.chosen(), engines[max(engines)]._lease(1) as slots:
            assert isinstance(slots, FixedSlots)
            rounds += [_round_share(sources[best].target(length), slots, drafts) for drafts in slots.widths]
        for share in rounds:
            took = f"round {share.round_us:.0f} us, network {share.network_us:.0f} us, {share.share:.3f}"
            print(f"{share.window} drafts: {took}")
        save(path, "latency", settings, rows=rows, rounds=rounds, ways=tried)


@dataclass(frozen=True)
class _Chain:
    """Makes both samplers of one chain, with its network run in any way."""

    sources: Mapping[Way, Pretrained]
    steps: int
    bands: bool
    prior: fs.Prior | None
    graph: bool

    def sequential(self, way: Way) -> Sequential:
        with way.chosen():
            return Sequential(self.sources[way].target(self.steps), 1, graph=self.graph)

    def engine(self, way: Way, window: int) -> fs.Engine:
        target = _in_basis(self.sources[way].target(self.steps), self.bands)
        with way.chosen():
            made = fs.Engine(target, window=window, graph=self.graph, drafter=fs.Replay(prior=self.prior))
            made.sample(seeds_of(PILOT_SEED, 1))  # the first call compiles, here for a window of states
            made.prepare()
        return made


def _windows(given: list[str], length: int) -> list[int]:
    """The windows for a chain of so many steps, from entries WINDOW and STEPS:WINDOW."""
    found = []
    for entry in given:
        steps, _, size = entry.rpartition(":")
        if not size.isdigit() or (":" in entry and not steps.isdigit()):
            raise typer.BadParameter(f"--window {entry} is neither WINDOW nor STEPS:WINDOW")
        if not steps or int(steps) == length:
            found.append(int(size))
    if not found:
        raise typer.BadParameter(f"no --window is for {length} steps: add --window {length}:25")
    return sorted(set(found))


def _way(name: str) -> Way:
    if name not in WAYS:
        raise typer.BadParameter(f"--way {name!r} is not one of: {'; '.join(WAYS)}")
    return WAYS[name]


def _quickest(samplers: Mapping[Way, Sequential | fs.Engine]) -> tuple[Way, list[WayRow]]:
    """The way in which pilot samples are drawn fastest, and a row for each way."""
    sides = {way.name: partial(_picture, sampler, PILOT_SEED) for way, sampler in samplers.items()}
    timing = take_turns(sides, least=PILOT_TURNS, most=PILOT_TURNS)
    best = min(samplers, key=lambda way: timing.median(way.name))
    rows = [
        WayRow(
            way=way.name,
            steps=len(sampler.target.std),
            window=sampler.speculation.window if isinstance(sampler, fs.Engine) else 0,
            ms=1e3 * timing.median(way.name),
            chosen=way is best,
        )
        for way, sampler in samplers.items()
    ]
    return best, rows


def _picture(sampler: Sequential | fs.Engine, seed: int, turn: int) -> tuple[float, Tensor]:
    """Calls and the picture of one sample, another one in every turn; classes in turn."""
    number = torch.tensor([turn + 1])  # a sample's number says which class it has
    run = sampler.sample(seeds_of(seed, 1, turn + 1), rows=number)
    target = sampler.target
    if isinstance(target, fs.targets.FrequencyTarget):
        return run.report.calls_mean, target.pictures(run.samples)
    return run.report.calls_mean, run.samples


def _latencies(
    plain: Sequential, engines: Mapping[int, fs.Engine], seed: int, samples: int, seconds: float = math.inf
) -> list[LatencyRow]:
    """Both samplers in turns, a new sample in every turn; the window that counts is chosen on pilot samples.

    The sequential sampler has other seeds, so that the timed samples of both can be tested for one distribution.
    """
    samplers: dict[int, Sequential | fs.Engine] = {
        0: plain,
        **{size: engines[size] for size in sorted(engines)},
    }
    calls: dict[int, list[float]] = {size: [] for size in samplers}
    drawn: dict[int, list[Tensor]] = {size: [] for size in samplers}

    def picture(size: int, seed: int, turn: int) -> None:
        count, sample = _picture(samplers[size], seed if size else seed + 1, turn)
        if turn >= 0:
            calls[size].append(count)
            drawn[size].append(sample)

    pilots = {f"{size}": partial(_picture, engine, PILOT_SEED) for size, engine in engines.items()}
    chosen = int(min(pilots, key=take_turns(pilots, least=PILOT_TURNS, most=PILOT_TURNS).median))
    sides = {f"{size}": partial(picture, size, seed) for size in samplers}
    timing = take_turns(sides, most=samples, seconds=seconds)
    own = torch.cat(drawn[0]).cpu()
    return [
        LatencyRow(
            steps=len(plain.target.std),
            window=size,
            calls=fmean(calls[size]),
            ms=1e3 * timing.median(f"{size}"),
            ms_error=1e3 * timing.median_error(f"{size}"),
            gain=timing.ratio(f"{size}").ratio,
            faster=timing.ratio(f"{size}") if size else None,
            chosen=size == chosen,
            law=samples_law(own, drawn[size]) if size else None,
        )
        for size in samplers
    ]


def _in_basis(target: ChainTarget, bands: bool) -> fs.Target:
    return fs.targets.in_frequencies(target) if bands else target


def _prior(source: Pretrained, target: fs.Target, window: int, pilots: int) -> fs.Prior:
    """A prior with one table for each class."""
    return fs.fit_prior(target, window=window, pilots=pilots, paths=max(1, len(source.labels)), slots=_SLOTS)


def _round_share(target: ChainTarget, slots: FixedSlots, drafts: int, repeats: int = 10) -> RoundShare:
    """Microseconds of a captured round of so many drafts, and of the network alone on as many states."""
    key = seeds_of(0, repeats)

    def begin(turn: int) -> None:
        slots.clear()
        slots.admit(key[:1] * 0, key[turn : turn + 1])
        slots._run(None)
        slots._run(drafts)  # the first has nothing to draft from

    return _share(target, partial(slots._run, drafts), drafts, begin, repeats)


def _step_share(plain: Sequential, repeats: int = 10) -> RoundShare:
    """The same of a captured step of the sequential sampler; its state is that at the end of a sample."""
    assert plain.graph is not None
    target = plain.target
    assert isinstance(target, ChainTarget)
    plain.sample(seeds_of(0, 1))
    return _share(target, plain.graph.replay, 0, lambda _: plain.step.zero_(), repeats)


def _share(
    target: ChainTarget,
    work: Callable[[], object],
    drafts: int,
    begin: Callable[[int], object],
    repeats: int,
) -> RoundShare:
    """The round's work and the network alone, replayed in turn. What a round adds to the target's predictions, a turn
    to frequencies and back, is no network."""
    x = torch.randn((drafts + 1, *target.shape), device="cuda")
    row = torch.zeros(drafts + 1, dtype=torch.int64, device="cuda")
    step = (torch.arange(drafts + 1, device="cuda") + 100).clamp(max=len(target.std) - 1)
    network = capture(lambda: target.predict(x, step, row), x.device).replay
    certain = max(1, min(50, len(target.std) // (drafts + 1) - 2))
    times: dict[str, list[float]] = {"round": [], "network": []}
    for turn in range(repeats):
        begin(turn)
        for name, replay in (("round", work), ("network", network)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(certain):
                replay()
            end.record()
            end.synchronize()
            times[name].append(1e3 * start.elapsed_time(end) / certain)
    (round_us, round_error), (network_us, network_error) = (_mean(times[n]) for n in ("round", "network"))
    return RoundShare(
        window=drafts,
        round_us=round_us,
        round_us_error=round_error,
        network_us=network_us,
        network_us_error=network_error,
        share=1 - network_us / round_us,
    )


@app.command()
def warm(
    model: Annotated[list[Path], typer.Argument(help="Diffusers DDPM folders.")],
    steps: list[int] = [50, 100, 250],  # noqa: B006
    samples: int = 256,
    pilots: int = 200,
    seed: int = 3,
    device: str = "cuda",
    out: Out = RESULTS,
) -> None:
    """Calls started cold, from a table a class, and from that with a Jacobian by bands of frequency; from the same
    seeds; window 50, or half the chain."""
    half = device == "cuda"
    for folder in model:
        rows: list[WarmRow] = []
        source = pretrained.load(folder, device, torch.bfloat16 if half else torch.float32)
        for length in steps:
            plain, window = source.target(length), min(50, length // 2)
            cold = _calls(plain, samples, window, seed)
            for bands in (False, True):
                target = _in_basis(plain, bands)
                hot = _calls(target, samples, window, seed, _prior(source, target, window, pilots))
                (before, before_error), (after, after_error) = _mean(cold.tolist()), _mean(hot.tolist())
                rows.append(
                    WarmRow(
                        model=folder.resolve().name,
                        steps=length,
                        window=window,
                        bands=bands,
                        pilots=pilots,
                        cold=before,
                        cold_error=before_error,
                        warm=after,
                        warm_error=after_error,
                        fewer=1 - after / before,
                        fewer_error=_mean(((cold - hot) / before).tolist())[1],
                    )
                )
                print(rows[-1], flush=True)
                settings = WarmSettings(samples=samples, seed=seed, network="bfloat16" if half else "float32")
                save(out / f"warm-{rows[-1].model}.json", "warm", settings, rows=rows)


def _calls(target: fs.Target, samples: int, window: int, seed: int, prior: fs.Prior | None = None) -> Tensor:
    drafter = fs.Replay(prior=prior)
    run = fs.sample(target, samples, window=window, seed=seed, slots=_SLOTS, drafter=drafter)
    return run.calls.double().cpu()


@app.command()
def throughput(
    model: Model,
    steps: list[int] = [50, 100],  # noqa: B006
    window: int = 20,
    slots: int = 64,
    samples: int = 1024,
    turns: Annotated[int, typer.Option(help="At most.")] = 16,
    seed: int = 2,
    out: Out = RESULTS,
) -> None:
    """Many samples through few slots, against fixed batches of as many."""
    source = _load(model, compiled=True)
    settings = ThroughputSettings(
        model=model.name, network="bfloat16", window=window, slots=slots, samples=samples
    )
    rows: list[ThroughputRow] = []
    tunings: list[fs.Tuning] = []
    for length in steps:
        target = source.target(length)
        plain = Sequential(target, slots, graph=True)
        engine = fs.Engine(target, window=window, slots=slots, graph=True)
        rows.append(row := _throughput(plain, engine, seed, samples, turns))
        print(row, flush=True)
        tunings.append(_tuning(target, slots, [window]))
        path = out / f"{model.resolve().name}-throughput.json"
        save(path, "throughput", settings, rows=rows, tunings=tunings)


def _throughput(plain: Sequential, engine: fs.Engine, seed: int, samples: int, turns: int) -> ThroughputRow:
    """As many samples in fixed batches, sequentially and not, and through slots, in turns."""
    drawn: dict[str, list[fs.Run]] = {"sequential": [], "fixed": [], "flowing": []}

    def draw(name: str, turn: int) -> None:
        seeds = seeds_of(seed, samples, (turn + 1) * samples)
        sampler, size = (
            (plain if name == "sequential" else engine),
            samples if name == "flowing" else plain.slots,
        )
        drawn[name] = [sampler.sample(batch) for batch in seeds.split(size)]

    timing = take_turns({name: partial(draw, name) for name in drawn}, least=min(turns, 8), most=turns)
    fixed = Timing({name: timing.seconds[name] for name in ("fixed", "flowing")}).ratio("flowing")
    a_second = {name: samples / timing.median(name) for name in drawn}
    (run,) = drawn["flowing"]
    return ThroughputRow(
        steps=len(plain.target.std),
        calls=run.report.calls_mean,
        occupancy=run.report.occupancy,
        fixed_occupancy=fmean(batch.report.occupancy for batch in drawn["fixed"]),
        samples_per_second=a_second["flowing"],
        fixed_samples_per_second=a_second["fixed"],
        sequential_samples_per_second=a_second["sequential"],
        gain_over_fixed=fixed.ratio,
        faster_than_fixed=fixed,
        faster=timing.ratio("flowing"),
    )


@app.command()
def memory(
    model: Model,
    steps: list[int] = [100, 1000],  # noqa: B006
    samples: list[int] = [32, 256],  # noqa: B006
    slots: int = 16,
    window: int = 8,
    out: Out = RESULTS,
) -> None:
    """Peak device memory of a stream, over chain lengths and numbers of samples."""
    source = _load(model, compiled=False)
    rows: list[MemoryRow] = []
    settings = MemorySettings(model=model.name, network="bfloat16", slots=slots, window=window)
    for length, count in [(s, samples[0]) for s in steps] + [(steps[0], c) for c in samples[1:]]:
        target = source.target(length)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        done = sum(1 for _ in fs.stream(target, count, window=window, slots=slots, graph=True))
        peak = torch.cuda.max_memory_allocated() / 2**20
        rows.append(MemoryRow(steps=length, samples=done, peak_mib=peak))
        print(rows[-1])
        save(out / f"{model.resolve().name}-memory.json", "memory", settings, rows=rows)


@app.command()
def growth(
    model: Model,
    steps: list[int] = [50, 100, 200, 400, 700, 1000],  # noqa: B006
    window: int = 50,
    samples: int = 64,
    slots: int = 64,
    seed: int = 3,
    out: Out = RESULTS,
) -> None:
    """Calls against the number of steps, and the exponent of their growth."""
    source = _load(model, compiled=False)
    rows: list[GrowthRow] = []
    settings = GrowthSettings(model=model.name, network="bfloat16", window=window, samples=samples, seed=seed)
    for length in steps:
        report = fs.sample(source.target(length), samples, window=window, seed=seed, slots=slots).report
        rows.append(GrowthRow(steps=length, calls=report.calls_mean, calls_error=report.calls_error))
        print(rows[-1], flush=True)
    x, y = torch.tensor([(row.steps, row.calls) for row in rows]).log().T
    x, y = x - x.mean(), y - y.mean()
    exponent = float((x * y).sum() / (x * x).sum())
    print(f"calls ~ N^{exponent:.3f}")
    save(out / f"{model.resolve().name}-growth.json", "growth", settings, rows=rows, exponent=exponent)


@dataclass(frozen=True)
class _Clocked(ChainTarget):
    """A target that knows what its predictions cost, in seconds of this thread."""

    spent: list[float] = field(default_factory=lambda: [0.0])

    def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
        began = thread_time()
        prediction = super().predict(x, step, row, extra)
        self.spent[0] += thread_time() - began
        return prediction


def _dense(dim: int, steps: int, width: int = 1024) -> ChainTarget:
    """A DDPM chain with three dense layers, untrained."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        *(torch.nn.Linear(dim, width), torch.nn.SiLU(), torch.nn.Linear(width, width), torch.nn.SiLU()),
        torch.nn.Linear(width, dim),
    )
    alpha_bar = torch.linspace(5e-4, 0.999, steps, dtype=torch.float64)
    return fs.targets.vp(lambda x, time, row: layers(x), alpha_bar, (dim,), predicts="x0")


@app.command()
def cpu(
    steps: int = 100,
    samples: Annotated[int, typer.Option(help="Of the small network; the embedded one draws a tenth.")] = 40,
    repeats: int = 5,
    seed: int = 4,
    out: Out = RESULTS,
) -> None:
    """The sampler's own arithmetic on one core, compiled and plain, beside the network in the same run.

    In seconds of this thread, so that what else the machine does counts little.
    """
    torch.set_num_threads(1)
    settings = CpuRoundSettings(repeats=repeats, seed=seed)
    dense, model = _dense(32, steps), pretrained.load()
    few = max(1, samples // 10)
    cases = [
        ("dense layers, d = 32", dense, 16, 1, samples),
        ("dense layers, d = 32", dense, 16, 16, 4 * samples),
        ("the embedded model", model.target(steps), 8, 1, few),
        ("the embedded model", model.target(max(1, steps // 10)), 8, 20, 20),
    ]
    rows: list[CpuRoundRow] = []
    for name, base, window, slots, count in cases:
        target, few_repeats = _Clocked(base.chain, base.shape, base.network), repeats if base is dense else 1

        def least(
            sampler: Callable[[], fs.Engine | Sequential],
            seeds: Tensor,
            plain: str,
            target: _Clocked = target,
            times: int = few_repeats,
        ) -> tuple[float, float, fs.Run]:
            """Seconds in all and in the network, of the quickest run."""
            os.environ["FORESAMPLE_PLAIN"] = plain
            made, found = sampler(), []
            made.sample(seeds[:1])
            for _ in range(times):
                target.spent[0], began = 0.0, thread_time()
                run = made.sample(seeds)
                found.append((thread_time() - began, target.spent[0], run))
            return min(found, key=lambda one: one[0] - one[1])

        engine = partial(fs.Engine, target, window=window, slots=slots)
        seeds = seeds_of(seed, count)
        (seconds, network, run), (plainly, plain_network, _) = (least(engine, seeds, p) for p in "01")
        alone, _, _ = least(partial(Sequential, target, slots), seeds[:slots], "0")
        rounds = run.report.rounds / run.report.occupancy / slots
        row = CpuRoundRow(
            target=name,
            dim=math.prod(target.shape),
            steps=len(target.std),
            window=window,
            slots=slots,
            calls=run.report.calls_mean,
            network_ms=1e3 * network / rounds,
            own_ms=1e3 * (seconds - network) / rounds,
            plain_own_ms=1e3 * (plainly - plain_network) / rounds,
            sequential_ms=1e3 * alone / slots,
            sample_ms=1e3 * seconds / count,
        )
        rows.append(row)
        print(row, flush=True)
        save(out / "cpu-rounds.json", "cpu-rounds", settings, rows=rows)
    os.environ.pop("FORESAMPLE_PLAIN")


def _tuning(target: ChainTarget, slots: int, windows: list[int]) -> fs.Tuning:
    """The tuning that `foresample.tune` measures, with its advice printed."""
    tuning = fs.tune(target, slots=slots, windows=windows, graph=True)
    print(tuning.advice, flush=True)
    return tuning


@app.command("tests")
def gpu_tests(out: Out = RESULTS) -> None:
    """The tests that need a GPU, and which of them passed."""
    import pytest

    class Log:
        def __init__(self) -> None:
            self.found: list[str] = []
            self.passed: list[str] = []
            self.failed: list[str] = []
            self.skipped: list[str] = []

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.found += [item.nodeid for item in session.items]

        @pytest.hookimpl(optionalhook=True)
        def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
            self.found = ids  # each worker finds all of them

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                self.failed.append(report.nodeid)
            elif report.skipped:
                self.skipped.append(report.nodeid)
            elif report.when == "call":
                self.passed.append(report.nodeid)

    log = Log()
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # for xdist's workers: more threads than cores make each test minutes long
    )
    torch.set_num_threads(1)
    status = pytest.main(["-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"], plugins=[log])
    ended = {*log.passed, *log.failed, *log.skipped}
    unfinished = [name for name in log.found if name not in ended]
    ends = {"passed": log.passed, "failed": log.failed, "skipped": log.skipped, "unfinished": unfinished}
    save(out / "gpu-tests.json", "gpu-tests", {}, **ends)
    if status != pytest.ExitCode.OK or not log.passed:
        raise typer.Exit(1)


@app.command()
def plot(out: Path = Path(__file__).parent.parent / "docs" / "pictures") -> None:
    """The pictures of docs/performance.md, from the saved results."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    latencies, grown = load(Latency, "cifar10-latency-graph"), load(Growth, "cifar10-growth")
    figure, (clock, calls) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    colours = {100: "#9fb8d0", 250: "#2f6690", 1000: "crimson"}
    for steps in sorted({row.steps for row in latencies.rows}):
        rows = [row for row in latencies.rows if row.steps == steps and row.window]
        windows = [row.window for row in rows]
        errors = [0.0 if row.faster is None else row.faster.error for row in rows]
        gains = [row.gain for row in rows]
        clock.errorbar(
            windows, gains, errors, marker="o", capsize=3, color=colours[steps], label=f"{steps} steps"
        )
    clock.axhline(1, color="grey", linewidth=1, linestyle=":")
    clock.set(xlabel="window", ylabel="times faster on the clock", ylim=(0, None))
    clock.set_title("One sample, against the compiled, captured sequential sampler", loc="left", fontsize=10)
    clock.set_xticks(sorted({row.window for row in latencies.rows if row.window}))
    clock.legend(frameon=False, loc=(0.74, 0.55))

    x, y = torch.tensor([(row.steps, row.calls) for row in grown.rows]).T
    fit = torch.exp(y.log().mean() + grown.exponent * (x.log() - x.log().mean()))
    theory = y[0] * (x / x[0]).sqrt()
    calls.plot(x, x, color="grey", linewidth=1, linestyle=":", label="sequential: N")
    calls.plot(x, theory, color="#9fb8d0", linestyle="--", label="autospeculation theory: √N")
    calls.plot(x, fit, color="crimson", linewidth=1, label=f"fit: N^{grown.exponent:.2f}")
    errors = [row.calls_error for row in grown.rows]
    calls.errorbar(x, y, errors, color="crimson", marker="o", linestyle="", capsize=3, label="measured")
    calls.set(xlabel="steps of the chain, N", ylabel="network calls a sample", xscale="log", yscale="log")
    calls.set_title(f"Calls against chain length, window {grown.settings.window}", loc="left", fontsize=10)
    ticks, marks = [int(v) for v in x.tolist()], [10, 20, 50, 100, 200, 500, 1000]
    calls.set_xticks(ticks, labels=[str(v) for v in ticks], minor=False)
    calls.set_yticks(marks, labels=[str(v) for v in marks], minor=False)
    calls.minorticks_off()
    calls.legend(frameon=False)
    for axes in (clock, calls):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "clock.png", dpi=140)

    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    saved = load(FrontierResult, "cifar10-frontier")
    measured, shades = fs.Frontier(saved.tunings).points, iter(("#9fb8d0", "#2f6690", "crimson", "#7a1f3d"))
    for window in (None, *sorted({point.window for point in measured if point.window})):
        line = [point for point in measured if point.window == window]
        x, y = ([1e3 * p.p95_seconds for p in line], [p.samples_per_second for p in line])
        name, colour = ("sequential", "grey") if window is None else (f"window {window}", next(shades))
        axes.plot(x, y, marker="o", color=colour, linestyle=":" if window is None else "-", label=name)
        if window in (None, 4):
            for point in line:
                place = (1e3 * point.p95_seconds, point.samples_per_second)
                beside = (-16, 5) if window is None else (-14, 5)
                axes.annotate(
                    f"{point.slots}", place, xytext=beside, textcoords="offset points", color=colour, fontsize=8
                )
    axes.set(xlabel="ms a sample, of 95 in 100", ylabel="samples a second", xscale="log", yscale="log")
    axes.set_title("CIFAR-10, 100 steps, H200; beside points: samples at a time", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(out / "frontier.png", dpi=140)


if __name__ == "__main__":
    app()
