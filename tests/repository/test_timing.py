"""`benchmarks.timing`: times of samplers against each other, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.timing import Timing, take_turns


class Clock:
    """A clock that moves only while a side works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.now

    def side(self, name: str, seconds: Callable[[int], float]) -> Callable[[int], None]:
        def run(turn: int) -> None:
            self.order.append((name, turn))
            self.now += seconds(turn)

        return run


def test_sides_are_warmed_and_take_turns_in_both_orders() -> None:
    clock = Clock()
    sides = {"slow": clock.side("slow", lambda turn: 3), "fast": clock.side("fast", lambda turn: 1)}
    take_turns(sides, warm=1, least=2, clock=clock)
    assert clock.order == [
        ("slow", -1),
        ("fast", -1),
        ("slow", 0),
        ("fast", 0),
        ("fast", 1),
        ("slow", 1),
    ]


def test_a_steady_ratio_needs_the_fewest_turns_and_warm_up_is_not_counted() -> None:
    clock = Clock()
    cold = clock.side("base", lambda turn: 60 if turn < 0 else 3)
    timing = take_turns({"base": cold, "ours": clock.side("ours", lambda turn: 1)}, clock=clock)
    ratio = timing.ratio("ours")
    assert (ratio.ratio, ratio.error, ratio.turns, ratio.settled) == (3, 0, 8, True)
    assert (timing.median("base"), timing.median("ours"), timing.median_error("ours")) == (3, 1, 0)


def test_a_disturbance_shared_by_both_sides_of_a_turn_adds_no_error() -> None:
    clock = Clock()
    noise = torch.rand(100, generator=torch.Generator().manual_seed(1)).tolist()
    sides = {
        "base": clock.side("base", lambda turn: 2 + 2 * noise[turn]),
        "ours": clock.side("ours", lambda turn: 1 + noise[turn]),
    }
    ratio = take_turns(sides, clock=clock).ratio("ours")
    assert ratio.ratio == pytest.approx(2)
    assert ratio.error < 1e-9


def test_turns_are_added_until_the_error_is_small() -> None:
    clock = Clock()
    noise = torch.rand((2, 1000), generator=torch.Generator().manual_seed(2)).tolist()
    sides = {
        "base": clock.side("base", lambda turn: 2 + noise[0][turn]),
        "ours": clock.side("ours", lambda turn: 1 + noise[1][turn]),
    }
    loose, tight = (take_turns(sides, most=1000, error=error, clock=clock) for error in (0.1, 0.02))
    assert loose.turns < tight.turns < 1000
    assert tight.ratio("ours").settled
    assert tight.ratio("ours").error < 0.02 * tight.ratio("ours").ratio


@pytest.mark.parametrize("limit", [{"most": 20}, {"seconds": 60.0}])
def test_a_limit_that_ends_the_measurement_is_stated(limit: dict[str, float]) -> None:
    clock = Clock()
    noise = torch.rand(1000, generator=torch.Generator().manual_seed(3)).tolist()
    sides = {
        "base": clock.side("base", lambda turn: 1),
        "ours": clock.side("ours", lambda turn: 0.1 + 3 * noise[turn]),
    }
    timing = take_turns(sides, clock=clock, **limit)  # type: ignore[arg-type]
    assert timing.turns < 50
    assert not timing.ratio("ours").settled
    assert "error still above 2%" in str(timing.ratio("ours"))


def test_one_disturbed_turn_does_not_move_the_ratio() -> None:
    clock = Clock()
    sides = {
        "base": clock.side("base", lambda turn: 100 if turn == 4 else 2),
        "ours": clock.side("ours", lambda turn: 1),
    }
    assert take_turns(sides, least=9, clock=clock).ratio("ours").ratio == 2


def test_a_quick_side_runs_several_times_in_a_turn_and_each_run_is_timed() -> None:
    clock = Clock()
    sides = {"base": clock.side("base", lambda turn: 6), "ours": clock.side("ours", lambda turn: 1 + turn % 3)}
    timing = take_turns(sides, warm=0, least=2, most=2, repeats={"ours": 3}, clock=clock)
    runs = [("base", 0), *(("ours", number) for number in range(6)), ("base", 1)]
    assert clock.order == runs
    assert timing.seconds == {"base": [6, 6], "ours": [1, 2, 3, 1, 2, 3]}
    assert timing.turns == 2
    assert (timing.ratio("ours").ratio, timing.ratio("ours").turns) == (3, 2)
    assert timing.ratio("base", "ours").ratio == pytest.approx(1 / 3)


def test_runs_of_one_turn_are_resampled_together() -> None:
    each = torch.rand(40, generator=torch.Generator().manual_seed(5), dtype=torch.float64).exp()
    base, ours = each.tolist(), each.repeat_interleave(4).tolist()
    ratio = Timing({"base": base, "ours": ours}).ratio("ours")
    assert (ratio.ratio, ratio.error, ratio.turns) == (1, pytest.approx(0), 40)


def test_the_stated_error_is_the_spread_of_repeated_measurements() -> None:
    generator = torch.Generator().manual_seed(4)
    ratios, errors = [], []
    for _ in range(200):
        base, ours = torch.randn((2, 30), generator=generator, dtype=torch.float64).mul(0.2).exp().tolist()
        ratio = Timing({"base": base, "ours": ours}).ratio("ours")
        ratios.append(ratio.ratio)
        errors.append(ratio.error)
    spread = float(torch.tensor(ratios).std())
    assert 0.8 * spread < float(torch.tensor(errors).mean()) < 1.3 * spread


def test_invalid_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="least=1: an error needs two turns"):
        take_turns({}, least=1)
    with pytest.raises(ValueError, match="most=4 is below least=8"):
        take_turns({}, most=4)
    with pytest.raises(ValueError, match="one side at least has to run once"):
        take_turns({"a": print, "b": print}, repeats={"a": 2, "b": 2})
