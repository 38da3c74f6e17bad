"""Shards drawn by many workers on Ray: one actor per GPU, or per given number of CPUs.

Each worker is a `LocalWorker` in its own process. It takes the next shard from a queue when it has a free slot, so fast
workers draw more, and writes it itself; samples are never sent. If a worker dies, its unwritten shards return to the
queue, and a new worker starts in its place as soon as there is room, while the others continue; if no machine is left,
the run ends with an error. If the queue dies, a new one receives the unwritten shards and all workers start again. If
the driver dies, its workers die seconds later, and the folder refuses their files once another driver has begun
(`folder`). The same command resumes from the files.

Several drivers may share a cluster: a worker that finds no free place waits for one.
"""

from __future__ import annotations

import logging
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from foresample.checks.samples import SamplesLaw
from foresample.datasets.shards import Plan
from foresample.datasets.workers import Description, Factory, LocalWorker, Progress, Stop, Window
from foresample.faults import first_line
from foresample.settings import Settings
from foresample.text import printable

_TELL_EVERY = 0.5  # seconds between a worker's reports, unless it has written a shard
_DEATHS = 3  # allowed for each worker in a row without a shard written
_PATIENCE = 10.0  # seconds without a report before the driver checks that machines are left


class ShardQueue:
    """An actor that holds the shards to draw, and which worker took which."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.waiting = deque(numbers)
        self.taken: dict[int, list[int]] = {}

    def take(self, worker: int) -> int | None:
        """The next shard, if there is one."""
        if not self.waiting:
            return None
        self.taken.setdefault(worker, []).append(self.waiting[0])
        return self.waiting.popleft()

    def has_more(self) -> bool:
        """Whether there is a shard to take."""
        return bool(self.waiting)

    def give_back(self, worker: int, written: set[int]) -> None:
        """Put the unwritten shards of a dead worker back."""
        self.waiting.extendleft(n for n in self.taken.pop(worker, []) if n not in written)


class Worker:
    """An actor: a `LocalWorker` that takes its shards from the queue. It makes its target when first used."""

    def __init__(self, make: Factory, settings: Settings, folder: Path) -> None:
        self.make, self.settings, self.folder = make, settings, folder

    @cached_property
    def local(self) -> LocalWorker:
        if not (self.folder / ".lock").exists():
            raise FileNotFoundError(
                f"a worker does not see {printable(self.folder)}: choose a folder that all machines share"
            )
        return LocalWorker(self.make, self.settings)

    def ready(self) -> None:
        """Return once the worker has a place and runs."""

    def answer(self, question: str, *arguments: Any) -> Any:
        """The result of a method of the worker."""
        return getattr(self.local, question)(*arguments)

    def work(self, plan: Plan, queue: Any, worker: int) -> Iterator[Progress]:
        """Draw shards until none is left."""
        import ray

        reported = perf_counter()
        for news in self.local.draw(
            plan, iter(lambda: ray.get(queue.take.remote(worker)), None), worker=worker
        ):
            if news.written or perf_counter() - reported > _TELL_EVERY:
                yield news
                reported = perf_counter()


@contextmanager
def cluster(
    address: str, make: Factory, settings: Settings, cpus: int | None, folder: Path
) -> Iterator[Cluster]:
    """Workers on Ray."""
    try:
        import ray
    except ImportError:
        raise ImportError("many workers need ray, which is not installed: pip install ray") from None
    ours = not ray.is_initialized()
    if ours:
        _require_cluster(address)
        where = None if address == "auto" else address
        ray.init(where, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    workers = None
    try:
        workers = Cluster(make, settings, cpus, folder)
        yield workers
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"Ray failed ({first_line(error)}): what was written is kept; see to the cluster and run the same "
            "command again"
        ) from None
    finally:
        for worker in workers.workers.values() if workers else ():  # so that others have their places
            with suppress(Exception):
                ray.kill(worker)
        if ours:
            ray.shutdown()


def _require_cluster(address: str) -> None:
    """Refuse an address where no cluster answers; Ray would retry for minutes."""
    if address.startswith("ray://"):
        raise ValueError(
            f"{address} is a way in from outside, on which workers cannot report: run this on a machine of the "
            "cluster, with --ray auto or its address without ray://"
        )
    host, _, port = address.rpartition(":")
    if address in ("auto", "local") or "://" in address:
        return
    if not (host and port.isdecimal()):
        raise ValueError(f"--ray takes auto or a cluster's address (HOST:PORT), not {printable(address)!r}")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster at {address} ({error}): start one, or say auto to have one on this machine"
        ) from None


class Cluster:
    """The workers, by number; new ones replace those that die."""

    def __init__(self, make: Factory, settings: Settings, cpus: int | None, folder: Path) -> None:
        import ray

        self.ray, self.workers, self.started = ray, dict[int, Any](), 0
        self.kind, self.each = "CPU", cpus or 1
        if cpus is None and ray.cluster_resources().get("GPU", 0) >= 1:
            self.kind, self.each = "GPU", 1
        self.need = f"{self.each} {self.kind}{'s' if self.each > 1 else ''}"
        places = self._places()
        if not places:
            raise ValueError(f"no machine of the cluster has {self.need} for a worker: ask for fewer")
        remote = ray.remote(**{f"num_{self.kind.lower()}s": self.each})(Worker)
        self._new = lambda: remote.remote(make, settings, folder)
        for _ in range(places):
            self._start()

    def _start(self) -> None:
        self.workers[self.started] = self._new()
        self.started += 1

    def _replace(self, worker: int) -> None:
        """Start another worker in the place of one that died."""
        with suppress(Exception):
            self.ray.kill(self.workers[worker])
        del self.workers[worker]
        self._start()

    def _places(self) -> int:
        """Number of workers that the live machines have room for, without other drivers."""
        machines = [machine["Resources"] for machine in self.ray.nodes() if machine["Alive"]]
        return sum(int(has.get(self.kind, 0)) // self.each for has in machines)

    def _ready(self, waited: Iterable[Any]) -> Any:
        """The first of these that is ready, None if none is after `_PATIENCE` seconds."""
        ready, _ = self.ray.wait(list(waited), num_returns=1, timeout=_PATIENCE)
        if ready:
            return ready[0]
        if not self._places():
            raise RuntimeError(
                f"the cluster has lost every machine with {self.need} for a worker: what was written is kept; "
                "start one and run the same command again"
            )
        return None

    def _death(self, error: Any) -> Any:
        """The actor's death that caused this error; any other error of a worker is raised."""
        errors = self.ray.exceptions
        why = error.cause if isinstance(error, errors.RayTaskError) else error
        if not isinstance(why, errors.RayError):
            raise why from None
        return why

    def describe(self, window: Window, count: int, say: Callable[[str], None]) -> Description:
        if window == "auto":
            say("windows, on one of the workers")
        return self._ask("describe", window, count)

    def law(self, plan: Plan, count: int) -> SamplesLaw:
        return self._ask("law", plan, count)

    def _ask(self, question: str, *arguments: Any) -> Any:
        """The result of a method of one worker that has a place."""
        ray = self.ray
        for _ in range(_DEATHS * len(self.workers)):
            asked = {actor.ready.remote(): worker for worker, actor in self.workers.items()}
            while (ready := self._ready(asked)) is None:
                if ray.available_resources().get(self.kind, 0) < self.each:
                    warnings.warn(
                        f"every {self.kind} of the cluster is in use: waiting for a place", stacklevel=3
                    )
            try:
                return ray.get(self.workers[asked[ready]].answer.remote(question, *arguments))
            except ray.exceptions.RayError as error:
                why = first_line(self._death(error))
                self._replace(asked[ready])
        raise RuntimeError(f"workers died repeatedly in their method {question} ({why})")

    def draw(self, plan: Plan, numbers: Iterable[int], stop: Stop | None = None) -> Iterator[Progress]:
        """Draw these shards. `stop` is ignored; `generate` refuses it on Ray."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray, left, written, deaths = self.ray, set(numbers), set[int](), 0
        # The queue runs on this machine, so that it survives the loss of others.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        start_queue = ray.remote(num_cpus=0, scheduling_strategy=here)(ShardQueue).remote
        queue = start_queue(sorted(left))
        streams: dict[Any, int] = {}

        def begin() -> None:
            """Start every idle worker."""
            for worker, actor in self.workers.items():
                if worker not in streams.values():
                    work = actor.work.options(num_returns="streaming")
                    streams[work.remote(plan, queue, worker)] = worker

        begin()
        while left:  # not while streams are left: one may wait for a place forever
            if (stream := self._ready(streams)) is None:
                continue
            gone = [streams[stream]]
            try:
                word = next(stream, None)
                if word is None:  # this worker has found nothing left to do
                    again = ray.get(queue.has_more.remote())  # since then another's shards may have come back
                    del streams[stream]
                    if again:
                        begin()
                    continue
                news = ray.get(word)
            except ray.exceptions.RayError as error:
                why = self._death(error)
                queue_died = why is not error  # the worker lives, but cannot take shards
            else:
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
            if not queue_died:
                try:
                    ray.get(queue.give_back.remote(gone[0], written))
                except ray.exceptions.RayError as error:
                    self._death(error)
                    queue_died = True
            if queue_died:  # it is unknown who took what: all start again, and find the written shards
                queue, gone = start_queue(sorted(left)), list(self.workers)
            for worker in gone:
                yield Progress(worker, 0, 0, ())
                self._replace(worker)
            streams = {stream: worker for stream, worker in streams.items() if worker not in gone}
            begin()  # also workers that were done
