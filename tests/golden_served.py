"""Cases of the golden comparison that accelerate: schedulers, pipelines, policies and packages."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import foresample as fs
from tests.golden_cases import STEPS, WINDOW, Draw, Record, digest, f64, noise_of, of_report, sampled


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
    for name, how in {
        "parent": {"drafter": fs.Frozen("parent")},
        "block 1": {"block": 1, "recycle": False},
    }.items():
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
    inferer, net = (
        rows.monai_inferer(scheduler),
        rows.MonaiNet(scheduler.prediction_type, scheduler.alphas_cumprod),
    )
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
