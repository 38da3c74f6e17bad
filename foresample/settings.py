"""The settings of speculation and of running: each is defined, checked, documented and defaulted here.

`sample`, `stream`, `Engine`, `tune`, `check`, `generate`, `accelerate`, `samplers` and the command line take the same
keywords, `**settings: Unpack[RunKeywords]`, and pass them on as one value, `Settings.of(settings)`.

Speculation, which affects the samples drawn from given seeds, but never their distribution:

    window    transitions drafted in a round, L; a call evaluates at most L + 1 states of each sample. "auto" measures
              which window is fastest here and samples sequentially if none gains; a saved `Tuning` has measured it
    drafter   source of the guessed predictions; `Replay()` by default
    block     transitions verified as one block; the whole window by default, 1 is the per-step test
    recycle   turn rejected noise back into fresh noise; False draws fresh noise instead

Running, which only affects time and memory:

    slots     samples under way at a time; by default all samples of the call, or 1 for an `Engine`
    graph     replay rounds as CUDA graphs, without launch overhead; the network must allow capture
    look      refuse a target whose answer at a state depends on more than that state; `core.look` documents its cost
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union

from foresample.contracts import Drafter, Target, at_least_one, drafter_for, require_drafter, resolve_window
from foresample.drafters import Replay

if TYPE_CHECKING:
    from foresample.engine.tuning import Tuning

WINDOW = 16  # the default
Window = Union[int, Literal["auto"], "Tuning"]


class DraftKeywords(TypedDict, total=False):
    """The settings of speculation, except the window."""

    drafter: Drafter | None
    block: int | None
    recycle: bool


class SpeculationKeywords(DraftKeywords, total=False):
    """The settings of speculation."""

    window: Window


class RunKeywords(SpeculationKeywords, total=False):
    """All settings."""

    slots: int | None
    graph: bool
    look: bool


class TuneKeywords(DraftKeywords, total=False):
    """The settings that `tune` does not measure itself."""

    graph: bool
    look: bool


@dataclass(frozen=True)
class Settings:
    """Checked settings; see the module for their meaning."""

    window: Window = WINDOW
    drafter: Drafter = field(default_factory=Replay)
    block: int | None = None
    recycle: bool = True
    slots: int | None = None
    graph: bool = False
    look: bool = True

    def __post_init__(self) -> None:
        if self.window != "auto" and not hasattr(self.window, "window_for"):
            if isinstance(self.window, str):
                raise ValueError(
                    f"window must be a whole number of at least 1, 'auto' or a Tuning, not {self.window!r}"
                )
            object.__setattr__(self, "window", at_least_one("window", self.window))
        require_drafter(self.drafter)
        for name in ("block", "slots"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, at_least_one(name, getattr(self, name)))

    @classmethod
    def of(
        cls, keywords: Mapping[str, Any], base: Settings | None = None, *, without: Iterable[str] = ()
    ) -> Settings:
        """Settings from a caller's keywords, which override those of `base`.

        An unknown keyword, or one of `without`, is refused by its name.
        """
        known = [f.name for f in fields(cls) if f.name not in set(without)]
        for name in keywords:
            if name not in known:
                raise TypeError(f"{name} is not a setting here: {remedy(name, known)}")
        given = {name: value for name, value in keywords.items() if name != "drafter" or value is not None}
        return replace(cls() if base is None else base, **given)

    def for_count(self, count: int) -> Settings:
        """These settings for a call that draws `count` samples, with at most as many slots."""
        return replace(self, slots=count if self.slots is None else min(self.slots, count))

    def for_target(self, target: Target) -> Settings:
        """These settings for one target: its drafter fitted to the target, its window no longer than the chain."""
        window = resolve_window(self.window, len(target.std)) if isinstance(self.window, int) else self.window
        return replace(self, window=window, drafter=drafter_for(self.drafter, target), slots=self.slots or 1)

    @property
    def method(self) -> str:
        """The settings that affect samples, except the window, as a text for reports and manifests."""
        noise = "recycled" if self.recycle else "fresh"
        return f"{self.drafter}, block {self.block or 'window'}, {noise} noise"


def remedy(name: str, known: list[str]) -> str:
    """The known name to use instead of an unknown one, or the list of all."""
    near = get_close_matches(name, known, 1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"
