"""Codes for NaN and infinity: the error names what the round noted, at every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foresample.faults import (
    NO_FAULT,
    broken,
    fault_error,
    fault_step,
    first_line,
    note_fault,
    note_state,
    raise_faults,
)

WIDTH = 5


def noted(network: Tensor, state: Tensor, first_step: int = 0, fault: int = NO_FAULT, used: int = WIDTH) -> int:
    """The code of one row after a round."""
    step = first_step + torch.arange(WIDTH)
    inside = torch.arange(WIDTH) < used
    values = (v.unsqueeze(0) for v in (network, state, step, inside))
    return int(note_fault(torch.tensor([fault]), *values))


def at(*positions: int) -> Tensor:
    flags = torch.zeros(WIDTH, dtype=torch.bool)
    flags[list(positions)] = True
    return flags


@given(first=st.integers(0, 10**6), position=st.integers(0, WIDTH - 1), state=st.booleans())
def test_the_error_of_a_fault_code_names_the_fault(first: int, position: int, state: bool) -> None:
    code = noted(at() if state else at(position), at(position) if state else at(), first)
    assert code != NO_FAULT
    assert fault_step(code) == first + position
    said = str(fault_error(code, 7))
    assert f"at step {first + position} of sample 7" in said
    assert said.startswith("the state" if state else "the network returned NaN or infinity")


def test_codes_are_all_different() -> None:
    codes = [noted(at(p), at(), first) for first in (0, WIDTH) for p in range(WIDTH)]
    codes += [noted(at(), at(p), first) for first in (0, WIDTH) for p in range(WIDTH)]
    assert len({*codes, NO_FAULT}) == 4 * WIDTH + 1


def test_the_first_fault_counts_and_only_what_was_used() -> None:
    assert noted(at(), at()) == NO_FAULT
    assert fault_step(noted(at(3, 4), at(2), 10)) == 12
    assert noted(at(3), at(4), used=3) == NO_FAULT
    # A broken state breaks the network: the state is to blame.
    assert noted(at(1), at(1)) == noted(at(), at(1))
    earlier = noted(at(0), at(), 4)
    assert noted(at(0), at(), 9, fault=earlier) == earlier


def test_the_first_row_that_broke_is_raised() -> None:
    sample = torch.tensor([4, 5, 6])
    raise_faults(torch.full((3,), NO_FAULT), sample)
    codes = torch.tensor([NO_FAULT, noted(at(2), at()), noted(at(), at(1))])
    with pytest.raises(FloatingPointError, match="NaN or infinity at step 2 of sample 5"):
        raise_faults(codes, sample)
    with pytest.raises(FloatingPointError, match="the state at step 1 of sample 6 is NaN or infinite"):
        raise_faults(codes.flip(0), sample.flip(0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_broken_value_is_enough(value: float) -> None:
    states = torch.zeros(2, 3, 2, 2)
    states[1, 2, 0, 1] = value
    assert broken(states).nonzero().tolist() == [[1, 2]]
    fault, step = torch.tensor([NO_FAULT, 7, NO_FAULT]), torch.tensor([3, 8, 9])
    assert torch.equal(note_state(fault, states[0], step), fault)
    after = note_state(fault, states[1], step)
    assert after[:2].equal(fault[:2])
    assert str(fault_error(int(after[2]), 5)).startswith("the state at step 9 of sample 5 is NaN or infinite")


@pytest.mark.parametrize("said", ["out of memory", "\n\n  out of memory\nat line 3", "out of memory \n"])
def test_an_error_of_another_library_is_reported_by_its_first_line(said: str) -> None:
    assert first_line(RuntimeError(said)) == "out of memory"
    assert first_line(RuntimeError("\n")) == first_line(RuntimeError()) == "RuntimeError"
