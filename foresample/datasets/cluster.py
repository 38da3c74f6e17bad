"""Shards drawn by many workers on Ray: one actor per GPU, or per so many CPUs.

Each worker is a `LocalWorker` of `workers`: its own process, target and engine, and the same `draw_shards`. It takes
the next shard from a queue when it has a free slot, so fast workers draw more, and writes it itself; only numbers
travel. If a worker dies, alone or with its machine, what it had taken and not written goes back to the queue, and
another takes its place, or waits for one while the others go on; if no machine is left, the run ends and says so. If
the queue dies, a new one holds what is not written, and all begin anew. If the driver dies, its workers do, too,
seconds later; what they would write once the next driver has begun is refused (`folder`). The same command resumes from
the files.

Several drivers may share a cluster: a worker that finds no free place waits for one.
"""

from __future__ import annotations

import logging
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from foresample.checks.samples import SamplesLaw
from foresample.datasets.drawing import Progress
from foresample.datasets.shards import Plan
from foresample.datasets.workers import Description, Factory, LocalWorker, Stop, Window
from foresample.faults import first_line
from foresample.settings import Settings
from foresample.text import printable

_TELL_EVERY = 0.5  # seconds between a worker's words, unless it has written a shard
_DEATHS = 3  # of each worker's place, before any of them has written a shard since
_PATIENCE = 10.0  # seconds without a word, after which somebody looks whether there can be one


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


class Worker:
    """A `LocalWorker` that takes its shards from the queue: an actor. It makes its target when it is first asked."""

    def __init__(self, make: Factory, how: Settings, folder: Path) -> None:
        self.make, self.how, self.folder = make, how, folder

    @cached_property
    def local(self) -> LocalWorker:
        if not (self.folder / ".lock").exists():
            raise FileNotFoundError(
                f"a worker does not see {printable(self.folder)}: choose a folder that all machines share"
            )
        return LocalWorker(self.make, self.how)

    def ready(self) -> None:
        """It has a place and runs."""

    def describe(self, window: Window, count: int) -> Description:
        return self.local.describe(window, count, lambda what: None)

    def law(self, plan: Plan, count: int) -> SamplesLaw:
        return self.local.law(plan, count)

    def work(self, plan: Plan, queue: Any, worker: int) -> Iterator[Progress]:
        """Draw shards until none is left."""
        import ray

        def taken() -> Iterator[int]:
            while (number := ray.get(queue.take.remote(worker))) is not None:
                yield number

        told = perf_counter()
        for news in self.local.draw(plan, taken(), worker=worker):
            if news.written or perf_counter() - told > _TELL_EVERY:
                yield news
                told = perf_counter()


@contextmanager
def cluster(address: str, make: Factory, how: Settings, cpus: int | None, folder: Path) -> Iterator[Cluster]:
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
    workers = None
    try:
        workers = Cluster(make, how, cpus, folder.resolve())
        yield workers
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"Ray failed ({first_line(error)}): what was written is kept; see to the cluster and run the same "
            "command again"
        ) from None
    finally:
        if workers is not None:
            workers.dismiss()
        if ours:
            ray.shutdown()


def _require_someone(address: str) -> None:
    """Refuse an address nobody answers at; Ray would try for minutes."""
    if address.startswith("ray://"):
        raise ValueError(
            f"{address} is a way in from outside, on which workers cannot report: run this on a machine of the "
            "cluster, with --ray auto or its address without ray://"
        )
    host, _, port = address.rpartition(":")
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

    def __init__(self, make: Factory, how: Settings, cpus: int | None, folder: Path) -> None:
        import ray

        self.ray, errors = ray, ray.exceptions
        self.death = (
            errors.RayActorError,
            errors.ObjectLostError,
            errors.NodeDiedError,
            errors.LocalRayletDiedError,
            errors.OutOfMemoryError,
            errors.WorkerCrashedError,
        )
        self.kind, self.each = "CPU", cpus or 1
        if cpus is None and ray.cluster_resources().get("GPU", 0) >= 1:
            self.kind, self.each = "GPU", 1
        places = self._places()
        if not places:
            raise ValueError(f"no machine of the cluster has {self._need} for a worker: ask for fewer")
        remote = ray.remote(**{f"num_{self.kind.lower()}s": self.each})(Worker)
        self._start = lambda: remote.remote(make, how, folder)
        self.workers = {number: self._start() for number in range(places)}
        self.started = places

    @property
    def _need(self) -> str:
        return f"{self.each} {self.kind}{'s' if self.each > 1 else ''}"

    def _places(self) -> int:
        """Workers that the machines there are have room for, if nobody else has any."""
        machines = [machine["Resources"] for machine in self.ray.nodes() if machine["Alive"]]
        return sum(int(has.get(self.kind, 0)) // self.each for has in machines)

    def _require_places(self) -> None:
        if not self._places():
            raise RuntimeError(
                f"the cluster has lost every machine with {self._need} for a worker: what was written is kept; "
                "start one and run the same command again"
            )

    def dismiss(self) -> None:
        """Workers go, so that others have their places."""
        for worker in self.workers.values():
            with suppress(Exception):
                self.ray.kill(worker)

    def describe(self, window: Window, count: int, say: Callable[[str], None]) -> Description:
        if window == "auto":
            say("windows, on one of the workers")
        return self._ask("describe", window, count)

    def law(self, plan: Plan, count: int) -> SamplesLaw:
        return self._ask("law", _shared(plan), count)

    def draw(self, plan: Plan, numbers: Iterable[int], stop: Stop | None = None) -> Iterator[Progress]:
        assert stop is None, "on Ray nobody is asked (generate)"
        ray, plan, left = self.ray, _shared(plan), set(numbers)
        # Here, so that it is not lost with another machine.
        start_queue = ray.remote(num_cpus=0, scheduling_strategy=_here(ray))(ShardQueue).remote
        queue = start_queue(sorted(left))
        written: set[int] = set()
        deaths = 0
        streams: dict[Any, int] = {}

        def begin() -> None:
            """Start every idle worker."""
            for worker, actor in self.workers.items():
                if worker not in streams.values():
                    work = actor.work.options(num_returns="streaming")
                    streams[work.remote(plan, queue, worker)] = worker

        begin()
        while left:  # not as long as there are streams: one may wait for a place for ever
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=_PATIENCE)
            if not ready:
                self._require_places()
                continue
            try:
                word = next(ready[0], None)
                news = None if word is None else ray.get(word)
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, self.death):
                    raise error.cause from None
                why, queue_died = error.cause, True  # it could take no more shards
            except self.death as error:
                why, queue_died = error, False
            else:
                if news is None:  # this worker has found nothing left to do
                    del streams[ready[0]]
                    continue
                if news.written:
                    written |= {entry.number for entry in news.written}
                    left -= written
                    deaths = 0
                yield news
                continue

            deaths += 1
            if deaths > _DEATHS * len(self.workers):
                raise RuntimeError(
                    f"workers died {deaths} times in a row without finishing a shard ({first_line(why)}): "
                    "look at Ray's logs; what was written is kept"
                )
            gone = [streams[ready[0]]]
            if not queue_died:
                try:
                    ray.get(queue.give_back.remote(gone[0], written))
                except self.death:
                    queue_died = True
            if queue_died:  # nobody knows who took what: all begin anew, and find what is written
                queue, gone = start_queue(sorted(left)), list(self.workers)
            for worker in gone:
                yield Progress(worker, 0, 0, ())
                self._replace(worker)
            for stream in [stream for stream, worker in streams.items() if worker in gone]:
                del streams[stream]
            begin()  # also those that had found nothing left to do

    def _replace(self, worker: int) -> None:
        """Another in the place of one that died."""
        with suppress(Exception):
            self.ray.kill(self.workers[worker])
        del self.workers[worker]
        self.workers[self.started] = self._start()
        self.started += 1

    def _ask(self, what: str, *arguments: Any) -> Any:
        """The answer of one worker that has a place."""
        ray = self.ray
        for _ in range(_DEATHS * len(self.workers)):
            asked = {actor.ready.remote(): worker for worker, actor in self.workers.items()}
            ready: list[Any] = []
            while not ready:
                ready, _ = ray.wait(list(asked), num_returns=1, timeout=_PATIENCE)
                if not ready:
                    self._require_places()
                    if ray.available_resources().get(self.kind, 0) < self.each:
                        warnings.warn(
                            f"every {self.kind} of the cluster is in use: waiting for a place", stacklevel=3
                        )
            worker = asked[ready[0]]
            try:
                return ray.get(getattr(self.workers[worker], what).remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self.death as error:
                why = first_line(error)
                self._replace(worker)
        raise RuntimeError(f"workers died again and again when they were asked to {what} ({why})")


def _here(ray: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)


def _shared(plan: Plan) -> Plan:
    """The plan, for a worker anywhere."""
    assert plan.claim is not None
    return replace(plan, out=plan.out.resolve(), claim=plan.claim.elsewhere())
