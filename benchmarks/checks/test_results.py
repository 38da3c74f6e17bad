"""Expectations of the committed result files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.checks import stale
from benchmarks.checks.commands import refusal
from benchmarks.checks.standing import STANDING
from benchmarks.curves import BATCHES, CIFAR10, PROBLEMS, TREES
from benchmarks.kinds.calls import Calls
from benchmarks.kinds.clock import GpuTests, Sanitized, Soak
from benchmarks.kinds.datasets import Training
from benchmarks.kinds.quality import QualityCost
from benchmarks.kinds.rivals import Curves, Published
from benchmarks.names import LABELS
from benchmarks.peers import nodes
from benchmarks.published import UNIFORM
from benchmarks.result_files import BenchResult, CheckResult, Result
from benchmarks.results import load, read
from benchmarks.tables import rivals
from foresample.pretrained import EMBEDDED

FILES = read().found
CURVES = rivals.curve_files()


each = pytest.mark.parametrize("result", FILES, ids=lambda result: result.name)
needs_history = pytest.mark.skipif(
    not stale.whole_history(), reason="this clone does not have all commits: git fetch --unshallow"
)


@each
def test_a_result_names_a_command_that_todays_code_accepts(result: Result) -> None:
    standing = STANDING.get(result.name)
    for origin in result.origins:
        command = standing.command if standing and standing.command else origin.command
        assert command, "the file names no command, and neither does benchmarks.checks.standing"
        assert (refused := refusal(command)) is None, refused


@needs_history
@each
def test_the_commit_of_a_result_is_in_the_history(result: Result) -> None:
    commit = stale.commit_of(result)
    assert commit
    assert stale.in_history(commit), f"commit {commit} is no ancestor of the current one"


@each
def test_a_result_names_its_commit_versions_and_machine(result: Result) -> None:
    commit = stale.commit_of(result)
    assert commit, "the file names no commit, and neither does benchmarks.checks.standing"
    assert "dirty" not in commit
    for origin in result.origins:
        if origin.commit:  # files from before they did are on the list
            assert {"foresample", "python", "torch"} <= set(origin.versions)
            assert origin.machine.cpu


@needs_history
@each
def test_a_result_is_no_older_than_the_code_it_measures(result: Result) -> None:
    changed = stale.stale(result)
    assert not changed, (
        f"{result.name} is older than {', '.join(changed)}: run its command again, or, if that needs a GPU, read the "
        "changes and state in benchmarks/checks/standing.py why its figures still hold"
    )


def test_the_list_of_older_results_names_existing_files_with_a_reason() -> None:
    assert set(STANDING) <= {result.name for result in FILES}
    assert all(len(standing.reason) > 40 for standing in STANDING.values())


def test_every_json_file_is_a_result_of_a_known_kind() -> None:
    assert read().foreign == []


@pytest.mark.parametrize(("name", "folder"), [("cifar10", CIFAR10), ("fashion-mnist", EMBEDDED)])
def test_the_recorded_number_of_parameters_is_that_of_the_weights(name: str, folder: Path) -> None:
    (weights,) = folder.rglob("*.safetensors")
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    count = sum(math.prod(value["shape"]) for key, value in header.items() if key != "__metadata__")
    assert count == load(Training, f"training-{name}").parameters


def test_nothing_failed() -> None:
    assert all(finding.passed for result in read().of(CheckResult) for finding in result.findings)
    assert [name for result in read().of(GpuTests) for name in result.failed] == []
    assert [row for result in read().of(Soak) for row in result.rows if row.faults or row.difference] == []
    assert [row for result in read().of(Sanitized) for row in result.rows if not row.clean] == []


def test_every_method_has_a_label() -> None:
    kinds = (Calls, Curves, BenchResult, QualityCost, Published)
    methods = {row.method for result in FILES if isinstance(result, kinds) for row in result.rows}
    assert methods <= set(LABELS)


# ------------------------------------------------------------------ side by side with everybody else


def test_there_are_curves_of_every_target() -> None:
    assert {saved.settings.problem for saved in CURVES} == set(PROBLEMS)
    assert {("mixture", 30), ("mixture", 300)} <= {(s.settings.problem, s.settings.steps) for s in CURVES}


@pytest.mark.parametrize("saved", CURVES, ids=lambda saved: saved.name)
def test_the_default_is_ahead_of_every_exact_peer_from_5_to_64_states(saved: Curves) -> None:
    low, high = rivals.LEAD
    sizes = [n for n in rivals.batches(saved.rows) if low <= n <= high]
    assert sizes == [n for n in BATCHES if low <= n <= high]
    for states in sizes:
        here = [row for row in saved.rows if row.states == states]
        (ours,) = [row for row in here if row.method == "default"]
        assert all(ours.calls < peer.calls for peer in rivals.peers(here)), states


@pytest.mark.parametrize("saved", CURVES, ids=lambda saved: saved.name)
def test_saved_curves_are_on_equal_terms(saved: Curves) -> None:
    steps = saved.settings.steps
    assert not any("/" in part for command in saved.commands for part in command.split())
    for row in saved.rows:
        assert row.exact
        assert row.evaluations <= row.states * row.calls * (1 + 1e-9)
        assert row.speedup == pytest.approx(steps / row.calls)
        assert row.speedup_error == pytest.approx(row.speedup * row.calls_error / row.calls)
        assert row.calls >= steps / row.states
        if row.method in TREES:
            assert row.shape is not None
            assert 1 + nodes(tuple(map(int, row.shape.split("-")))) <= row.states
        else:
            assert row.shape is None
        assert row.reuse in saved.settings.reuse


def test_the_saved_quality_has_its_floor() -> None:
    rows = load(QualityCost, "quality-cost-fashion").rows
    (floor,) = [row for row in rows if row.method == "sequential"]
    assert floor.exact
    assert any(row.exact and row.calls < floor.calls for row in rows)
    assert any(not row.exact for row in rows)


def test_published_figures_are_reproduced() -> None:
    """Within three standard errors."""
    published = [row for row in load(Published, "published").rows if row.published is not None]
    assert {row.method for row in published} == {"reflection-nearest", "dgrs"}
    for row in published:
        assert row.published is not None
        assert row.published.low is not None
        rounding = 0.005 if row.published.low == row.published.high else 0.0
        room = 3 * row.error + rounding
        assert row.published.low - room < row.speedup < row.published.high + room
        assert row.setting.tree in (None, "-".join(map(str, UNIFORM)))
