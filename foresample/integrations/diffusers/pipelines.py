"""diffusers pipelines, drawn speculatively: `foresample.accelerate(pipe)`.

Every pipeline mixes guidance, prompts and embeddings into its denoising loop in a way of its own. So the loop itself
is used: it runs as written, but each of its turns becomes one *call* of the speculative sampler:

    for i, t in enumerate(timesteps):        # the pipeline's; turns that are not needed cost no network call
        network(latents, t, prompts)         # ours: each state gets its own timestep and its image's prompt
        guidance                             # the pipeline's
        latents = scheduler.step(...)        # ours: verify, commit, and hand out the next states to evaluate

`latents` is then a batch of drafted states instead of one state for each image. The loop serves them as well if all it
does is row by row and the same in every turn. `session` checks that in every turn, and `watch` watches the untouched
loop first. Text encoders, initial latents, the decoder and everything else stay as they are.
No pipeline has code of its own here. The stand-ins are put on the instances while the pipeline draws (`stand_ins`).
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
from foresample.integrations.diffusers.callbacks import CALLBACK, take_callback, wanted_tensors
from foresample.integrations.diffusers.calls import (
    as_generators,
    bound_call,
    by_name,
    call_by_name,
    configuration,
    copied_arguments,
    forward_signature,
    networks_of,
    numbers_in,
    random_state,
    stream_seeds,
    to_drop,
    undisturbed,
)
from foresample.integrations.diffusers.parts import Known, Parts, Run
from foresample.integrations.diffusers.session import Session
from foresample.integrations.diffusers.stand_ins import (
    SENTENCES,
    Guard,
    disguised,
    one_line,
    reclassed,
    settings_kept,
    states_class,
    taken,
    timesteps_class,
)
from foresample.integrations.diffusers.trees import same
from foresample.integrations.diffusers.unchanged import require_no_cache, values_of
from foresample.integrations.diffusers.watch import Enough, Trace, Untouched, Watch, replay_scheduler
from foresample.integrations.refusal import Changed, Refused
from foresample.integrations.replaced import Replaced
from foresample.settings import Settings

_ATTRIBUTES = ("_foresample", "foresample_report", "foresample_trace")
"""Attributes that are put on the pipeline's instance."""
WINDOWS = (2, 4, 8, 16, 32)
"""The windows that `window="auto"` tries."""
_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


def is_pipeline(served: Any) -> bool:
    """Whether this is a diffusion pipeline: it has a scheduler, and a network to denoise with."""
    return hasattr(served, "scheduler") and any(
        getattr(served, name, None) is not None for name in ("unet", "transformer", "prior", "decoder")
    )


def accelerate_pipeline(pipe: Any, settings: Settings, trace: bool) -> AcceleratedPipeline:
    """See `foresample.accelerate`; a scheduler without an exact coupling is refused before a prompt is encoded."""
    if getattr(settings.drafter, "prior", None) is not None:
        raise ValueError(
            "a pipeline's loop evaluates its first latents before anything can be drafted, so a prior would never be "
            "used: leave the prior out of the drafter"
        )
    trial = copy.deepcopy(pipe.scheduler)
    dynamic = {"mu": 1.0} if trial.config.get("use_dynamic_shifting", False) else {}
    trial.set_timesteps(4, **dynamic)
    scheduler_chain(trial, eta=1.0)
    restore_pipeline(pipe)
    pipe._foresample = AcceleratedPipeline(pipe, settings, trace)
    return pipe._foresample


def restore_pipeline(pipe: Any) -> None:
    """Undo `accelerate`; does nothing to a pipeline that was not accelerated."""
    handle = vars(pipe).get("_foresample")
    if handle is not None:
        pipe.__class__ = handle.pipeline_class
        _forget(pipe, _ATTRIBUTES)


class AcceleratedPipeline:
    """The handle of an accelerated pipeline; a context manager that returns the pipeline.

    Only the pipeline's class is replaced between calls. Networks and scheduler have stand-ins only while it draws.
    """

    def __init__(self, pipe: Any, settings: Settings, trace: bool) -> None:
        self.pipe, self.scheduler, self.networks = pipe, pipe.scheduler, networks_of(pipe)
        self.settings, self.trace = settings, trace
        self.session: Session | Watch | Untouched | None = None
        self.known: dict[Any, Known] = {}
        """Results of earlier calls, by configuration."""
        self._answered: dict[str, Answered] = {}  # outputs of the watched networks, for the next run
        self._timesteps_class = timesteps_class(lambda timesteps: self._turns(timesteps))
        self._states_class = states_class(self._among_states)
        self._watched: dict[tuple[str, type], type] = {}
        self._methods: dict[str, Callable[..., Any]] = {}  # the scheduler's own, while stand-ins are in place
        self._code: dict[str, Any] = {}  # the same, and everything else of its class
        self._running: Run
        self._counts_rows = hasattr(pipe, "pag_applied_layers")  # its loop counts the rows of an image
        self._positional = 0  # arguments by position in the loop's call of a network under way
        self._drawing, self._thread, self._guard = threading.Lock(), 0, Guard()
        self.pipeline_class = type(pipe)
        original = self.pipeline_class.__call__

        @functools.wraps(original)
        def __call__(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run(bound_call(original, pipe, *args, **kwargs))

        pipe.__class__ = disguised(self.pipeline_class, __call__, _ATTRIBUTES)

    def __enter__(self) -> Any:
        return self.pipe

    def __exit__(self, *error: object) -> None:
        restore_pipeline(self.pipe)

    # ------------------------------------------------------------ putting in place and taking away

    @contextmanager
    def _serving(self, session: Session | Watch | Untouched) -> Iterator[None]:
        """Keep stand-ins in place for one run of the loop, however it ends."""
        scheduler, self._thread, replaced = self.scheduler, threading.get_ident(), Replaced()
        replacements: dict[str, Callable[..., Any]] = {
            "step": self._step,
            "set_timesteps": self._set_timesteps,
            "scale_model_input": self._scale,
            "add_noise": functools.partial(self._add_noise, "add_noise"),
            "scale_noise": functools.partial(self._add_noise, "scale_noise"),
        }
        originals = {name: getattr(scheduler, name) for name in replacements if hasattr(scheduler, name)}
        everything = [vars(base) for base in reversed(type(scheduler).__mro__)]  # all of these may be patched
        self._code = {**{k: v for names in everything for k, v in names.items()}, **originals}
        self._methods = {name: self._guard.theirs("scheduler", m) for name, m in originals.items()}
        with ExitStack() as stack:
            stack.enter_context(settings_kept(self.networks.values()))
            # A network is watched at its call, outside of whatever hooks or compilers do to its `forward`.
            for name, network in self.networks.items():
                stack.enter_context(reclassed(network, self._watched_class(name, type(network))))
            stack.callback(replaced.remove)
            for name, method in originals.items():
                replaced.put(scheduler, name, self._stand_in(method, replacements[name]))
            self.session = session
            try:
                yield
            finally:
                self.session = None
                if isinstance(getattr(scheduler, "timesteps", None), Tensor):
                    scheduler.timesteps = scheduler.timesteps.as_subclass(Tensor)

    def _watched_class(self, name: str, kind: type) -> type:
        """A network's class with another `__call__`; made once, so that a compiled network stays compiled."""
        if (name, kind) not in self._watched:

            def evaluate(network: Any, *args: Any, **kwargs: Any) -> Any:
                call = self._guard.theirs(name, functools.partial(kind.__call__, network))
                return self._evaluate(name, network, call, args, kwargs)

            self._watched[name, kind] = disguised(kind, self._stand_in(kind.__call__, evaluate))
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
        """Whether a loop is under way in this thread: a pipeline of another thread may share the parts.

        Inside a callback the parts work as they do without stand-ins.
        """
        here = self.session is not None and threading.get_ident() == self._thread
        return here and not getattr(self.session, "calling_back", False)

    def _require_same_parts(self) -> None:
        """Refuse other parts than those that were accelerated; they may have been compiled since."""
        replaced = ["scheduler"] if self.pipe.scheduler is not self.scheduler else []
        for name, network in networks_of(self.pipe).items():
            known = self.networks.get(name)
            if known is not None and getattr(network, "_orig_mod", None) is known:
                self.networks[name] = network
            elif known is not network:
                replaced.append(name)
        if replaced:
            raise RuntimeError(
                f"the pipeline's {replaced[0]} was replaced: call foresample.accelerate(pipe) again"
            )

    # ------------------------------------------------------------ one call of the pipeline

    def _run(self, bound: inspect.BoundArguments) -> Any:
        if not self._drawing.acquire(blocking=False):
            raise Refused(
                "this accelerated pipeline is still drawing, in another thread or around a callback that calls it: "
                "wait until that call returns, or give each thread a pipeline of its own (copy.deepcopy(pipe))"
            )
        try:
            _forget(self.pipe, _ATTRIBUTES[1:])  # of an earlier call
            self._require_same_parts()
            require_no_cache(self.networks)
            with taken({"scheduler": self.scheduler, **self.networks}):
                return self._drawn(bound)
        except BaseException as error:
            _forget(self.pipe, _ATTRIBUTES[1:])  # of trials
            if isinstance(error, Refused):
                error.args = (f"{error}{to_drop(bound)}",)
            raise
        finally:
            self._drawing.release()

    def _drawn(self, bound: inspect.BoundArguments) -> Any:
        arguments = bound.arguments
        if type(self.scheduler).__name__.startswith("DDIM") and not arguments.get("eta"):
            scheduler_chain(self.scheduler, eta=0.0)  # refuses, with the remedy
        if "generator" in arguments:
            arguments["generator"] = as_generators(arguments["generator"])
        whole = copied_arguments(bound)
        callback = take_callback(bound)
        setting = self.settings.window
        tuned = not isinstance(setting, (int, str))  # for one number of images
        key = configuration(self.scheduler, self.networks, arguments, counts=tuned)
        known = self.known.setdefault(key, Known())
        if known.trace is None and (self.trace or not isinstance(setting, int)):
            known.trace = self._watch(bound)
        window = setting if isinstance(setting, int) else self._chosen(known, bound)
        if window is None:
            return self._sequential(whole, known)
        return self._draw(bound, window, callback, known)

    def _draw(
        self, bound: inspect.BoundArguments, window: int, callback: Callable[..., Any] | None, known: Known
    ) -> Any:
        """One run of the loop, in parts where it changes at a few of its steps."""
        # A second attempt would call a callback twice, so with one the loop is rehearsed before the first.
        new = callback is not None and known.rehearsed != numbers_in([bound.arguments, self.pipe.config])
        rehearse = known.begins != (0,) or new
        watched, self._answered = self._answered, {}
        parts = self._rehearsed(bound, known.begins, watched) if rehearse else Parts()
        put_back = random_state(bound)
        try:
            return self._draw_parts(bound, window, callback, known, parts, dict(watched))
        except Changed:
            put_back()
            parts = Parts() if rehearse else self._rehearsed(bound, (0,), watched)
            if not parts.records:
                raise
        return self._draw_parts(bound, window, callback, known, parts, dict(watched))

    def _draw_parts(
        self,
        bound: inspect.BoundArguments,
        window: int,
        callback: Callable[..., Any] | None,
        known: Known,
        parts: Parts,
        watched: dict[str, Answered],
    ) -> Any:
        seeds, settings = stream_seeds(bound.arguments.get("generator")), replace(self.settings, window=window)
        new, rounding = known.rounding is None, dict(known.rounding or {})
        callbacks, numbers = (callback, wanted_tensors(bound)), numbers_in([bound.arguments, self.pipe.config])

        def make(first: bool) -> Session:
            first_calls, callers = watched if first else {}, self._callers()
            session = Session(
                self.pipe, settings, seeds, callbacks, self._states_class, callers, rounding, new, first_calls
            )
            if self.trace:
                session.explain = functools.partial(self._explain, session, known)
            return session

        run = Run(parts, make)
        if run.session.in_order.needs_loop:
            bound = copied_arguments(bound)
            bound.arguments[CALLBACK] = lambda *given: run.session.in_order.end_of_turn(*given)
        result = self._looped(run, bound)
        known.rounding, known.begins, known.rehearsed = rounding, parts.begins, numbers
        self._set_report(run, known)
        return result

    def _rehearsed(
        self, bound: inspect.BoundArguments, begins: tuple[int, ...], watched: dict[str, Answered]
    ) -> Parts:
        """The parts in which this loop can be drawn; a single one if it does not change, or too often."""
        seeds = stream_seeds(bound.arguments.get("generator"))

        def make(first: bool) -> Session:
            seen = dict(watched) if first else {}
            callers, kind = self._callers(), self._states_class
            return Session(
                self.pipe, self.settings, seeds, (None, []), kind, callers, {}, False, seen, rehearsed=True
            )

        parts: Parts | None = Parts(begins)
        while parts is not None:
            run = Run(parts, make)
            try:
                with undisturbed(self.pipe, bound), suppress(Enough):
                    self._looped(run, bound)
            except Changed as change:
                parts = parts.split_at(change.turn)
            except Refused:
                if parts.begins != (0,) or run.session.turn == 0:
                    raise
                break  # the run itself raises the reason
            else:
                return parts.rehearsed(run.sessions)
        return Parts()

    def _looped(self, run: Run, bound: inspect.BoundArguments) -> Any:
        """Run the pipeline, its loop driven by the sessions of a run."""
        self._running = run
        try:
            with self._serving(run.session):
                result = self.pipeline_class.__call__(*bound.args, **bound.kwargs)
                with self._guard.ours(run.session):
                    run.close()
                    return result
        except SENTENCES:
            raise
        except Exception as error:
            session = run.session
            if session.calling_back or session.batch is None or session.over:
                raise
            whose = self._guard.whose if error is self._guard.foreign else "loop"
            raise Changed(
                f"at step {session.loop_turn} the pipeline's {whose} cannot take a batch of drafted states "
                f"({type(error).__name__}: {one_line(error)})",
                session.loop_turn,
            ) from error

    def _callers(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Calls of the networks with arguments by name, as many of them by position as the loop's own call had."""

        def caller(network: Any) -> Callable[[dict[str, Any]], Any]:
            return lambda arguments: call_by_name(network, arguments, self._positional)

        return {n: self._guard.theirs(n, caller(network)) for n, network in self.networks.items()}

    def _watch(self, bound: inspect.BoundArguments) -> Trace:
        """Watch three steps of the untouched loop; the generators are restored."""
        watch = Watch(self.pipe, self.settings.look)
        with undisturbed(self.pipe, bound), suppress(Enough), self._serving(watch):
            self.pipeline_class.__call__(*bound.args, **bound.kwargs)
        with self._guard.ours(watch):
            trace = watch.conclude()
        self._answered = watch.answered
        return trace

    def _sequential(self, bound: inspect.BoundArguments, known: Known) -> Any:
        """The pipeline's own loop, because no window is faster, and a report that says so."""
        untouched, trace = Untouched(), known.trace
        assert trace is not None
        with self._serving(untouched):
            result = self.pipeline_class.__call__(*bound.args, **bound.kwargs)
        self.pipe.foresample_report, self.pipe.foresample_trace = untouched.report(trace.copies), trace
        return result

    def _chosen(self, known: Known, bound: inspect.BoundArguments) -> int | None:
        """The window of a tuning; for "auto" the fastest of all windows, measured once for this configuration."""
        setting, trace = self.settings.window, known.trace
        assert trace is not None
        assert not isinstance(setting, int)
        if setting != "auto":
            return setting.window_for(trace.loop_steps, trace.images)
        if not known.windows:
            best, fastest = None, trace.loop_seconds
            for window in WINDOWS:
                with undisturbed(self.pipe, bound):
                    self._draw(bound, window, None, known)
                seconds = self.pipe.foresample_report.seconds
                if seconds < fastest:
                    best, fastest = window, seconds
                elif best is not None and seconds > 1.4 * fastest:
                    break
            known.windows = [best]
        return known.windows[0]

    # ------------------------------------------------------------ the stand-ins

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
            if not isinstance(self.session, Session):
                yield from self.session.turns(plain)
                return
            run = self._running
            yield from run.turns(plain, functools.partial(setattr, self, "session"))
            if run.session.rehearsed and run.session.over:
                raise Enough

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        session, bound = self.session, by_name(self.scheduler, "step", args, kwargs)
        assert session is not None
        return session.step(self._methods["step"], bound)

    def _scale(self, sample: Tensor, timestep: Any = None) -> Tensor:
        if not isinstance(self.session, Session) or self.session.turn < 1 or self.session.over:
            return self._methods["scale_model_input"](sample, timestep)
        return self.session.scale(sample)

    def _add_noise(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        session, original = self.session, self._methods[name]
        if not isinstance(session, Session) or not session.inside or not session.answered:
            return original(*args, **kwargs)
        if session.finished:
            with session.in_order.index_after(session.loop_turn):
                return original(*args, **kwargs)
        return session.add_noise(original, by_name(self.scheduler, name, args, kwargs))

    def _evaluate(self, name: str, network: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        session = self.session
        if isinstance(session, Watch) and session.turning:
            return session.evaluate(name, call, args, kwargs)
        if not isinstance(session, Session) or not session.inside:
            return call(*args, **kwargs)
        signature, self._positional = forward_signature(network), len(args)
        bound = signature.bind(*args, **kwargs)
        return session.evaluate(name, dict(bound.arguments), list(signature.parameters))

    def _among_states(self, kind: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation on drafted states: tensors with a row for each image get a row for each state."""
        session, kwargs = self.session, kwargs or {}
        if isinstance(session, Session) and session.inside:
            if self._counts_rows and func == _SHAPE:
                return session.shape_for_images(args[0])
            with torch._C.DisableTorchFunctionSubclass(), self._guard.ours(session):
                args, kwargs = session.aligned((args, kwargs))
        return Tensor.__torch_function__.__func__(kind, func, types, args, kwargs)  # type: ignore[attr-defined]

    def _set_report(self, run: Run, known: Known) -> None:
        """Set the report of a run, with what was checked and what was trusted."""
        report, trace = run.report, known.trace
        on = {"look=False": self.settings.look, "trace=False": self.trace}
        on["differences of the network's rounding"] = not report.evidence.largest_change > DIFFERS
        on["answers at states that were not evaluated again"] = False
        report.evidence.trusted = [name for name, checked in on.items() if not checked]
        self.pipe.foresample_report = report
        if trace is not None:
            report.evidence.steps_replayed = trace.steps + self.trace * report.steps
            self.pipe.foresample_trace = trace

    def _explain(
        self, session: Session, known: Known, chain: Any, x: Tensor, arguments: dict[str, Any]
    ) -> None:
        """Replay the scheduler's own `step` at all steps, unless nothing changed since the last replay."""
        kept = {name: value for name, value in arguments.items() if name != "generator"}
        ours = {*self._methods, "__getstate__"}
        values = {name: v for name, v in values_of(self.scheduler).items() if name not in ours}
        now = [values, self._code, kept]
        if not same(known.replayed, now):
            clock, names = session.clock, session.step_names
            replay_scheduler(self.scheduler, self._methods, chain, clock.timesteps, x, kept, clock.start, names)
            known.replayed = now


def _forget(pipe: Any, names: Sequence[str]) -> None:
    for name in names:
        vars(pipe).pop(name, None)
