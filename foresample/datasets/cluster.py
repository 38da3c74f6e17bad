"""Shards drawn by many workers on Ray: one actor per GPU, or per so many CPUs.

Each worker is a `LocalWorker` of `generation`: its own process, target and engine, and the same `draw_shards`. It takes
the next shard from a queue when it has a free slot, so fast workers draw more, and writes it itself; only
numbers travel. If a worker dies, what it had taken and not written goes back to the queue and another takes its
place. If the driver dies, its workers do, too, and the same command resumes from the files.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from foresample.datasets.generation import Factory, LocalWorker
from foresample.datasets.shards import Plan, Progress
from foresample.selftest import SamplesLaw

_TELL_EVERY = 0.5  # seconds between a worker's words, unless it has written a shard
_DEATHS = 3  # of each worker's place, before any of them has written a shard since


class ShardQueue:
    """Shards to be drawn, and who took which: an actor."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.waiting = deque(numbers)
        self.taken: dict[int, list[int]] = {}

    def take(self, worker: int) -> int | None:
        """The next shard, if there is one."""
        if not self.waiting:
            return None
        self.taken.setdefault(worker, []).append(self.waiting[0])
        return self.waiting.popleft()

    def give_back(self, worker: int, written: set[int]) -> None:
        """This worker died: what it took and did not write is to be drawn."""
        self.waiting.extendleft(n for n in self.taken.pop(worker, []) if n not in written)


class Worker(LocalWorker):
    """A worker that takes its shards from the queue: an actor."""

    def __init__(self, make: Factory, engine: Mapping[str, Any], folder: Path) -> None:
        if not (folder / ".lock").exists():
            raise FileNotFoundError(f"a worker does not see {folder}: choose a folder that all machines share")
        super().__init__(make, engine)

    def work(self, plan: Plan, queue: Any, worker: int) -> Iterator[Progress]:
        """Draw shards until none is left."""
        import ray

        def taken() -> Iterator[int]:
            while (number := ray.get(queue.take.remote(worker))) is not None:
                yield number

        told = perf_counter()
        for news in self.draw(plan, taken(), worker):
            if news.written or perf_counter() - told > _TELL_EVERY:
                yield news
                told = perf_counter()


@contextmanager
def cluster(
    address: str, make: Factory, engine: Mapping[str, Any], cpus: int | None, folder: Path
) -> Iterator[Cluster]:
    """Workers on Ray."""
    try:
        import ray
    except ImportError:
        raise ImportError("many workers need the ray extra: pip install 'foresample[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        _require_someone(address)
        where = None if address == "auto" else address
        ray.init(where, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    try:
        yield Cluster(make, engine, cpus, folder.resolve())
    finally:
        if ours:
            ray.shutdown()


def _require_someone(address: str) -> None:
    """Refuse an address nobody answers at; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # auto, local
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster at {address} ({error}): start one, or say auto to have one on this machine"
        ) from None


class Cluster:
    """Workers, and those that take the place of dead ones."""

    def __init__(self, make: Factory, engine: Mapping[str, Any], cpus: int | None, folder: Path) -> None:
        import ray

        self.ray = ray
        resources = ray.cluster_resources()
        gpus = 0 if cpus is not None else int(resources.get("GPU", 0))
        places = gpus or int(resources.get("CPU", 0)) // (cpus or 1)
        if not places:
            raise ValueError(f"the cluster has no {cpus or 1} CPUs for a worker: ask for fewer")
        needs = {"num_gpus": 1} if gpus else {"num_cpus": cpus or 1}
        remote = ray.remote(**needs)(Worker)
        self._start = lambda: remote.remote(make, engine, folder)
        self.workers = {number: self._start() for number in range(places)}
        self.started = places

    def describe(self) -> dict[str, Any]:
        return self._ask("describe")

    def law(self, plan: Plan, sequential: int) -> SamplesLaw:
        return self._ask("law", _shared(plan), sequential)

    def draw(self, plan: Plan, numbers: Iterable[int]) -> Iterator[Progress]:
        ray, plan = self.ray, _shared(plan)
        queue = ray.remote(num_cpus=0)(ShardQueue).remote(numbers)
        written: set[int] = set()
        deaths = 0

        def stream(worker: int) -> Any:
            work = self.workers[worker].work.options(num_returns="streaming")
            return work.remote(plan, queue, worker)

        streams = {stream(worker): worker for worker in self.workers}
        while streams:
            (ready, *_), _ = ray.wait(list(streams), num_returns=1)
            try:
                word = next(ready, None)
                news = None if word is None else ray.get(word)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayActorError as error:
                deaths += 1
                if deaths > _DEATHS * len(self.workers):
                    raise RuntimeError(
                        f"workers died {deaths} times in a row without finishing a shard ({error}): look at "
                        "Ray's logs; what was written is kept"
                    ) from None
                worker = streams.pop(ready)
                ray.get(queue.give_back.remote(worker, written))
                yield Progress(worker, 0, 0, ())
                del self.workers[worker]
                self.workers[self.started] = self._start()
                streams[stream(self.started)] = self.started
                self.started += 1
            else:
                if news is None:  # this worker is done
                    del streams[ready]
                    continue
                if news.written:
                    written |= {entry.number for entry in news.written}
                    deaths = 0
                yield news

    def _ask(self, what: str, *arguments: Any) -> Any:
        """One worker's answer."""
        ray, worker = self.ray, next(iter(self.workers.values()))
        try:
            return ray.get(getattr(worker, what).remote(*arguments))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"a worker died while it was asked to {what} ({error})") from None


def _shared(plan: Plan) -> Plan:
    """The plan, as seen from a worker's folder."""
    return Plan(**{**vars(plan), "out": plan.out.resolve()})
