"""The Triton kernels in Triton's interpreter: numpy on a CPU, program by program. `test_interpreted.py` runs this file
in processes of their own, since the interpreter must be asked for before Triton is imported.

What the compiler makes of them, and whether programs get in one another's way, only a GPU shows (tests/gpu).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import foresample as fs
from benchmarks import soak
from foresample import backends
from foresample.backends import triton as kernels
from foresample.core import coupling
from foresample.core import noise as streams
from foresample.core.round import Layout, Packed, Padded, Speculation, begin, last_draftable
from foresample.faults import BROKEN_STATE
from foresample.targets import ChainTarget
from tests.backends import fused
from tests.backends.fused import CPU, assert_agree_along, small, warm, wide
from tests.core import test_coupling as oracle
from tests.support.agreement import fused_round, plain_round

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/backends/test_interpreted.py"
assert os.environ.get("FORESAMPLE_PLAIN") == "1", "what kernels are held against is plain PyTorch"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in lanes that are masked later

# The interpreter puts its own functions into the language at every call of a device function, and takes a third of the
# time for it; here they stay.
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)

ROOM = [
    f"foresample.backends.triton.{name}"
    for name in ("basis", "noise", "transition", "coupling", "round", "tally")
]


def _lifted(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of numpy's arrays for the interpreter's tensors."""

    def of_tensor(x: Any) -> Any:
        assert x.dtype == tl.float64
        return tl.core.tensor(interpreter.TensorHandle(function(x.handle.data), x.handle.dtype), x.type)

    return of_tensor


LIBDEVICE = SimpleNamespace(
    erf=_lifted(scipy.special.erf),
    erfc=_lifted(scipy.special.erfc),
    erfcx=_lifted(scipy.special.erfcx),
    normcdfinv=_lifted(scipy.special.ndtri),
    expm1=_lifted(np.expm1),
    log1p=_lifted(np.log1p),
    cospi=_lifted(lambda x: np.cos(np.pi * x)),
    sinpi=_lifted(lambda x: np.sin(np.pi * x)),
)
"""Replacements for the CUDA functions that the kernels use and the interpreter lacks."""


def load() -> None:
    """The kernels as their files are now."""
    for name in (*ROOM, "tests.backends.scalars"):
        sys.modules.pop(name, None)
    for name in ROOM:
        module: Any = importlib.import_module(name)
        if hasattr(module, "libdevice"):
            module.libdevice = LIBDEVICE
        for constant, value in list(vars(module).items()):
            # As numbers: this version's interpreter takes constexpr · tensor for a constexpr.
            if isinstance(value, tl.constexpr) and isinstance(value.value, float):
                setattr(module, constant, value.value)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds and transitions by Triton on a CPU; noise and tallies, which they are held against, stay plain."""

    def transition(*given: Any, **named: Any) -> None:
        from foresample.backends.triton.transition import transition as fused

        fused(*given, **named)

    here = replace(backends.PLAIN, name="Triton", transition=transition)
    monkeypatch.setattr(backends, "backend_for", lambda device, dtype: here)
    load()


# ------------------------------------------------------------------ what must agree


@dataclass(frozen=True)
class Case:
    """Rounds to compare: how a chain is sampled."""

    block: int | None
    layout: Layout | None
    prior: str | None = None
    window: int = 5
    rows: tuple[int, ...] = (0, 1)


CASES = {
    "flow": Case(1, Packed(), "slopes", window=3),
    "multistep": Case(4, Packed()),
    "ddim": Case(None, None, "table"),
    "interrupted": Case(None, Padded()),
    "wells": Case(4, Padded(), "jacobian"),
    "strays": Case(None, Packed(), window=10, rows=(19,)),  # one of the few that do
    "wide": Case(None, None, window=3),
    "wide, diagonal": Case(None, None, "diagonal", window=3),
}


@pytest.mark.parametrize("chain", CASES)
def test_rounds_agree(chain: str) -> None:
    case = CASES[chain]
    # In single precision, and more elements than any program takes at a time.
    target = wide(CPU, torch.float32, 5, 1100) if chain.startswith("wide") else small(chain, CPU)
    drafter = fs.Replay() if case.prior is None else warm(target, case.prior)
    seeds = streams.seeds_of(1, 20)[list(case.rows)]
    assert_agree_along(target, drafter, case.window, seeds, case.block, case.layout)


@pytest.mark.parametrize("name", soak.VARIANTS)
def test_rounds_of_the_soak_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = soak.VARIANTS[name]
    target = variant.target("cpu", torch.float32)
    with monkeypatch.context() as plainly:
        plainly.setattr(backends, "backend_for", lambda device, dtype: backends.PLAIN)
        drafter = variant.drafter(target, 8)
    assert soak.difference(variant, target, drafter, 1) is None


@pytest.mark.parametrize("layout", [Padded(2), Packed()], ids=["padded", "packed"])
def test_a_target_may_write_into_its_states(layout: Layout) -> None:
    from foresample.backends.triton import round as fused_rounds

    target = small("flow", CPU)
    speculation = Speculation(warm(target, "table"), 3, None, True, last_draftable(target.std), layout)
    draft = fused_rounds.propose(target, begin(target, speculation, streams.seeds_of(0, 2)), speculation)
    drafted = draft.states.clone()
    here = draft.call.needed if draft.call.needed is not None else torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(draft.call.x, drafted[here])
    draft.call.x.zero_()
    assert torch.equal(draft.states, drafted)


def test_scalars_agree() -> None:
    fused.assert_scalars_agree(CPU, 1 << 14, 1 << 11)


def test_a_fixed_number_of_newton_steps_reaches_the_root() -> None:
    """Over the grid of the plain code's own test, and against the same oracle."""
    from tests.backends.scalars import every

    grid = [
        (delta, log_p, level)
        for delta in oracle.DELTAS[1:]
        for log_p in oracle.LOG_PS
        if log_p < 0 and oracle.reachable(delta, log_p)
        for level in oracle.LEVELS
    ]
    count = triton.next_power_of_2(len(grid))
    delta, log_p, level = torch.tensor((grid + grid)[:count], dtype=torch.float64).T.contiguous()
    out = torch.empty(3, count, dtype=torch.float64)
    every[(1,)](delta, log_p, 0 * delta, level, *coupling.quadrature(CPU), out, count, BLOCK=count)
    errors = [oracle.backward_error(s, u, d, p) for s, (d, p, u) in zip(out[2], grid, strict=False)]
    assert max(errors) < oracle.TOLERANCE


def test_streams_agree() -> None:
    fused.assert_noise_is_the_same_stream(CPU, 3)


@pytest.mark.parametrize("chain", ["multistep", "wide"])
def test_sequential_transitions_agree(chain: str) -> None:
    target = wide(CPU, torch.float64, 5, 300) if chain == "wide" else small(chain, CPU)
    fused.assert_sequential_is_its_formula(target)


def test_pictures_are_turned() -> None:
    fused.assert_pictures_are_turned(CPU)


def broken(where: str) -> tuple[ChainTarget, int]:
    """A chain whose network, or whose state, is broken at step 5, or one element of which ends so; and the code."""
    if where == "the end":
        whole = wide(CPU, torch.float64, 5, 300)
        far = 1e308 * (torch.arange(300) == 290).double()

        def beyond(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
            return torch.where((step == 4).unsqueeze(1), far, whole.network(x, step, row))

        share = torch.tensor([0.05, 0.05, 0.05, 0.05, 2.0], dtype=torch.float64)
        return replace(
            whole, chain=replace(whole.chain, prediction_weight=share), network=beyond
        ), BROKEN_STATE - 5
    base = small("langevin", CPU)
    if where == "network":

        def network(x: Tensor, step: Tensor, row: Tensor) -> Tensor:
            return torch.where((step == 5).unsqueeze(1), torch.nan, base.network(x, step, row))

        return replace(base, network=network), 5
    weight = base.chain.state_weight.clone()
    weight[4] = torch.inf
    return replace(base, chain=replace(base.chain, state_weight=weight)), BROKEN_STATE - 5


@pytest.mark.parametrize("where", ["network", "state", "the end"])
def test_faults_agree(where: str) -> None:
    target, code = broken(where)
    speculation = Speculation(fs.Replay(), 2, None, True, last_draftable(target.std), Padded())
    for settled in (plain_round, fused_round):
        rows = begin(target, speculation, streams.seeds_of(0, 1))
        for _ in range(6):
            rows = settled(target, rows, speculation).after
        assert (rows.fault == code).all()
    with pytest.raises(FloatingPointError, match=r"step 5 of sample 0"):
        fs.sequential(target, 1)


# ------------------------------------------------------------------ what must be caught


@dataclass(frozen=True)
class Twin:
    """One place of one kernel changed, and a test that must notice."""

    file: str
    old: str
    new: str
    notices: Callable[[], None]


TWINS = {
    "draft: a response of the wrong sign": Twin(
        "round", "guess + follow * innovation", "guess - follow * innovation", lambda: test_rounds_agree("flow")
    ),
    "draft: the noise is kept a place further": Twin(
        "round", "spent + at + j * size, z", "spent + at + (j + 1) * size, z", lambda: test_rounds_agree("flow")
    ),
    "draft: the rest of the window ends early": Twin(
        "round", "(place < tl.minimum(", "(place + 1 < tl.minimum(", lambda: test_rounds_agree("ddim")
    ),
    "draft: the Jacobian transposed": Twin(
        "round",
        "element[:, None]) * size + element[None, :]",
        "element[None, :]) * size + element[:, None]",
        lambda: test_rounds_agree("wells"),
    ),
    "measure: only the first elements": Twin(
        "round", "range(0, size, BLOCK)", "range(0, BLOCK, BLOCK)", lambda: test_rounds_agree("wide")
    ),
    "measure: a gain of the wrong sign": Twin(
        "round", "cross += dx * dp\n", "cross -= dx * dp\n", lambda: test_rounds_agree("ddim")
    ),
    "measure: the prediction before forgotten": Twin(
        "round",
        "earlier = inside & (j > 0)",
        "earlier = inside & (j < 0)",
        lambda: test_rounds_agree("multistep"),
    ),
    "decide: blocks end early": Twin(
        "round", "(i % block == block - 1)", "(i % block == block - 2)", lambda: test_rounds_agree("multistep")
    ),
    "decide: uniforms of another round": Twin(
        "round", "done.to(tl.uint32)", "(done + 1).to(tl.uint32)", lambda: test_rounds_agree("flow")
    ),
    "decide: reflected to the wrong side": Twin(
        "round", "drawn, mismatch - s)", "drawn, mismatch + s)", lambda: test_rounds_agree("flow")
    ),
    "decide: the residual of the other tail": Twin(
        "round",
        "residual(drawn + level_at,",
        "residual(1.0 - level_at - drawn,",
        lambda: test_rounds_agree("wells"),
    ),
    "decide: recycled noise of the wrong sign": Twin(
        "round", "normcdfinv(level))", "-normcdfinv(level))", lambda: test_rounds_agree("multistep")
    ),
    "decide: hopeless drafts examined": Twin(
        "round", "(mismatch <= _FAR) & (code < 2)", "i < LANES", lambda: test_rounds_agree("strays")
    ),
    "decide: a fault of the wrong kind": Twin(
        "round", "tl.where(kind > 1,", "tl.where(kind > 2,", lambda: test_faults_agree("state")
    ),
    "commit: noise moved up too little": Twin(
        "round",
        "source = j + moves",
        "source = j + moves - 1",
        lambda: test_rounds_agree("flow"),
    ),
    "commit: no correction": Twin(
        "round", "+ scale * shift * difference", "+ 0 * shift * difference", lambda: test_rounds_agree("flow")
    ),
    "coupling: the residual on the wrong side": Twin(
        "coupling", "return t + y", "return t - y", lambda: test_scalars_agree()
    ),
    "coupling: too few Newton steps": Twin(
        "coupling",
        "left = tl.full([], _NEWTON_STEPS, tl.int32)",
        "left = tl.full([], 2, tl.int32)",
        lambda: test_a_fixed_number_of_newton_steps_reaches_the_root(),
    ),
    "coupling: small mismatches cancel": Twin(
        "coupling",
        "value = tl.where(mismatch < _SMALL, small, large)",
        "value = large",
        lambda: test_scalars_agree(),
    ),
    "noise: pairs split elsewhere": Twin("noise", "(size + 1) // 2", "size // 2", lambda: test_streams_agree()),
    "transition: the prediction forgotten": Twin(
        "transition",
        "previous + at, p,",
        "previous + at, 0 * p,",
        lambda: test_sequential_transitions_agree("multistep"),
    ),
    "transition: noise of another step": Twin(
        "transition",
        "element, k, k * 0",
        "element, k + 1, k * 0",
        lambda: test_sequential_transitions_agree("wide"),
    ),
    "draft: the diagonal of the step before": Twin(
        "round",
        "jacobian + k * size + element",
        "jacobian + tl.maximum(k - 1, 0) * size + element",
        lambda: test_rounds_agree("wide, diagonal"),
    ),
    "basis: the wrong way across": Twin(
        "basis",
        "right + column_down * columns + column,",
        "right + column * columns + column_down,",
        lambda: test_pictures_are_turned(),
    ),
    "tally: mismatches of the step after": Twin(
        "tally", "row * stride) + i", "row * stride) + i + 1", lambda: test_rounds_agree("wide")
    ),
    "commit: only the first part of a state is looked at": Twin(
        "round",
        "if wrong > 0:",
        "if wrong * (tl.program_id(1) == 0) > 0:",
        lambda: test_faults_agree("the end"),
    ),
}


@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
def test_twins_are_caught(twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home,) = kernels.__path__
    source = Path(home, f"{twin.file}.py").read_text()
    assert source.count(twin.old) == 1
    (tmp_path / f"{twin.file}.py").write_text(source.replace(twin.old, twin.new))
    monkeypatch.setattr(kernels, "__path__", [str(tmp_path), home])
    load()
    with pytest.raises(AssertionError):
        twin.notices()
