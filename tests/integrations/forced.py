"""A sharp test that an accelerated pipeline is exact: the untouched pipeline walks its path again.

The states committed in an accelerated run are given to the untouched pipeline, step after step, whatever its scheduler
would have made. So its loop, guidance and network say what the mean of each transition is, and the innovations

    z_k = (x_{k+1} − mean_k(x_k)) / std_k

must be i.i.d. standard normal. A few images give thousands of them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import foresample as fs
from foresample.chains import scheduler_chain
from foresample.checks.kolmogorov import ks_two_sample
from foresample.integrations.diffusers.callbacks import InOrder
from foresample.integrations.diffusers.calls import numbers_in, undisturbed
from foresample.integrations.diffusers.pipelines import Known
from foresample.integrations.diffusers.session import Step


@dataclass(frozen=True)
class Walk:
    """An accelerated run, compared with the untouched pipeline."""

    innovations: list[Tensor]
    """The innovations of each step with noise, [images, …], without overwritten coordinates."""
    deterministic: float
    """The largest relative error of the steps without noise."""
    ours: Tensor
    theirs: Tensor
    """The results of both."""
    calls: float

    def p_values(self) -> list[float]:
        """P-values of the innovations' sum of squares and sum at each step, and of their whole distribution."""
        found = []
        for z in self.innovations:
            n = z.numel()
            # Wilson and Hilferty: the cube root of χ²/n is normal, nearly.
            cube = ((float((z**2).sum()) / n) ** (1 / 3) - (1 - 2 / (9 * n))) / math.sqrt(2 / (9 * n))
            found += [_two_sided(cube), _two_sided(float(z.sum()) / math.sqrt(n))]
        everything = torch.cat([z.flatten() for z in self.innovations]).numpy()
        normal = torch.randn(10**5, generator=torch.Generator().manual_seed(9), dtype=torch.float64).numpy()
        return [*found, ks_two_sample(np.sort(everything), normal)]

    def require_exact(self, level: float = 1e-4) -> None:
        p_values = self.p_values()
        assert min(p_values) > level / len(p_values), p_values
        assert self.deterministic < 1e-2
        torch.testing.assert_close(
            self.ours, self.theirs, rtol=1e-3, atol=1e-3 * float(self.theirs.abs().max()) + 1e-5
        )


def walk(
    pipe: Any,
    arguments: dict[str, Any],
    *,
    window: int = 4,
    seed: int = 0,
    result: str | int = 0,
    prepare: Callable[[], None] = lambda: None,
    between: Callable[[], None] | None = None,
    callback: Callable[..., Any] | None = None,
) -> Walk:
    """Draw with `accelerate`, then let the untouched pipeline walk the same path.

    `prepare` brings the pipeline to where both begin. With `between`, an image is drawn before and this done to the
    pipeline then, both times. `callback` is the pipeline's `callback_on_step_end`.
    """
    path: dict[int, Tensor] = {}
    report = InOrder._report

    def keep(self: Any, step: int, latents: Tensor) -> None:
        path[step] = latents.clone()
        if callback is not None:
            report(self, step, latents)

    def draw(call: Callable[..., Any], **more: Any) -> Tensor:
        torch.manual_seed(seed)
        told = arguments | more
        return torch.as_tensor(call(pipe, **told, generator=torch.Generator().manual_seed(seed))[result])

    kind = type(pipe)
    prepare()
    with fs.accelerate(pipe, window=window):
        handle = pipe._foresample

        def observed(self: Any, **told: Any) -> Any:
            bound = inspect.signature(kind.__call__).bind(self, **told)
            rehearsed = numbers_in([bound.arguments, pipe.config]) if callback is None else None
            known = Known(trace=handle._watch(bound), rehearsed=rehearsed)
            if between is not None:
                with undisturbed(pipe, bound):
                    handle._draw(bound, window, None, known)
                between()
            with mock.patch.object(InOrder, "_report", keep):
                return handle._draw(bound, window, callback or (lambda *told: None), known)

        ours = draw(observed)
        calls = pipe.foresample_report.calls_mean
    assert type(ours) is Tensor  # none of the classes that patch its loop
    prepare()
    if between is not None:
        draw(kind.__call__)
        between()
    more = {} if callback is None else {"callback_on_step_end": callback}
    seen = _forced(pipe, path, lambda: draw(kind.__call__, **more))
    return _compared(pipe.scheduler, path, seen, ours, calls)


def _forced(pipe: Any, path: dict[int, Tensor], draw: Callable[[], Tensor]) -> dict[str, Any]:
    scheduler, real = pipe.scheduler, pipe.scheduler.step
    steps: list[dict[str, Any]] = []

    @functools.wraps(real)
    def step(*args: Any, **kwargs: Any) -> Step:
        bound = dict(inspect.signature(real).bind(*args, **kwargs).arguments)
        bound["sample"] = bound["sample"].clone()
        real(*args, **kwargs)  # its indices go on
        after = path[len(steps)].to(bound["sample"].dtype)
        after = torch.cat([after] * (len(bound["sample"]) // len(after)))
        steps.append(bound)
        return Step(after, after)

    scheduler.step = step
    try:
        result = draw()
    finally:
        del scheduler.step
    return {"steps": steps, "result": result}


def _compared(
    scheduler: Any, path: dict[int, Tensor], seen: dict[str, Any], ours: Tensor, calls: float
) -> Walk:
    steps = seen["steps"]
    start = int((scheduler.timesteps == steps[0]["timestep"]).nonzero()[0])
    first = steps[0]
    chain = scheduler_chain(scheduler, eta=first.get("eta") or 0.0, start=start).to("cpu", torch.float64)
    innovations, worst, previous = [], 0.0, None
    images = len(path[0])
    known = torch.zeros_like(path[0], dtype=torch.bool)
    for k, told in enumerate(steps):
        x, output = (told[name][:images].double() for name in ("sample", "model_output"))
        index = torch.full((images,), k)
        learned = chain.low_variance is not None
        std = chain.variance(output, index).sqrt() if learned and chain.std[k] > 0 else chain.std[k]
        prediction = chain.predict(x, output.chunk(2, 1)[0] if learned else output, index)
        previous = torch.zeros_like(x) if previous is None else previous
        mean = chain.mean(x, prediction, index, previous)
        previous = prediction
        apart = path[k].double() - mean
        if k + 1 < len(steps):  # what is overwritten before the next step is no part of the chain
            known |= steps[k + 1]["sample"][:images] != path[k].to(steps[k + 1]["sample"].dtype)
        free = ~known
        if chain.std[k] > 1e-8:
            innovations.append((apart / std)[free])
        else:
            worst = max(worst, float(apart[free].abs().max() / path[k].abs().max()))
    return Walk(innovations, worst, ours, seen["result"], calls)


def _two_sided(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))
