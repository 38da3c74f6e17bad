from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.datasets.disturbing import Process, Start
from tests.datasets.process import Gate, draw


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole dataset, drawn in peace; to be read only."""
    out = tmp_path_factory.mktemp("datasets") / "undisturbed"
    assert draw(out).complete
    return out


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A closed gate."""
    gate = Gate(tmp_path / "gate")
    gate.close()
    return gate


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes, and sees that they end with the test."""
    started: list[Process] = []

    def begin(out: Path, **settings: object) -> Process:
        started.append(Process(tmp_path / f"{len(started)}.log", out, **settings))
        return started[-1]

    yield begin
    for process in started:
        process.popen.kill()
        process.ended()
