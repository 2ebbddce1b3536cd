"""Run coroutines and asynchronous iterators to their end in an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

# Seconds without an op after which a coroutine is thought to wait for something that does not come.
PATIENCE = 2.0


def complete(work: Any, take: Callable[[Any], None], count_events: Callable[[], int], limit: int) -> bool:
    """Run an awaitable, or an asynchronous iterator for `limit` items at most; return whether it ended.

    `take` is called with each result. A thread runs the loop where this thread has one, as in a notebook.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work, take, count_events, limit)
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(_run(work, take, count_events, limit))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return bool(outcome[0])


def _run(work: Any, take: Callable[[Any], None], count_events: Callable[[], int], limit: int) -> bool:
    # Not asyncio.run, after which the thread would have no event loop.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_supervise(_consume(work, take, limit), count_events))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _consume(work: Any, take: Callable[[Any], None], limit: int) -> bool:
    if not hasattr(type(work), "__anext__"):
        take(await work)
        return True
    for _ in range(limit):
        try:
            take(await work.__anext__())
        except StopAsyncIteration:
            return True
    return False


async def _supervise(consumption: Any, count_events: Callable[[], int]) -> bool:
    """Await a coroutine as long as ops are recorded."""
    task = asyncio.ensure_future(consumption)
    while True:
        before = count_events()
        done, _ = await asyncio.wait({task}, timeout=PATIENCE)
        if done:
            return bool(task.result())
        if count_events() == before:
            task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE)
            return False
