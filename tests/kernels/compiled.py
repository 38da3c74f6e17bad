"""The Triton kernels compiled for a GPU, without one: types, shapes and loops that the interpreter lets pass, the
compiler does not. `test_interpreted.py` runs this file in a process of its own, where launching means compiling.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import foresample as fs
from foresample.contracts import affine_chain
from foresample.core import noise as streams
from foresample.core.report import Tally
from foresample.core.round import Padded, Speculation, begin, last_draftable
from foresample.kernels import basis, noise, round, tally, transition
from tests.kernels.fused import CPU, small, warm, wide

H200 = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.bool: "*i1",
    int: "i32",
    float: "fp32",
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels launched, each of which was compiled for what it was given, and nothing more done."""
    launched: list[str] = []

    def launch(kernel: Any, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = dict(zip((p.name for p in kernel.params), values, strict=False)) | named
        signature, constants = {}, {}
        for number, parameter in enumerate(kernel.params):
            value = given.pop(parameter.name)
            if parameter.is_constexpr:
                signature[parameter.name], constants[(number,)] = "constexpr", value
            else:
                kind = value.dtype if isinstance(value, torch.Tensor) else type(value)
                signature[parameter.name] = TYPES[kind]
        triton.compile(ASTSource(kernel, signature, constants), target=H200, options=given)
        launched.append(kernel.__name__)

    monkeypatch.setattr(JITFunction, "run", launch)
    return launched


@pytest.mark.parametrize("case", ["double", "single, narrow", "multistep", "jacobian", "diagonal"])
def test_rounds_compile(case: str, compiled: list[str]) -> None:
    window, drafts = (20, 3) if "narrow" in case else (5, 5)
    target = small("multistep", CPU) if case == "multistep" else wide(CPU, torch.float64, 30, 100)
    if "single" in case:
        target = wide(CPU, torch.float32, 30)
    drafter = warm(target, case) if case in ("jacobian", "diagonal") else fs.Replay()
    how = Speculation(drafter, window, None, True, last_draftable(target.std), Padded(drafts))
    rows = begin(target, how.drafter, window, streams.seeds_of(1, 2))
    draft = round.propose(target, rows, how)
    _, commit = round.settle(target, rows, draft, torch.zeros_like(draft.call.x), how)
    counters = Tally(window, len(target.std), CPU)
    tally.count(commit, counters.lengths, counters.drafted, counters.mismatch)
    assert compiled == ["_draft", "_measure", "_decide", "_commit", "_count"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transitions_and_noise_compile(dtype: torch.dtype, compiled: list[str]) -> None:
    target, key = wide(CPU, dtype), streams.seeds_of(0, 2)
    x = noise.normal(key, target.shape, dtype, stream=streams.STEP, step=key * 0, draw=key * 0)
    chain = affine_chain(target)
    assert chain is not None
    transition.transition(chain, x, x.clone(), x.clone(), key, key * 0, key * 0)
    assert len(compiled) == 2


def test_turning_compiles(compiled: list[str]) -> None:
    basis.turn(torch.eye(96), torch.zeros(2, 96, 32), torch.eye(32))
    assert compiled == ["_turn"]


@triton.jit
def _restless(out, n, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    for _ in range(n):
        lane = tl.arange(0, 2 * LANES)  # another shape in every loop
    tl.store(out + lane, lane)


def test_what_does_not_compile_is_caught() -> None:
    with pytest.raises(triton.compiler.errors.CompilationError):
        _restless[(1,)](torch.zeros(8, dtype=torch.int64), 3, LANES=4)
