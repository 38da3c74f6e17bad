"""sbi's posteriors from score estimators (NPSE), drawn speculatively.

`VectorFieldPosterior._sample_via_diffusion` is replaced, so that `sample` and `sample_batched` reject at the prior as
before. With the estimator's own drift f(t)·x and diffusion g(t), and Δ = t − t' on sbi's grid of times, a step is

    predictor   x' = (1 − f Δ) x + (1 + η²)/2 g² Δ score(x, t) + η g √Δ z,     at every step, the last one, too
    corrector   x' = x + h score(x, t) + √(2h) z,                              Langevin's, a few times after each

and the chain starts from the estimator's base distribution, N(mean_base, std_base²).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from foresample.chains import Chain
from foresample.chains.sde import levels_of, score_chain
from foresample.integrations.packages.loop import Drawing, PackageLoop
from foresample.integrations.replaced import REPORT, standing_in
from foresample.integrations.trusted import held
from foresample.integrations.untouched import kept_random_state
from foresample.settings import WINDOW
from foresample.targets import from_chain

_TIMED = 8
"""Steps of sbi's own loop that are timed."""
_CLEARLY = 1.5
"""A draw that took so many times longer than sbi's own loop is not repeated to make sure."""


@dataclass(frozen=True)
class Corrector:
    """Langevin steps of a fixed size after each step of the predictor."""

    step_size: float = 1e-4
    num_steps: int = 0

    def __post_init__(self) -> None:
        if not self.step_size >= 0 or not isinstance(self.num_steps, int) or self.num_steps < 0:
            raise ValueError(
                "corrector_params must have a step_size of at least 0 and a whole num_steps of at least 0, not "
                f"{self.step_size} and {self.num_steps}"
            )


@dataclass(frozen=True)
class _Timed(Drawing):
    """A drawing, and the seconds that sbi's own loop would take for it."""

    theirs: Callable[[], float] = lambda: math.inf


@dataclass
class _Faster:
    """The numbers of samples for which each loop was faster."""

    ours: int = 0
    """The most samples for which ours was faster."""
    theirs: float = math.inf
    """The fewest samples for which theirs was faster."""


class SbiLoop(PackageLoop):
    """Stands in for `VectorFieldPosterior._sample_via_diffusion`.

    With the default window, the first draw of each larger number of samples is timed, and so are a few steps of sbi's
    own loop; where that would have been faster, it draws so many samples from then on. A window that was chosen stays.
    """

    package, kind, replaces = "sbi", "VectorFieldPosterior", ("_sample_via_diffusion",)
    attributes = "_sample_via_diffusion", "sample_via_ode", "vector_field_estimator", "potential_fn"
    owners = ("sbi.inference.posteriors.vector_field_posterior.VectorFieldPosterior",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._faster: dict[tuple, _Faster] = {}
        self._chain: tuple[Any, Chain] | None = None
        self._scored: tuple[Any, ...] | None = None  # the score that was checked at several times at once

    def refuse(self) -> None:
        if self.served.sample_with != "sde":
            raise ValueError(
                f"a posterior with sample_with={self.served.sample_with!r} adds no noise, so there is nothing to "
                "speculate on: build it with build_posterior(sample_with='sde')"
            )

    # ------------------------------------------------------------ what is drawn

    def drawing(self, asked: dict[str, Any]) -> Drawing:
        posterior, potential = self.served, self.served.potential_fn
        estimator, observed = posterior.vector_field_estimator, potential.x_o
        eta, corrector = self._steps(asked)
        if potential.x_is_iid and len(observed) > 1:
            raise ValueError(
                "several observations x of one parameter have a score that an accelerated posterior cannot evaluate at "
                "different times at once: call sample_batched for a posterior of each, or restore it first"
            )
        times = asked["ts"] if asked["ts"] is not None else estimator.solve_schedule(asked["steps"])
        times = times.to(estimator.mean_base)
        chain = self._checked_chain(times, eta, corrector)
        count, observations = torch.Size(asked["sample_shape"]).numel(), len(observed)
        at_once = min(count, asked["max_sampling_batch_size"] or posterior.max_sampling_batch_size)

        def score(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
            x, time = x.to(times.dtype), time.to(times.dtype)
            if observations == 1:
                return potential.gradient(x, time)
            with standing_in(potential, "_x_o", observed[row % observations]):
                return potential.gradient(x, time)

        def result(samples: Tensor) -> Tensor:
            samples = samples.to(times.dtype).view(count, observations, *estimator.input_shape)
            return estimator.from_z(samples) if estimator.compose_enabled else samples

        # A corrector's steps may be large beside σ², where float32 would lose the score.
        dtype = torch.float64 if corrector.num_steps else torch.float32
        target = from_chain(score, chain, estimator.input_shape, dtype=dtype, device=times.device)
        base = tuple(v[0].to(target.std) for v in (estimator.mean_base, estimator.std_base))
        target = replace(target, start_law=base)
        return _Timed(
            target,
            count * observations,
            estimator,
            result,
            slots=at_once * observations,
            theirs=partial(self._theirs, asked, times),
        )

    def _steps(self, asked: dict[str, Any]) -> tuple[float, Corrector]:
        """The predictor's eta and the corrector; other arguments are refused."""
        if asked["predictor"] != "euler_maruyama":
            raise ValueError(
                f"predictor={_name(asked['predictor'])} is not known here: leave it out, which means 'euler_maruyama', "
                "or restore the posterior first"
            )
        if asked["corrector"] not in (None, "langevin"):
            raise ValueError(
                f"corrector={_name(asked['corrector'])} is not known here: use 'langevin' or none, or restore the "
                "posterior first"
            )
        if asked["save_intermediate"]:
            raise ValueError("an accelerated posterior keeps no states on the way: leave save_intermediate out")
        names = "sample_shape", "predictor", "corrector", "predictor_params", "corrector_params", "steps", "ts"
        self.refuse_others(asked, *names, "max_sampling_batch_size", "show_progress_bars")
        eta = float(_only("predictor_params", asked, ["eta"]).get("eta", 1.0))
        given = _only("corrector_params", asked, ["step_size", "num_steps"])
        return eta, Corrector() if asked["corrector"] is None else Corrector(**{"num_steps": 5} | given)

    def _checked_chain(self, times: Tensor, eta: float, corrector: Corrector) -> Chain:
        """The chain of the loop with its present values; the loop is run again if any of them changed."""
        posterior, potential = self.served, self.served.potential_fn
        estimator, several = posterior.vector_field_estimator, len(potential.x_o) > 1
        scaled = potential.iid_method if several else None  # one of these methods has another start
        settings = tuple(times.tolist()), eta, corrector, scaled
        now = type(estimator), held(estimator), settings
        if self._chain is None or self._chain[0] != now:
            self._chain = now, sde_steps(estimator, times, eta, corrector)
        score = estimator, potential.guidance_method, potential.guidance_params
        if self._scored is None or any(a is not b for a, b in zip(self._scored, score, strict=True)):
            _require_times_in_rows(potential, times)
            self._scored = score

        def run(generator: torch.Generator) -> Any:
            given = (
                {"corrector": "langevin", "corrector_params": vars(corrector)} if corrector.num_steps else {}
            )
            params = {"eta": eta}
            return self.original((1,), ts=times, predictor_params=params, show_progress_bars=False, **given)

        def instead(network: nn.Module) -> AbstractContextManager[Any]:
            return standing_in(potential, "gradient", network)

        def begin(noise: Tensor) -> Tensor:
            return estimator.mean_base + estimator.std_base * noise

        whole = not estimator.compose_enabled  # what it returns is the last state
        self.compare(self._chain[1], now, run, instead, times.device, rounding=1e-5, begin=begin, whole=whole)
        return self._chain[1]

    # ------------------------------------------------------------ the faster loop

    def _window(self, drawing: Drawing) -> int | None:
        if self.settings.window != WINDOW:
            return super()._window(drawing)
        return None if drawing.count >= self._known(drawing).theirs else WINDOW

    def _draw(self, drawing: Drawing, window: int) -> Tensor:
        known = self._known(drawing)
        if self.settings.window != WINDOW or drawing.count <= known.ours:
            return super()._draw(drawing, window)
        assert isinstance(drawing, _Timed)
        put_back = kept_random_state()
        if not known.ours:  # compilers and caches
            compared = self._unreported
            super()._draw(replace(drawing, count=1, slots=1), window)
            self._unreported = compared
            put_back()
        samples = super()._draw(drawing, window)
        put_back, report = kept_random_state(), getattr(self.served, REPORT)
        theirs = drawing.theirs()
        faster = report.seconds < theirs
        if not faster and report.seconds < _CLEARLY * theirs:
            super()._draw(drawing, window)
            faster = getattr(self.served, REPORT).seconds < theirs
            setattr(self.served, REPORT, report)
        put_back()
        if faster:
            known.ours = drawing.count
        else:
            known.theirs = drawing.count
        return samples

    def _known(self, drawing: Drawing) -> _Faster:
        std = drawing.target.std
        return self._faster.setdefault((len(std), std.device), _Faster())

    def _theirs(self, asked: dict[str, Any], times: Tensor) -> float:
        """Seconds that sbi's own loop would take, estimated from its first steps."""
        few = times[: _TIMED + 1]
        began = perf_counter()
        self.original(**asked | {"ts": few, "show_progress_bars": False}).cpu()
        return (perf_counter() - began) * (len(times) - 1) / (len(few) - 1)


def sde_steps(estimator: Any, times: Tensor, eta: float, corrector: Corrector) -> Chain:
    """The chain of sbi's loop on these times, each coefficient computed as in the loop, to the same bits."""
    if times.ndim != 1 or len(times) < 2 or not (times.diff() < 0).all():
        raise ValueError(
            "the times must fall strictly from t_max to t_min, at least two of them: give steps=2 or more, "
            "or another ts"
        )
    if not eta > 0:
        raise ValueError(f"predictor_params must have a positive eta, not {eta}")
    one, here = torch.ones(1, device=times.device), times[:-1]
    f, g = (
        torch.stack([of(one, time).reshape(()) for time in here]).double().cpu()
        for of in (estimator.drift_fn, estimator.diffusion_fn)
    )
    size = -times.diff().double().cpu()
    further = [1.0] * corrector.num_steps, [corrector.step_size] * corrector.num_steps
    state = _after_each(1 - f * size, further[0])
    pull = _after_each((1 + eta**2) / 2 * g**2 * size, further[1])
    std = _after_each(eta * g * size.sqrt(), [math.sqrt(2 * h) for h in further[1]])
    time = here.double().cpu().repeat_interleave(1 + corrector.num_steps)
    alpha, sigma = (of(time.to(times.device)).flatten().cpu() for of in (estimator.mean_t_fn, estimator.std_fn))
    return score_chain(time, levels_of(alpha, sigma), state, pull, std)


def _after_each(values: Tensor, further: Sequence[float]) -> Tensor:
    """Each value followed by these."""
    more = torch.tensor(further, dtype=torch.float64).expand(len(values), -1)
    return torch.cat([values.unsqueeze(1), more], 1).flatten()


def _require_times_in_rows(potential: Any, times: Tensor) -> None:
    """Refuse a score that sbi evaluates at a single time only, as for flow matching and for some guidance."""
    shape = potential.vector_field_estimator.input_shape
    with standing_in(potential, "_x_o", potential.x_o[:1]):
        apart = [_times_apart(potential, shape, times, rows) for rows in {2, shape[-1], shape[-1] + 1}]
    if not all(apart):  # with as many rows as numbers in a state, times could be taken for these
        kind = potential.guidance_method or type(potential.vector_field_estimator).__name__
        raise ValueError(
            f"the score of {kind} for a sample depends on the other samples evaluated with it, or on their times: use "
            "a score estimator (NPSE) without this guidance, or restore the posterior first"
        )


def _times_apart(potential: Any, shape: torch.Size, times: Tensor, rows: int) -> bool:
    """Whether the first and the last of these rows have the score of their own times."""
    x = torch.linspace(-1, 1, rows * shape.numel(), device=times.device).view(rows, *shape).to(times)
    time = times[torch.linspace(0, len(times) - 2, rows).long()]
    alone = torch.stack([potential.gradient(x, time[k])[k] for k in (0, -1)])
    try:
        together = potential.gradient(x, time)
    except (RuntimeError, ValueError, IndexError):
        return False
    return together.shape == x.shape and torch.allclose(together[[0, -1]], alone, rtol=1e-3, atol=1e-3)


def _only(argument: str, asked: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The parameters given in an argument; one that is not known here is refused."""
    given = asked[argument] or {}
    for name in given:
        if name not in known:
            raise ValueError(f"{argument} may have {' and '.join(known)} here, not {name}: leave {name} out")
    return given


def _name(given: Any) -> str:
    return repr(given) if isinstance(given, str) else type(given).__name__
