"""Golden comparison: does the package still draw the same samples, bit for bit, at the same cost?

    python -m tests.golden record FILE      draw every case and write its digest
    python -m tests.golden compare FILE     draw again; list every case that differs and exit with 1 if any does

A case records the SHA-256 of its samples' bytes with the calls and evaluations, or the sentence of a refusal. Every
case is drawn with both backends of the CPU, each in a process of its own with one thread. The cases use public names
and helpers of the tests only, so that the file runs before and after a change of the package's inside. A recording
holds for one machine and one set of installed versions.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import foresample as fs

Record = dict[str, Any]
Draw = Callable[[], Record]
f64 = torch.float64
COUNT, WINDOW, STEPS = 4, 4, 9
BACKENDS = {"numba": "", "plain": "1"}
"""Each backend and its value of FORESAMPLE_PLAIN."""


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
    return torch.cat([fs.chains.karras_sigmas(STEPS, 0.1, 8.0), torch.zeros(1, dtype=f64)])


def sde(process: Any, predictor: Any, **more: Any) -> Callable[[], Any]:
    return lambda: fs.chains.reverse_sde_chain(process, STEPS, predictor=predictor, end=0.05, **more)


PROCESSES = {"VP": fs.chains.VP(0.1, 5.0), "SubVP": fs.chains.SubVP(0.1, 5.0), "VE": fs.chains.VE(0.05, 8.0)}
SIGMAS = {name: getattr(fs.chains, name) for name in dir(fs.chains) if re.fullmatch(r"(dpm|euler).*_chain", name)}
CHAINS: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
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


@dataclass(frozen=True)
class Turned:
    """A chain shifted by extra noise of another shape before every step."""

    base: Any
    extra: torch.Size = torch.Size([1])  # noqa: RUF009

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def std(self) -> Tensor:
        return self.base.std

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return self.base.start(noise, row)

    def predict(self, x: Tensor, step: Tensor, row: Tensor, extra: Tensor) -> Tensor:
        return self.base.predict(x + 0.1 * extra, step, row)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, extra: Tensor) -> Tensor:
        return self.base.mean(x + 0.1 * extra, prediction, step)


def conditioned(**more: Any) -> Any:
    """A target whose network looks up a condition by the row."""
    table = torch.linspace(-0.5, 0.5, COUNT, dtype=f64)
    make = lambda network: lambda x, time, row: network(x, time, row) + table[row].unsqueeze(1)  # noqa: E731
    return target_of("vp eps", make=make, **more)


def mixture() -> Any:
    kind = getattr(fs, "GaussianMixture", None) or fs.targets.GaussianMixture
    means = torch.tensor([[-1.0, 0.5], [1.2, -0.4], [0.3, 1.5]], dtype=f64)
    return kind(means, torch.tensor([0.4, 0.6, 0.5], dtype=f64), torch.full((3,), 1 / 3, dtype=f64))


def interrupted() -> Any:
    """Deterministic steps at the start, in the middle and at the end."""
    from dataclasses import replace

    base = target_of("langevin")
    std = base.std.clone()
    std[[0, 4, STEPS - 1]] = 0
    return replace(base, chain=replace(base.chain, std=std))


def picture() -> Any:
    chain = fs.chains.vp_chain(ALPHA_BAR)
    return fs.targets.in_frequencies(fs.targets.from_chain(noise_of, chain, (1, 4, 4), dtype=f64))


TARGETS: dict[str, Callable[[], Any]] = {
    "extra noise": lambda: Turned(target_of("vp eps")),
    "conditions": conditioned,
    "conditions and starts": lambda: conditioned(start=torch.linspace(-2, 2, 3 * COUNT, dtype=f64).view(COUNT, 3)),
    "float32": lambda: target_of("vp eps", torch.float32),
    "float32 edm": lambda: target_of("edm euler", torch.float32),
    "interrupted": interrupted,
    "structures": lambda: fs.targets.structures(bent, sigmas(), 2, gamma_min=0.3, dtype=f64),
    "structures, aligned": lambda: fs.targets.structures(bent, sigmas(), 4, gamma_min=0.3, align=True, dtype=f64),
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
            # Every sixth pair of block, recycle and slots for each drafter but the default one, all of them in turn.
            turn = HOW.index(how) + list(DRAFTERS).index(drafter) + list(CHAINS).index(chain)
            if drafter == "replay" or turn % 3 == 0:
                yield f"chain/{chain}/{drafter}/{told(how)}", lambda c=chain, d=drafter, h=how: sampled(
                    target_of(c), d, target_of(c, make=worse), **h
                )


def told(how: Record) -> str:
    return " ".join(f"{name}={value}" for name, value in how.items())


def targets() -> Iterator[tuple[str, Draw]]:
    for name, make in TARGETS.items():
        yield f"sequential/{name}", lambda make=make: of_run(fs.sequential(make(), COUNT, seed=5))
        for drafter, how in product(DRAFTERS, (HOW[1], HOW[5], HOW[9])):
            yield f"target/{name}/{drafter}/{told(how)}", lambda m=make, d=drafter, h=how: sampled(m(), d, **h)


def streamed(target: Any, **how: Any) -> Record:
    samples = list(fs.stream(target, 7, window=WINDOW, seed=2, **how))
    costs = {name: [getattr(sample, name) for sample in samples] for name in ("calls", "evaluations")}
    return {"samples": digest(*(sample.x for sample in samples))} | costs


def observed(target: Any) -> Record:
    """The states committed in each round, too."""
    seen: list[Tensor] = []

    def observe(commit: fs.Commit) -> None:
        seen.extend(states[:n] for states, n in zip(commit.states.clone(), commit.committed.tolist(), strict=True))

    run = fs.sample(target, COUNT, window=WINDOW, seed=5, slots=3, observe=observe)
    return of_run(run) | {"committed": digest(*seen)}


def ways() -> Iterator[tuple[str, Draw]]:
    """Streams, seeds, observers, windows, and the embedded model."""
    for chain, ordered, slots in product(("vp eps", "edm heun", "langevin"), (True, False), (1, 3, 9)):
        yield f"stream/{chain}/ordered={ordered} slots={slots}", lambda c=chain, o=ordered, s=slots: streamed(
            target_of(c), ordered=o, slots=s
        )
    for chain in ("vp eps", "vp learned variance", "sigmas dpmpp_3m_sde_chain"):
        yield f"observe/{chain}", lambda c=chain: observed(target_of(c))
        for window in (1, 2, 7, 40):
            yield f"window/{chain}/{window}", lambda c=chain, w=window: of_run(
                fs.sample(target_of(c), window=w, seeds=[7, 7, 2**62, 3], slots=2, look=False)
            )
    for drafter in DRAFTERS:
        yield f"embedded/{drafter}", lambda d=drafter: sampled(fs.pretrained.load().target(6), d, slots=3)
    yield "embedded/sequential", lambda: of_run(fs.sequential(fs.pretrained.load().target(6), COUNT, seed=5))


def churned(name: str) -> Record:
    more = {"s_churn": 4.0} if name in ("sample_euler", "sample_heun", "sample_dpm_2") else {}
    x, reports = 8 * torch.randn(3, 2, dtype=f64, generator=torch.Generator().manual_seed(1)), []
    model = lambda x, sigma: bent(x, sigma, sigma)  # noqa: E731
    samples = getattr(fs.samplers, name)(model, x, sigmas(), **more, window=4, seed=3, report=reports.append)
    return of_report(samples, reports[0])


def samplers() -> Iterator[tuple[str, Draw]]:
    for name in fs.samplers.__all__:
        yield f"samplers/{name}", lambda name=name: churned(name)


# ------------------------------------------------------------------ schedulers, pipelines, policies and packages


def helper(name: str) -> Any:
    """A helper module of the tests, wherever it lives."""
    for place in ("tests", "tests.support", "tests.integrations"):
        try:
            return importlib.import_module(f"{place}.{name}")
        except ModuleNotFoundError as error:
            if name not in str(error) and place not in str(error):
                raise
    raise ModuleNotFoundError(f"tests have no helper {name}")


SCHEDULERS: dict[str, Record] = {
    "DDPMScheduler": {},
    "DDIMScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "DPMSolverSinglestepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "CosineDPMSolverMultistepScheduler": {},
    "EDMDPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "CogVideoXDPMScheduler": {},
    "LCMScheduler": {},
    "TCDScheduler": {},
    "UnCLIPScheduler": {},
    "FlowMatchEulerDiscreteScheduler": {"stochastic_sampling": True},
    "FlowMatchLCMScheduler": {},
}


def scheduled(name: str, drafter: str) -> Record:
    import diffusers

    scheduler = getattr(diffusers, name)(**SCHEDULERS[name])
    scheduler.set_timesteps(STEPS)
    network = lambda x, time, row: noise_of(x, time / 1000, row)  # noqa: E731
    target = fs.targets.from_scheduler(scheduler, network, (1, 2, 2), dtype=f64)
    return sampled(target, drafter, slots=3)


def piped(case: Any, **how: Any) -> Record:
    """Four images of a pipeline, twice, so that what is kept between calls takes part."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = case.build(Path(folder))
        images, costs = [], []
        with fs.accelerate(pipe, window=WINDOW, **how):
            for seed in (1, 2):
                torch.manual_seed(seed)
                generator = torch.Generator().manual_seed(seed)
                told = case.arguments(4) | {"num_inference_steps": min(case.steps, 8) if not case.note else 12}
                images.append(torch.as_tensor(pipe(**told, generator=generator)[0]))
                costs.append(pipe.foresample_report)
    return {
        "samples": digest(*images),
        "calls": [report.calls_mean for report in costs],
        "evaluations": [report.evaluations_mean for report in costs],
    }


def pipelines() -> Iterator[tuple[str, Draw]]:
    for name, drafter in product(SCHEDULERS, ("replay", "nearest")):
        yield f"scheduler/{name}/{drafter}", lambda n=name, d=drafter: scheduled(n, d)
    rows = helper("pipelines")
    rows.diffusers.logging.set_verbosity_error()
    for case in (*rows.EXACT, *rows.REFUSED):
        yield f"pipeline/{case}", lambda case=case: piped(case)
    for name, how in {"parent": {"drafter": fs.Frozen("parent")}, "block 1": {"block": 1, "recycle": False}}.items():
        yield f"pipeline/{rows.EXACT[0]}/{name}", lambda how=how: piped(rows.EXACT[0], **how)


def planned(policy: Any, plan: Callable[..., Any], **how: Any) -> Record:
    """Three plans, one after another."""
    plans, costs = [], []
    with fs.accelerate(policy, window=6, **how):
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            plans.append(plan(policy, 2))
            costs.append(policy.foresample_report)
    return {
        "samples": digest(*plans),
        "calls": [report.calls_mean for report in costs],
        "evaluations": [report.evaluations_mean for report in costs],
    }


def plan_lerobot(policy: Any, count: int) -> Tensor:
    condition = policy.diffusion._prepare_global_conditioning(helper("lerobots").observation(policy, count))
    with torch.no_grad():
        return policy.diffusion.conditional_sample(count, global_cond=condition)


def policies() -> Iterator[tuple[str, Draw]]:
    families = helper("policies").FAMILIES | helper("test_loops").FAMILIES
    families["LeRobot itself"] = (lambda: helper("lerobots").policy(10), plan_lerobot)
    settings: dict[str, Record] = {
        "cold": {},
        "warm": {"warm": True},
        "pilots": {"pilots": 4},
        "padded": {"batch_pad": True},
        "per step": {"block": 1, "recycle": False, "drafter": fs.Frozen("parent")},
    }
    for (family, (make, plan)), (name, how) in product(families.items(), settings.items()):
        yield f"policy/{family}/{name}", lambda m=make, p=plan, h=how: planned(m(), p, **h)


def packaged(served: Any, draw: Callable[[], Any]) -> Record:
    with fs.accelerate(served, window=WINDOW):
        torch.manual_seed(3)
        return of_report(draw(), served.foresample_report)


def monai(options: Record) -> Record:
    rows = helper("test_packages")
    scheduler = rows.monai_ddpm(**options)
    inferer, net = rows.monai_inferer(scheduler), rows.MonaiNet(scheduler.prediction_type, scheduler.alphas_cumprod)
    start = torch.randn(3, 1, 2, generator=torch.Generator().manual_seed(2))
    return packaged(inferer, lambda: inferer.sample(start, net, verbose=False))


def boltz(version: str, align: bool) -> Record:
    rows = helper("test_packages")
    diffusion = rows.atom_diffusion(version, align)
    return packaged(diffusion, lambda: diffusion.sample(**rows.arguments(version))["sample_atom_coords"])


def gaussian(options: Record) -> Record:
    diffusion = helper("test_packages").gaussian(**options)
    return packaged(diffusion, lambda: diffusion.sample(batch_size=3))


def packages() -> Iterator[tuple[str, Draw]]:
    rows = helper("test_packages")
    for options in rows.CASES:
        yield f"package/denoising-diffusion-pytorch/{options}", lambda o=options: gaussian(dict(o))
    for options in rows.MONAI:
        yield f"package/monai/{options}", lambda o=options: monai(o)
    for version, align in product(("", "v2"), (False, True)):
        yield f"package/boltz{version}/align={align}", lambda v=version, a=align: boltz(v, a)


# ------------------------------------------------------------------ drawing and comparing

GROUPS: dict[str, Callable[[], Iterator[tuple[str, Draw]]]] = {
    "chains": chains,
    "targets": targets,
    "ways": ways,
    "samplers": samplers,
    "pipelines": pipelines,
    "policies": policies,
    "packages": packages,
}


def record_of(draw: Draw) -> Record:
    """The record of one case; a refusal is one, too."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return draw()
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def draw_here(backend: str, pattern: str) -> dict[str, Record]:
    """Every case whose name matches, in this process."""
    torch.set_num_threads(1)
    found = {}
    for group in GROUPS.values():
        for name, draw in group():
            if re.search(pattern, f"{backend}/{name}"):
                found[f"{backend}/{name}"] = record_of(draw)
    return found


def draw_all(pattern: str) -> dict[str, Record]:
    """Every case whose name matches, each backend in a process of its own."""
    found: dict[str, Record] = {}
    for backend, plain in BACKENDS.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "records.json"
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "FORESAMPLE_PLAIN": plain}
            command = [sys.executable, "-P", __file__, backend, str(out), "--only", pattern]
            subprocess.run(command, env=environment, check=True)
            found |= json.loads(out.read_text())
    return found


def differences(before: dict[str, Record], after: dict[str, Record], *, reworded: bool = False) -> list[str]:
    """One line for each case that differs; `reworded` allows a refusal to have another sentence."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            lines.append(f"{name}: {'not recorded before' if old is None else 'vanished'}")
            continue
        parts = [part for part in sorted(old.keys() | new.keys()) if old.get(part) != new.get(part)]
        if parts == ["refused"] and reworded and "refused" in old and "refused" in new:
            continue
        if parts:
            shown = "; ".join(f"{part} {old.get(part)} -> {new.get(part)}" for part in parts)
            lines.append(f"{name}: {shown}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "compare", *BACKENDS])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression the cases' names match")
    parser.add_argument("--reworded", action="store_true", help="let a refusal have another sentence")
    given = parser.parse_args(arguments)
    if given.command in BACKENDS:
        given.file.write_text(json.dumps(draw_here(given.command, given.only)))
        return 0
    found = draw_all(given.only)
    if given.command == "record":
        given.file.write_text(json.dumps(found, indent=0, sort_keys=True))
        print(f"{len(found)} cases recorded, {sum('refused' in r for r in found.values())} of them refusals")
        return 0
    recorded = json.loads(given.file.read_text())
    before = {name: record for name, record in recorded.items() if re.search(given.only, name)}
    lines = differences(before, found, reworded=given.reworded)
    print("\n".join([*lines, f"{len(found)} cases drawn, {len(lines)} differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
