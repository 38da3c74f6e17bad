"""Workers on Ray: one that dies, a driver that dies, and what they leave behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import foresample as fs
from foresample.datasets.cluster import ShardQueue
from tests.datasets.disturbing import Start, alive, assert_identical, inodes, run, shards
from tests.datasets.process import BREAKS, SHARD, Gate, draw
from tests.small_chains import flow
from tests.waiting import wait_for

FREE = 4
"""Shards before the gate: one of two workers draws two of them or more, and the first of these is whole when a sample
behind the gate gets a slot, for no sample takes as many calls as forty others in seven slots."""


def test_what_a_dead_worker_took_and_did_not_write_comes_next() -> None:
    queue = ShardQueue(range(5))
    assert [queue.take(worker) for worker in (1, 2, 1)] == [0, 1, 2]
    queue.give_back(1, written={0})
    queue.give_back(7, written=set())  # took nothing
    assert [queue.take(3) for _ in range(4)] == [2, 3, 4, None]


@pytest.mark.slow
@pytest.mark.ray
def test_a_worker_killed_in_the_middle_of_a_shard(
    undisturbed: Path, tmp_path: Path, gate: Gate, start: Start
) -> None:
    out = tmp_path / "out"
    process = start(out, ray="local", workers=2, cpus=1, slots=8, gate=gate.folder, held_from=FREE * SHARD)
    process.wait_until(lambda: len(gate.waiting()) == 2 and shards(out), "both workers stand at the gate")
    kept = inodes(out)
    assert len(kept) <= FREE
    os.kill(min(gate.waiting()), signal.SIGKILL)
    process.wait_until(lambda: len(gate.waiting()) == 3, "another worker has taken its place")
    gate.open()
    assert process.ended() == 0, process.log.read_text()
    assert_identical(out, undisturbed)
    assert kept.items() <= inodes(out).items()


@pytest.mark.slow
@pytest.mark.ray
def test_a_driver_killed_on_ray_and_the_next(
    undisturbed: Path, tmp_path: Path, gate: Gate, start: Start
) -> None:
    out, flag = tmp_path / "out", tmp_path / "flag"
    flag.touch()
    process = start(
        out,
        ray="local",
        workers=2,
        cpus=1,
        slots=8,
        gate=gate.folder,
        held_from=FREE * SHARD,
        breaks_while=flag,
    )
    process.wait_until(lambda: len(gate.waiting()) == 2 and shards(out), "both workers stand at the gate")
    process.signal(signal.SIGKILL)
    process.ended()
    wait_for(lambda: not any(map(alive, gate.waiting())), "the workers to die with their driver")
    assert 1 <= len(inodes(out)) <= FREE
    broken = run(out, {"ray": "local", "cpus": 1, "breaks_while": flag})  # where a sample breaks
    assert broken.returncode == 3, broken.stderr
    assert [failure.index for failure in fs.inspect_dataset(out).failures] == [BREAKS]
    draw(out)  # the last word is this process's own
    assert_identical(out, undisturbed)


@pytest.mark.ray
def test_an_address_where_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"no Ray cluster at 127.0.0.1:1 .*: start one, or say auto"):
        draw(tmp_path, ray="127.0.0.1:1")


def test_settings_of_ray(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="pass a function that does, not the target itself"):
        fs.generate(flow(), 5, out=tmp_path, window=4, ray="auto")
    with pytest.raises(ValueError, match="give ray='auto' as well"):
        fs.generate(flow(), 5, out=tmp_path, window=4, cpus=2)
