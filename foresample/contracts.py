"""The protocols of targets and drafters, and errors for objects that do not follow them.

Shapes: R rows (samples under way), B states of one call, N steps, L the window, `*shape` one state.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

Method = TypeVar("Method")


@runtime_checkable
class Target(Protocol):
    """A chain of Gaussian transitions x_{k+1} = mean_k(x_k) + std_k z_k, z_k ~ N(0, I), k = 0 … N−1.

    `std` also fixes the chain's dtype and device. A call must process each row independently and always return the same
    answer for it: a network whose output for one row depends on its batch-mates, on random numbers or on earlier calls
    has no transition distribution (samplers check some calls, `foresample.check` every step).
    """

    @property
    def shape(self) -> torch.Size:
        """Shape of one state."""

    @property
    def std(self) -> Tensor:
        """[N], the noise scale of each transition; 0 for a deterministic one."""

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        """The first states x_0 from unit noise, [R, *shape], of the samples `row`, [R] -> [R, *shape]."""

    def predict(self, x: Tensor, step: Tensor, row: Tensor) -> Tensor:
        """The expensive call: states [B, *shape], their steps [B] and sample indices [B] -> [B, *shape].

        Returns the quantity worth reusing at a nearby state (denoised estimate, velocity, score, …). It may write into
        x, which is a copy, but not into step and row. A target that evaluates its network twice (second-order steps)
        has an attribute `calls_per_step = 2`.
        """

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor) -> Tensor:
        """The cheap part: the transition's mean at (x, step), given the prediction there. It may not write into them.

        A multistep target, whose mean also needs the prediction of the step before, has an attribute `multistep = 1`
        (or True) and takes that prediction as a fourth argument (at step 0 it is zero and must not matter).
        With `multistep = 2` the argument holds the predictions one and two steps before, [B, 2, *shape].

        A target with **extra noise** has an attribute `extra`, the shape of ξ_k ~ N(0, I), and takes ξ as a keyword in
        both methods: predict(x, step, row, extra=ξ), mean(x, prediction, step, extra=ξ), with ξ of shape [B, *extra].
        ξ is a function of the sample's seed and the step, independent of all z. Given ξ the chain is one of the kind
        above, so samples are exact whatever ξ does to predictions and means (theory, section 11).

        A target whose mean is affine may offer its weights as `chain` (`AffineChain`), so that rounds on a GPU are
        fused. A target whose average Jacobian of predictions is diagonal may have `bands`, a number for each element
        of a state, on the CPU, equal for elements with the same entry; priors then hold that diagonal. A target may
        have a `fault_hint`, a string that ends the error about NaN.
        """


class UnknownRow(ValueError, IndexError):
    """An error of a target that looks something up by `row` and has nothing for this one."""


class Wrapper:
    """Forwards every attribute of the contract to another target; subclasses override some."""

    def __init__(self, target: Target) -> None:
        self.target, self.shape, self.std = target, target.shape, target.std
        self.multistep, self.extra = earlier_predictions(target), extra_shape(target)
        self.calls_per_step, self.bands = calls_per_step(target), bands(target)
        self.chain = offered_chain(target)
        self.fault_hint: str = getattr(target, "fault_hint", "")

    def start(self, noise: Tensor, row: Tensor) -> Tensor:
        return self.target.start(noise, row)

    def predict(self, x: Tensor, step: Tensor, row: Tensor, **extra: Tensor) -> Tensor:
        return self.target.predict(x, step, row, **extra)

    def mean(self, x: Tensor, prediction: Tensor, step: Tensor, *previous: Tensor, **extra: Tensor) -> Tensor:
        return self.target.mean(x, prediction, step, *previous, **extra)


DrafterMemory = dict[str, Tensor]
"""The state of a drafter from round to round: tensors whose first dimension is the row."""


@dataclass(frozen=True)
class DraftPath:
    """The states of one round and the target's predictions at them, for the drafter to learn from."""

    states: Tensor
    """[R, W+1, *shape]: the round's first state and its drafts; position j is step `step + j`."""
    predictions: Tensor
    """[R, W+1, *shape]: the target's predictions at them."""
    innovations: Tensor
    """[R, W, *shape]: std · noise of the drafted transitions; position j leads to the state at j + 1."""
    length: Tensor
    """[R]: drafts of each row to learn from. Fewer than were drafted if one strayed hopelessly or broke the network;
    positions past `length` hold nothing."""
    step: Tensor
    """[R]: the step of position 0."""


@dataclass(frozen=True)
class PreviousDraft:
    """The transition drafted just before a position: its guessed prediction and its noise."""

    guess: Tensor
    """[R, *shape]"""
    innovation: Tensor
    """[R, *shape]: std · noise."""


class Drafter(Protocol):
    """Guesses the target's predictions along a window, from what earlier rounds evaluated.

    **Adaptedness** is the one rule. The guess at a position, and whether the window reaches beyond it, may use the
    states and predictions of steps up to that position's step and the innovations of steps before it, of this path and
    of earlier ones. They must not use anything of later steps, whose noise is still to be spent. `foresample.check`
    tests this.
    """

    def begin(self, rows: int, window: int, like: Tensor) -> DrafterMemory:
        """The memory of rows before their first round; `like` is a state, [*shape]."""

    # A drafter with a starting point (`drafters.Prior`) also has prime(memory, row) -> memory, called once after
    # `begin` with the indices of the samples, [R]; and for_target(target) -> drafter, called once before any work, to
    # move its starting point to the target's device, or to refuse a target that it does not fit.

    def reach(self, memory: DrafterMemory, window: int) -> Tensor:
        """[R]: the number of transitions to draft now, 0 … window (0: only evaluate the state).

        Adapted as well: whether the transition from a position is drafted depends only on what is known there.
        """

    def guess(
        self,
        memory: DrafterMemory,
        x: Tensor,
        position: int,
        step: Tensor,
        row: Tensor,
        before: PreviousDraft | None,
    ) -> Tensor:
        """The guessed prediction at the states x, [R, *shape], of the window's `position`.

        `before` is None at position 0, the window's first.
        """

    def learn(self, memory: DrafterMemory, path: DraftPath, committed: Tensor) -> DrafterMemory:
        """The memory after a round that committed `committed` ≥ 1 transitions: its first `committed` − 1
        drafts were kept, and the next round starts at what was position `committed`.
        """


def require_target(target: Any) -> None:
    """Refuse an object that is not a target, before any work."""
    missing = [n for n in ("shape", "std", "start", "predict", "mean") if not hasattr(target, n)]
    if missing:
        raise TypeError(
            f"{type(target).__name__} is not a target: it lacks {', '.join(missing)}; "
            "see docs/extending.md, or wrap a denoiser with foresample.targets (pipelines, policies and samplers of "
            "packages: foresample.accelerate)"
        )
    if not isinstance(target.shape, torch.Size) or not target.shape:
        raise ValueError(
            f"target.shape must be a torch.Size of one dimension or more, not {target.shape!r}; a scalar state has "
            "torch.Size([1])"
        )
    if not accepts(target.start, "noise", "row"):
        raise TypeError(
            "target.start must take (noise, row): unit noise, [R, *shape], and the sample each row belongs to, [R]"
        )
    std = target.std
    exact = torch.float32, torch.float64
    if not isinstance(std, Tensor) or std.ndim != 1 or len(std) == 0 or std.dtype not in exact:
        raise ValueError(
            "target.std must be a float32 or float64 tensor of shape [N], one scale per transition: the states have "
            "its dtype, and only the network may run in half precision"
        )
    for step in (~torch.isfinite(std) | (std < 0)).nonzero().flatten().tolist():
        raise ValueError(
            f"target.std must be finite and not negative, but is {std[step].item()} at step {step}; "
            "a deterministic transition has std 0"
        )
    earlier, extra = earlier_predictions(target), extra_shape(target)
    if earlier not in (0, 1, 2):
        raise ValueError(f"target.multistep must be 0, 1 or 2 earlier predictions, not {earlier}")
    if extra is not None and (not isinstance(extra, torch.Size) or len(extra) == 0):
        raise ValueError(
            f"target.extra must be a torch.Size, the shape of one step's extra noise, not {extra!r}; a single number "
            "has shape torch.Size([1])"
        )
    named = {} if extra is None else {"extra": "noise"}
    history = ["previous"] if earlier else []
    for name, args in (("predict", ["x", "step", "row"]), ("mean", ["x", "prediction", "step", *history])):
        method = getattr(target, name)
        if not accepts(method, *args, **named):
            taken = ", ".join([*args, *(f"{key}=…" for key in named)])
            raise TypeError(
                f"target.{name} is called as {name}({taken}), but {defined(method)} does not take that"
            )


def accepts(function: Any, *args: object, **named: object) -> bool:
    """Whether the signature of a function, or of a module's forward, takes these arguments."""
    try:
        inspect.signature(getattr(function, "forward", function)).bind(*args, **named)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        pass
    return True


def defined(function: Any) -> str:
    """A function's name, signature and place, for messages."""
    called = getattr(function, "forward", function)
    name = type(function).__name__ if called is not function else getattr(function, "__name__", repr(function))
    code = getattr(inspect.unwrap(called), "__code__", None)
    place = "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"
    return f"{name}{inspect.signature(called)}{place}"


_CHAIN_MEANS: set[object] = set()


def chain_mean(method: Method) -> Method:
    """Marks a `mean` that is its chain's own by construction: the one of `Chain`, and those of targets that call it."""
    _CHAIN_MEANS.add(method)
    return method


def is_chain_mean(method: object) -> bool:
    """Whether a `mean` is marked as its chain's own."""
    return method in _CHAIN_MEANS


def require_drafter(drafter: object) -> None:
    """Refuse an object that is not a drafter, before any work."""
    missing = [n for n in ("begin", "reach", "guess", "learn") if not callable(getattr(drafter, n, None))]
    if isinstance(drafter, type) or missing:
        raise TypeError(
            f"{drafter!r} is not a drafter; pass an object such as foresample.Replay() or "
            "foresample.Frozen('nearest'), or see docs/extending.md"
        )


def drafter_for(drafter: Drafter, target: Target) -> Drafter:
    """The drafter, fitted to a target; refused if it is made for another chain."""
    fit = getattr(drafter, "for_target", None)
    return drafter if fit is None else fit(target)


def begin_memory(drafter: Drafter, window: int, row: Tensor, like: Tensor) -> DrafterMemory:
    """The memory of samples `row`, [R], before their first round; `like` is a state, [*shape]."""
    memory = drafter.begin(len(row), window, like)
    prime = getattr(drafter, "prime", None)
    return memory if prime is None else prime(memory, row)


def times_written(value: object) -> int:
    """The number of times that a tensor was written to; 0 in inference mode, where torch does not count."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def start_states(target: Target, noise: Tensor, row: Tensor) -> Tensor:
    """The first states of samples `row` from unit noise, checked."""
    x = target.start(noise, row)
    _require_like(x, noise, "target.start(noise, row)")
    return x


def predict(target: Target, x: Tensor, step: Tensor, row: Tensor, extra: Tensor | None = None) -> Tensor:
    """The target's prediction, its shape and dtype checked; `extra` is the extra noise of a target that has some."""
    prediction = target.predict(x, step, row, **_extra(target, extra))
    _require_like(prediction, x, "target.predict(x, step, row)")
    return prediction


def transition_mean(
    target: Target, x: Tensor, prediction: Tensor, step: Tensor, previous: Tensor, extra: Tensor | None = None
) -> Tensor:
    """The transition's mean, checked; `previous` comes from `no_history` or `remember`."""
    history = (previous,) if earlier_predictions(target) else ()
    given = {"x": x, "prediction": prediction, "step": step, "previous": previous}
    written = [times_written(value) for value in given.values()]
    mean = target.mean(x, prediction, step, *history, **_extra(target, extra))
    for (name, value), before in zip(given.items(), written, strict=True):
        if times_written(value) != before:
            raise ValueError(f"target.mean writes into {name}, which the sampler goes on using: work on a copy")
    _require_like(mean, x, "target.mean(x, prediction, step)")
    return mean


def no_history(target: Target | AffineChain, x: Tensor) -> Tensor:
    """The earlier predictions before the first step: zeros, [R, *shape], or [R, 2, *shape] for two."""
    earlier = earlier_predictions(target)
    return torch.zeros_like(x) if earlier < 2 else x.new_zeros((len(x), earlier, *x.shape[1:]))


def remember(target: Target | AffineChain, prediction: Tensor, previous: Tensor) -> Tensor:
    """The earlier predictions of the next step: this one, then those before it."""
    if earlier_predictions(target) < 2:
        return prediction
    return torch.cat([prediction.unsqueeze(1), previous[:, :-1]], dim=1)


def expand(values: Tensor, like: Tensor) -> Tensor:
    """Values shaped to go with states that have more dimensions behind theirs: [R] with [R, *shape]."""
    return values.view(*values.shape, *(1,) * (like.ndim - values.ndim))


def earlier_predictions(target: object) -> int:
    """The number of earlier predictions that the target's mean needs: 0, 1 or 2."""
    return int(getattr(target, "multistep", 0))


def extra_shape(target: Target) -> torch.Size | None:
    """Shape of the extra noise of a step, None for a target without extra noise."""
    return getattr(target, "extra", None)


def bands(target: Target) -> Tensor | None:
    """The band of each element of a state, None for a target without bands; see `Target.mean`."""
    return getattr(target, "bands", None)


def calls_per_step(target: Target) -> int:
    """Network calls in one call of the target."""
    return getattr(target, "calls_per_step", 1)


def _extra(target: Target, extra: Tensor | None) -> dict[str, Tensor]:
    """The extra noise as a keyword of the target's methods; {} for a target without."""
    shape = extra_shape(target)
    if shape is None:
        return {}
    if extra is None:
        raise TypeError(
            f"{type(target).__name__} has extra noise, which a drafter does not know: it can be sampled, but it cannot "
            "draft for another target; draft with foresample.Replay()"
        )
    if extra.shape[1:] != shape:
        raise ValueError(f"extra noise must have shape {(len(extra), *shape)} here, not {tuple(extra.shape)}")
    return {"extra": extra}


def affine_chain(target: Target) -> AffineChain | None:
    """The chain of a target with an affine mean, for the kernels; see `Target.mean`.

    None for targets with extra noise or more than one earlier prediction, which kernels do not support.
    """
    chain = offered_chain(target)
    served = extra_shape(target) is None and earlier_predictions(target) < 2
    return chain if served and getattr(chain, "affine", False) else None


def offered_chain(target: Target) -> Any:
    """The target's attribute `chain`, None if it has none that belongs to its mean.

    A subclass with a mean of its own does not offer the chain that it inherits. Neither does a class with a mean of its
    own offer a chain that it gets from another target by `__getattr__`.
    """
    declared = _declares_chain(type(target))
    own = "chain" in getattr(target, "__dict__", {}) if declared is None else declared
    return getattr(target, "chain", None) if own else None


@cache
def _declares_chain(kind: type) -> bool | None:
    """Whether `chain` is declared in the class that defines `mean`, or nearer; None if no class declares it."""
    mean_found = False
    for base in kind.__mro__:
        if "chain" in vars(base) or "chain" in inspect.get_annotations(base):
            return not mean_found
        mean_found |= "mean" in vars(base)
    return None


class AffineChain(Protocol):
    """The part of a chain that kernels need: mean = state_weight·x + prediction_weight·p (+ previous_weight·p_before).

    All are [N]; `previous_weight` is None unless the chain is multistep.
    """

    @property
    def std(self) -> Tensor: ...

    @property
    def state_weight(self) -> Tensor: ...

    @property
    def prediction_weight(self) -> Tensor: ...

    @property
    def previous_weight(self) -> Tensor | None: ...


def at_least_one(name: str, value: int) -> int:
    """The value as a whole number of at least 1, or an error."""
    if _whole(value) < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return _whole(value)


def resolve_slots(slots: int | None, count: int) -> int:
    """Samples under way at a time: all by default, and never more than `count`."""
    return count if slots is None else min(at_least_one("slots", slots), count)


def resolve_window(window: int, steps: int) -> int:
    """Transitions drafted in a round: a window longer than the chain would draft no more."""
    return min(at_least_one("window", window), max(1, steps - 1))


def seed_number(value: int) -> int:
    """The value as a seed, or an error."""
    if not 0 <= _whole(value) < 2**63:
        raise ValueError(f"a seed must be a whole number from 0 to 2**63 - 1, not {value!r}")
    return _whole(value)


def _whole(value: Any) -> int:
    """An integer of any type (numpy's, a tensor's); −1 for all else, bools and floats included."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def _require_like(value: Tensor, like: Tensor, what: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must return a tensor, not {type(value).__name__}")
    if value.shape != like.shape:
        raise ValueError(
            f"{what} must return shape {tuple(like.shape)} for input of that shape, not {tuple(value.shape)}"
        )
    if value.dtype != like.dtype:
        raise TypeError(
            f"{what} must return {like.dtype}, the dtype of target.std, not {value.dtype}; "
            "cast inside the target (a half-precision network is fine, the chain stays in its own dtype)"
        )
