"""Every scalar of `backends.triton.coupling` in one kernel; a module of its own, since Triton is not everywhere."""

from __future__ import annotations

import triton
import triton.language as tl

from foresample.backends.triton import coupling


@triton.jit
def every(mismatch, log_p, s, level, nodes, weights, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u, w = tl.load(nodes + tl.arange(0, 16)), tl.load(weights + tl.arange(0, 16))
    d, p = tl.load(mismatch + i), tl.load(log_p + i)
    tl.store(out + i, coupling.acceptance(d, p, u, w))
    tl.store(out + n + i, coupling.tilted_cdf(tl.load(s + i), d, p, u, w))
    tl.store(out + 2 * n + i, coupling.residual(tl.load(level + i), d, p, u, w))
