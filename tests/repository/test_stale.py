"""`benchmarks.checks`: which results are older than the code they measure, and whose command is no longer accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.checks import stale
from benchmarks.checks.code import essence
from benchmarks.checks.commands import refusal
from benchmarks.checks.test_results import needs_history
from benchmarks.kinds.rivals import Curves
from benchmarks.result_files import KINDS
from benchmarks.results import read

CODE = """
def window(size):
    '''The window.'''
    # at least one
    assert size, "no size"
    if size < 1:
        raise ValueError(f"window={size} is below 1")
    return max(size, 2)

HELP = option(3, help="a number")
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("The window.", "A window of transitions."),
        ("# at least one", "# no window is empty"),
        ('"no size"', '"size is missing"'),
        ('f"window={size} is below 1"', '"a window has one transition or more"'),
        ('help="a number"', 'help="an integer"'),
    ],
)
def test_changed_words_leave_the_code_the_same(old: str, new: str) -> None:
    assert old in CODE
    assert essence(CODE) == essence(CODE.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [("max(size, 2)", "max(size, 3)"), ("assert size", "assert not size")])
def test_a_changed_number_or_name_changes_the_code(old: str, new: str) -> None:
    assert essence(CODE) != essence(CODE.replace(old, new))


def test_imports_of_result_types_do_not_count_and_all_others_do() -> None:
    assert essence(f"from benchmarks.kinds.calls import Calls\n{CODE}") == essence(CODE)
    assert essence(f"from benchmarks.peers import dgrs\n{CODE}") != essence(CODE)


def test_refusals_do_not_count() -> None:
    more = CODE.replace(
        "    return",
        "    for part in [size]:\n        if part > 9:\n            raise ValueError(part)\n    return",
    )
    assert more != CODE
    assert (
        essence(more)
        == essence(CODE)
        == essence(f"{CODE}\ndef require(x):\n    if x:\n        raise ValueError(x)\n")
    )
    other = CODE.replace("    return", "    if size > 9:\n        size = 9\n    return")
    assert essence(other) != essence(CODE)


def test_one_function_of_a_file_can_be_compared_alone() -> None:
    other = CODE.replace("option(3", "option(4")
    assert essence(CODE) != essence(other)
    assert essence(CODE, "window") == essence(other, "window")


def test_one_function_of_a_file_can_be_left_out() -> None:
    changed = CODE.replace("max(size, 2)", "max(size, 3)")
    assert essence(CODE, without="window") == essence(changed, without="window")
    other = CODE.replace("option(3", "option(4")
    assert essence(CODE, without="window") != essence(other, without="window")


@needs_history
def test_every_kind_of_result_has_sources_that_exist() -> None:
    assert set(stale.SOURCES) <= set(KINDS)
    for source in {source for sources in stale.SOURCES.values() for source in sources}:
        path, _, function = source.partition("::")
        files = stale._files("HEAD", path)
        assert files, source
        assert not function or essence(files[path], function) != essence("", function), source


@needs_history
def test_the_table_has_a_row_for_every_result() -> None:
    head, *lines = stale.table().splitlines()
    assert head.split()[:3] == ["result", "machine", "commit"]
    assert [line.split()[0] for line in lines] == [result.name for result in read().found]
    (result, *_) = read().of(Curves)
    assert not stale.in_history("f" * 40)
    with pytest.raises(LookupError, match="not in this clone"):
        stale.changed(replace(result, commit="f" * 40))


def test_a_command_is_accepted_if_its_program_takes_its_arguments() -> None:
    assert refusal("curves.py mixture --steps 300") is None
    assert refusal("clock.py latency assets/cifar10 --samples 100 --window 22") is None
    assert refusal("foresample generate --count 9 --steps 50 --window 8") is None
    assert "--alone" in (refusal("curves.py mixture --alone 2") or "")
    assert "no curve.py" in (refusal("curve.py mixture") or "")
