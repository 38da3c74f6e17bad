"""OpenAI's GaussianDiffusion and SpacedDiffusion: guided-diffusion's, improved-diffusion's, DiT's, MDM's.

Over a thousand repositories hold a copy of this class, and many have changed it. So no copy is trusted:

* Every prediction comes from the object's own `p_mean_variance`, and from its `condition_mean` with a `cond_fn`, so
  changes in them are kept. With c the posterior's weight of x_0, the prediction is the x_0 with their posterior mean:
  pred_xstart + (mean − posterior mean at pred_xstart) / c.
* The rest of a step adds noise times exp(log_variance / 2) to that mean. This is compared with the object's own loop
  and its `p_sample`, which run with a made-up network: the loop once for each configuration, and its first steps and
  all steps of `p_sample` in every call, with the conditions of that call.
* `p_sample_loop` runs as it is. It takes its result from `p_sample_loop_progressive`, which is replaced.

**Guidance that doubles the batch** (DiT's `forward_with_cfg`): the model computes both halves of the batch from the
states of the first. So only the first half is drawn. The second needs no network: the object's own `p_sample` takes its
steps with the outputs recorded along the first half's path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from foresample.chains import Chain, vp
from foresample.chains.chain import Levels, denoising_chain, per_row
from foresample.chains.schedulers import LEARNED_BASE
from foresample.contracts import Target, Wrapper
from foresample.core.report import Commit, Report
from foresample.integrations.explain import ChainBeside, difference, made_up, same_noise
from foresample.integrations.networks import for_rows
from foresample.integrations.packages.loop import Drawing, PackageLoop
from foresample.integrations.replaced import REPORT
from foresample.integrations.trusted import held, require_current
from foresample.targets import from_chain

_LOOP, _PROGRESSIVE = "p_sample_loop", "p_sample_loop_progressive"
_STEP = "p_sample", "p_mean_variance", "q_posterior_mean_variance"
_OPTIONS = "clip_denoised", "denoised_fn", "cond_fn"
_ARGUMENTS = "model", "shape", "noise", *_OPTIONS, "model_kwargs", "device", "progress"
_ROUNDING = 1e-4  # of 1 + |x|, in float32
_FIRST = 2
"""Steps of the object's own loop that every call compares."""
_AT_ONCE = 2**20
"""Numbers in the states for which its `p_sample` is called at once."""


class OpenAILoop(PackageLoop):
    """Replaces `p_sample_loop_progressive`, and `p_sample_loop` to note that only the last state is needed."""

    package, kind = "OpenAI", "GaussianDiffusion"
    attributes = _PROGRESSIVE, _LOOP, *_STEP, "model_var_type"
    replaces = _PROGRESSIVE, _LOOP
    steps = ("p_sample",)
    last_only = False

    @property
    def owners(self) -> tuple[str, ...]:  # type: ignore[override]
        """All classes of the object: copies have no name in common."""
        return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(self.served).__mro__)

    def refuse(self) -> None:
        openai_chain(self.served)

    def assumption(self) -> str:
        return f"{getattr(self, '__qualname__', self.name)} steps as it did when it was compared"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.name == _PROGRESSIVE:
            path = super().__call__(*args, **kwargs)
            report = vars(self.served).get(REPORT)
            return _timed(path, report) if report is not None and report.window == 0 else path
        require_current(self.original, self.served, self.name)
        progressive = vars(self.served)[_PROGRESSIVE]
        progressive.last_only = self._asked(args, kwargs).get("dump_steps") is None
        try:
            return self.original(*args, **kwargs)
        finally:
            progressive.last_only = False

    def drawing(self, asked: dict[str, Any]) -> Drawing | None:
        self.refuse_others(asked, *_ARGUMENTS)
        model, shape, start, device = asked["model"], asked["shape"], asked.get("noise"), asked.get("device")
        device = next(model.parameters()).device if device is None else device
        start = torch.randn(*shape, device=device) if start is None else start
        if len(start) != shape[0]:
            raise ValueError(
                f"noise holds {len(start)} states and shape asks for {shape[0]}: give one for each sample"
            )
        if not len(start):
            return None
        chain = openai_chain(self.served).to(start.device, torch.promote_types(start.dtype, torch.float32))
        options = {name: asked[name] for name in _OPTIONS if name in asked}
        steps = _Steps(self.served, chain, model, options, asked.get("model_kwargs") or {}, len(start))
        self._require_explained(steps, start)
        steps.halves = not isinstance(model, torch.nn.Module) and steps.doubles(start)
        drawn = start[: len(start) // 2] if steps.halves else start
        dtype, last_only = chain.std.dtype, self.last_only
        target: Target = from_chain(
            steps, chain, start.shape[1:], start=drawn, dtype=dtype, device=start.device
        )
        kept = [] if last_only else ["sample", "pred_xstart"]
        path = _Path(target, steps, len(drawn), kept + ["answer"] * steps.halves)
        if path.names:
            target = path

        def result(samples: Tensor) -> Iterator[dict[str, Tensor]]:
            second = steps.second_half(start, path.kept["answer"]) if steps.halves else None
            for k in range(len(chain.std)):
                found = {} if last_only else {name: path.kept[name][k] for name in kept}
                if k == len(chain.std) - 1:
                    found["sample"] = samples
                if second is not None:
                    other = next(second)
                    found = {name: torch.cat([value, other[name]]) for name, value in found.items()}
                yield _Kept(found)

        network = getattr(model, "__self__", model)
        return Drawing(target, len(drawn), network, result, observe=path.observe if path.names else None)

    def _require_explained(self, steps: _Steps, start: Tensor) -> None:
        """Refuse the object if its own steps, with a made-up network, make other states than the chain.

        A new configuration is compared over the whole loop. Steps may also depend on the values of conditions, or on
        values kept anywhere, so every call compares the loop's first steps and `p_sample` at every step.
        """
        diffusion, given = self.served, steps.options
        functions = [getattr(getattr(diffusion, n, None), "__func__", None) for n in (*_STEP, "condition_mean")]
        options = given.get("clip_denoised"), [name for name, value in given.items() if value is not None]
        kind = _names(steps.conditions), start.shape[1:], start.dtype, start.device
        now = self.original, functions, held(diffusion), options, *kind
        made, new = steps.with_made_up_network(), now != self._compared
        self._require_loop(made, start, None if new else _FIRST)
        self._require_steps(made, start)
        if new:
            self._compared, self._unreported = now, len(steps.chain.std)

    def _require_loop(self, made: _Steps, start: Tensor, most: int | None) -> None:
        """Compare the object's own loop, at most so many steps of it, with the chain."""
        steps, row = len(made.chain.std), torch.arange(len(start), device=start.device)
        x, beside, count = start, ChainBeside(made.chain, start), 0
        asked = made.options | {"noise": x, "model_kwargs": made.given(row), "device": x.device}
        with same_noise(x.device) as noise:
            for found in islice(self.original(made.model, tuple(start.shape), **asked), most):
                if count == steps:
                    self._refuse(f"step {count} of its {_PROGRESSIVE}")
                output = made(x, torch.full_like(row, steps - 1 - count), row)
                expected, x = beside.after(count, x, output, _drawn(x, noise)), found["sample"]
                if not _explains(expected, x):
                    self._refuse(f"step {count} of its {_PROGRESSIVE}")
                count += 1
        if count < steps and most is None:
            self._refuse(f"step {count} of its {_PROGRESSIVE}")

    def _require_steps(self, made: _Steps, start: Tensor) -> None:
        """Compare the object's own `p_sample` with the chain, at least once at each step and for each sample."""
        last, at_once = len(made.chain.std) - 1, max(1, _AT_ONCE // start[0].numel())
        place = torch.arange(max(last + 1, len(start)), device=start.device)
        noisy = place % (last + 1) < last  # a copy may add noise to all rows of a call or to none
        parts = (*place[noisy].split(at_once), *place[~noisy].split(at_once))
        for part in filter(len, parts):
            step, row = part % (last + 1), part % len(start)
            x, options = start[row], made.options | {"model_kwargs": made.given(row)}
            with same_noise(x.device) as noise:
                found = self.served.p_sample(made.model, x, last - step, **options)
            output = made(x, last - step, row)
            expected = ChainBeside(made.chain, x).after(step, x, output, _drawn(x, noise))
            if not _explains(expected, found["sample"]):
                self._refuse("a step of its p_sample")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"{type(self.served).__name__} takes other steps than its chain: {what} is not its p_mean_variance plus "
            "noise; undo that change, or leave out the entry of model_kwargs that causes it, or make a target with "
            "foresample.targets"
        )


def _drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _explains(expected: Tensor, found: Tensor) -> bool:
    return difference(expected, found, lambda x: 1 + x.abs()) <= _ROUNDING


def openai_chain(diffusion: Any) -> Chain:
    """The chain of its loop, its network predicting x_0: the tables of the object, in float64."""

    def table(name: str) -> Tensor:
        return torch.from_numpy(np.array(getattr(diffusion, name), np.float64)).flip(0)

    kind, time = diffusion.model_var_type.name, torch.arange(diffusion.num_timesteps).flip(0)
    if kind not in ("FIXED_SMALL", "FIXED_LARGE", "LEARNED_RANGE"):
        raise ValueError(
            f"{type(diffusion).__name__}(model_var_type={kind}) has a variance without a lower bound, for which there "
            "is no exact coupling: use a model with ModelVarType.LEARNED_RANGE or a fixed variance"
        )
    variance = table("betas") if kind == "FIXED_LARGE" else table("posterior_log_variance_clipped").exp()
    chain = denoising_chain(
        Levels(table("sqrt_alphas_cumprod"), table("sqrt_one_minus_alphas_cumprod")),
        state_weight=table("posterior_mean_coef2"),
        x0_weight=table("posterior_mean_coef1"),
        std=torch.where(time > 0, variance.sqrt(), 0.0),
        predicts="x0",
        reuse="x0",
        time=time,
    )
    return vp.learned_range(chain, table("betas"), LEARNED_BASE) if kind == "LEARNED_RANGE" else chain


@dataclass(eq=False)
class _Steps:
    """The object's predictions at states of any steps: the network of its chain, which predicts x_0."""

    diffusion: Any
    chain: Chain
    model: Any
    options: dict[str, Any]
    conditions: dict[str, Any]
    count: int
    halves: bool = False
    """True if the model doubles its batch: then states and return values are the first half's."""
    answer: Any = None
    """The last output of the model."""
    seen: dict[str, Tensor] = field(default_factory=dict)
    """Values of the last call: pred_xstart, and the model's answers for the second half."""

    def __call__(self, x: Tensor, time: Tensor, row: Tensor) -> Tensor:
        count = len(x)
        if self.halves:
            x, time, row = torch.cat([x, x]), torch.cat([time, time]), torch.cat([row, row + self.count // 2])
        options, given, chain = dict(self.options), self.given(row), self.chain
        cond_fn, step = options.pop("cond_fn", None), len(chain.std) - 1 - time
        model = _Model(self.model, self._answer)
        found = self.diffusion.p_mean_variance(model, x, time, **options, model_kwargs=given)
        x0, mean, log_variance = (found[name] for name in ("pred_xstart", "mean", "log_variance"))
        if cond_fn is not None:
            mean = self.diffusion.condition_mean(cond_fn, found, x, time, model_kwargs=given)
        posterior = self.diffusion.q_posterior_mean_variance(x_start=x0, x_t=x, t=time)[0]
        output = x0 + (mean - posterior) / per_row(chain.prediction_weight, step, x)
        std = per_row(chain.std, step, x)
        if chain.low_variance is not None and chain.high_variance is not None:
            low, high = (per_row(v, step, x) for v in (chain.low_variance, chain.high_variance))
            between = 2 * (log_variance - low) / torch.where(std > 0, high - low, 1.0) - 1
            output = torch.cat([output, torch.where(std > 0, between, 0.0)], 1)
        elif (
            ((0.5 * log_variance).exp() - std).abs() > torch.where(std > 0, _ROUNDING * std, torch.inf)
        ).any():
            raise ValueError(
                f"{type(self.diffusion).__name__}.p_mean_variance returns another variance than its "
                "model_var_type has: undo that change, or make a target with foresample.targets"
            )
        self.seen = {"pred_xstart": x0[:count]} | ({"answer": self.answer[count:]} if self.halves else {})
        return output[:count]

    def _answer(self, *args: Any, **given: Any) -> Any:
        self.answer = self.model(*args, **given)
        return self.answer

    def with_made_up_network(self) -> _Steps:
        """The same with functions that are made up instead of the model and of those in the options."""
        learned, options = self.chain.low_variance is not None, dict(self.options)
        if options.get("denoised_fn") is not None:
            options["denoised_fn"] = lambda x: 0.7 * torch.sin(x)
        if options.get("cond_fn") is not None:
            options["cond_fn"] = lambda x, t, **given: torch.cos(2 * x)
        model = _Model(self.model, lambda x, t, **given: made_up(x, learned, wide=True))
        return replace(self, options=options, model=model)

    def given(self, row: Tensor) -> dict[str, Any]:
        """The model's keywords for these samples."""
        given, y = for_rows(self.conditions, row, self.count), self.conditions.get("y")
        if isinstance(y, dict) and "text_embed" in y:  # MDM's: [words, samples, width], or that and a mask
            words, *mask = y["text_embed"] if isinstance(y["text_embed"], tuple) else (y["text_embed"],)
            words = words[:, row.to(words.device)] if words.shape[1] == self.count else words
            given["y"]["text_embed"] = (words, *for_rows(mask, row, self.count)) if mask else words
        return given

    def doubles(self, start: Tensor) -> bool:
        """True if the model computes both halves of a batch from the states of the first."""
        half, last = self.count // 2, len(self.chain.std) - 1
        if self.count % 2:
            return False
        row = torch.tensor([0, 0, 0, half, half, half], device=start.device)
        time = torch.tensor([last, last // 2, 0] * 2, device=start.device)
        x, answers = start[row], []
        for second in (x[3:], 1 - 0.5 * x[3:]):
            self(torch.cat([x[:3], second]), time, row)
            answers.append(self.answer)
        return isinstance(answers[0], Tensor) and torch.equal(*answers)

    def second_half(self, start: Tensor, answers: Tensor) -> Iterator[dict[str, Tensor]]:
        """The steps of the second half, from the model's answers for it, [N, R, …]."""
        half = self.count // 2
        x, given = start[half:], self.given(torch.arange(half, self.count, device=start.device))
        for k, answer in enumerate(answers):
            t = torch.full((half,), len(answers) - 1 - k, device=start.device)
            with torch.no_grad():
                model = _Model(self.model, lambda *args, answer=answer, **given: answer)
                found = self.diffusion.p_sample(model, x, t, **self.options, model_kwargs=given)
            yield found
            x = found["sample"]


class _Model:
    """A model with other outputs and its own attributes."""

    def __init__(self, model: Any, answer: Callable[..., Any]) -> None:
        self.model, self.answer = model, answer

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self.answer(*args, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class _Path(Wrapper):
    """A target that keeps the results of its steps, [N, R, …]; only the calls of rounds, not of checks."""

    def __init__(self, target: Target, steps: _Steps, count: int, names: list[str]) -> None:
        super().__init__(target)
        self.steps, self.count, self.names, self.unrecorded = steps, count, names, target
        self.kept: dict[str, Tensor] = {}

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        prediction = super().predict(x, step, row, **extra)
        self.row, self.seen = row, self.steps.seen
        return prediction

    def observe(self, commit: Commit) -> None:
        """Keep the states that a round committed; those of a row are adjacent in its call."""
        place: dict[int, int] = {}
        for i, row in enumerate(self.row.tolist()):
            place.setdefault(row, i)
        states = commit.states
        for r, (sample, first, count) in enumerate(
            zip(*(v.tolist() for v in (commit.sample, commit.step, commit.committed)), strict=True)
        ):
            for name in self.names:
                value = states[r] if name == "sample" else self.seen[name][place[sample] :]
                if name not in self.kept:
                    self.kept[name] = value.new_empty(len(self.std), self.count, *value.shape[1:])
                self.kept[name][first : first + count, sample] = value[:count]


def _timed(path: Iterator[Any], report: Report) -> Iterator[Any]:
    """The object's own steps, where no window gains; the report has their time when they are done."""
    started = perf_counter()
    yield from path
    report.seconds = report.target_seconds = perf_counter() - started


class _Kept(dict[str, Any]):
    """The kept values of a step."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"an accelerated {_LOOP} keeps its last state only, not {name!r} of a step: iterate over {_PROGRESSIVE}, "
            "or call foresample.restore first"
        )


def _names(given: Any) -> Any:
    """Nested keywords with plain values kept and all others replaced by their types."""
    if isinstance(given, dict):
        return {name: _names(value) for name, value in given.items()}
    return given if isinstance(given, bool | int | float | str) else type(given)
