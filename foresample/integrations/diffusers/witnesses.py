"""Witnesses: rows given to the loop that are never evaluated, and are the same in every turn.

They are the first image's first state and two made-up states for each image. Their network outputs are made up as well,
so what the loop computes from them must be the same in all turns; a difference shows that the loop depends on its own
step. Made-up numbers are heavy-tailed, so that a clamp or a blend shows at any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresample.chains import Chain
from foresample.chains.chain import per_row
from foresample.core.round import Call
from foresample.integrations.diffusers.clock import Clock
from foresample.integrations.diffusers.trees import close, mapped, plain, tensors
from foresample.integrations.refusal import REMEDY, Changed, Refused, require


@dataclass(frozen=True)
class Batch:
    """The rows given to the loop, [rows, *shape]: drafted states, then the witnesses."""

    states: Tensor
    row: Tensor
    """[rows]: the image of each."""
    step: Tensor
    drafted: int
    images: int

    def __len__(self) -> int:
        return len(self.row)

    def index(self, copies: int, device: torch.device) -> Tensor:
        """Each row's index in a batch of `copies` × images, for `copies` × these rows."""
        number = torch.arange(copies, device=device).repeat_interleave(len(self))
        return self.row.to(device).repeat(copies) + self.images * number

    def is_drafted(self, copies: int, device: torch.device) -> Tensor:
        """True for those of `copies` × these rows that are drafted states, not witnesses."""
        return (torch.arange(len(self), device=device) < self.drafted).repeat(copies)

    def scaled(self, chain: Chain, sample: Tensor) -> Tensor:
        """`scale_model_input`, for states at different steps; `sample` may hold several copies of them."""
        if chain.scale is None:
            return sample
        step = self.step.repeat(len(sample) // len(self))
        return (per_row(chain.scale, step, sample) * sample).to(sample.dtype)

    def aligned(self, tree: Any, wrap: type[Tensor]) -> Any:
        """The arguments of an operation on drafted states: tensors with a row for each image get one for each state."""
        wrapped = [v for v in tensors(tree).values() if isinstance(v, wrap) and v.ndim > 1]
        found = {(v.ndim, len(v) // len(self)) for v in wrapped}

        def fit(value: Any) -> Any:
            if isinstance(value, Tensor) and not isinstance(value, wrap) and value.ndim > 1:
                for ndim, copies in found:
                    if ndim == value.ndim and copies and len(value) == copies * self.images:
                        return plain(value)[self.index(copies, value.device)]
            return value

        return mapped(fit, tree) if found else tree


class Witnesses:
    """Checks, in every turn, of the rows that the loop gives back."""

    def __init__(self, first: Tensor, output: Tensor, chain: Chain, clock: Clock) -> None:
        """`first`, `output`: the latents of turn 0 and the guided output, [images, *shape]."""
        self.first, self.output, self.chain, self.clock = first, output, chain, clock
        self.known: Tensor | None = None
        """[images, *shape]: coordinates that the loop overwrites."""
        images, number = len(first), torch.arange(len(first), device=first.device)
        self._made_up = heavy_tailed((2 * images, *first.shape[1:]), 0).to(first)
        self._row = torch.cat([number[:1], number, number])
        self._step = torch.ones_like(self._row).clamp(max=len(chain.std) - 1)
        self._given: Tensor | None = None  # the made-up latents, as the loop first gave them back
        self._made: Tensor | None = None  # and their outputs after guidance

    def beside(self, call: Call | None) -> Batch:
        """The states of a call, and the witnesses."""
        parts, row, step = [self.first[:1], self._made_up], self._row, self._step
        if call is not None:
            parts = [call.x.to(self.first.dtype), *parts]
            row, step = torch.cat([call.row, row]), torch.cat([call.step, step])
        return Batch(torch.cat(parts), row, step, 0 if call is None else len(call.x), len(self.first))

    def require_same_latents(self, batch: Batch, sample: Tensor) -> None:
        """Refuse latents that do not come back bit by bit, except coordinates that are overwritten in all turns alike.

        The first time, `known` is found: the coordinates at which made-up states came back with the same other values.
        """
        given, made_up = sample[batch.drafted + 1 :], batch.states[batch.drafted + 1 :]
        if self._given is None:
            self._given = given.clone()
            if not torch.equal(sample, batch.states):
                self.known = self._overwritten(batch, sample, given, made_up)
        elif self.known is not None:
            require(
                torch.equal(given, self._given),
                f"the pipeline overwrites latents with values of its own step {self.clock.loop_turn}, while the "
                "states are of other steps",
            )
        changed = sample != batch.states
        if self.known is not None:
            changed = changed & ~self.known[batch.row]
        if changed.any():
            raise self._changed(batch, sample)

    def _overwritten(self, batch: Batch, sample: Tensor, given: Tensor, made_up: Tensor) -> Tensor:
        one, two = (given != made_up).chunk(2)
        known = one | two
        value, other = given.chunk(2)
        if not torch.equal(value[known], other[known]):
            raise self._changed(batch, sample)
        require(
            not torch.equal(value[known], self.first[known]),
            "the pipeline keeps a part of its latents as they were a step before (as DeepFloyd IF's inpainting does), "
            "while the states are of other steps",
        )
        if known.all():
            raise Refused(
                "the pipeline overwrites all of its latents, so its mask leaves nothing to be painted; pass a "
                f"mask_image with a part to be painted, or {REMEDY}"
            )
        if self.chain.low_variance is not None:
            raise Refused(
                "the pipeline overwrites latents, which is not served with a learned variance; use "
                "variance_type='fixed_small'"
            )
        return known

    def _changed(self, batch: Batch, sample: Tensor) -> Refused:
        size = float((sample - batch.states).abs().max() / batch.states.abs().max())
        turn = self.clock.loop_turn
        return Refused(
            f"the pipeline changes the latents between step {turn - 1} and step {turn} (by up to {size:.2g} of their "
            f"size), which the scheduler's chain does not contain; {REMEDY}"
        )

    def require_same_guidance(self, batch: Batch, output: Tensor) -> None:
        """Refuse guidance that makes something else of the witnesses' outputs than before."""
        seen = output[batch.drafted :]
        if self._made is None:
            self._made = seen[1:].clone()
        if not (close(seen[:1], self.output[:1]) and close(seen[1:], self._made)):
            raise Changed(
                f"at step {self.clock.loop_turn} the pipeline's guidance differs from earlier steps, while the states "
                "are of other steps",
                self.clock.loop_turn,
            )

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The results of the loop on the made-up rows, which do not depend on the other rows."""
        return self._made, self.known, None if self.known is None else self._given


def heavy_tailed(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers of many sizes, 0.03 to 30: every clamp and every blend changes some of them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (3 * torch.rand(shape, generator=generator) - 1.5)
