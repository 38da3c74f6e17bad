"""One noise stream per sample: every random number is a pure function of the seed and the number's purpose.

The generator is Philox4x32-10 (Salmon et al. 2011), a keyed bijection of counters. The key is the sample's
seed; the counter identifies the number: (element, step, draw, stream). There is no state to carry, so a
sample's noise cannot depend on its batch-mates, on the order of work or on how often a number is drawn,
and any number can be drawn again.

    stream   element        step         draw
    START    of the state   0            0        unit noise the chain starts from
    STEP     of the state   the step     0        noise of a transition; draw > 0: redrawn in that round
    TEST     of the window  the round    0        uniforms of the acceptance test
    SEED     0              sample index 0        seeds of the samples of a run
    EXTRA    of the noise   the step     0        extra noise of a transition, for targets that have some

Numbers carry 53 random bits and are made in float64, then rounded to the chain's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from foresample.contracts import Target, at_least_one, extra_shape, seed_number

START, STEP, TEST, SEED, EXTRA = range(5)

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def seeds_of(seed: int, count: int, first: int = 0) -> Tensor:
    """The seeds of samples first … first + count − 1 of a run: 63-bit integers, a function of (seed, index)."""
    index = first + torch.arange(count)
    key = torch.full((count,), seed_number(seed))
    zero = torch.zeros_like(index)
    high, low, _, _ = _philox((zero, index, zero, torch.full_like(index, SEED)), key)
    return ((high << 32) | low) & (2**63 - 1)


def as_seeds(seeds: Sequence[int] | Tensor) -> Tensor:
    """A list of seeds as a tensor on the host, or an error that names the one that cannot be a seed."""
    if isinstance(seeds, Tensor) and seeds.dtype == torch.int64 and seeds.ndim == 1 and not (seeds < 0).any():
        return seeds.cpu()
    if not isinstance(seeds, Iterable):
        raise TypeError(f"seeds must be a list with one seed per sample, such as range(4), not {seeds!r}")
    return torch.tensor([seed_number(seed) for seed in seeds], dtype=torch.int64)


def resolve_seeds(
    count: int | None = None, seed: int = 0, seeds: Sequence[int] | Tensor | None = None
) -> Tensor:
    """One seed per sample: derived from the run's seed, or the seeds given."""
    if seeds is None:
        if count is None:
            raise ValueError("say how many samples to draw: count=64, or seeds=[…], one per sample")
        return seeds_of(seed, at_least_one("count", count))
    key = as_seeds(seeds)
    if count is not None and len(key) != count:
        raise ValueError(f"{len(key)} seeds for count={count} samples: give one seed per sample, or no count")
    if not len(key):
        raise ValueError("seeds is empty: give one seed per sample")
    return key


Normal = Callable[..., Tensor]
"""`normal`, or a backend's version of it."""


def normal(
    seed: Tensor, shape: torch.Size, dtype: torch.dtype, *, stream: int = STEP, step: Tensor, draw: Tensor
) -> Tensor:
    """Standard normal states, [B, *shape]: row b is the state of (seed[b], stream, step[b], draw[b])."""
    size = math.prod(shape)
    pair = torch.arange((size + 1) // 2, device=seed.device)
    counter = pair, step.unsqueeze(1), draw.unsqueeze(1), torch.full_like(pair, stream)
    words = _philox(counter, seed.unsqueeze(1))
    radius = torch.sqrt(-2 * torch.log1p(-_unit(words[0], words[1])))  # Box–Muller
    angle = (2 * math.pi) * _unit(words[2], words[3])
    flat = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)[:, :size]
    return flat.to(dtype).reshape(len(seed), *shape)


def extra_noise(target: Target, seed: Tensor, step: Tensor, normal: Normal = normal) -> Tensor | None:
    """ξ of these samples at these steps, [B] and [B] or [R] and [R, W]; None for a target without extra noise.

    ξ is a function of seed and step alone: drafts, the target, every later round and the sequential sampler see the
    same one.
    """
    shape = extra_shape(target)
    if shape is None:
        return None
    seed = (seed.unsqueeze(1) if step.ndim > 1 else seed).expand_as(step).flatten()
    at = step.flatten()
    noise = normal(seed, shape, target.std.dtype, stream=EXTRA, step=at, draw=torch.zeros_like(at))
    return noise.view(*step.shape, *shape)


def uniform(seed: Tensor, count: int, *, round: Tensor) -> Tensor:
    """Uniforms on [0, 1) for the acceptance test, [B, count], float64."""
    element = torch.arange(count, device=seed.device)
    zero = torch.zeros_like(element)
    words = _philox((element, round.unsqueeze(1), zero, torch.full_like(element, TEST)), seed.unsqueeze(1))
    return _unit(words[0], words[1])


def _unit(high: Tensor, low: Tensor) -> Tensor:
    """Two 32-bit words as a multiple of 2⁻⁵³ in [0, 1)."""
    return ((high >> 5) * 2**26 + (low >> 6)).double() * 2.0**-53


def _philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-10 on broadcast int64 tensors whose values are 32-bit words; the key is a 64-bit integer."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        # The products wrap modulo 2⁶⁴ in int64; their 32-bit halves are still right.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
