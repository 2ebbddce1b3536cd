"""The pool of workers: it hands out models, watches the clock, and replaces a worker that died."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from sweeping.result import Result
from sweeping.worker import WANTS_MEMORY, Answer, Task, serve

GIB = 1 << 30
# A worker needs more than a model's weights: activations of the run, and what Python and torch hold.
_SLACK = 4 * GIB


class PoolError(RuntimeError):
    """No worker can be started."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A way to build a model; a `heavy` one gets the memory of --memory, and runs while no other heavy one does."""

    way: str
    heavy: bool


def plan_attempts(ways: Sequence[str]) -> tuple[Attempt, ...]:
    """Return how a model is tried until one attempt succeeds, by the ways of its library.

    Weights that are real may want more memory, so that such a way is tried again as a heavy one.

    >>> [(attempt.way, attempt.heavy) for attempt in plan_attempts(("meta", "random"))]
    [('meta', False), ('random', True)]
    >>> [(attempt.way, attempt.heavy) for attempt in plan_attempts(("tiny", "small"))]
    [('tiny', False), ('tiny', True), ('small', True)]
    """
    later = ways[1:] if ways[0] == "meta" else ways
    return Attempt(ways[0], heavy=False), *(Attempt(way, heavy=True) for way in later)


@dataclass(slots=True)
class _Worker:
    """A process, the pipe to it, and what it is doing: `task` is None while it starts or waits."""

    process: Any
    connection: Connection
    ready: bool = False
    task: Task | None = None
    deadline: float = 0.0


class Pool:
    """Workers that count the models of one library; iterate over `run` for the results, in the order of completion."""

    def __init__(
        self,
        library: str,
        ways: Sequence[str],
        table: str,
        *,
        execution: str = "auto",
        jobs: int,
        timeout: float,
        memory: int,
    ) -> None:
        self._library = library
        self._table = table
        self._execution = execution
        self._attempts = plan_attempts(ways)
        self._jobs = jobs
        self._timeout = timeout
        self._memory = memory
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._light: deque[Task] = deque()
        self._heavy: deque[Task] = deque()
        self._causes: dict[str, dict[str, list[str]]] = {}
        self._seconds: dict[str, float] = {}

    def run(self, names: Sequence[str]) -> Iterator[Result]:
        """Yield a result for each name."""
        first = self._attempts[0]
        self._light.extend(Task(name, first.way, first.heavy) for name in names)
        self._workers = [self._start() for _ in range(min(self._jobs, len(names)))]
        left = len(names)
        try:
            while left:
                for result in self._turn():
                    left -= 1
                    yield result
        finally:
            for worker in self._workers:
                worker.process.kill()

    def _turn(self) -> list[Result]:
        """Hand out what can be handed out, wait for something to happen, and return the results that are final."""
        for worker in self._workers:
            if worker.ready and worker.task is None:
                self._hand_out(worker)
        now = time.monotonic()
        deadlines = [worker.deadline for worker in self._workers if worker.task is not None]
        patience = max(0.0, min(deadlines) - now) if deadlines else None
        arrived = wait([worker.connection for worker in self._workers], patience)
        results = []
        for index, worker in enumerate(self._workers):
            if worker.connection in arrived:
                try:
                    message = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    message = _Death(self._bury(worker))
            elif worker.task is not None and time.monotonic() >= worker.deadline:
                message = _Death(f"stopped after {self._timeout:.0f} s")
                self._kill(worker)
            else:
                continue
            if isinstance(message, _Death):
                self._workers[index] = self._start()
            elif message is not None and message.exhausted:
                # It may keep what it could not get enough of.
                self._kill(worker)
                self._workers[index] = self._start()
            results += self._take(worker, message)
        return results

    def _take(self, worker: _Worker, message: Any) -> list[Result]:
        task, worker.task = worker.task, None
        if task is None:
            if isinstance(message, _Death) and not worker.ready:
                raise PoolError(f"a worker that was importing {self._library} {message.cause}")
            worker.ready = True
            return []
        if isinstance(message, _Death):
            seconds = round(self._timeout - max(0.0, worker.deadline - time.monotonic()), 3)
            failed = Result(task.name, error=message.cause, seconds=seconds)
            message = Answer(failed, None, final=False, exhausted=False)
        return self._settle(task, message)

    def _settle(self, task: Task, answer: Answer) -> list[Result]:
        """Return the result if it is final, otherwise queue the next way of building the model."""
        result = answer.result
        seconds = self._seconds[task.name] = self._seconds.get(task.name, 0.0) + result.seconds
        if not result.error:
            return [replace(result, seconds=round(seconds, 3))]
        causes = self._causes.setdefault(task.name, {})
        causes.setdefault(result.error, []).append(task.way)
        later = self._attempts[self._attempts.index(Attempt(task.way, task.heavy)) + 1 :]
        if not any(word in result.error for word in WANTS_MEMORY):
            later = tuple(attempt for attempt in later if attempt.way != task.way)
        is_random = [attempt.way == "random" for attempt in later]
        if answer.weight_bytes is not None and answer.weight_bytes > self._memory and any(is_random):
            causes[f"its weights take {answer.weight_bytes / GIB:.1f} GiB"] = ["random"]
            later = tuple(attempt for attempt in later if attempt.way != "random")
        if answer.final or not later:
            error = " | ".join(f"{', '.join(ways)}: {cause}" for cause, ways in causes.items())
            return [replace(result, error=error, seconds=round(seconds, 3))]
        self._heavy.append(Task(task.name, later[0].way, later[0].heavy))
        return []

    def _hand_out(self, worker: _Worker) -> None:
        # Heavy models one at a time, so that two of them need not fit into memory.
        alone = all(other.task is None or not other.task.heavy for other in self._workers)
        queue = self._heavy if self._heavy and alone else self._light
        if queue:
            try:
                worker.connection.send(queue[0])
            except OSError:  # it died while it waited; the pipe will say so
                return
            worker.task = queue.popleft()
            worker.deadline = time.monotonic() + self._timeout

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._library, self._table, self._execution, self._memory + _SLACK)
        process = self._context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends when the worker does
        return _Worker(process, ours)

    def _kill(self, worker: _Worker) -> None:
        worker.process.kill()
        self._bury(worker)

    def _bury(self, worker: _Worker) -> str:
        worker.process.join()
        worker.connection.close()
        code = worker.process.exitcode
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


@dataclass(frozen=True, slots=True)
class _Death:
    """Instead of an answer: why a worker ended."""

    cause: str
