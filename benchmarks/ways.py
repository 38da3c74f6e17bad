"""Ways to run a pretrained network on a GPU; a comparison gives each side the way that is fastest for it.

torch.compile and channels-last belong to a network. cuDNN's search belongs to the moment at which work is captured:
with it, cuDNN tries its convolutions on every new shape, and a captured graph keeps those that it chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from foresample import pretrained
from foresample.pretrained import Pretrained
from foresample.pretrained.model import compile_network


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run a network, in bfloat16."""

    name: str
    compiled: bool = True
    """As `foresample.pretrained.load` compiles it: for one state, and in channels-last for several."""
    mode: str | None = None
    """Of torch.compile."""
    channels_last: bool = False
    """One state runs in channels-last, too."""
    search: bool = False
    """cuDNN tries its convolutions (`torch.backends.cudnn.benchmark`)."""
    one_state: bool = False
    """It differs from another way for one state alone, or takes minutes to compile: not tried for several states."""

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Capture work here, so that cuDNN searches if this way says so."""
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, self.search
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


EAGER = Way(name="eager", compiled=False)
WAYS = {
    way.name: way
    for way in (
        Way(name="compiled"),
        Way(name="compiled, cuDNN search", search=True),
        Way(name="compiled, channels-last", channels_last=True, one_state=True),
        Way(name="compiled, channels-last, cuDNN search", channels_last=True, search=True, one_state=True),
        Way(name="max-autotune", mode="max-autotune-no-cudagraphs", one_state=True),
    )
}


def networks(model: Path, ways: Sequence[Way], device: str = "cuda") -> dict[Way, Pretrained]:
    """The model's network in each way; ways that differ in cuDNN's search share one, which compiles once."""
    made: dict[Any, Pretrained] = {}
    found: dict[Way, Pretrained] = {}
    # Compiled code is kept by function, so the networks of all ways share this limit.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for way in ways:
        key = way.compiled, way.mode, way.channels_last
        if key not in made:
            made[key] = _network(model, way, device)
        found[way] = made[key]
    return found


def _network(model: Path, way: Way, device: str) -> Pretrained:
    """One network of its own; torch.compile compiles it when it is first called."""
    source = pretrained.load(model, device, torch.bfloat16)
    if way.channels_last:
        # nn.Module's own method, since diffusers' warns of casts
        cast(Any, torch.nn.Module.to)(source.unet, memory_format=torch.channels_last)
    if not way.compiled:
        return source
    unet, for_many = compile_network(source.unet, mode=way.mode)
    return replace(source, unet=unet, for_many=for_many)
