"""A network's arguments: those of turn 0 are recorded, those of later turns compared and given to each drafted state.

A network must be called with the arguments of turn 0, a row for each image or for each row that the loop was handed.
Then a drafted state gets the row of its image.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foresample.integrations.diffusers.clock import Clock
from foresample.integrations.diffusers.trees import Path, at, close, plain, rebuilt, same
from foresample.integrations.diffusers.witnesses import Batch, heavy_tailed
from foresample.integrations.refusal import REMEDY, Changed, Refused, require

WITHOUT_ROWS = ("img_ids", "txt_ids", "image_rotary_emb")
"""Arguments whose first dimension is never the batch."""


@dataclass(eq=False)
class Recorded:
    """One network call of turn 0, to which those of later turns are compared.

    It was given `states` as the first argument, the time and `arguments` (copied), and returned `output`. Its input
    has `copies` rows for each of the images, as with guidance. If it holds more than latents, the rest follows `size`
    channels of latents in dimension `dim`.
    """

    name: str
    names: tuple[str, str]
    """The names of the first argument and of the time."""
    states: Tensor
    arguments: dict[str, Any]
    output: Any
    clock: Clock
    wrap: type[Tensor]
    """The class of drafted states."""
    images: int = 0
    copies: int = 1
    dim: int | None = None
    size: int = 0
    made_up: dict[Path, Tensor] = field(default_factory=dict)
    """Outputs of the witnesses, [copies, witnesses, …], for each tensor returned."""
    side: dict[Path, Tensor] = field(default_factory=dict)
    """Arguments made of other networks' outputs, [copies, witnesses, …]."""
    latents: Tensor | None = None
    """The latents that this turn's call was given, [rows, …]."""

    # ------------------------------------------------------------ the states

    def locate(self, x: Tensor, scale: float) -> None:
        """Find the first latents x, [images, *shape], in the network's input."""
        states, self.images = self.states, len(x)
        apart = [d for d, (a, b) in enumerate(zip(states.shape[1:], x.shape[1:], strict=False), 1) if a != b]
        fits = states.ndim == x.ndim and len(states) % len(x) == 0 and len(apart) <= 1
        if fits and apart:
            self.dim, self.size = apart[0], x.shape[apart[0]]
            fits = self.size < states.shape[self.dim]
        require(
            fits,
            f"the pipeline gives its {self.name} something else than its latents (shape {tuple(states.shape)} for "
            f"{tuple(x.shape)}), which foresample does not follow",
        )
        self.copies = len(states) // len(x)
        part, _ = self._parts(states)
        alike = (scale * x).to(part).repeat(self.copies, *[1] * (x.ndim - 1))
        if not close(part, alike):
            size = float((part - alike).abs().max() / alike.abs().max())
            raise Refused(
                f"at step 0 the pipeline gives its {self.name} other values than its latents (by up to {size:.2g} of "
                f"their size: a changed copy, or rows in another order), which foresample does not follow; {REMEDY}"
            )

    def _parts(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """The latents in the network's input, and the conditioning beside them."""
        if self.dim is None:
            return states, None
        latents, rest = states.split([self.size, states.shape[self.dim] - self.size], self.dim)
        return latents, rest

    def require_states(self, batch: Batch, states: Tensor) -> None:
        """Refuse an input that is not made as in turn 0: scaled latents, and beside them the image's conditioning."""
        gives = f"at step {self.clock.loop_turn} the pipeline gives its {self.name}"
        if len(states) != self.copies * len(batch):
            raise Changed(
                f"{gives} {len(states)} rows, where it was handed {len(batch)} states of which it makes "
                f"{self.copies} rows each: its loop keeps latents of its own",
                self.clock.loop_turn,
            )
        latents, rest = self._parts(states)
        old = self._parts(self.states)[1]
        index = batch.index(self.copies, states.device)
        beside = rest is None or old is None or torch.equal(rest, old[index])
        require(beside, f"{gives} another conditioning beside the latents than at step 0")
        one = latents.unflatten(0, (self.copies, len(batch)))
        self.latents = one[0]  # compared with the latents when these come back
        for other in one[1:]:
            self.require_latents(other)

    def require_latents(self, scaled: Tensor) -> None:
        """Refuse a call of this turn that was given other latents than those that came back."""
        require(
            self.latents is not None and torch.equal(self.latents, scaled.to(self.latents.dtype)),
            f"at step {self.clock.loop_turn} the pipeline gives its {self.name} something else than the latents it was "
            "handed",
        )

    # ------------------------------------------------------------ the other arguments

    def for_drafted(self, batch: Batch, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments as the loop gives them, which must be those of turn 0, with a row for each drafted state."""
        odd = set(arguments) ^ set(self.arguments)
        self._require_same(not odd, ", ".join(sorted(odd)))
        return {k: self._argument(batch, (k,), v, self.arguments[k]) for k, v in arguments.items()}

    def _argument(self, batch: Batch, path: Path, value: Any, old: Any) -> Any:
        if isinstance(value, dict) and isinstance(old, dict) and value.keys() == old.keys():
            return {k: self._argument(batch, (*path, k), v, old[k]) for k, v in value.items()}
        if isinstance(value, (list, tuple)) and type(value) is type(old) and len(value) == len(old):
            return type(value)(self._argument(batch, (*path, i), v, old[i]) for i, v in enumerate(value))
        if isinstance(value, Tensor) and isinstance(old, Tensor):
            return self._tensor(batch, path, value, old)
        self._require_same(same(value, old), path[0])
        return value

    def _tensor(self, batch: Batch, path: Path, given: Tensor, old: Tensor) -> Tensor:
        value, copies, frames = plain(given), self.copies, self.frames(path, old)
        index, drafted = batch.index(copies, old.device), batch.is_drafted(copies, old.device)
        if frames == 1 and value.ndim == old.ndim and len(value) == copies * len(batch):
            if not isinstance(given, self.wrap):  # made again for this many rows
                alike = torch.equal(value, old[index])
            else:  # made of the states, by way of another network: the same for witnesses in all turns
                seen = value.unflatten(0, (copies, len(batch)))[:, batch.drafted :]
                before = self.side.setdefault(path, seen)
                anchor = old.unflatten(0, (copies, self.images))[:, :1]
                alike = close(seen, before) and close(seen[:, :1], anchor)
            self._require_same(alike, path[0])
            return value[drafted]
        self._require_same(torch.equal(value, old), path[0])
        return value.unflatten(0, (-1, frames))[index[drafted]].flatten(0, 1) if frames else value

    def frames(self, path: Path, old: Any) -> int:
        """Rows of an argument for each of the network's: 0 if it has none. Some video pipelines give one a frame."""
        rows = self.copies * self.images
        if not isinstance(old, Tensor) or old.ndim == 0 or path[0] in WITHOUT_ROWS:
            return 0
        if len(old) == rows:
            return 1
        frames = len(old) // rows
        per_frame = old.ndim > 1 and self.states.ndim == 5 and frames in self.states.shape[1:3]
        return frames if per_frame and len(old) == rows * frames else 0

    def _require_same(self, holds: bool, name: str) -> None:
        if not holds:
            raise Changed(
                f"at step {self.clock.loop_turn} the pipeline calls its {self.name} with another {name} than at step "
                f"{self.clock.first}, while the states are of other steps",
                self.clock.loop_turn,
            )

    # ------------------------------------------------------------ the output

    def with_witnesses(self, answer: Any, drafted: int) -> Any:
        """The output for all rows: evaluated for the drafted states, if there are any, made up for the witnesses."""

        def whole(path: Path, old: Any) -> Any:
            new = None if answer is None else at(answer, path)
            if not isinstance(old, Tensor) or old.ndim == 0 or len(old) != self.copies * self.images:
                return old if new is None else new
            if path not in self.made_up:
                first = old.unflatten(0, (self.copies, self.images))[:, :1]
                shape = self.copies, 2 * self.images, *old.shape[1:]
                self.made_up[path] = torch.cat([first, heavy_tailed(shape, 1 + len(self.made_up)).to(old)], 1)
            parts = [self.made_up[path]]
            if new is not None:
                parts = [plain(new).unflatten(0, (self.copies, -1))[:, :drafted], *parts]
            return torch.cat(parts, 1).flatten(0, 1).as_subclass(self.wrap)

        return rebuilt(whole, self.output)
