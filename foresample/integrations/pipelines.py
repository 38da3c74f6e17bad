"""diffusers pipelines, drawn speculatively: `foresample.accelerate(pipe)`.

A pipeline's denoising loop is its own affair: guidance, prompts and embeddings are mixed into it in a different
way in each. So the loop itself is put to work. It keeps running as written, but each turn of it becomes one
*call* of the speculative sampler:

    for i, t in enumerate(timesteps):        # ours: goes on until all images are done
        network(latents, t, prompts)         # ours: each state gets its own timestep and its image's prompt
        guidance                             # the pipeline's
        latents = scheduler.step(...)        # ours: verify, commit, and hand out the next states to evaluate

`latents` is then a batch of drafted states instead of one state an image, which the loop cannot tell, since all
it does is row by row. Text encoders, initial latents, the decoder and everything else stay as they are.
Nothing is subclassed per pipeline; what is put in place sits on the instances and is taken away by `restore`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foresample.chains import Chain, scheduler_chain
from foresample.chains.chain import per_row
from foresample.contracts import Drafter, require_drafter
from foresample.core.noise import seeds_of
from foresample.core.report import Commit, Report, Tally
from foresample.core.round import Call, Packed, Speculation, begin, last_draftable
from foresample.drafters import Replay
from foresample.engine.slots import HandedRounds
from foresample.targets import ChainTarget

_PATCHED = ("step", "set_timesteps", "scale_model_input")
"""Methods of the scheduler's instance that are replaced."""


def is_pipeline(served: Any) -> bool:
    """Whether this is a diffusion pipeline: it has a scheduler, and a unet or a transformer."""
    return hasattr(served, "scheduler") and _network_of(served) is not None


def accelerate_pipeline(
    pipe: Any, window: int, drafter: Drafter | None, block: int | None, recycle: bool
) -> AcceleratedPipeline:
    """See `foresample.accelerate`."""
    drafter = Replay() if drafter is None else drafter
    require_drafter(drafter)
    _require_supported(pipe.scheduler)
    restore_pipeline(pipe)
    handle = AcceleratedPipeline(pipe, _network_of(pipe), window, drafter, block, recycle)
    pipe._foresample = handle
    return handle


def restore_pipeline(pipe: Any) -> None:
    """Undo `accelerate`; does nothing to a pipeline that was not accelerated."""
    handle = vars(pipe).get("_foresample")
    if handle is not None:
        handle._remove()
        del pipe._foresample


def _network_of(pipe: Any) -> Any:
    return getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)


class AcceleratedPipeline:
    """What `accelerate` put in place; a context manager that hands out the pipeline."""

    def __init__(
        self,
        pipe: Any,
        network: torch.nn.Module,
        window: int,
        drafter: Drafter,
        block: int | None,
        recycle: bool,
    ) -> None:
        self.pipe, self.network, self.scheduler = pipe, network, pipe.scheduler
        self.window, self.drafter, self.block, self.recycle = window, drafter, block, recycle
        self.session: Session | None = None
        self._pipeline_class = type(pipe)
        self._forward = network.forward
        self._step = self.scheduler.step
        self._set_timesteps = self.scheduler.set_timesteps
        self._scale = getattr(self.scheduler, "scale_model_input", None)
        # Iterating over the scheduler's timesteps is what drives the loop; all else about the tensor stays.
        self._timesteps_class = type(
            "SpeculativeTimesteps", (Tensor,), {"__iter__": lambda timesteps: self._turns(timesteps)}
        )
        # What the instances had of their own before (an offloading hook, somebody's patch) is put back.
        self._before = [
            (owner, name, vars(owner)[name])
            for owner, name in (*((self.scheduler, name) for name in _PATCHED), (network, "forward"))
            if name in vars(owner)
        ]
        self._install()

    def __enter__(self) -> Any:
        return self.pipe

    def __exit__(self, *error: object) -> None:
        restore_pipeline(self.pipe)

    # ------------------------------------------------------------ putting in place and taking away

    def _install(self) -> None:
        handle, original = self, self._pipeline_class.__call__

        @functools.wraps(original)
        def __call__(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            return handle._run(inspect.signature(original).bind(pipe, *args, **kwargs))

        self.pipe.__class__ = type(
            self._pipeline_class.__name__, (self._pipeline_class,), {"__call__": __call__}
        )
        self.network.forward = _stand_in(self._forward, self._evaluate)
        self.scheduler.step = _stand_in(self._step, self._answer)
        self.scheduler.set_timesteps = _stand_in(self._set_timesteps, self._plan)
        if self._scale is not None:
            self.scheduler.scale_model_input = _stand_in(self._scale, self._scale_states)

    def _remove(self) -> None:
        self.pipe.__class__ = self._pipeline_class
        vars(self.network).pop("forward", None)
        for name in _PATCHED:
            vars(self.scheduler).pop(name, None)
        for owner, name, value in self._before:
            setattr(owner, name, value)
        if isinstance(getattr(self.scheduler, "timesteps", None), Tensor):
            self.scheduler.timesteps = self.scheduler.timesteps.as_subclass(Tensor)
        vars(self.pipe).pop("foresample_report", None)

    # ------------------------------------------------------------ one call of the pipeline

    def _run(self, bound: inspect.BoundArguments) -> Any:
        if self.pipe.scheduler is not self.scheduler:
            raise RuntimeError("the pipeline's scheduler was replaced: call foresample.accelerate(pipe) again")
        arguments = bound.arguments
        if type(self.scheduler).__name__ == "DDIMScheduler" and not arguments.get("eta"):
            scheduler_chain(self.scheduler, eta=0.0)  # refuses, with the remedy
        generator = arguments.get("generator")
        if isinstance(generator, Sequence):
            generator = [_as_generator(g) for g in generator]
            arguments["generator"] = generator
        self.session = Session(self, _stream_seeds(generator), _take_callback(arguments))
        try:
            return self._pipeline_class.__call__(*bound.args, **bound.kwargs)
        finally:
            self.session = None

    def _plan(self, *args: Any, **kwargs: Any) -> Any:
        result = self._set_timesteps(*args, **kwargs)
        self.scheduler.timesteps = self.scheduler.timesteps.as_subclass(self._timesteps_class)
        return result

    def _turns(self, timesteps: Tensor) -> Iterator[Tensor]:
        plain = timesteps.as_subclass(Tensor)
        return iter(plain.unbind()) if self.session is None else self.session.turns(plain)

    def _answer(self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.session is None:
            return self._step(model_output, timestep, sample, *args, **kwargs)
        states = self.session.answer(model_output, sample, **kwargs)
        if kwargs.get("return_dict", True):
            return SimpleNamespace(prev_sample=states, pred_original_sample=None)
        return (states, None)

    def _scale_states(self, sample: Tensor, timestep: Any) -> Tensor:
        if self.session is None or self.session.call is None:
            assert self._scale is not None
            return self._scale(sample, timestep)
        return self.session.scale(sample)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if self.session is None:
            return self._forward(*args, **kwargs)
        bound = inspect.signature(self._forward).bind(*args, **kwargs)
        self.session.condition(bound.arguments)
        return self._forward(*bound.args, **bound.kwargs)


class Session:
    """One call of an accelerated pipeline, from its first turn to its last."""

    def __init__(
        self, handle: AcceleratedPipeline, seeds: Callable[[int], Tensor], callback: Callable[..., Any] | None
    ) -> None:
        self.handle, self.seeds, self.callback = handle, seeds, callback
        self.call: Call | None = None  # the states now in the loop's hands; None until the first answer
        self.rounds: HandedRounds | None = None
        self.chain: Chain | None = None
        self.images = 0
        self.tally: Tally | None = None
        self.report: Report | None = None
        self.start, self.started = 0, 0.0
        self.first_time: float | None = None
        self.time_scale: float | None = None
        self.done = self.answered = False
        self.own_seconds = 0.0

    def turns(self, timesteps: Tensor) -> Iterator[Tensor]:
        """What the pipeline's loop iterates over: one timestep for each turn it must take."""
        self.start = len(self.handle.scheduler.timesteps) - len(timesteps)
        self.first_time = float(timesteps[0])
        yield timesteps[0]
        while not self.done:
            if not self.answered:
                raise RuntimeError(
                    "the pipeline skipped a step (an interrupt?), which an accelerated pipeline cannot; "
                    "call foresample.restore(pipe) first"
                )
            self.answered = False
            assert self.call is not None
            yield timesteps[self.call.step[0]]

    def answer(self, output: Tensor, sample: Tensor, **kwargs: Any) -> Tensor:
        """Take the (guided) network output for the states in hand; return the next states to evaluate."""
        started = perf_counter()
        with torch.no_grad():
            states = self._advance(output, sample, **kwargs)
        self.own_seconds += perf_counter() - started
        done = None if self.rounds is None else self.rounds.finished
        if done is not None and self.report is not None and self.tally is not None:
            self.report.seconds = perf_counter() - self.started
            self.report.target_seconds = self.report.seconds - self.own_seconds
            self.tally.close(self.report, states, done.calls, done.evaluations)
            self.handle.pipe.foresample_report = self.report
        self.answered = True
        return states.to(sample.dtype)

    def _advance(self, output: Tensor, sample: Tensor, **kwargs: Any) -> Tensor:
        if self.call is None:
            self.call = self._begin(sample, **kwargs)
            if len(self.call.x) != len(sample):  # a drafter that needs no warm-up: its drafts come first
                return self.call.x
        assert self.rounds is not None
        assert self.chain is not None
        self.rounds.answer(self.chain.predict(self.call.x, output, self.call.step, self.call.extra))
        if self.rounds.finished is not None:
            self.done = True
            return self.rounds.finished.x
        assert self.rounds.call is not None
        self.call = self.rounds.call
        return self.call.x

    def _begin(self, x: Tensor, eta: float = 0.0, use_clipped_model_output: bool = False, **_: Any) -> Call:
        handle, self.images = self.handle, len(x)
        read = scheduler_chain(
            handle.scheduler, eta=eta, use_clipped=use_clipped_model_output, start=self.start
        )
        self.chain = read.to(x.device, torch.float32)
        target = ChainTarget(self.chain, x.shape[1:], _unreachable)
        last = last_draftable(self.chain.std)
        how = Speculation(handle.drafter, handle.window, handle.block, handle.recycle, last, Packed())
        seeds = self.seeds(len(x)).to(x.device)
        steps = len(self.chain.std)
        self.report = Report(f"{handle.drafter}", steps, len(x), handle.window, slots=len(x))
        self.tally, self.started = Tally(handle.window, steps, x.device), perf_counter()
        rows = begin(target, handle.drafter, handle.window, seeds, x=x.float())
        self.rounds = HandedRounds(target, rows, how, self.tally, _InOrder(self, steps))
        assert self.rounds.call is not None
        return self.rounds.call

    def scale(self, sample: Tensor) -> Tensor:
        """scale_model_input, for states at different steps; `sample` may hold several copies of them."""
        assert self.chain is not None
        assert self.call is not None
        if self.chain.scale is None:
            return sample
        step = self.call.step.repeat(len(sample) // len(self.call.step))
        return (per_row(self.chain.scale, step, sample) * sample).to(sample.dtype)

    def condition(self, arguments: dict[str, Any]) -> None:
        """Give each state of a network call its own timestep and its image's conditioning, in place."""
        received = arguments["timestep"]
        if self.time_scale is None:  # some pipelines pass t / 1000
            assert self.first_time is not None
            value = float(received.flatten()[0]) if isinstance(received, Tensor) else float(received)
            self.time_scale = value / self.first_time if self.first_time else 1.0
        if self.call is None or self.chain is None:
            return
        states = next(iter(arguments.values()))
        copies = len(states) // len(self.call.x)
        assert self.chain.time is not None
        time = (self.chain.time[self.call.step] * self.time_scale).repeat(copies)
        arguments["timestep"] = time.to(received.dtype) if isinstance(received, Tensor) else time
        offset = self.images * torch.arange(copies, device=states.device).repeat_interleave(len(self.call.row))
        row = self.call.row.repeat(copies) + offset
        for name, argument in list(arguments.items())[1:]:
            if name not in ("timestep", "img_ids", "txt_ids"):
                arguments[name] = _select(argument, row, copies * self.images)


class _InOrder:
    """Calls the user's callback once for each step, in order, when all images have committed it."""

    def __init__(self, session: Session, steps: int) -> None:
        self.session, self.steps, self.next = session, steps, 0
        self.waiting: dict[int, Tensor] = {}
        self.committed: Tensor | None = None

    def __call__(self, commit: Commit) -> None:
        session = self.session
        if session.callback is None:
            return
        if self.committed is None:
            self.committed = torch.zeros(session.images, dtype=torch.int64)
        for r, image in enumerate(commit.sample.tolist()):
            first, count = int(commit.step[r]), int(commit.committed[r])
            for j in range(count):
                shape = (session.images, *commit.states.shape[2:])
                states = self.waiting.setdefault(first + j, commit.states.new_empty(shape))
                states[image] = commit.states[r, j]
            self.committed[image] = first + count
        while self.next < self.steps and int(self.committed.min()) > self.next:
            self._report(self.next, self.waiting.pop(self.next))
            self.next += 1

    def _report(self, step: int, latents: Tensor) -> None:
        session = self.session
        assert session.callback is not None
        assert session.chain is not None
        assert session.chain.time is not None
        given = latents.clone()
        answer = session.callback(session.handle.pipe, step, session.chain.time[step], {"latents": given})
        changed = (answer or {}).get("latents", given)
        if changed is not given or not torch.equal(given, latents):
            raise ValueError(
                "callback_on_step_end changed the latents, which an accelerated pipeline has already stepped "
                "beyond; call foresample.restore(pipe) first"
            )


def _stand_in(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement under the original's name and signature, which pipelines inspect."""

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return stand_in


def _take_callback(arguments: dict[str, Any]) -> Callable[..., Any] | None:
    """Remove the pipeline's own callback; refuse what cannot be handed to it."""
    if (
        arguments.pop("callback", None) is not None
        or arguments.get("kwargs", {}).pop("callback", None) is not None
    ):
        raise ValueError("the deprecated `callback` is not supported: use callback_on_step_end")
    callback = arguments.pop("callback_on_step_end", None)
    wanted = arguments.get("callback_on_step_end_tensor_inputs") or ["latents"]
    if callback is not None and list(wanted) != ["latents"]:
        raise ValueError(
            f"an accelerated pipeline can hand only latents to callback_on_step_end, not {', '.join(wanted)}"
        )
    return callback


def _as_generator(value: Any) -> torch.Generator:
    """A generator as it is; a seed as a generator."""
    return value if isinstance(value, torch.Generator) else torch.Generator().manual_seed(int(value))


def _stream_seeds(generator: Any) -> Callable[[int], Tensor]:
    """Seeds of the images' noise streams, drawn from copies: the generators stay the pipeline's."""

    def drawn(source: torch.Generator | None) -> int:
        if source is None:
            return int(torch.randint(2**62, ()))
        twin = torch.Generator(source.device)
        twin.set_state(source.get_state())
        return int(torch.randint(2**62, (), generator=twin, device=source.device))

    if isinstance(generator, Sequence):
        each = [drawn(g) for g in generator]
        return lambda count: torch.tensor(each) if len(each) == count else seeds_of(each[0], count)
    run = drawn(generator)
    return lambda count: seeds_of(run, count)


def _select(value: Any, row: Tensor, batch: int) -> Any:
    """Conditioning for rows: tensors with a batch dimension are indexed, containers looked into."""
    if isinstance(value, Tensor):
        return value[row] if value.ndim > 0 and len(value) == batch else value
    if isinstance(value, dict):
        return {name: _select(item, row, batch) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_select(item, row, batch) for item in value)
    return value


def _require_supported(scheduler: Any) -> None:
    """Refuse a scheduler without an exact coupling at once, and not after a prompt has been encoded."""
    trial = copy.deepcopy(scheduler)
    for name in _PATCHED:
        vars(trial).pop(name, None)
    dynamic = {"mu": 1.0} if trial.config.get("use_dynamic_shifting", False) else {}
    trial.set_timesteps(4, **dynamic)
    scheduler_chain(trial, eta=1.0)


def _unreachable(x: Tensor, time: Tensor, row: Tensor) -> Tensor:
    raise AssertionError("the pipeline evaluates the network, not the target")
