"""diffusers pipelines, drawn speculatively: `foresample.accelerate(pipe)`.

A pipeline's denoising loop is its own affair: guidance, prompts and embeddings are mixed into it in a different
way in each. So the loop itself is put to work. It keeps running as written, but each turn of it becomes one
*call* of the speculative sampler:

    for i, t in enumerate(timesteps):        # the pipeline's; turns that are not needed cost no network call
        network(latents, t, prompts)         # ours: each state gets its own timestep and its image's prompt
        guidance                             # the pipeline's
        latents = scheduler.step(...)        # ours: verify, commit, and hand out the next states to evaluate

`latents` is then a batch of drafted states instead of one state an image, which the loop cannot tell as long as all
it does is row by row and the same in every turn. `turns` checks that it is, in every turn, and `trace` watches the
untouched loop first. Text encoders, initial latents, the decoder and everything else stay as they are.
Nothing is subclassed per pipeline; what is put in place sits on the instances and is taken away by `restore`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from foresample.chains import scheduler_chain
from foresample.contracts import Drafter, require_drafter
from foresample.core.look import DIFFERS
from foresample.core.noise import seeds_of
from foresample.drafters import Replay
from foresample.integrations.again import Answered
from foresample.integrations.caches import require_no_cache
from foresample.integrations.fingerprint import alike, values_of
from foresample.integrations.trace import Enough, Trace, Watch, replay_scheduler
from foresample.integrations.turns import REMEDY, Refused, Session, Settings

_PATCHED = ("step", "set_timesteps", "scale_model_input", "add_noise", "scale_noise")
"""Methods of the scheduler's instance that are replaced."""
WINDOWS = (2, 4, 8, 16, 32)
"""Those that `window="auto"` tries."""


def is_pipeline(served: Any) -> bool:
    """Whether this is a diffusion pipeline: it has a scheduler, and a network to denoise with."""
    return hasattr(served, "scheduler") and any(
        getattr(served, name, None) is not None for name in ("unet", "transformer", "prior", "decoder")
    )


def accelerate_pipeline(
    pipe: Any,
    window: int | Literal["auto"],
    drafter: Drafter | None,
    block: int | None,
    recycle: bool,
    trace: bool,
    look: bool,
) -> AcceleratedPipeline:
    """See `foresample.accelerate`."""
    drafter = Replay() if drafter is None else drafter
    require_drafter(drafter)
    _require_supported(pipe.scheduler)
    restore_pipeline(pipe)
    handle = AcceleratedPipeline(pipe, window, drafter, block, recycle, trace, look)
    pipe._foresample = handle
    return handle


def restore_pipeline(pipe: Any) -> None:
    """Undo `accelerate`; does nothing to a pipeline that was not accelerated."""
    handle = vars(pipe).get("_foresample")
    if handle is not None:
        handle._remove()
        del pipe._foresample


class AcceleratedPipeline:
    """What `accelerate` put in place; a context manager that hands out the pipeline."""

    def __init__(
        self,
        pipe: Any,
        window: int | Literal["auto"],
        drafter: Drafter,
        block: int | None,
        recycle: bool,
        trace: bool,
        look: bool,
    ) -> None:
        self.pipe, self.scheduler, self.networks = pipe, pipe.scheduler, _networks(pipe)
        self.window, self.drafter, self.block, self.recycle = window, drafter, block, recycle
        self.trace, self.look = trace, look
        self.session: Session | Watch | None = None
        self.traces: dict[Any, Trace] = {}
        """What was watched, for each configuration."""
        self.rounding: dict[Any, dict[str, float]] = {}
        """For each configuration that was drawn before: how far the answers of its networks may differ."""
        self.replayed: dict[Any, dict[str, Any]] = {}
        """For each configuration, the scheduler whose `step` was replayed."""
        self.windows: dict[Any, int | None] = {}
        """What `window="auto"` found, for each configuration; None: no window is faster than the pipeline itself."""
        self._pipeline_class = type(pipe)
        # Iterating over the scheduler's timesteps is what drives the loop; all else about the tensor stays.
        self._timesteps_class = type(
            "SpeculativeTimesteps", (Tensor,), {"__iter__": lambda timesteps: self._turns(timesteps)}
        )
        self._states_class = type(
            "DraftedStates", (Tensor,), {"__torch_function__": classmethod(self._among_states)}
        )
        # What the scheduler's instance had of its own before (somebody's patch) is put back.
        self._before = {name: vars(self.scheduler)[name] for name in _PATCHED if name in vars(self.scheduler)}
        self._methods = {
            name: getattr(self.scheduler, name) for name in _PATCHED if hasattr(self.scheduler, name)
        }
        self._answered: dict[str, Answered] = {}  # by the networks while they were watched, for the next run
        self._stand_ins: dict[str, Any] = {}
        self._positional = 0  # arguments by position in the loop's call of a network under way
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

        name, kind = self._pipeline_class.__name__, self._pipeline_class
        self.pipe.__class__ = type(name, (kind,), {"__call__": __call__})
        # A network is watched at its call, outside of whatever hooks or compilers do to its `forward`.
        for name in self.networks:
            self._watch_network(name)
        replacements: dict[str, Callable[..., Any]] = {
            "step": self._step,
            "set_timesteps": self._set_timesteps,
            "scale_model_input": self._scale,
            "add_noise": functools.partial(self._add_noise, "add_noise"),
            "scale_noise": functools.partial(self._add_noise, "scale_noise"),
        }
        for name, method in self._methods.items():
            self._stand_ins[name] = _stand_in(method, replacements[name])
            setattr(self.scheduler, name, self._stand_ins[name])

    def _remove(self) -> None:
        """Put back what was there. What somebody put over ours in the meantime stays: ours lets all pass then."""
        self.pipe.__class__ = self._pipeline_class
        for name in self.networks:
            self._leave_network(name)
        for name, stand_in in self._stand_ins.items():
            if vars(self.scheduler).get(name) is stand_in:
                delattr(self.scheduler, name)
                if name in self._before:
                    setattr(self.scheduler, name, self._before[name])
        if isinstance(getattr(self.scheduler, "timesteps", None), Tensor):
            self.scheduler.timesteps = self.scheduler.timesteps.as_subclass(Tensor)
        for name in ("foresample_report", "foresample_trace"):
            vars(self.pipe).pop(name, None)

    def _watch_network(self, name: str) -> None:
        network = self.networks[name]
        object.__setattr__(network, "__class__", _watched(type(network), name, self))

    def _leave_network(self, name: str) -> None:
        network = self.networks[name]
        if getattr(type(network), "_foresample_handle", None) is self:
            object.__setattr__(network, "__class__", type(network).__bases__[0])

    def _require_same_networks(self) -> None:
        """Those that were there, or compiled since: then what was compiled is watched instead, at its own call."""
        for name, network in _networks(self.pipe).items():
            known = self.networks.get(name)
            if known is not None and getattr(network, "_orig_mod", None) is known:
                self._leave_network(name)
                self.networks[name] = network
                self._watch_network(name)
            elif known is not network:
                raise RuntimeError(
                    f"the pipeline's {name} was replaced: call foresample.accelerate(pipe) again"
                )

    # ------------------------------------------------------------ one call of the pipeline

    def _run(self, bound: inspect.BoundArguments) -> Any:
        if self.pipe.scheduler is not self.scheduler:
            raise RuntimeError("the pipeline's scheduler was replaced: call foresample.accelerate(pipe) again")
        self._require_same_networks()
        require_no_cache(self.networks)
        arguments = bound.arguments
        if type(self.scheduler).__name__.startswith("DDIM") and not arguments.get("eta"):
            scheduler_chain(self.scheduler, eta=0.0)  # refuses, with the remedy
        generator = arguments.get("generator")
        if isinstance(generator, Sequence):
            generator = [_as_generator(g) for g in generator]
            arguments["generator"] = generator
        callback = _take_callback(arguments)
        key = _configuration(self.scheduler, arguments)
        if self.trace and key not in self.traces:
            self.traces[key] = self._watch(bound)
        window = self.window if self.window != "auto" else self._fastest(key, bound)
        if window is None:
            return self._pipeline_class.__call__(*bound.args, **bound.kwargs)
        return self._draw(bound, window, callback, key)

    def _draw(
        self, bound: inspect.BoundArguments, window: int, callback: Callable[..., Any] | None, key: Any
    ) -> Any:
        settings = Settings(window, self.drafter, self.block, self.recycle)
        seeds = _stream_seeds(bound.arguments.get("generator"))
        new, rounding = key not in self.rounding, dict(self.rounding.get(key, {}))
        networks = {name: self._caller(network) for name, network in self.networks.items()}
        session = Session(
            self.pipe, settings, seeds, callback, self._states_class, networks, self.look, rounding, new
        )
        session.watched, self._answered = self._answered, {}
        if self.trace:
            session.explain = functools.partial(self._explain, session, key)
        self.session = session
        try:
            result = self._pipeline_class.__call__(*bound.args, **bound.kwargs)
            session.close()
        except (Refused, FloatingPointError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if session.calling_back or session.turn < 1 or session.over:
                raise
            raise Refused(
                f"the pipeline's loop cannot take a batch of drafted states ({type(error).__name__}: {error}); {REMEDY}"
            ) from error
        finally:
            self.session = None
        self.rounding[key] = rounding
        self._tell(session, key)
        self.pipe.foresample_report = session.report
        if key in self.traces:
            self.pipe.foresample_trace = self.traces[key]
        return result

    def _watch(self, bound: inspect.BoundArguments) -> Trace:
        """Three steps of the untouched loop, with copies of the generators."""
        watch = Watch(self.pipe, self.look)
        with _undisturbed(self.pipe, bound) as arguments:
            self.session = watch
            try:
                self._pipeline_class.__call__(*arguments.args, **arguments.kwargs)
            except Enough:
                pass
            finally:
                self.session = None
        self._answered = watch.answered
        return watch.conclude()

    def _fastest(self, key: Any, bound: inspect.BoundArguments) -> int | None:
        """`window="auto"`: the pipeline itself is drawn with each window, once for this configuration."""
        if key not in self.windows:
            if key not in self.traces:
                self.traces[key] = self._watch(bound)
            best, fastest = None, self.traces[key].loop_seconds
            for window in WINDOWS:
                with _undisturbed(self.pipe, bound) as arguments:
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
        return iter(plain.unbind()) if self.session is None else self.session.turns(plain)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        original = self._methods["step"]
        if self.session is None:
            return original(*args, **kwargs)
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        bound = {**bound.pop("kwargs", {}), **bound}
        if isinstance(self.session, Watch):
            return self.session.step(original, bound)
        return self.session.answer(bound)

    def _scale(self, sample: Tensor, timestep: Any = None) -> Tensor:
        if not isinstance(self.session, Session) or self.session.turn < 1 or self.session.over:
            return self._methods["scale_model_input"](sample, timestep)
        return self.session.scale(sample)

    def _add_noise(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        session, original = self.session, self._methods[name]
        if not isinstance(session, Session) or not session.inside or not session.answered or session.finished:
            return original(*args, **kwargs)
        return session.add_noise(original, dict(inspect.signature(original).bind(*args, **kwargs).arguments))

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
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = session.aligned((args, kwargs))
        return Tensor.__torch_function__.__func__(kind, func, types, args, kwargs)  # type: ignore[attr-defined]

    def _tell(self, session: Session, key: Any) -> None:
        """What the run checked, and what it took on trust."""
        evidence = session.report.evidence
        if key in self.traces:
            evidence.steps_replayed = self.traces[key].steps + self.trace * session.turns_expected
        trusted = [name for name, on in (("look=False", self.look), ("trace=False", self.trace)) if not on]
        if evidence.largest_change > DIFFERS:
            trusted.append("differences of the network's rounding")
        evidence.trusted = [*trusted, "answers at states that were not asked again"]

    def _explain(self, session: Session, key: Any, chain: Any, x: Tensor, arguments: dict[str, Any]) -> None:
        """The scheduler's own `step` at all steps, unless this very scheduler was replayed before."""
        scheduler = values_of(self.scheduler)
        if key in self.replayed and alike(self.replayed[key], scheduler):
            return
        step, told = self._methods["step"], session.step_names
        replay_scheduler(self.scheduler, step, chain, session.timesteps, x, arguments, session.start, told)
        self.replayed[key] = scheduler


def _networks(pipe: Any) -> dict[str, torch.nn.Module]:
    """The pipeline's networks, by their names."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def _signature(network: Any) -> inspect.Signature:
    """Of its `forward`, also where it is compiled."""
    return inspect.signature(getattr(network, "_orig_mod", network).forward)


def _watched(kind: type, name: str, handle: AcceleratedPipeline) -> type:
    """The network's class, but for its call."""

    def __call__(network: Any, *args: Any, **kwargs: Any) -> Any:
        return handle._evaluate(name, network, functools.partial(kind.__call__, network), args, kwargs)

    own = {"__call__": __call__, "_foresample_handle": handle, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


def _stand_in(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement under the original's name and signature, which pipelines inspect."""

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return stand_in


def _configuration(scheduler: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one use of a pipeline from another: numbers, shapes, and which arguments are given at all."""

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape[1:]), value.dtype
        if value is None or isinstance(value, (bool, int, float)):
            return value
        return type(value).__name__

    given = tuple((name, told(value)) for name, value in arguments.items() if name not in ("self", "prompt"))
    return type(scheduler).__name__, repr(sorted(scheduler.config.items(), key=str)), given


@contextmanager
def _undisturbed(pipe: Any, bound: inspect.BoundArguments) -> Iterator[inspect.BoundArguments]:
    """The same arguments with copies of the generators; numbers drawn inside are not missing afterwards."""
    twin = copy.copy(bound)
    twin.arguments = dict(bound.arguments)
    generator = twin.arguments.get("generator")
    if isinstance(generator, Sequence):
        twin.arguments["generator"] = [_copied_generator(g) for g in generator]
    elif generator is not None:
        twin.arguments["generator"] = _copied_generator(generator)
    if "output_type" in twin.signature.parameters:
        twin.arguments["output_type"] = "latent"
    bars = getattr(pipe, "_progress_bar_config", None)
    pipe._progress_bar_config = {**(bars or {}), "disable": True}
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield twin
    finally:
        if bars is None:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = bars


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


def _copied_generator(source: torch.Generator) -> torch.Generator:
    twin = torch.Generator(source.device)
    twin.set_state(source.get_state())
    return twin


def _stream_seeds(generator: Any) -> Callable[[int], Tensor]:
    """Seeds of so many images' noise streams, drawn from the generators when the first latents have been."""

    def drawn(source: torch.Generator | None) -> int:
        return int(
            torch.randint(2**62, (), generator=source, device="cpu" if source is None else source.device)
        )

    def seeds(count: int) -> Tensor:
        if isinstance(generator, Sequence) and len(generator) == count:
            return torch.tensor([drawn(one) for one in generator])
        return seeds_of(drawn(generator[0] if isinstance(generator, Sequence) else generator), count)

    return seeds


def _require_supported(scheduler: Any) -> None:
    """Refuse a scheduler without an exact coupling at once, and not after a prompt has been encoded."""
    trial = copy.deepcopy(scheduler)
    for name in _PATCHED:
        vars(trial).pop(name, None)
    dynamic = {"mu": 1.0} if trial.config.get("use_dynamic_shifting", False) else {}
    trial.set_timesteps(4, **dynamic)
    scheduler_chain(trial, eta=1.0)
