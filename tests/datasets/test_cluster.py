"""Workers on Ray: one that dies, a driver that dies, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import exceptions as ray_exceptions

import foresample as fs
from foresample.datasets.cluster import Cluster, ShardQueue
from foresample.datasets.workers import Progress
from foresample.targets import ChainTarget
from tests.datasets.disturbing import (
    ENVIRONMENT,
    Start,
    alive,
    assert_identical,
    descendants,
    inodes,
    run,
    shards,
)
from tests.datasets.process import BREAKS, SHARD, Gate, draw
from tests.support.small_chains import flow
from tests.support.waiting import wait_for

FREE = 4
"""Shards before the gate: one of two workers draws two of them or more, and the first of these is whole when a sample
behind the gate gets a slot, for no sample takes as many calls as forty others in seven slots."""


def test_shards_that_a_dead_worker_did_not_write_come_next() -> None:
    queue = ShardQueue(range(5))
    assert [queue.take(worker) for worker in (1, 2, 1)] == [0, 1, 2]
    queue.give_back(1, written={0})
    queue.give_back(7, written=set())  # took nothing
    assert [queue.take(3) for _ in range(4)] == [2, 3, 4, None]


class Scripted:
    """Ray with two places and two shards. Worker 0 draws shard 0 and finds no other; then worker 1 dies in shard 1, its
    place is lost, and worker 2 waits for one. The driver hears of the death before it hears that worker 0 has ended."""

    exceptions = ray_exceptions

    def __init__(self) -> None:
        self.queue, self.streams, self.begun = ShardQueue([0, 1]), dict[int, Iterator[Any]](), list[int]()
        self.heard = iter((0, 1, 0, 0))  # shard 0, the death, the end, and what worker 0 does next

    def worker(self) -> Any:
        return SimpleNamespace(work=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._work)))

    def _work(self, plan: object, queue: object, worker: int) -> Iterator[Any]:
        self.begun.append(worker)
        taken = self.queue.take(worker) if worker < 2 else None
        self.streams[worker] = stream = _dying() if worker == 1 else _writing(taken)
        return stream

    def wait(self, streams: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        stream = self.streams[next(self.heard)]
        assert stream in streams, "the driver would wait forever"
        return [stream], []

    def remote(self, **_: object) -> Any:
        methods = {
            name: SimpleNamespace(remote=getattr(self.queue, name)) for name in ("has_more", "give_back")
        }
        return lambda kind: SimpleNamespace(remote=lambda numbers: SimpleNamespace(**methods))

    def get(self, value: Any) -> Any:
        return value

    def kill(self, actor: object) -> None:
        pass

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "0" * 56)


def _writing(number: int | None) -> Iterator[Any]:
    yield Progress(0, 1, 1, (cast(Any, SimpleNamespace(number=number)),))


def _dying() -> Iterator[Any]:
    raise ray_exceptions.ActorDiedError
    yield


def test_a_shard_that_comes_back_after_a_worker_has_found_none_is_drawn_by_it() -> None:
    ray, cluster = Scripted(), cast(Any, object.__new__(Cluster))
    cluster.ray, cluster._new = ray, ray.worker
    cluster.workers, cluster.started = {0: ray.worker(), 1: ray.worker()}, 2
    drawn = [news.written[0].number for news in cluster.draw(cast(Any, None), [0, 1]) if news.written]
    assert drawn == [0, 1]
    assert ray.begun == [0, 1, 2, 0]


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_survives_a_worker_killed_in_a_shard_and_ends_with_its_queue(
    undisturbed: Path, tmp_path: Path, gate: Gate, start: Start
) -> None:
    out = tmp_path / "out"
    process = start(out, ray="local", workers=2, cpus=1, slots=8, gate=gate.folder, held_from=FREE * SHARD)
    process.wait_until(lambda: len(gate.waiting()) == 2 and shards(out), "both workers stand at the gate")
    kept = inodes(out)
    assert len(kept) <= FREE
    os.kill(min(gate.waiting()), signal.SIGKILL)
    process.wait_until(lambda: len(gate.waiting()) == 3, "another worker has taken its place")
    (queue,) = descendants(process.pid, "ray::ShardQueue")
    os.kill(queue, signal.SIGKILL)
    gate.open()
    assert process.ended() == 0, process.log.read_text()
    assert_identical(out, undisturbed)
    assert kept.items() <= inodes(out).items()


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_resumes_after_its_driver_was_killed_on_ray(
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


# ------------------------------------------------------------------ clusters that others have started


@contextmanager
def machines(*cpus: int) -> Iterator[list[Any]]:
    """A cluster of several machines with these numbers of CPUs; the first is the head.

    They have addresses of their own, so that drivers run on the head and on no other.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False})
    try:
        others = [
            cluster.add_node(num_cpus=number, node_ip_address=f"127.0.0.{i}")
            for i, number in enumerate(cpus[1:], 2)
        ]
        yield [cluster, *others]
    finally:
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_survives_a_lost_machine_and_resumes_after_all_are_lost(
    undisturbed: Path, tmp_path: Path, gate: Gate, start: Start
) -> None:
    """With one of two machines lost the other goes on; with both lost the run ends with an error and can be resumed."""
    out = tmp_path / "out"
    with machines(0, 1, 1) as (cluster, one, two):
        how = {"ray": cluster.address, "cpus": 1, "slots": 8, "gate": gate.folder}
        process = start(out, **how, held_from=FREE * SHARD)
        process.wait_until(lambda: len(gate.waiting()) == 2 and shards(out), "both workers stand at the gate")
        kept = inodes(out)
        cluster.remove_node(one, allow_graceful=False)
        wait_for(lambda: sum(map(alive, gate.waiting())) == 1, "its worker to die with it")
        gate.open()
        assert process.ended() == 0, process.log.read_text()
        assert_identical(out, undisturbed)
        assert kept.items() <= inodes(out).items()

        gate.folder.joinpath("closed").touch()
        again = tmp_path / "again"
        before = gate.waiting()
        process = start(again, **how, held_from=FREE * SHARD)
        process.wait_until(lambda: gate.waiting() - before and shards(again), "its worker stands at the gate")
        kept = inodes(again)
        cluster.remove_node(two, allow_graceful=False)
        assert process.ended() == 2
        assert "the cluster has lost every machine with 1 CPU for a worker" in process.log.read_text()
        assert "Traceback" not in process.log.read_text()
    draw(again)
    assert_identical(again, undisturbed)
    assert kept.items() <= inodes(again).items()


@contextmanager
def started_cluster(cpus: int) -> Iterator[dict[str, str]]:
    """A cluster started by `ray start --head`, and the environment that finds it."""
    with tempfile.TemporaryDirectory(
        prefix="ray-", ignore_cleanup_errors=True
    ) as folder:  # sockets want short paths
        environment = {**ENVIRONMENT, "RAY_TMPDIR": folder}
        command = [
            sys.executable,
            "-c",
            "from ray.scripts.scripts import main; main()",
            "start",
            "--head",
            "--block",
        ]
        sizes = [f"--num-cpus={cpus}", "--port=0", "--include-dashboard=false", "--disable-usage-stats"]
        log = Path(folder) / "start.log"
        with log.open("w") as told:
            head = subprocess.Popen(
                [*command, *sizes], env=environment, stdout=told, stderr=told, start_new_session=True
            )
        try:

            def up() -> bool:
                assert head.poll() is None, log.read_text()
                return (Path(folder) / "ray" / "ray_current_cluster").exists()

            wait_for(up, "the cluster to be up")
            yield environment
        finally:
            head.terminate()
            head.wait()


@pytest.mark.slow
@pytest.mark.ray
def test_two_drivers_join_a_running_cluster(
    undisturbed: Path, tmp_path: Path, gate: Gate, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first takes all workers, the second reports that it waits for one; the cluster outlives the first."""
    first, second = tmp_path / "first", tmp_path / "second"
    with started_cluster(2) as environment:
        monkeypatch.setattr("tests.datasets.disturbing.ENVIRONMENT", environment)
        how: dict[str, object] = {"ray": "auto", "cpus": 1, "slots": 8}
        one = start(first, **how, gate=gate.folder, held_from=16)  # behind the fingerprint
        one.wait_until(lambda: len(gate.waiting()) == 2, "both places are taken")
        two = start(second, **how)
        two.wait_until(
            lambda: "every CPU of the cluster is in use: waiting for a place" in two.log.read_text(), "it waits"
        )
        assert not shards(second)
        gate.open()
        assert one.ended() == 0, one.log.read_text()
        assert two.ended() == 0, two.log.read_text()
    for out in (first, second):
        assert_identical(out, undisturbed)


@pytest.mark.ray
def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"no Ray cluster at 127.0.0.1:1 .*: start one, or say auto"):
        draw(tmp_path, ray="127.0.0.1:1")
    with pytest.raises(ValueError, match=r"run this on a machine of the cluster, with --ray auto"):
        draw(tmp_path, ray="ray://127.0.0.1:10001")
    with pytest.raises(ValueError, match=r"--ray takes auto or a cluster's address \(HOST:PORT\), not 'bogus'"):
        draw(tmp_path, ray="bogus")


def test_settings_of_ray(tmp_path: Path) -> None:
    class Called(ChainTarget):
        def __call__(self) -> None:
            """Makes the target callable, so it could be mistaken for a function that makes a target."""

    for target in (flow(), Called(**vars(flow())), "flow"):
        with pytest.raises(TypeError, match="pass a function that does, not the target itself"):
            fs.generate(cast(Any, target), 5, out=tmp_path, window=4, ray="auto")
    with pytest.raises(ValueError, match="give ray='auto' as well"):
        fs.generate(flow(), 5, out=tmp_path, window=4, cpus=2)
