"""diffusers pipelines, drawn speculatively: `foresample.accelerate(pipe)`.

A pipeline's denoising loop is its own affair: guidance, prompts and embeddings are mixed into it in a different
way in each. So the loop itself is put to work. It keeps running as written, but each turn of it becomes one
*call* of the speculative sampler:

    for i, t in enumerate(timesteps):        # the pipeline's; turns that are not needed cost no network call
        network(latents, t, prompts)         # ours: each state gets its own timestep and its image's prompt
        guidance                             # the pipeline's
        latents = scheduler.step(...)        # ours: verify, commit, and hand out the next states to evaluate

`latents` is then a batch of drafted states instead of one state an image, which the loop cannot tell as long as all
it does is row by row and the same in every turn. `session` checks that it is, in every turn, and `watch` watches the
untouched loop first. Text encoders, initial latents, the decoder and everything else stay as they are.
No pipeline has a class of its own here. The stand-ins sit on the instances, while the pipeline draws (`stand_ins`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foresample.chains import scheduler_chain
from foresample.core.look import DIFFERS
from foresample.integrations.diffusers.again import Answered
from foresample.integrations.diffusers.caches import require_no_cache
from foresample.integrations.diffusers.callbacks import CALLBACK, take_callback, wanted_tensors
from foresample.integrations.diffusers.calls import (
    as_generator,
    by_name,
    configuration,
    copied_arguments,
    signature_of,
    stream_seeds,
    to_drop,
    undisturbed,
)
from foresample.integrations.diffusers.sequential import Untouched
from foresample.integrations.diffusers.session import Session
from foresample.integrations.diffusers.stand_ins import (
    SENTENCES,
    Guard,
    disguised,
    one_line,
    overridden,
    reclassed,
    settings_kept,
    states_class,
    taken,
    timesteps_class,
)
from foresample.integrations.diffusers.unchanged import alike, values_of
from foresample.integrations.diffusers.watch import Enough, Trace, Watch, replay_scheduler
from foresample.integrations.refusal import REMEDY, Refused
from foresample.integrations.untouched import NothingGains
from foresample.settings import Settings, Window

_PATCHED = ("step", "set_timesteps", "scale_model_input", "add_noise", "scale_noise")
"""Methods of the scheduler that are overridden while the pipeline draws."""
_ATTRIBUTES = ("_foresample", "foresample_report", "foresample_trace")
"""Attributes that are put on the pipeline's instance."""
WINDOWS = (2, 4, 8, 16, 32)
"""Those that `window="auto"` tries."""


def is_pipeline(served: Any) -> bool:
    """Whether this is a diffusion pipeline: it has a scheduler, and a network to denoise with."""
    return hasattr(served, "scheduler") and any(
        getattr(served, name, None) is not None for name in ("unet", "transformer", "prior", "decoder")
    )


def accelerate_pipeline(pipe: Any, settings: Settings, trace: bool) -> AcceleratedPipeline:
    """See `foresample.accelerate`."""
    _require_supported(pipe.scheduler)
    restore_pipeline(pipe)
    handle = AcceleratedPipeline(pipe, settings, trace)
    pipe._foresample = handle
    return handle


def restore_pipeline(pipe: Any) -> None:
    """Undo `accelerate`; does nothing to a pipeline that was not accelerated."""
    handle = vars(pipe).get("_foresample")
    if handle is not None:
        handle._remove()


class AcceleratedPipeline:
    """What `accelerate` put in place; a context manager that hands out the pipeline.

    Between calls that is the class of the pipeline, no more. Its networks and its scheduler have stand-ins only while
    it draws.
    """

    def __init__(self, pipe: Any, settings: Settings, trace: bool) -> None:
        self.pipe, self.scheduler, self.networks = pipe, pipe.scheduler, _networks(pipe)
        self.settings, self.trace = settings, trace
        self.session: Session | Watch | Untouched | None = None
        self.traces: dict[Any, Trace] = {}
        """What was watched, for each configuration."""
        self.rounding: dict[Any, dict[str, float]] = {}
        """For each configuration that was drawn before: how far the answers of its networks may differ."""
        self.replayed: dict[Any, list[dict[str, Any]]] = {}
        """For each configuration, the scheduler whose `step` was replayed: values, code, and what `step` was given."""
        self._answered: dict[str, Answered] = {}  # by the networks while they were watched, for the next run
        self.doubled: dict[Any, int] = {}
        """How many copies of an image the pipeline's latents hold, for each configuration."""
        self.windows: dict[Any, int | None] = {}
        """What `window="auto"` found, for each configuration; None: no window is faster than the pipeline itself."""
        self._timesteps_class = timesteps_class(lambda timesteps: self._turns(timesteps))
        self._states_class = states_class(self._among_states)
        self._watched: dict[tuple[str, type], type] = {}
        self._methods: dict[str, Callable[..., Any]] = {}  # the scheduler's own, while stand-ins are in place
        self._code: dict[str, Any] = {}  # the same, and everything else of its class
        self._positional = 0  # arguments by position in the loop's call of a network under way
        self._drawing, self._thread, self._guard = threading.Lock(), 0, Guard()
        self._pipeline_class = type(pipe)
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

        self.pipe.__class__ = disguised(self._pipeline_class, {"__call__": __call__}, _ATTRIBUTES)

    def _remove(self) -> None:
        self.pipe.__class__ = self._pipeline_class
        for name in _ATTRIBUTES:
            vars(self.pipe).pop(name, None)

    @contextmanager
    def _serving(self, session: Session | Watch | Untouched) -> Iterator[None]:
        """Stand-ins are in place for one run of the loop, whatever ends it."""
        scheduler, self._thread = self.scheduler, threading.get_ident()
        originals = {name: getattr(scheduler, name) for name in _PATCHED if hasattr(scheduler, name)}
        self._code = {**_code_of(type(scheduler)), **originals}
        self._methods = {name: self._guard.theirs("scheduler", m) for name, m in originals.items()}
        replacements: dict[str, Callable[..., Any]] = {
            "step": self._step,
            "set_timesteps": self._set_timesteps,
            "scale_model_input": self._scale,
            "add_noise": functools.partial(self._add_noise, "add_noise"),
            "scale_noise": functools.partial(self._add_noise, "scale_noise"),
        }
        with ExitStack() as stack:
            stack.enter_context(settings_kept(self.networks.values()))
            # A network is watched at its call, outside of whatever hooks or compilers do to its `forward`.
            for name, network in self.networks.items():
                stack.enter_context(reclassed(network, self._watched_class(name, type(network))))
            methods = {name: self._stand_in(m, replacements[name]) for name, m in originals.items()}
            stack.enter_context(overridden(scheduler, methods))
            self.session = session
            try:
                yield
            finally:
                self.session = None
                if isinstance(getattr(scheduler, "timesteps", None), Tensor):
                    scheduler.timesteps = scheduler.timesteps.as_subclass(Tensor)

    def _watched_class(self, name: str, kind: type) -> type:
        """A network's class, but for its call; made once, so that a compiled network stays compiled."""
        if (name, kind) not in self._watched:

            def __call__(network: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._serves():
                    return kind.__call__(network, *args, **kwargs)
                call = self._guard.theirs(name, functools.partial(kind.__call__, network))
                with self._guard.ours(self.session):
                    return self._evaluate(name, network, call, args, kwargs)

            self._watched[name, kind] = disguised(kind, {"__call__": __call__})
        return self._watched[name, kind]

    def _stand_in(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement under the original's name and signature, which pipelines inspect."""

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if not self._serves():
                return original(*args, **kwargs)
            with self._guard.ours(self.session):
                return replacement(*args, **kwargs)

        return stand_in

    def _serves(self) -> bool:
        """Whether a loop is under way, in this thread: parts may be shared with a pipeline of another one.

        A callback has the parts as they are.
        """
        here = self.session is not None and threading.get_ident() == self._thread
        return here and not getattr(self.session, "calling_back", False)

    def _require_same_parts(self) -> None:
        """The parts that were accelerated, or compiled since."""
        if self.pipe.scheduler is not self.scheduler:
            raise RuntimeError("the pipeline's scheduler was replaced: call foresample.accelerate(pipe) again")
        for name, network in _networks(self.pipe).items():
            known = self.networks.get(name)
            if known is not None and getattr(network, "_orig_mod", None) is known:
                self.networks[name] = network
            elif known is not network:
                raise RuntimeError(
                    f"the pipeline's {name} was replaced: call foresample.accelerate(pipe) again"
                )

    # ------------------------------------------------------------ one call of the pipeline

    def _run(self, bound: inspect.BoundArguments) -> Any:
        if not self._drawing.acquire(blocking=False):
            raise Refused(
                "this accelerated pipeline is still drawing, in another thread or around a callback that calls it: "
                "wait until that call returns, or give each thread a pipeline of its own (copy.deepcopy(pipe))"
            )
        try:
            self._forget_reports()  # of an earlier call
            self._require_same_parts()
            require_no_cache(self.networks)
            with taken({"scheduler": self.scheduler, **self.networks}):
                return self._drawn(bound)
        except BaseException as error:
            self._forget_reports()  # of trials
            if isinstance(error, Refused):
                error.args = (f"{error}{to_drop(bound)}",)
            raise
        finally:
            self._drawing.release()

    def _forget_reports(self) -> None:
        for name in ("foresample_report", "foresample_trace"):
            vars(self.pipe).pop(name, None)

    def _drawn(self, bound: inspect.BoundArguments) -> Any:
        arguments = bound.arguments
        if type(self.scheduler).__name__.startswith("DDIM") and not arguments.get("eta"):
            scheduler_chain(self.scheduler, eta=0.0)  # refuses, with the remedy
        generator = arguments.get("generator")
        if isinstance(generator, Sequence):
            generator = [as_generator(g) for g in generator]
            arguments["generator"] = generator
        whole = copied_arguments(bound)
        callback = take_callback(bound)
        key = configuration(self.scheduler, self.networks, arguments)
        if self.trace and key not in self.traces:
            self.traces[key] = self._watch(bound)
        window = self._window(key, bound)
        if window is None:
            return self._sequential(whole, key)
        return self._draw(bound, window, callback, key)

    def _draw(
        self, bound: inspect.BoundArguments, window: Window, callback: Callable[..., Any] | None, key: Any
    ) -> Any:
        seeds = stream_seeds(bound.arguments.get("generator"))
        new, rounding = key not in self.rounding, dict(self.rounding.get(key, {}))
        callers = {n: self._guard.theirs(n, self._caller(network)) for n, network in self.networks.items()}
        settings, heard = replace(self.settings, window=window), (callback, wanted_tensors(bound))
        session = Session(self.pipe, settings, seeds, heard, self._states_class, callers, rounding, new)
        session.watched, self._answered = self._answered, {}
        if self.trace:
            session.explain = functools.partial(self._explain, session, key)
        if session.in_order.needs_loop:
            bound = copied_arguments(bound)
            bound.arguments[CALLBACK] = session.in_order.end_of_turn
        try:
            with self._serving(session):
                result = self._pipeline_class.__call__(*bound.args, **bound.kwargs)
                with self._guard.ours(session):
                    session.close()
        except SENTENCES:
            raise
        except Exception as error:
            if session.calling_back or session.batch is None or session.over:
                raise
            whose = self._guard.whose if error is self._guard.foreign else "loop"
            raise Refused(
                f"at step {session.turn} the pipeline's {whose} cannot take a batch of drafted states "
                f"({type(error).__name__}: {one_line(error)}); {REMEDY}"
            ) from error
        finally:
            self.doubled[key] = session.double
        self.rounding[key] = rounding
        self._tell(session, key)
        self.pipe.foresample_report = session.report
        if key in self.traces:
            self.pipe.foresample_trace = self.traces[key]
        return result

    def _watch(self, bound: inspect.BoundArguments) -> Trace:
        """Three steps of the untouched loop, with copies of the generators."""
        watch = Watch(self.pipe, self.settings.look)
        with undisturbed(self.pipe, bound) as arguments:
            try:
                with self._serving(watch):
                    self._pipeline_class.__call__(*arguments.args, **arguments.kwargs)
            except Enough:
                pass
        with self._guard.ours(watch):
            trace = watch.conclude()
        self._answered = watch.answered
        return trace

    def _sequential(self, bound: inspect.BoundArguments, key: Any) -> Any:
        """The pipeline's own loop, because no window is faster, and a report that says so."""
        untouched = Untouched()
        with self._serving(untouched):
            result = self._pipeline_class.__call__(*bound.args, **bound.kwargs)
        self.pipe.foresample_report = untouched.report(self.doubled[key])
        if key in self.traces:
            self.pipe.foresample_trace = self.traces[key]
        return result

    def _window(self, key: Any, bound: inspect.BoundArguments) -> Window | None:
        """The window to draw with; None for the pipeline's own loop."""
        asked = self.settings.window
        if asked == "auto":
            return self._fastest(key, bound)
        if isinstance(asked, int) or asked.window is not None:
            return asked
        if key not in self.doubled:  # a tuning by which none gains: is it one for such calls?
            with undisturbed(self.pipe, bound) as arguments, suppress(NothingGains):
                self._draw(arguments, asked, None, key)
        return None

    def _fastest(self, key: Any, bound: inspect.BoundArguments) -> int | None:
        """`window="auto"`: the pipeline itself is drawn with each window, once for this configuration."""
        if key not in self.windows:
            if key not in self.traces:
                self.traces[key] = self._watch(bound)
            best, fastest = None, self.traces[key].loop_seconds
            for window in WINDOWS:
                with undisturbed(self.pipe, bound) as arguments:
                    self._draw(arguments, window, None, key)
                seconds = self.pipe.foresample_report.seconds
                if seconds < fastest:
                    best, fastest = window, seconds
                elif best is not None and seconds > 1.4 * fastest:
                    break
            self.windows[key] = best
        return self.windows[key]

    # ------------------------------------------------------------ what stands in

    def _set_timesteps(self, *args: Any, **kwargs: Any) -> Any:
        result = self._methods["set_timesteps"](*args, **kwargs)
        self.scheduler.timesteps = self.scheduler.timesteps.as_subclass(self._timesteps_class)
        return result

    def _turns(self, timesteps: Tensor) -> Iterator[Tensor]:
        plain = timesteps.as_subclass(Tensor)
        if self.session is None or not self._serves():
            yield from plain.unbind()
            return
        with self._guard.ours(self.session):
            yield from self.session.turns(plain)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        session, bound = self.session, by_name(self.scheduler, "step", args, kwargs)
        if isinstance(session, (Untouched, Watch)):
            return session.step(self._methods["step"], bound)
        assert session is not None
        return session.answer(bound)

    def _scale(self, sample: Tensor, timestep: Any = None) -> Tensor:
        if not isinstance(self.session, Session) or self.session.turn < 1 or self.session.over:
            return self._methods["scale_model_input"](sample, timestep)
        return self.session.scale(sample)

    def _add_noise(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        session, original = self.session, self._methods[name]
        if not isinstance(session, Session) or not session.inside or not session.answered or session.finished:
            return original(*args, **kwargs)
        return session.add_noise(original, by_name(self.scheduler, name, args, kwargs))

    def _caller(self, network: Any) -> Callable[[dict[str, Any]], Any]:
        """Calls a network with arguments by their names, as many of them by position as the loop's own call had."""

        def call(arguments: dict[str, Any]) -> Any:
            ordered = {k: arguments[k] for k in parameters if k in arguments}
            more: dict[str, Any] = ordered.pop(others, {}) if others is not None else {}
            values = list(ordered.values())[: self._positional]
            return network(*values, **dict(list(ordered.items())[self._positional :]), **more)

        parameters = _signature(network).parameters
        others = next((k for k, p in parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
        return call

    def _evaluate(self, name: str, network: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        session = self.session
        if isinstance(session, Watch) and session.turning:
            return session.evaluate(name, call, args, kwargs)
        if not isinstance(session, Session) or not session.inside:
            return call(*args, **kwargs)
        signature, self._positional = _signature(network), len(args)
        bound = signature.bind(*args, **kwargs)
        return session.evaluate(name, dict(bound.arguments), list(signature.parameters))

    def _among_states(self, kind: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Drafted states meet a tensor with a row for each image: it is given a row for each state."""
        session, kwargs = self.session, kwargs or {}
        if isinstance(session, Session) and session.inside:
            with torch._C.DisableTorchFunctionSubclass(), self._guard.ours(session):
                args, kwargs = session.aligned((args, kwargs))
        return Tensor.__torch_function__.__func__(kind, func, types, args, kwargs)  # type: ignore[attr-defined]

    def _tell(self, session: Session, key: Any) -> None:
        """What the run checked, and what it took on trust."""
        evidence = session.report.evidence
        if key in self.traces:
            evidence.steps_replayed = self.traces[key].steps + self.trace * session.clock.steps
        trusted = [
            name for name, on in (("look=False", self.settings.look), ("trace=False", self.trace)) if not on
        ]
        if evidence.largest_change > DIFFERS:
            trusted.append("differences of the network's rounding")
        evidence.trusted = [*trusted, "answers at states that were not asked again"]

    def _explain(self, session: Session, key: Any, chain: Any, x: Tensor, arguments: dict[str, Any]) -> None:
        """The scheduler's own `step` at all steps, unless this very scheduler was replayed before."""
        told = {name: value for name, value in arguments.items() if name != "generator"}
        now = [values_of(self.scheduler), self._code, told]
        if key in self.replayed and alike(self.replayed[key], now):
            return
        clock, names = session.clock, session.step_names
        replay_scheduler(self.scheduler, self._methods, chain, clock.timesteps, x, told, clock.start, names)
        self.replayed[key] = now


def _networks(pipe: Any) -> dict[str, torch.nn.Module]:
    """The pipeline's networks, by their names."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def _code_of(kind: type) -> dict[str, Any]:
    """Everything that instances of a class have from it: somebody may patch it between two runs."""
    return {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}


def _signature(network: Any) -> inspect.Signature:
    """Of its `forward`, also where it is compiled."""
    return signature_of(getattr(network, "_orig_mod", network), "forward")


def _require_supported(scheduler: Any) -> None:
    """Refuse a scheduler without an exact coupling at once, and not after a prompt has been encoded."""
    trial = copy.deepcopy(scheduler)
    dynamic = {"mu": 1.0} if trial.config.get("use_dynamic_shifting", False) else {}
    trial.set_timesteps(4, **dynamic)
    scheduler_chain(trial, eta=1.0)
