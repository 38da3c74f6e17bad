"""The Triton kernels compiled for a GPU, without one: types, shapes and loops that the interpreter lets pass, the
compiler does not. `test_interpreted.py` runs this file in a process of its own, where launching means compiling.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import foresample as fs
from foresample.backends import triton as kernels
from foresample.backends.triton import basis, noise, round, tally, transition
from foresample.contracts import affine_chain
from foresample.core import noise as streams
from foresample.core.report import Tally
from foresample.core.round import Padded, Speculation, begin, last_draftable
from tests.backends.fused import CPU, small, warm, wide
from tests.backends.lanes import fused_exchanges, lane_decisions

H200 = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.bool: "*i1",
    int: "i32",
    float: "fp32",
}
Compiled = dict[str, Mapping[str, str]]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """The kernels launched, each of which was compiled for what it was given, and nothing more done; and their code at
    every stage: before it is spread over threads ("ttir"), after ("ttgir"), and for the GPU ("ptx")."""
    launched: Compiled = {}

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
        built = triton.compile(ASTSource(kernel, signature, constants), target=H200, options=given)
        launched[kernel.__name__] = built.asm

    monkeypatch.setattr(JITFunction, "run", launch)
    return launched


CASES = ["double", "single, narrow", "multistep", "jacobian", "small jacobian", "diagonal"]


def compile_round(case: str, round: ModuleType) -> None:
    window, drafts = (20, 3) if "narrow" in case else (5, 5)
    target = small("multistep", CPU) if case == "multistep" else wide(CPU, torch.float64, 30, 100)
    if "single" in case:
        target = wide(CPU, torch.float32, 30)
    if "small" in case:
        target = small("wells", CPU)
    prior = case.split()[-1]
    drafter = warm(target, prior) if prior in ("jacobian", "diagonal") else fs.Replay()
    speculation = Speculation(drafter, window, None, True, last_draftable(target.std), Padded(drafts))
    rows = begin(target, speculation, streams.seeds_of(1, 2))
    draft = round.propose(target, rows, speculation)
    _, commit = round.settle(target, rows, draft, torch.zeros_like(draft.call.x), speculation)
    counters = Tally(window, len(target.std), CPU)
    tally.count(commit, counters.lengths, counters.drafted, counters.mismatch)


def assert_lanes_agree(compiled: Compiled) -> None:
    for name, code in compiled.items():
        for stage in ("ttir", "ttgir"):
            assert lane_decisions(code[stage]) == set(), name
        assert fused_exchanges(code["ptx"]) == [], name


@pytest.mark.parametrize("case", CASES)
def test_rounds_compile(case: str, compiled: Compiled) -> None:
    compile_round(case, round)
    assert list(compiled) == ["_draft", "_measure", "_decide", "_commit", "_count"]
    assert not read_late(compiled["_decide"]["ttir"]) - {"sums"}  # whose columns are written by those before
    assert_lanes_agree(compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transitions_and_noise_compile(dtype: torch.dtype, compiled: Compiled) -> None:
    target, key = wide(CPU, dtype), streams.seeds_of(0, 2)
    x = noise.normal(key, target.shape, dtype, stream=streams.STEP, step=key * 0, draw=key * 0)
    chain = affine_chain(target)
    assert chain is not None
    transition.transition(chain, x, x.clone(), x.clone(), key, key * 0, key * 0)
    assert len(compiled) == 2
    assert_lanes_agree(compiled)


def test_turning_compiles(compiled: Compiled) -> None:
    basis.turn(torch.eye(96), torch.zeros(2, 96, 32), torch.eye(32))
    assert list(compiled) == ["_turn"]
    assert_lanes_agree(compiled)


def read_late(code: str) -> set[str]:
    """Parameters that a kernel changes in place and does not read before its first barrier, or write after it.

    Every warp of a program reads a row's numbers for itself. One that comes late must not read what an early one has
    written already: it would decide otherwise, take another branch, and wait at a barrier that no other warp reaches.
    """
    source: dict[str, str] = {}  # the parameter that a pointer came from
    read, written, late, met = set[str](), set[str](), set[str](), False
    for line in code.splitlines():
        if "tt.func" in line:
            source = {name: name[1:] for name in re.findall(r"(%\w+): !tt.ptr", line)}
        elif "barrier" in line:
            met = True
        elif pointer := re.search(r"(%\w+) = tt.(?:addptr|splat|broadcast|bitcast) (%\w+)", line):
            if pointer[2] in source:
                source[pointer[1]] = source[pointer[2]]
        elif access := re.search(r"tt.(load|store) (%\w+)", line):
            loads, name = access[1] == "load", source[access[2]]
            (read if loads else written).add(name)
            if loads == met:
                late.add(name)
    in_place = read & written
    assert in_place
    return late & in_place


@triton.jit
def _hasty(step, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    tl.store(out + lane, lane)
    tl.debug_barrier()
    at = tl.load(step)
    tl.store(out + at + lane, lane)
    tl.store(step, at + 1)


def test_a_number_read_late_is_caught(compiled: Compiled) -> None:
    numbers = torch.zeros(8, dtype=torch.int64)
    _hasty[(1,)](numbers, numbers, LANES=4)
    assert read_late(compiled["_hasty"]["ttir"]) == {"step"}


TWINS: dict[str, tuple[str, str, str, str, Callable[[Compiled], bool]]] = {
    "Newton's steps until they settle": (
        "coupling",
        "        y = tl.where((step > 0) & (step <= y_right), step, y)\n        left -= 1\n",
        "        new = tl.where((step > 0) & (step <= y_right), step, y)\n"
        "        left = (left - 1) * tl.max((tl.abs(new - y) > 1e-8 * y).to(tl.int32), 0)\n"
        "        y = new\n",
        "double",
        lambda seen: all(
            lane_decisions(seen["_decide"][stage]) == {"scf.while"} for stage in ("ttir", "ttgir")
        ),
    ),
    "a branch on a sum": (
        "round",
        "    if before_at < 0:",
        "    if tl.sum(tl.where(corrected, before, 0.0), 0) < 0:",
        "double",
        lambda seen: lane_decisions(seen["_decide"]["ttgir"]) == {"scf.if"},
    ),
    "drafts kept by levels that every lane has added up": (
        "round",
        "    after = tl.load(sums + i * _SUMS + _AFTER, mask=inside, other=0.0)\n",
        "",
        "double",
        lambda seen: {"scf.if", "tt.load", "tt.store"} <= lane_decisions(seen["_decide"]["ttgir"]),
    ),
    "products fused with a neighbour's, in integrals": (
        "round",
        "enable_fp_fusion=False",
        "enable_fp_fusion=True",
        "double",
        lambda seen: bool(fused_exchanges(seen["_decide"]["ptx"])),
    ),
    "products fused with a neighbour's, in a matrix": (
        "round",
        "enable_fp_fusion=not jacobian.is_matrix",
        "enable_fp_fusion=True",
        "small jacobian",
        lambda seen: bool(fused_exchanges(seen["_draft"]["ptx"]) and fused_exchanges(seen["_measure"]["ptx"])),
    ),
}
"""Kernels as they were: file, what stands there now, what stood there, a round, and what shows in its code."""


@pytest.mark.parametrize("twin", TWINS)
def test_lanes_that_branch_apart_are_caught(
    twin: str, compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now, before, case, shows = TWINS[twin]
    (home,) = kernels.__path__
    source = Path(home, f"{file}.py").read_text()
    assert now in source
    (tmp_path / f"{file}.py").write_text(source.replace(now, before))
    monkeypatch.setattr(kernels, "__path__", [str(tmp_path), home])
    for name in ("coupling", "round"):
        monkeypatch.delitem(sys.modules, f"foresample.backends.triton.{name}")
        monkeypatch.delattr(kernels, name)
    compile_round(case, importlib.import_module("foresample.backends.triton.round"))
    assert shows(compiled)


@triton.jit
def _restless(out, n, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    for _ in range(n):
        lane = tl.arange(0, 2 * LANES)  # another shape in every loop
    tl.store(out + lane, lane)


def test_what_does_not_compile_is_caught() -> None:
    with pytest.raises(triton.compiler.errors.CompilationError):
        _restless[(1,)](torch.zeros(8, dtype=torch.int64), 3, LANES=4)
