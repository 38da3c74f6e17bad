"""The interface for packages: the declarations of a package's file, and the code that all packages share.

`accelerate` puts a `PackageLoop` in the place of a sampling function, on one object. To serve another package, write
one file here with a subclass, and add that class to `PACKAGES` (`packages.acceleration`). The subclass declares

    package, kind       names for reports and messages, such as "MONAI" and "DiffusionInferer"
    attributes          the attributes by which an object is recognised; nothing is imported from a package
    replaces            the names of the sampling functions to replace
    owners, steps       the trusted code: the classes (or the package) that may define the functions, and the names of
                        the other functions that they call
    refuse()            raises for an object that cannot be served, before anything is replaced; optional
    drawing(asked)      the chain and the network of one call, read off the object as it is now, and its arguments;
                        raises for arguments that cannot be served; None if the call draws no samples

The rest is done here. At every call the functions must be the package's own, neither overridden nor patched, and the
network must be in eval mode. The window is chosen, and the samples are drawn and reported. Where no window gains, the
package's own function is called.
A loop whose steps may differ from its tables is also run once with a made-up network (`compare`).
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foresample.chains import Chain
from foresample.contracts import Target
from foresample.core.report import Observer
from foresample.engine import Engine
from foresample.integrations.explain import Rerun, Standard, require_explained
from foresample.integrations.networks import require_fixed
from foresample.integrations.replaced import REPORT, Replaced
from foresample.integrations.trusted import library_name, require_current
from foresample.integrations.untouched import NothingGains, kept_random_state, undisturbed_window
from foresample.settings import Settings


@dataclass(frozen=True)
class Drawing:
    """The samples that one call of a package's function draws.

    `network` is refused in training mode if it has dropout or batch normalisation; `result` turns the samples, [count,
    *shape], into the function's result; `trusted` lists assumptions that no check covers, besides the function itself;
    `slots` is the number of samples drawn at a time, all by default.
    """

    target: Target
    count: int
    network: Any
    result: Callable[[Tensor], Any]
    trusted: tuple[str, ...] = ()
    observe: Observer | None = None
    slots: int | None = None


def states_dtype() -> torch.dtype:
    """The dtype of the states if the package draws its start in torch's default dtype."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class PackageLoop(ABC):
    """Replaces a sampling function of an object, with the same arguments and distribution; see the module."""

    package: ClassVar[str]
    kind: ClassVar[str]
    attributes: ClassVar[tuple[str, ...]]
    replaces: ClassVar[tuple[str, ...]]
    owners: ClassVar[tuple[str, ...]]
    steps: ClassVar[tuple[str, ...]] = ()

    def __init__(self, served: Any, name: str, settings: Settings, replaced: Replaced) -> None:
        self.served, self.name, self.settings, self.replaced = served, name, settings, replaced
        self.original: Callable[..., Any] = getattr(served, name)
        functools.update_wrapper(self, self.original)
        self._windows: dict[tuple, int | None] = {}  # for each kind of call
        self._compared: Any = None  # values of the object when its own loop was last compared
        self._unreported = 0  # steps compared since the last report
        self._require_own()
        self.refuse()

    @classmethod
    def functions(cls, served: Any) -> tuple[str, ...]:
        """The names of an object's sampling functions to replace; () for an object of another package."""
        return cls.replaces if all(hasattr(served, name) for name in cls.attributes) else ()

    def refuse(self) -> None:  # noqa: B027
        """Raise for an object that cannot be served, before anything is replaced."""

    @abstractmethod
    def drawing(self, asked: dict[str, Any]) -> Drawing | None:
        """The samples that a call with these arguments, defaults included, draws; None if it draws none.

        Called with gradients off.
        """

    def generator(self) -> torch.Generator | None:
        """The generator that the function draws from; None for torch's own."""
        return None

    def assumption(self) -> str:
        """The assumption about the function itself, which no check covers."""
        return f"{self.package}'s own {getattr(self, '__qualname__', self.name)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        require_current(self.original, self.served, self.name)
        self._require_own()
        put_back = kept_random_state(self.generator())
        with torch.no_grad():
            drawing = self.drawing(self._asked(args, kwargs))
            if drawing is not None and drawing.count:
                require_fixed(drawing.network)
                window = self._window(drawing)
                if window is not None:
                    return drawing.result(self._draw(drawing, window))
        put_back()
        if drawing is None or not drawing.count:  # no samples to draw: there is no report
            vars(self.served).pop(REPORT, None)
            return self.original(*args, **kwargs)
        slower = NothingGains(len(drawing.target.std), drawing.count)
        result, report = slower.run(self.original, *args, **kwargs)
        setattr(self.served, REPORT, report)
        return result

    def _asked(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments of a call by their names."""
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        bound.apply_defaults()
        asked = dict(bound.arguments)
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                asked |= asked.pop(parameter.name)
        return asked

    def _window(self, drawing: Drawing) -> int | None:
        target, settings = drawing.target, self.settings.for_count(drawing.slots or drawing.count)
        call = (drawing.count, len(target.std), target.shape, target.std.dtype, target.std.device)
        if call not in self._windows:
            self._windows[call] = undisturbed_window(target, settings)
        return self._windows[call]

    def _draw(self, drawing: Drawing, window: int) -> Tensor:
        """Draw samples with seeds from the function's generator."""
        generator = self.generator()
        device = None if generator is None else generator.device
        seeds = torch.randint(2**62, (drawing.count,), generator=generator, device=device).cpu()
        settings = replace(self.settings.for_count(drawing.slots or drawing.count), window=window)
        run = Engine(drawing.target, settings).sample(seeds, drawing.observe)
        run.report.evidence.trusted += [self.assumption(), *drawing.trusted]
        run.report.evidence.steps_replayed, self._unreported = self._unreported, 0
        setattr(self.served, REPORT, run.report)
        return run.samples

    # ------------------------------------------------------------ what is refused

    def _require_own(self) -> None:
        """Refuse a function that is not the package's own."""
        for name in (self.name, *self.steps):
            method = self.original if name == self.name else getattr(self.served, name, None)
            own = library_name(method, self.served) or ""
            if method is not None and not any(own.startswith(f"{owner}.") for owner in self.owners):
                raise ValueError(
                    f"{type(self.served).__name__}.{name} is not {self.owners[0]}'s own function: it is overridden or "
                    "patched, and may change from sample to sample; use the package's own class, or make a target "
                    "with foresample.targets"
                )

    def refuse_others(self, asked: dict[str, Any], *names: str) -> None:
        """Refuse all other arguments that differ from their defaults."""
        defaults = {p.name: p.default for p in inspect.signature(self.original).parameters.values()}
        unknown = [
            n
            for n, value in asked.items()
            if n not in names and (n not in defaults or value is not defaults[n])
        ]
        if unknown:
            raise ValueError(
                f"an accelerated {self.name} cannot take {', '.join(unknown)}: leave that out, or call "
                "foresample.restore first"
            )

    def compare(
        self,
        chain: Chain,
        held: Any,
        run: Callable[[torch.Generator], Any],
        instead: Callable[[nn.Module], AbstractContextManager[Any]],
        device: torch.device,
        rounding: float = 1e-3,
        **more: Any,
    ) -> None:
        """Run the package's own loop and refuse it if its states are not the chain's; again when `held` changes.

        `run` runs it, with this generator if it takes one; `instead` replaces its network; states may differ by
        `rounding`, relative to 1 + |x|; `more` are further fields of `Rerun`.
        """
        if held == self._compared:
            return
        sentence = (
            f"{type(self.served).__name__} takes other steps than those of the chain read off it: "
            "{what}; make a target with foresample.targets"
        )
        standard = Standard(sentence, rounding={}, coarse=rounding, scale=lambda x: 1 + x.abs())
        require_explained(Rerun(standard, run, instead, device, **more), chain)
        self._compared, self._unreported = held, len(chain.std)
