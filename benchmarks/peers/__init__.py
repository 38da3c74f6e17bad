"""Methods to use instead of foresample, written from their papers' formulas on foresample's contract.

Exact: `reflection`, `blocks`, `asd`, `dgrs`, `rass`. Lossy: `paradigms`, `parasolver` and `parataa`, and fewer steps
with `ddpm`, `ddim` or `dpmpp_2m`. Each is a function of a target, a count and a seed and returns a `PeerRun`; the
costs of all are counted the same way.
"""

from benchmarks.peers.anderson import parataa
from benchmarks.peers.chains import asd, blocks, reflection
from benchmarks.peers.common import Committed, PeerRun
from benchmarks.peers.few import Schedule, ddim, ddpm, dpmpp_2m, trailing
from benchmarks.peers.picard import paradigms, parasolver
from benchmarks.peers.trees import dgrs, nodes, rass

__all__ = [
    "Committed",
    "PeerRun",
    "Schedule",
    "asd",
    "blocks",
    "ddim",
    "ddpm",
    "dgrs",
    "dpmpp_2m",
    "nodes",
    "paradigms",
    "parasolver",
    "parataa",
    "rass",
    "reflection",
    "trailing",
]
