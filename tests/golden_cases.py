"""Cases of the golden comparison that sample a target: chains, targets, drafters and ways to draw."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

import foresample as fs
from foresample.core.noise import seeds_of
from tests.support.small_chains import Turned

Record = dict[str, Any]
Draw = Callable[..., Record]
f64 = torch.float64
COUNT, WINDOW, STEPS = 4, 4, 9


def digest(*values: Any) -> str:
    """SHA-256 of the values' shapes, dtypes and bytes."""
    found = hashlib.sha256()
    for value in values:
        tensor = torch.as_tensor(value).detach().contiguous()
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def of_run(run: fs.Run) -> Record:
    """The record of a run."""
    return {
        "samples": digest(run.samples),
        "calls": run.calls.tolist(),
        "evaluations": run.evaluations.tolist(),
    }


def of_report(samples: Any, report: fs.Report) -> Record:
    """The record of samples that came with a report only."""
    return {"samples": digest(samples), "calls": report.calls_mean, "evaluations": report.evaluations_mean}


# ------------------------------------------------------------------ chains


def bent(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    """A network that bends its states, depends on the time and mixes coordinates; each row by itself."""
    scale = 1 + time.to(x.dtype).abs().view(-1, *(1,) * (x.ndim - 1))
    return 0.9 * torch.tanh(1.5 * x / scale) + 0.2 * torch.sin(x.roll(1, -1))


def noise_of(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    """A network that predicts noise or a velocity: most of its input."""
    return 0.7 * x - 0.3 * bent(x, time, row)


def score(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    return bent(x, time, row) - x


def doubled(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    """A network with a learned variance."""
    return torch.cat([noise_of(x, time, row), 0.9 * torch.sin(3 * x)], 1)


def worse(network: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, time, row: 0.9 * network(x, time, row) + 0.1


ALPHA_BAR = torch.linspace(0.03, 0.97, STEPS, dtype=f64)
FLOW = torch.linspace(1, 0.1, STEPS, dtype=f64)


def sigmas() -> Tensor:
    return fs.chains.karras_sigmas(STEPS, 0.1, 8.0)


def sde(process: Any, predictor: Any, **more: Any) -> Callable[[], Any]:
    return lambda: fs.chains.reverse_sde_chain(process, STEPS, predictor=predictor, end=0.05, **more)


PROCESSES = {"VP": fs.chains.VP(0.1, 5.0), "SubVP": fs.chains.SubVP(0.1, 5.0), "VE": fs.chains.VE(0.05, 8.0)}
SIGMAS = {
    name: getattr(fs.chains, name) for name in dir(fs.chains) if re.fullmatch(r"(dpm|euler).*_chain", name)
}
CHAINS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "vp eps": (lambda: fs.chains.vp_chain(ALPHA_BAR), noise_of),
    "vp x0, reuse eps": (lambda: fs.chains.vp_chain(ALPHA_BAR, predicts="x0", reuse="eps"), bent),
    "vp v, reuse v": (lambda: fs.chains.vp_chain(ALPHA_BAR, predicts="v", reuse="v"), noise_of),
    "vp eta 0.6": (lambda: fs.chains.vp_chain(ALPHA_BAR, eta=0.6), noise_of),
    "vp clipped": (lambda: fs.chains.vp_chain(ALPHA_BAR, clip=0.7), noise_of),
    "vp learned variance": (lambda: fs.chains.vp_chain(ALPHA_BAR, learned_base=0.9), doubled),
    "flow v": (lambda: fs.chains.flow_chain(FLOW, churn=1.0), noise_of),
    "flow x0": (lambda: fs.chains.flow_chain(FLOW, churn=0.7, predicts="x0", reuse="x0"), bent),
    **{
        f"edm {steps}": (lambda steps=steps: fs.chains.edm_chain(sigmas(), churn=4.0, steps=steps), bent)
        for steps in ("euler", "heun", "midpoint")
    },
    "langevin": (lambda: fs.chains.langevin_chain(0.1, STEPS), score),
    **{
        f"sde {name} {predictor}": (sde(process, predictor), score)
        for name, process in PROCESSES.items()
        for predictor in ("euler_maruyama", "reverse_diffusion")
    },
    "sde VP eps, noisy end": (sde(PROCESSES["VP"], "euler_maruyama", predicts="eps", denoise=False), noise_of),
    **{f"sigmas {name}": (lambda make=make: make(sigmas()), bent) for name, make in SIGMAS.items()},
    "sigmas eta 0.5": (lambda: fs.chains.dpmpp_2m_sde_chain(sigmas(), eta=0.5, solver_type="heun"), bent),
}
"""Makers of every kind of chain, and a network for each."""


def target_of(chain: str, dtype: torch.dtype = f64, make: Any = lambda network: network, **more: Any) -> Any:
    maker, network = CHAINS[chain]
    return fs.targets.from_chain(make(network), maker(), (3,), dtype=dtype, **more)


def conditioned(**more: Any) -> Any:
    """A target whose network looks up a condition by the row."""
    table = torch.linspace(-0.5, 0.5, COUNT, dtype=f64)
    make = lambda network: lambda x, time, row: network(x, time, row) + table[row].unsqueeze(1)  # noqa: E731
    return target_of("vp eps", make=make, **more)


def mixture() -> Any:
    kind = fs.GaussianMixture
    means = torch.tensor([[-1.0, 0.5], [1.2, -0.4], [0.3, 1.5]], dtype=f64)
    return kind(means, torch.tensor([0.4, 0.6, 0.5], dtype=f64), torch.full((3,), 1 / 3, dtype=f64))


def interrupted() -> Any:
    """Deterministic steps at the start, in the middle and at the end."""
    base = target_of("langevin")
    std = base.std.clone()
    std[[0, 4, STEPS - 1]] = 0
    return replace(base, chain=replace(base.chain, std=std))


def picture() -> Any:
    chain = fs.chains.vp_chain(ALPHA_BAR)
    return fs.targets.in_frequencies(fs.targets.from_chain(noise_of, chain, (1, 4, 4), dtype=f64))


TARGETS: dict[str, Callable[[], Any]] = {
    "extra noise": lambda: Turned(target_of("vp eps"), by=lambda x, extra: x + 0.1 * extra),
    "conditions": conditioned,
    "conditions and starts": lambda: conditioned(
        start=torch.linspace(-2, 2, 3 * COUNT, dtype=f64).view(COUNT, 3)
    ),
    "float32": lambda: target_of("vp eps", torch.float32),
    "float32 edm": lambda: target_of("edm euler", torch.float32),
    "interrupted": interrupted,
    "structures": lambda: fs.targets.structures(bent, sigmas(), 2, gamma_min=0.3, dtype=f64),
    "structures, aligned": lambda: fs.targets.structures(
        bent, sigmas(), 4, gamma_min=0.3, align=True, dtype=f64
    ),
    "frequencies": picture,
    "replicated": lambda: fs.targets.replicated([target_of("vp eps"), target_of("vp eps")]),
    "mixture flow": lambda: mixture().flow(STEPS, 1.0),
    "mixture vp": lambda: mixture().vp(ALPHA_BAR),
    "mixture langevin": lambda: mixture().langevin(STEPS, 0.05),
    "maker vp": lambda: fs.targets.vp(noise_of, ALPHA_BAR, (3,), dtype=f64),
    "maker flow": lambda: fs.targets.flow(noise_of, FLOW, (3,), churn=1.0, dtype=f64),
    "maker from_edm": lambda: fs.targets.from_edm(bent, sigmas(), (3,), churn=4.0, dtype=f64),
    "maker langevin": lambda: fs.targets.langevin(score, (3,), step_size=0.1, steps=STEPS, dtype=f64),
    "maker reverse_sde": lambda: fs.targets.reverse_sde(score, fs.chains.VP(), STEPS, (3,), dtype=f64),
}
"""Targets that are more than a chain and a network of each row by itself, and the other ways to make one."""

DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "replay": lambda target: fs.Replay(),
    "replay, no secant": lambda target: fs.Replay(secant=False),
    "replay, prior": lambda target: fs.Replay(prior=fs.fit_prior(target, window=WINDOW, pilots=8, rows=COUNT)),
    "head": lambda target: fs.Frozen("head"),
    "parent": lambda target: fs.Frozen("parent"),
    "nearest": lambda target: fs.Frozen("nearest"),
    "model": lambda target: fs.DraftModel(target),
}
HOW = [
    {"block": block, "recycle": recycle, "slots": slots}
    for block, recycle, slots in product((None, 1, 3), (True, False), (1, 3, None))
]


def sampled(target: Any, drafter: str, own: Any = None, **how: Any) -> Record:
    made = fs.DraftModel(own) if own is not None and drafter == "model" else DRAFTERS[drafter](target)
    return of_run(fs.sample(target, COUNT, window=WINDOW, seed=5, drafter=made, **how))


def chains() -> Iterator[tuple[str, Draw]]:
    """Every chain × drafter × block × recycle × slots, and sequentially."""
    for chain in CHAINS:
        yield f"sequential/{chain}", lambda chain=chain: of_run(fs.sequential(target_of(chain), COUNT, seed=5))
        for drafter, how in product(DRAFTERS, HOW):
            # All settings with the default drafter; a third of them, in turn, with each other one.
            turn = HOW.index(how) + list(DRAFTERS).index(drafter) + list(CHAINS).index(chain)
            if drafter == "replay" or turn % 3 == 0:
                yield (
                    f"chain/{chain}/{drafter}/{told(how)}",
                    lambda c=chain, d=drafter, h=how: sampled(target_of(c), d, target_of(c, make=worse), **h),
                )


def told(how: Record) -> str:
    return " ".join(f"{name}={value}" for name, value in how.items())


def targets() -> Iterator[tuple[str, Draw]]:
    for name, make in TARGETS.items():
        yield f"sequential/{name}", lambda make=make: of_run(fs.sequential(make(), COUNT, seed=5))
        for drafter, how in product(DRAFTERS, (HOW[1], HOW[5], HOW[9])):
            yield f"target/{name}/{drafter}/{told(how)}", lambda m=make, d=drafter, h=how: sampled(m(), d, **h)


def streamed(target: Any, ordered: bool, slots: int) -> Record:
    """Seven samples one by one: in order, or as they finish."""
    if ordered:
        samples: Any = list(fs.stream(target, 7, window=WINDOW, seed=2, slots=slots))
        costs = {name: [getattr(sample, name) for sample in samples] for name in ("calls", "evaluations")}
        return {"samples": digest(*(sample.x for sample in samples))} | costs
    parts = list(fs.Engine(target, window=WINDOW, slots=slots).draw(seeds_of(2, 7)))
    costs = {
        name: torch.cat([getattr(part, name) for part in parts]).tolist() for name in ("calls", "evaluations")
    }
    return {"samples": digest(*(x for part in parts for x in part.x))} | costs


def observed(target: Any) -> Record:
    """The states committed in each round, too."""
    seen: list[Tensor] = []

    def observe(commit: fs.Commit) -> None:
        seen.extend(
            states[:n] for states, n in zip(commit.states.clone(), commit.committed.tolist(), strict=True)
        )

    run = fs.sample(target, COUNT, window=WINDOW, seed=5, slots=3, observe=observe)
    return of_run(run) | {"committed": digest(*seen)}


def ways() -> Iterator[tuple[str, Draw]]:
    """Streams, seeds, observers, windows, and the embedded model."""
    for chain, ordered, slots in product(("vp eps", "edm heun", "langevin"), (True, False), (1, 3, 9)):
        yield (
            f"stream/{chain}/ordered={ordered} slots={slots}",
            lambda c=chain, o=ordered, s=slots: streamed(target_of(c), o, s),
        )
    for chain in ("vp eps", "vp learned variance", "sigmas dpmpp_3m_sde_chain"):
        yield f"observe/{chain}", lambda c=chain: observed(target_of(c))
        for window in (1, 2, 7, 40):
            yield (
                f"window/{chain}/{window}",
                lambda c=chain, w=window: of_run(
                    fs.sample(target_of(c), window=w, seeds=[7, 7, 2**62, 3], slots=2, look=False)
                ),
            )
    for drafter in DRAFTERS:
        yield f"embedded/{drafter}", lambda d=drafter: sampled(fs.pretrained.load().target(6), d, slots=3)
    yield "embedded/sequential", lambda: of_run(fs.sequential(fs.pretrained.load().target(6), COUNT, seed=5))


def churned(name: str) -> Record:
    more = {"s_churn": 4.0} if name in ("sample_euler", "sample_heun", "sample_dpm_2") else {}
    reports: list[fs.Report] = []
    x = 8 * torch.randn(3, 2, dtype=f64, generator=torch.Generator().manual_seed(1))
    model = lambda x, sigma: bent(x, sigma, sigma)  # noqa: E731
    samples = getattr(fs.samplers, name)(model, x, sigmas(), **more, window=4, seed=3, report=reports.append)
    return of_report(samples, reports[0])


def samplers() -> Iterator[tuple[str, Draw]]:
    for name in fs.samplers.__all__:
        yield f"samplers/{name}", lambda name=name: churned(name)
