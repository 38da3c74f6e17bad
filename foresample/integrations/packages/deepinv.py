"""deepinv's PosteriorDiffusion, and its DPS, drawn speculatively.

With the SDE's scale s and noise level σ, a state at time t is s·x0 + s·σ·ξ. From t to t' the two solvers step

    Euler        x' = (1 − f Δ) x + (1 + α)/2 g² Δ score + √α g √Δ z                      Δ = |t' − t|
    ancestral    x' = s'/s x + s s' σ² (1 − r q) score + s' σ' √(1 − q²) z                r = σ'/σ,  q = r^α

or q² = 1 − η² (1 − r²) with DDIM's η. The score is the object's own, guidance and its gradient included. Drafters reuse
the denoised estimate that follows from it. The object's own `forward` makes the first state and the last denoising; its
solver is given the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foresample.chains import Chain
from foresample.chains.chain import Levels, denoising_chain
from foresample.contracts import expand
from foresample.integrations.explain import ChainBeside, difference, made_up
from foresample.integrations.networks import for_rows, require_fixed
from foresample.integrations.packages.gaussian import keep_states
from foresample.integrations.packages.loop import Drawing, PackageLoop
from foresample.integrations.replaced import standing_in
from foresample.integrations.trusted import library_name
from foresample.targets import ChainTarget, from_chain

_OWN_ARGUMENTS = "y", "physics", "x_init", "seed", "timesteps", "denoise_output", "get_trajectory"
_SOLVERS = "deepinv.sampling.sde_solver."
_RANDOM = "ScoreSDEDataFidelity", "ILVRDataFidelity"
_ROUNDING = {torch.float64: 1e-6}
_COARSE = 1e-3  # in other dtypes, and of denoisers, which run in float32
_SEED = 20  # any


class DeepinvLoop(PackageLoop):
    """Stands in for `forward`, which is called by calling the object."""

    package, kind, replaces = "deepinv", "PosteriorDiffusion", ("forward",)
    attributes = "posterior", "sde", "solver", "data_fidelity", "score", "minus_one_one"
    owners, steps = ("deepinv",), ("score",)
    _rowwise: Any = None  # values of the object when its score was last compared

    def refuse(self) -> None:
        self.checked_chain(self.served.solver.timesteps)

    def generator(self) -> torch.Generator | None:
        return self.served.solver.rng

    def checked_chain(self, timesteps: Any) -> Chain:
        """The chain of the solver with its present values; its steps are compared again if any of them changed."""
        fidelity = type(self.served.data_fidelity)
        if any(kind.__name__ in _RANDOM for kind in fidelity.__mro__):
            raise ValueError(
                f"{fidelity.__name__} draws noise at every step besides the solver's, so that the mean is not a "
                "function of the state: use DPSDataFidelity or ALDDataFidelity"
            )
        posterior = self.served.posterior
        times = torch.as_tensor(timesteps).to(posterior.device, posterior.dtype)
        if times.ndim != 1 or len(times) < 2:
            raise ValueError(f"timesteps must be at least two times in a row, not shape {tuple(times.shape)}")
        chain = posterior_chain(self.served, times)
        if not (chain.std > 0).any():
            if not (times.diff() < 0).any():
                raise ValueError("timesteps rise: they must fall from noise to data, so flip them")
            eta = getattr(self.served.solver, "eta", None)
            remedy = "give the SDE an alpha above 0, 1.0 say" if eta is None else "use DDPMSolver, or eta=1.0"
            raise ValueError(
                f"with {'alpha' if eta is None else 'eta'}=0 the solver adds no noise, so there is nothing to "
                f"speculate on: {remedy}"
            )
        self._require_explained(chain, times)
        return chain

    def drawing(self, asked: dict[str, Any]) -> Drawing | None:
        model, solver = self.served, self.served.solver
        if asked.pop("args", ()):
            raise ValueError(
                "an accelerated PosteriorDiffusion takes arguments after get_trajectory by name only"
            )
        require_fixed(model)
        handed: dict[str, Any] = {}

        def take(posterior: Any, x_init: Tensor, **given: Any) -> Any:
            handed.update(given, x_init=x_init)
            return SimpleNamespace(sample=x_init, trajectory=x_init)

        with standing_in(solver, "sample", take):
            self.original(**asked | {"denoise_output": False, "get_trajectory": False})
        timesteps, start = handed["timesteps"], handed["x_init"]
        if not len(start):
            return None
        chain = self.checked_chain(solver.timesteps if timesteps is None else timesteps)
        given = {name: value for name, value in asked.items() if name not in _OWN_ARGUMENTS}
        y, physics, count = asked["y"], asked["physics"], len(start)
        _refuse_shared(model.data_fidelity, physics)

        def score(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
            measured, more = for_rows((y, given), row, count)
            return model.score(measured, physics, x, expand(time, x), **more)

        target = from_chain(
            score, chain, start.shape[1:], start=start, dtype=model.posterior.dtype, device=start.device
        )
        self._require_rowwise(target, asked, given)
        states = None
        if asked["get_trajectory"]:
            states = target.std.new_empty(count, len(chain.std) + 1, *target.shape)
            states[:, 0] = start

        def result(samples: Tensor) -> Any:
            path = samples if states is None else states.transpose(0, 1)
            found = SimpleNamespace(sample=samples, trajectory=path)
            with standing_in(solver, "sample", lambda *args, **options: found):
                return self.original(**asked | {"x_init": start, "seed": None})

        observe = None if states is None else partial(keep_states, states)
        return Drawing(target, count, model, result, observe=observe)

    def _require_explained(self, chain: Chain, times: Tensor) -> None:
        """Take every step of the solver with made-up scores, and refuse one that is not the chain's."""
        model, solver, posterior = self.served, self.served.solver, self.served.posterior
        functions = [
            vars(posterior).get(name) for name in ("drift", "diffusion", "alpha", "score", "discretize")
        ]
        names = "time", "std", "state_weight", "prediction_weight"
        tables = [getattr(chain, name).tolist() for name in names]
        now = type(solver), functions, tables
        if now == self._compared:
            return
        generator, levels = torch.Generator().manual_seed(_SEED), chain.levels
        assert levels is not None
        x, z = torch.randn((2, 2, 1, 2, 2), generator=generator, dtype=torch.float64).to(times)
        beside, at = ChainBeside(chain, x), 0

        def noise(*args: Any, **options: Any) -> Tensor:  # of size 1 when it is added, as is the score
            return z / chain.std[at].to(z) if chain.std[at] > 0 else z

        called = False
        elsewhere = (
            f"the SDE of this {type(model).__name__} does not call its score, but that of another object, as a deep "
            "copy does: make a new one instead of a copy"
        )

        def score(y: Any, physics: Any, x: Tensor, t: Tensor) -> Tensor:  # another one at other times
            nonlocal called
            called = True
            return made_up(x + (t - times[at]), False, wide=True) * (levels.alpha / levels.sigma**2)[at].to(x)

        with standing_in(solver, "randn_like", noise), standing_in(model, "score", score):
            for at in range(len(chain.std)):
                try:
                    theirs = solver.step(posterior, times[at], times[at + 1], x, y=None, physics=None)[
                        0
                    ].detach()
                except (AttributeError, TypeError, RuntimeError) as error:
                    if called:
                        raise
                    raise ValueError(elsewhere) from error
                if not called:
                    raise ValueError(elsewhere)
                ours = beside.after(at, x, score(None, None, x, times[at]), noise())
                apart = difference(ours, theirs, lambda x: 1 + x.abs())
                if not apart <= _ROUNDING.get(theirs.dtype, _COARSE):
                    raise ValueError(
                        f"step {at} of {type(solver).__name__} is not that of the chain read off the SDE: undo what "
                        "was changed in the SDE, or make a target with foresample.targets.from_sde"
                    )
        self._compared, self._unreported = now, len(chain.std)

    def _require_rowwise(self, target: ChainTarget, asked: dict[str, Any], given: dict[str, Any]) -> None:
        """Refuse a score that differs between rows at their own times and the loop's batch at one time."""
        model, chain, start = self.served, target.chain, target.start_states
        y, physics = asked["y"], asked["physics"]
        held = physics.state_dict() if isinstance(physics, torch.nn.Module) else {}
        shapes = [tuple(getattr(v, "shape", ())) for v in (start, y, *held.values(), *given.values())]
        now = model.sde.denoiser, model.data_fidelity, physics, shapes, list(given)
        if now == self._rowwise:
            return
        assert start is not None
        assert chain.time is not None
        assert chain.levels is not None
        end, middle = len(chain.std) - 1, len(chain.std) // 2
        more = 1 + (len(start) == 4)  # another number of rows than the batch's
        row = torch.tensor([0, len(start) - 1, 0] + [0] * more, device=start.device)
        step = torch.tensor([0, middle, middle] + [end] * more, device=start.device)
        spread = chain.levels.sigma.to(start)
        at_middle = start * spread[middle] / spread[0]
        theirs = model.score(y, physics, at_middle, chain.time[middle], **given).to(chain.std)
        theirs = chain.predict(at_middle, theirs, step[1:2].expand(len(start)))
        what = f"of {type(model.data_fidelity).__name__} and the denoiser"
        sentence = (
            f"the score {what} differs where rows are at different times or in another order: let the denoiser take a "
            "noise level for each row, [B, 1, 1, 1], and draw from one measurement at a time where the physics or the "
            "data fidelity depend on the batch"
        )
        try:
            ours = target.predict(start[row] * expand(spread[step] / spread[0], start), step, row)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(sentence) from error
        ours, theirs = ours[1:3], theirs[row[1:3]]
        if theirs.isfinite().all() and not difference(ours, theirs) <= _COARSE:
            raise ValueError(sentence)
        self._rowwise = now


def _refuse_shared(fidelity: Any, physics: Any) -> None:
    """Refuse conjugate gradients: deepinv's share their step sizes between all rows of a call."""
    named = [kind.__name__ for kind in (*type(fidelity).__mro__, *type(physics).__mro__)]
    closed = "PiGDMDataFidelity" in named and "DecomposablePhysics" in named
    if hasattr(fidelity, "cg_max_iter") and not closed:
        raise ValueError(
            f"{type(fidelity).__name__} solves one linear system for all rows of a call, so that a sample depends on "
            "the others: use DPSDataFidelity, or PiGDMDataFidelity with a DecomposablePhysics"
        )


def _step(solver: Any) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The coefficients of a solver's step; anything but a solver that is known here is refused."""
    for name in ("sample", "randn_like", "rng_manual_seed"):
        if library_name(getattr(solver, name, None), solver) != f"{_SOLVERS}BaseSDESolver.{name}":
            raise ValueError(
                f"{type(solver).__name__}.{name} is not deepinv's own function: it is overridden or patched; use "
                "deepinv's own solver, or make a target with foresample.targets"
            )
    known = {f"{_SOLVERS}EulerSolver.step": _euler, f"{_SOLVERS}AncestralSolver.step": _ancestral}
    step = known.get(library_name(solver.step, solver) or "")
    if step is None:
        raise ValueError(
            f"{type(solver).__name__} takes steps for which there is no exact coupling here: use deepinv's "
            "EulerSolver, AncestralSolver or DDPMSolver"
        )
    return step


def posterior_chain(model: Any, times: Tensor) -> Chain:
    """The chain of an object's solver, read off its SDE, whose functions of time are called with all times at once."""
    sde, solver = model.sde, model.solver
    step = _step(solver)
    try:
        scale, sigma = (_read(of_time, times) for of_time in (sde.scale_t, sde.sigma_t))
        state_weight, score_weight, std = step(sde, solver, times, scale, sigma)
    except (NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"{type(sde).__name__} does not say its scale_t, sigma_t, forward_drift and forward_diffusion: use a "
            "subclass of deepinv's EDMDiffusionSDE"
        ) from error
    levels = Levels(scale[:-1], (scale * sigma)[:-1])
    return denoising_chain(
        levels,
        state_weight=state_weight - score_weight / levels.sigma**2,
        x0_weight=score_weight * levels.alpha / levels.sigma**2,
        std=std,
        predicts="score",
        reuse="x0",
        time=times[:-1].cpu(),
    )


def _euler(sde: Any, solver: Any, times: Tensor, scale: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of state and score, and the std."""
    now, duration = times[:-1], times.diff().abs().double().cpu()
    drift = _read(lambda t: sde.forward_drift(torch.ones_like(t), t), now)
    alpha, diffusion, added = (
        _read(of_time, now) for of_time in (sde.alpha, sde.forward_diffusion, sde.diffusion)
    )
    return 1 - drift * duration, (1 + alpha) / 2 * diffusion**2 * duration, added * duration.sqrt()


def _ancestral(
    sde: Any, solver: Any, times: Tensor, scale: Tensor, sigma: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of state and score, and the std."""
    ratio = sigma[1:] / sigma[:-1]
    kept = (
        ratio ** (2 * _read(sde.alpha, times[:-1]))
        if solver.eta is None
        else 1 - solver.eta**2 * (1 - ratio**2)
    )
    std = scale[1:] * sigma[1:] * (1 - kept).clamp(min=0).sqrt()
    if solver.variance == "large":
        larger = (scale * sigma)[:-1] / (scale * sigma)[1:]
        std = torch.where(sigma[1:] > 0, std * larger, std)
    weight = scale[:-1] * scale[1:] * sigma[:-1] ** 2 * (1 - ratio * kept.clamp(min=0).sqrt())
    return scale[1:] / scale[:-1], weight, std


def _read(of_time: Callable[[Tensor], Any], times: Tensor) -> Tensor:
    """A function's values at these times; one by one if it takes a single time only."""
    try:
        found = torch.as_tensor(of_time(times), dtype=times.dtype)
        found = found.expand(times.shape)
    except (RuntimeError, ValueError, TypeError):
        found = torch.stack([torch.as_tensor(of_time(time), dtype=times.dtype) for time in times])
    return found.detach().double().cpu()
