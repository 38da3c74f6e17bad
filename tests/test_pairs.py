"""Every way to draw together with every two settings: the samples are those of `fs.sample` with the same seeds.

`ROWS` has every two values of two settings in some row, and each row is drawn in every way of `WAYS`. Each way has a
chain of its own kind, and its samples are compared with those that `fs.sample` draws from that chain, built by hand,
with the same start states, conditions and seeds. A setting that a way does not have is refused by a sentence of
`REFUSED`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import foresample as fs
from foresample.core.noise import START, normal, seeds_of
from foresample.drafters import LearnedPrior, Prior
from foresample.engine.priors import RecordingTarget
from foresample.engine.slots import in_order
from foresample.engine.tuning import Trial
from foresample.integrations.packages.gaussian import gaussian_chain
from foresample.integrations.packages.openai import openai_chain
from foresample.integrations.policies.learning import unused_seeds, weights_of
from foresample.targets import ChainTarget
from tests.support.small_chains import mixture

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from tests.integrations.test_packages import gaussian  # noqa: E402
from tests.support import openai  # noqa: E402
from tests.support.pipelines import stable_diffusion  # noqa: E402
from tests.support.policies import lerobot  # noqa: E402

COUNT, WINDOW = 3, 3
Settings = dict[str, Any]
VALUES: dict[str, tuple[Any, ...]] = {
    "window": (WINDOW, "auto", "tuning", "no gain"),
    "drafter": ("replay", "no secant", "head", "parent", "nearest", "prior", "learned", "model"),
    "block": (None, 1),
    "recycle": (True, False),
    "slots": (None, 2),
    "look": (True, False),
    "conditions": (False, True),
    "callback": (False, True),
}
"""The settings and their values; the first is the default. `conditions` are the target's, one for each sample."""


def every_two(values: dict[str, tuple[Any, ...]]) -> list[Settings]:
    """Rows in which every value of a setting meets every value of each other one."""
    chosen, generator = [], random.Random(0)
    left = {
        frozenset([(a, x), (b, y)])
        for a, b in combinations(values, 2)
        for x, y in product(range(len(values[a])), range(len(values[b])))
    }
    every = [dict(zip(values, one, strict=True)) for one in product(*(range(len(v)) for v in values.values()))]
    while left:
        rows = generator.sample(every, min(len(every), 300))
        best = max(rows, key=lambda row: sum(pair <= set(row.items()) for pair in left))
        left -= {pair for pair in left if pair <= set(best.items())}
        chosen.append({name: values[name][at] for name, at in best.items()})
    return chosen


ROWS = every_two(VALUES)


# ------------------------------------------------------------------ the ways: a chain and how it is drawn


@dataclass(frozen=True)
class Way:
    """A function that draws, and the kind of chain it draws from."""

    chain: Callable[[bool], tuple[Any, ChainTarget]]
    """With conditions or without: the object to draw from, and the same chain for `fs.sample`."""
    draw: Callable[..., tuple[Tensor, Any]]
    """(object to draw from, target, settings, callback or None) -> samples, and the report or None."""
    seeds: Callable[[], Tensor] = lambda: seeds_of(3, COUNT)
    slots: int = COUNT
    """The default number of slots."""
    lacks: tuple[str, ...] = ()
    """Settings, or their values, that are refused."""
    exact: bool = True
    """True if the samples have the same bits; otherwise they agree up to rounding of float32."""


CONDITIONS = torch.linspace(-0.5, 0.5, COUNT, dtype=torch.float64)


def shifts(conditions: bool) -> Tensor:
    return CONDITIONS if conditions else torch.zeros_like(CONDITIONS)


def flow(conditions: bool) -> tuple[None, ChainTarget]:
    base, shift = mixture().flow(6, 1.0), shifts(conditions)
    network = lambda x, time, row: base.network(x, time, row) + shift[row].unsqueeze(1)  # noqa: E731
    return None, replace(base, network=network)


class Seen:
    """An observer that keeps the last state of every sample."""

    def __init__(self, steps: int) -> None:
        self.steps, self.last = steps, torch.full((COUNT, 2), torch.nan, dtype=torch.float64)

    def __call__(self, commit: fs.Commit) -> None:
        for r, sample in enumerate(commit.sample.tolist()):
            count = int(commit.committed[r])
            if int(commit.step[r]) + count == self.steps:
                self.last[sample] = commit.states[r, count - 1]


def drawn(_: None, target: ChainTarget, settings: Settings, callback: bool) -> tuple[Tensor, Any]:
    seen = Seen(len(target.std)) if callback else None
    run = fs.sample(target, seeds=seeds_of(3, COUNT), observe=seen, **settings)
    assert seen is None or torch.equal(seen.last, run.samples)
    return run.samples, run.report


def by_engine(_: None, target: ChainTarget, settings: Settings, callback: bool) -> tuple[Tensor, Any]:
    seen = Seen(len(target.std)) if callback else None
    x = in_order(list(fs.Engine(target, **settings).draw(seeds_of(3, COUNT), seen))).x
    assert seen is None or torch.equal(seen.last, x)
    return x, None


def by_engine_in_order(_: None, target: ChainTarget, settings: Settings, callback: bool) -> tuple[Tensor, Any]:
    """Two streams of one engine, a sample of each in turn."""
    engine = fs.Engine(target, **settings)
    one, other = engine.stream(seeds_of(3, COUNT)), engine.stream(seeds_of(4, COUNT))
    return torch.stack([mine.x for mine, _ in zip(one, other, strict=True)]), None


def streamed(_: None, target: ChainTarget, settings: Settings, callback: bool) -> tuple[Tensor, Any]:
    return torch.stack([sample.x for sample in fs.stream(target, COUNT, seed=3, **settings)]), None


def generated(_: None, target: ChainTarget, settings: Settings, callback: bool) -> tuple[Tensor, Any]:
    reports: list[Any] = []
    with TemporaryDirectory() as out:
        more: Settings = {"progress": reports.append} if callback else {}
        dataset = fs.generate(target, COUNT, out=Path(out), shard=2, seed=3, **more, **settings)
        assert bool(reports) == callback
        return torch.cat(list(dataset.samples())), None


TIMES = torch.linspace(1, 0.02, 8, dtype=torch.float64)


def drift(t: Tensor) -> Tensor:
    return -0.5 * (0.1 + 9.9 * t)


def noise_rate(t: Tensor) -> Tensor:
    return (0.1 + 9.9 * t).sqrt()


def reverse_sde(conditions: bool) -> tuple[ChainTarget, ChainTarget]:
    """A target of `from_sde` with a start of its own, and its chain walked from the same first states."""
    shift = shifts(conditions)
    score = lambda x, t, row: shift[row].unsqueeze(1) - torch.tanh(x)  # noqa: E731
    given = fs.targets.from_sde(
        score, TIMES, drift, noise_rate, (2,), start_mean=0.3, start_std=1.5, dtype=torch.float64
    )
    seeds, zero = seeds_of(3, COUNT), torch.zeros(COUNT, dtype=torch.int64)
    start = 0.3 + 1.5 * normal(seeds, given.shape, torch.float64, stream=START, step=zero, draw=zero)
    chain = fs.chains.sde_chain(TIMES, drift, noise_rate)
    return given, fs.targets.from_chain(score, chain, (2,), start=start, dtype=torch.float64)


def drawn_from_sde(
    given: ChainTarget, _: ChainTarget, settings: Settings, callback: bool
) -> tuple[Tensor, Any]:
    return drawn(None, given, settings, callback)


SIGMAS = fs.chains.karras_sigmas(6, 0.1, 8.0)


def denoise(x: Tensor, sigma: Tensor, shift: Tensor) -> Tensor:
    return 0.9 * torch.tanh(1.5 * x / (1 + sigma.unsqueeze(1))) + shift.unsqueeze(1)


def ancestral(conditions: bool) -> tuple[Settings, ChainTarget]:
    x = 8 * torch.randn(COUNT, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shift, chain = shifts(conditions), fs.chains.euler_ancestral_chain(SIGMAS)
    network = lambda x, sigma, row: denoise(x, sigma, shift[row])  # noqa: E731
    target = fs.targets.from_chain(network, chain, (2,), start=x, dtype=torch.float64)
    return {"x": x, "extra_args": {"shift": shift}}, target


def sampled(given: Settings, _: ChainTarget, settings: Settings, callback: bool) -> tuple[Tensor, Any]:
    reports: list[fs.Report] = []
    x = fs.samplers.sample_euler_ancestral(
        denoise, sigmas=SIGMAS, seed=3, report=reports.append, **given, **settings
    )
    return x, reports[0]


def scheduled(scheduler: Any, steps: int, network: Any, shape: tuple[int, ...]) -> ChainTarget:
    scheduler.set_timesteps(steps)
    return fs.targets.from_scheduler(scheduler, network, shape)


def robot(conditions: bool) -> tuple[Any, ChainTarget]:
    policy, condition = lerobot(), torch.tensor([[0.3, -0.5, 1.0]]).expand(COUNT, 3)
    condition = condition + shifts(conditions).float().unsqueeze(1)
    net, scheduler = deepcopy(policy.diffusion.unet), policy.diffusion.noise_scheduler

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:  # of a plan as one list of numbers
        return net(x.view(-1, 4, 2), time, global_cond=condition[row]).flatten(1)

    return SimpleNamespace(policy=policy, condition=condition), scheduled(scheduler, 20, network, (8,))


def planned(given: Any, _: ChainTarget, settings: Settings | None, callback: bool) -> tuple[Tensor, Any]:
    diffusion, generator = given.policy.diffusion, torch.Generator().manual_seed(1)
    drafter = (settings or {}).get("drafter")
    if settings and isinstance(drafter, fs.Replay) and drafter.prior is not None:
        settings = settings | {"prior": getattr(given, "learned", drafter.prior), "drafter": None}
    with accelerated(diffusion, settings), torch.no_grad():
        plans = diffusion.conditional_sample(COUNT, global_cond=given.condition, generator=generator)
        return plans.flatten(1), getattr(diffusion, "foresample_report", None)


def accelerated(served: Any, settings: Settings | None) -> Any:
    """The object as it is where there are no settings."""
    return nullcontext() if settings is None else fs.accelerate(served, **settings)


def plan_seeds() -> Tensor:
    return torch.randint(2**63 - 1, (COUNT,), generator=torch.Generator().manual_seed(1))


@cache
def pipeline() -> Any:
    with TemporaryDirectory() as folder:
        return stable_diffusion(Path(folder))


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(COUNT)]


def pictures(conditions: bool) -> tuple[Any, ChainTarget]:
    pipe, embeds = pipeline(), torch.randn(COUNT, 5, 16, generator=torch.Generator().manual_seed(5))
    embeds = embeds if conditions else embeds[:1].expand(COUNT, -1, -1)
    start = torch.cat([torch.randn(1, 4, 4, 4, generator=one) for one in generators()])
    unet = deepcopy(pipe.unet)
    network = lambda x, time, row: unet(x, time, encoder_hidden_states=embeds[row]).sample  # noqa: E731
    return (pipe, embeds), replace(scheduled(pipe.scheduler, 8, network, (4, 4, 4)), start_states=start)


def painted(given: Any, _: ChainTarget, settings: Settings | None, callback: bool) -> tuple[Tensor, Any]:
    (pipe, embeds), latents = given, []

    def keep(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(tensors["latents"].clone())
        return tensors

    more = {"callback_on_step_end": keep} if callback else {}
    with accelerated(pipe, settings):
        images = pipe(
            prompt_embeds=embeds,
            num_inference_steps=8,
            guidance_scale=1.0,
            height=8,
            width=8,
            output_type="latent",
            generator=generators(),
            **more,
        ).images
        report = getattr(pipe, "foresample_report", None)
    assert len(latents) == (8 if callback else 0)
    assert not latents or torch.equal(latents[-1], images)
    return images, report


def image_seeds() -> Tensor:
    found = generators()
    for generator in found:
        torch.randn(1, 4, 4, 4, generator=generator)
    return torch.tensor([int(torch.randint(2**62, (), generator=one)) for one in found])


def diffusion(conditions: bool) -> tuple[Any, ChainTarget]:
    served = gaussian()
    torch.manual_seed(3)
    start = torch.randn(COUNT, 1, 1, 2)
    network = lambda x, time, row: served.model(x, time)  # noqa: E731
    chain = gaussian_chain(served)
    return served, fs.targets.from_chain(network, chain, start.shape[1:], start=start)


def diffused(served: Any, _: ChainTarget, settings: Settings | None, callback: bool) -> tuple[Tensor, Any]:
    with accelerated(served, settings):
        torch.manual_seed(3)
        samples = served.sample(batch_size=COUNT)
        return 2 * samples - 1, getattr(served, "foresample_report", None)


def package_seeds() -> Tensor:
    torch.manual_seed(3)
    torch.randn(COUNT, 1, 1, 2)
    return torch.randint(2**62, (COUNT,))


def spaced(conditions: bool) -> tuple[Any, ChainTarget]:
    """OpenAI's class on some of its timesteps, and its chain."""
    (copy,) = openai.copies()
    served = copy.make("START_X", keep=range(0, 60, 6))
    net, shift, start = openai.Net(served), shifts(conditions).float(), torch.randn(COUNT, 1, 2)
    times = torch.tensor(served.timestep_map)

    def network(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        return net(x, times[time], {"shift": shift[row].view(-1, 1, 1)})

    given = SimpleNamespace(served=served, net=net, shift=shift, start=start)
    return given, fs.targets.from_chain(network, openai_chain(served), start.shape[1:], start=start)


def looped(given: Any, _: ChainTarget, settings: Settings | None, callback: bool) -> tuple[Tensor, Any]:
    conditions = {"y": {"shift": given.shift.view(-1, 1, 1)}}
    with accelerated(given.served, settings):
        torch.manual_seed(3)
        samples = given.served.p_sample_loop(
            given.net, given.start.shape, noise=given.start, clip_denoised=False, model_kwargs=conditions
        )
        return samples, getattr(given.served, "foresample_report", None)


def loop_seeds() -> Tensor:
    torch.manual_seed(3)
    return torch.randint(2**62, (COUNT,))


WAYS = {
    "sample": Way(flow, drawn),
    "stream": Way(flow, streamed, lacks=("callback",)),
    "Engine.draw": Way(flow, by_engine, slots=1),
    "Engine.stream": Way(flow, by_engine_in_order, slots=1, lacks=("callback",)),
    "from_sde": Way(reverse_sde, drawn_from_sde),
    "generate": Way(flow, generated),
    "samplers": Way(ancestral, sampled, lacks=("callback",)),
    "policy": Way(robot, planned, plan_seeds, lacks=("slots", "callback"), exact=False),
    "pipeline": Way(pictures, painted, image_seeds, lacks=("slots", "prior", "learned"), exact=False),
    "package": Way(
        diffusion,
        diffused,
        package_seeds,
        lacks=("slots", "conditions", "callback"),
        exact=False,
    ),
    "OpenAI": Way(spaced, looped, loop_seeds, lacks=("slots", "callback"), exact=False),
}


def learned_for(given: Any, target: ChainTarget) -> fs.Replay:
    """A drafter whose paths a network expects of each sample's condition; policies are given the network."""
    pilots, steps = 36, len(target.std)
    recorded = RecordingTarget(target, pilots, steps, COUNT)
    fs.Engine(recorded, window=WINDOW, slots=pilots, look=False).sample(seeds_of(9, pilots))
    states, predictions = (v[:, :steps].flatten(2) for v in (recorded.states, recorded.predictions))
    condition = getattr(given, "condition", CONDITIONS.unsqueeze(1)).to(target.std)
    flat = target.std.new_zeros((steps, target.shape.numel(), target.shape.numel()))
    policy = getattr(given, "policy", None)
    origin = None if policy is None else weights_of(policy.diffusion.unet)
    of_pilots = condition[torch.arange(pilots) % COUNT]
    learned = LearnedPrior.fit(of_pilots, states, predictions, flat, origin=origin, steps=20)
    if policy is not None:
        given.learned = learned
    states, predictions = (v.unflatten(2, target.shape) for v in learned(condition))
    return fs.Replay(prior=Prior(states, predictions, jacobian=learned.jacobian))


def drafter_of(name: str, target: ChainTarget, given: Any = None) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "replay": fs.Replay,
        "no secant": lambda: fs.Replay(secant=False),
        "prior": lambda: fs.Replay(prior=fs.fit_prior(target, window=WINDOW, pilots=8, rows=COUNT)),
        "learned": lambda: learned_for(given, target),
        "model": lambda: fs.DraftModel(target),
    }
    return makers[name]() if name in makers else fs.Frozen(name)  # type: ignore[arg-type]


def window_of(name: Any, target: ChainTarget, slots: int) -> Any:
    """A window, "auto", or a tuning for this number of slots, saved and loaded again."""
    if name not in ("tuning", "no gain"):
        return name
    trials = [Trial(WINDOW, slots * (WINDOW + 1), 1e-3, 1e-3, 2.0, 1.5)]
    best = (WINDOW, 1.5) if name == "tuning" else (None, None)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tuning.json"
        fs.Tuning(len(target.std), slots, 1e-3, trials, *best).save(path)
        return fs.Tuning.load(path)


def described(row: Settings) -> str:
    return (
        ", ".join(f"{name} {value}" for name, value in row.items() if value != VALUES[name][0])
        or "all defaults"
    )


def cells() -> Iterator[Any]:
    for name, way in WAYS.items():
        for row in ROWS:
            kept = {
                s: VALUES[s][0] if s in way.lacks or value in way.lacks else value for s, value in row.items()
            }
            marks = [pytest.mark.slow] if name == "pipeline" else []
            yield pytest.param(name, kept, id=f"{name}: {described(kept)}", marks=marks)


@pytest.fixture(autouse=True)
def _few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured, the window is 2, or sampling is sequential."""
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    monkeypatch.setattr("foresample.engine.tuning.WINDOWS", (2,))
    monkeypatch.setattr("foresample.integrations.diffusers.pipelines.WINDOWS", (2,))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "row"), list(cells()))
def test_the_samples_are_those_of_the_plain_call(name: str, row: Settings) -> None:
    way = WAYS[name]
    given, target = way.chain(row["conditions"])
    drafter = drafter_of(row["drafter"], target, given)
    window = window_of(row["window"], target, row["slots"] or way.slots)
    deciding = {"drafter": drafter, "block": row["block"], "recycle": row["recycle"]}
    running = {"look": row["look"]} | ({"slots": row["slots"]} if row["slots"] else {})
    samples, report = way.draw(given, target, {"window": window, **deciding, **running}, row["callback"])
    seeds = way.seeds()
    if name == "policy" and row["drafter"] in ("prior", "learned"):
        seeds = unused_seeds(seeds, repr(getattr(given, "learned", drafter.prior)))
    speculative = fs.sample(target, seeds=seeds, window=2 if window == "auto" else WINDOW, **deciding).samples
    sequential = fs.sequential(target, seeds=way.seeds()).samples
    if not way.exact:  # a loop that is left as it is has noise of its own
        sequential = way.draw(given, target, None, False)[0]
    expected = {"speculative": speculative, "sequential": sequential}
    assert report is not None or way.exact, "the cost of a plan or an image is always reported"
    if window != "auto":
        found = "sequential" if row["window"] == "no gain" else "speculative"
    elif report is None:
        found = "either"
    else:
        found = "sequential" if report.method.startswith("sequential") else "speculative"
    gap = min(float((samples - one).abs().max()) for name, one in expected.items() if found in (name, "either"))
    assert gap == 0 if way.exact else gap < 1e-4
    assert report is None or row["window"] not in (WINDOW, "tuning") or report.window == WINDOW


def test_a_changed_sample_is_seen() -> None:
    """The comparison above can fail: a drafter of another kind draws other samples from the same seeds."""
    _, target = flow(False)
    one, other = (
        fs.sample(target, seeds=seeds_of(3, COUNT), window=WINDOW, drafter=fs.Frozen(kind)).samples
        for kind in ("head", "parent")
    )
    assert not torch.equal(one, other)


# ------------------------------------------------------------------ what a way does not have


CUDA = "graph=True needs a target on a CUDA device"
WARM = fs.Replay(prior=fs.Prior(*2 * [torch.zeros(1, 12, 4, 4, 4)]))
REFUSED: dict[tuple[str, str], tuple[Settings, str]] = {
    ("sample", "graph"): ({"graph": True}, CUDA),
    ("stream", "graph"): ({"graph": True}, CUDA),
    ("Engine.draw", "graph"): ({"graph": True}, CUDA),
    ("Engine.stream", "graph"): ({"graph": True}, CUDA),
    ("from_sde", "graph"): ({"graph": True}, CUDA),
    ("generate", "graph"): ({"graph": True}, CUDA),
    ("samplers", "graph"): ({"graph": True}, CUDA),
    ("policy", "graph"): ({"graph": True}, "graph=True needs a policy on a CUDA device: move it there first"),
    ("pipeline", "graph"): (
        {"graph": True},
        "graph is an option of a policy, not of a pipeline: leave graph out",
    ),
    ("package", "graph"): ({"graph": True}, "graph is an option of a policy, not of a package's sampler"),
    ("OpenAI", "graph"): ({"graph": True}, "graph is an option of a policy, not of a package's sampler"),
    ("Engine.stream", "callback"): ({"observe": print}, "observe is not a setting here"),
    ("stream", "callback"): (
        {"observe": print},
        "observe is not a setting here: the settings are window, drafter",
    ),
    ("samplers", "callback"): (
        {"callback": print},
        "callback cannot be had with speculative samples: leave it out",
    ),
    ("policy", "callback"): ({"observe": print}, "observe is not an option of accelerate"),
    ("package", "callback"): ({"observe": print}, "observe is not an option of accelerate"),
    ("OpenAI", "callback"): ({"observe": print}, "observe is not an option of accelerate"),
    ("OpenAI", "slots"): ({"slots": 2}, "slots is not an option of accelerate"),
    ("policy", "slots"): ({"slots": 2}, "slots is not an option of accelerate"),
    ("pipeline", "slots"): ({"slots": 2}, "slots is not an option of accelerate"),
    ("package", "slots"): ({"slots": 2}, "slots is not an option of accelerate"),
    **{("pipeline", name): ({"drafter": WARM}, "a prior would never be used") for name in ("prior", "learned")},
}
"""Settings of a way to draw, and the error message that refuses them."""


def test_every_setting_that_a_way_does_not_have_is_in_the_table() -> None:
    lacking = {(name, setting) for name, way in WAYS.items() for setting in (*way.lacks, "graph")}
    assert lacking == REFUSED.keys() | {("package", "conditions")}  # this network takes none


@pytest.mark.parametrize(("name", "setting"), REFUSED)
def test_a_setting_that_a_way_does_not_have_is_refused(name: str, setting: str) -> None:
    way, (refused, sentence) = WAYS[name], REFUSED[name, setting]
    given, target = way.chain(False)
    with pytest.raises((TypeError, ValueError), match=sentence):
        way.draw(given, target, {"window": WINDOW, "drafter": fs.Replay()} | refused, False)
