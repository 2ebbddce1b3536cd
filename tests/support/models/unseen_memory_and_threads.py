"""Work outside the dispatcher: on a model's inputs and constants, in threads and processes, or in lazy results.

Each kind is a function (module, input) that the module `Scan` calls. It is counted, or reported as an unseen op.
"""

from __future__ import annotations

import _thread
import array
import asyncio
import ctypes
import functools
import itertools
import multiprocessing
import os
import queue
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import shared_memory
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter
from scipy import ndimage
from torch import nn

SHAPE = 4, 8
# Multiply-adds of `Scan.layer` on an input of this shape.
LAYER = 256


class Kind(NamedTuple):
    """A function that computes, the calls of `Scan.layer` that are counted, and the unseen op that is reported."""

    compute: Callable[[Scan, torch.Tensor], Any]
    calls: int
    op: str | None = None


class Scan(nn.Module):
    """A module that computes by one of the kinds."""

    def __init__(self, compute: Callable[[Scan, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(SHAPE))
        self.array = self.table.numpy()
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


class Net(nn.Module):
    """A model that returns what its module `scan` does."""

    def __init__(self, compute: Callable[[Scan, torch.Tensor], Any]) -> None:
        super().__init__()
        self.scan = Scan(compute)

    def forward(self, x):
        return self.scan(x)


WAVE = np.sin(np.arange(32, dtype=np.float32)).reshape(SHAPE)


# Memory of tensors that code other than torch's writes to.


def into(write: Callable[[torch.Tensor], Any], make: Callable[..., torch.Tensor] = torch.zeros) -> Any:
    """Return a function that makes a tensor, writes to it, and calls the layer."""

    def written(scan: Scan, x: torch.Tensor) -> Any:
        y = make(SHAPE)
        write(y)
        return scan.layer(y)

    return written


def _write_items(y):
    storage = y.untyped_storage()
    for index, byte in enumerate(WAVE.tobytes()):
        storage[index] = byte


WRITES = {
    "numpy_into_zeros": into(lambda y: np.copyto(y.numpy(), WAVE)),
    "numpy_into_empty": into(lambda y: np.cos(WAVE, out=y.numpy()), torch.empty),
    "numpy_into_a_part": into(lambda y: y.numpy()[1, 3:5].fill(1)),
    "asarray_into_zeros": into(lambda y: np.copyto(np.asarray(y), WAVE)),
    "ctypes_into_zeros": into(lambda y: ctypes.memmove(y.data_ptr(), WAVE.ctypes.data, WAVE.nbytes)),
    "storage_pointer": into(lambda y: ctypes.memmove(y.untyped_storage().data_ptr(), WAVE.ctypes.data, WAVE.nbytes)),
    "scipy_into_zeros": into(lambda y: ndimage.gaussian_filter(WAVE, sigma=1, output=y.numpy())),
}
if np.from_dlpack(torch.zeros(1)).flags.writeable:  # an older torch exports tensors as read-only
    WRITES["dlpack_into_zeros"] = into(lambda y: np.copyto(np.from_dlpack(y), WAVE))


def behind(make: Callable[[], Any], write: Callable[[Any], Any], of: Callable[[Any], torch.Tensor]) -> Any:
    """Return a function that writes to the memory that a tensor was made of, after an op on the tensor."""

    def written(scan: Scan, x: torch.Tensor) -> Any:
        memory = make()
        y = of(memory)
        z = y + 1
        write(memory)
        return scan.layer(y + z)

    return written


def _of_buffer(memory):
    return torch.frombuffer(memory, dtype=torch.float32).view(SHAPE)


BLOCKS = []


def _make_block():
    block = shared_memory.SharedMemory(create=True, size=128)
    block.unlink()
    BLOCKS.append(block)  # exported memory cannot be closed
    return block.buf


def _write_bytes(memory):
    memory[:] = WAVE.tobytes()


def _write_numbers(memory):
    for index in range(32):
        memory[index] = 2.0 * index


array_of_a_tensor = behind(
    lambda: np.zeros(SHAPE, dtype=np.float32), lambda memory: np.sin(WAVE, out=memory), torch.from_numpy
)
BEHIND = {
    "bytearray_of_a_tensor": behind(
        lambda: bytearray(128), lambda memory: struct.pack_into("32f", memory, 0, *range(32)), _of_buffer
    ),
    "python_array_of_a_tensor": behind(lambda: array.array("f", [0.0] * 32), _write_numbers, _of_buffer),
    "shared_memory_of_a_tensor": behind(_make_block, _write_bytes, _of_buffer),
}


def numpy_into_ones(scan: Scan, x: torch.Tensor) -> Any:
    y = torch.ones(SHAPE)
    y.numpy()[:] *= WAVE
    return scan.layer(x + y)


def numpy_into_a_buffer(scan: Scan, x: torch.Tensor) -> Any:
    scan.table.numpy()[:] = WAVE
    return scan.layer(x + scan.table)


def numpy_into_the_result(scan: Scan, x: torch.Tensor) -> Any:
    y = torch.zeros(SHAPE)
    y.numpy()[:] = WAVE
    return y


def array_of_a_buffer(scan: Scan, x: torch.Tensor) -> Any:
    np.sin(WAVE, out=scan.array)
    return scan.layer(x + scan.table)


def array_in_another_module(scan: Scan, x: torch.Tensor) -> Any:
    y = torch.zeros(SHAPE)
    memory = y.numpy()
    z = scan.layer(y)
    memory[:] = WAVE
    return z + y


def pillow_filter(scan: Scan, x: torch.Tensor) -> Any:
    image = Image.fromarray((x.numpy() * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1))
    return scan.layer(torch.from_numpy(np.asarray(image, dtype=np.float32)))


# Threads.

EXECUTOR = ThreadPoolExecutor(2)
POOL = ThreadPool(2)


def _tanh(x):
    return torch.from_numpy(np.tanh(x.numpy()))


def beside(start: Callable[[Scan, torch.Tensor], Any]) -> Any:
    """Return a function that starts work and calls the layer."""

    def started(scan: Scan, x: torch.Tensor) -> Any:
        start(scan, x)
        return scan.layer(x)

    return started


def _finish(worker: threading.Thread | multiprocessing.process.BaseProcess) -> None:
    worker.start()
    worker.join()


def numpy_beside_an_op(scan: Scan, x: torch.Tensor) -> Any:
    large = torch.ones(512, 512)
    busy = EXECUTOR.submit(lambda: [large @ large for _ in range(4)])
    y = _tanh(x)
    busy.result()
    return scan.layer(y)


def raw_thread(scan: Scan, x: torch.Tensor) -> Any:
    results = []
    lock = _thread.allocate_lock()
    lock.acquire()
    _thread.start_new_thread(lambda: (results.append(scan.layer(x)), lock.release()), ())
    lock.acquire()
    return results


def _work_later(scan: Scan, x: torch.Tensor) -> None:
    time.sleep(0.05)
    scan.layer(x)


RELEASED = threading.Event()


def wait_for_release():
    RELEASED.wait(60)


class _Worker(Executor):
    """An executor whose thread exists before the run."""

    def __init__(self):
        self._tasks = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            future, function, args = self._tasks.get()
            future.set_result(function(*args))

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future()
        self._tasks.put((future, function, args))
        return future


WORKER = _Worker()


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


LOOP = _start_loop()


async def _tanh_later() -> np.ndarray:
    return np.tanh(WAVE)


def dispatch_disabled(scan: Scan, x: torch.Tensor) -> Any:
    with torch.utils._python_dispatch._disable_current_modes():
        y = x * 2
    return scan.layer(y)


def input_written_with_dispatch_disabled(scan: Scan, x: torch.Tensor) -> Any:
    with torch.utils._python_dispatch._disable_current_modes():
        x.mul_(2)
    return scan.layer(x)


# Processes.

_FORK = multiprocessing.get_context("fork")


def process_pool_executor(scan: Scan, x: torch.Tensor) -> Any:
    with ProcessPoolExecutor(1, mp_context=_FORK) as executor:
        return executor.submit(np.tanh, WAVE).result()


def process_pool(scan: Scan, x: torch.Tensor) -> Any:
    with _FORK.Pool(1) as pool:
        return scan.layer(torch.from_numpy(pool.map(np.tanh, [WAVE])[0]))


def _fill(y):
    y.numpy()[:] = WAVE


def program(scan: Scan, x: torch.Tensor) -> Any:
    done = subprocess.run(["cat"], input=x.numpy().tobytes(), stdout=subprocess.PIPE, check=True)
    return scan.layer(_of_buffer(bytearray(done.stdout)))


def fork(scan: Scan, x: torch.Tensor) -> Any:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return scan.layer(x)


def _serve(connection):
    while True:
        connection.send(np.tanh(connection.recv()))


@functools.cache
def start_server():
    """Start a process that returns the tanh of arrays sent to it, before a run; return the connection."""
    ours, theirs = _FORK.Pipe()
    _FORK.Process(target=_serve, args=(theirs,), daemon=True).start()
    return ours


def pipe_to_a_process(scan: Scan, x: torch.Tensor) -> Any:
    connection = start_server()
    connection.send(WAVE)
    return connection.recv().tolist()


# Lazy results.


def generator(scan: Scan, x: torch.Tensor) -> Any:
    for _ in range(3):
        yield scan.layer(x)


@dataclass
class Output:
    steps: Any


class _Steps(Iterator[torch.Tensor]):
    def __init__(self, scan: Scan, x: torch.Tensor) -> None:
        self.scan, self.x, self.left = scan, x, 2

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.scan.layer(self.x)


async def coroutine(scan: Scan, x: torch.Tensor) -> Any:
    return scan.layer(x)


async def coroutine_with_tasks(scan: Scan, x: torch.Tensor) -> Any:
    await asyncio.sleep(0.01)
    return await asyncio.gather(*(coroutine(scan, x) for _ in range(3)))


async def coroutine_with_a_thread(scan: Scan, x: torch.Tensor) -> Any:
    return await asyncio.to_thread(scan.layer, x)


async def async_generator(scan: Scan, x: torch.Tensor) -> Any:
    for _ in range(2):
        yield await coroutine(scan, x)


class _Awaitable:
    def __init__(self, scan: Scan, x: torch.Tensor) -> None:
        self.scan, self.x = scan, x

    def __await__(self):
        return coroutine(self.scan, self.x).__await__()


class _AsyncSteps:
    def __init__(self, scan: Scan, x: torch.Tensor) -> None:
        self.scan, self.x, self.left = scan, x, 2

    def __aiter__(self) -> _AsyncSteps:
        return self

    async def __anext__(self):
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        return self.scan.layer(self.x)


async def coroutine_that_does_not_end(scan: Scan, x: torch.Tensor) -> Any:
    await asyncio.get_running_loop().create_future()
    return scan.layer(x)


class _Lazy:
    def __init__(self, scan: Scan, x: torch.Tensor) -> None:
        self.scan, self.x = scan, x

    @functools.cached_property
    def result(self):
        return self.scan.layer(self.x)


_UNSEEN = (
    *(numpy_into_ones, numpy_into_a_buffer, array_in_another_module, pillow_filter),
    *(dispatch_disabled, process_pool, fork),
)
_WITHOUT_THE_LAYER = (numpy_into_the_result, process_pool_executor, pipe_to_a_process)
# Name → work during the call, or in threads and processes that it starts.
KINDS = {
    **{function.__name__: Kind(function, 1, f"unseen::{function.__name__}") for function in _UNSEEN},
    **{function.__name__: Kind(function, 0, f"unseen::{function.__name__}") for function in _WITHOUT_THE_LAYER},
    **{name: Kind(compute, 1, "unseen::lambda") for name, compute in WRITES.items()},
    **{name: Kind(compute, 1, "unseen::_of_buffer") for name, compute in BEHIND.items()},
    "array_of_a_tensor": Kind(array_of_a_tensor, 1, "unseen::written"),
    "array_of_a_buffer": Kind(array_of_a_buffer, 1, "unseen::ndarray"),
    "numpy_into_the_input": Kind(
        beside(lambda scan, x: np.copyto(x.numpy(), np.abs(np.fft.fft(x.numpy())))), 1, "unseen::lambda"
    ),
    "numpy_result": Kind(lambda scan, x: {"loss": np.tanh(x.numpy())}, 0, "unseen::lambda"),
    "numpy_number": Kind(lambda scan, x: float(np.tanh(x.numpy()).sum()), 0, "unseen::lambda"),
    "python_apply": Kind(
        lambda scan, x: scan.layer(torch.ones(SHAPE).apply_(lambda value: value * 2)), 1, "unseen::lambda"
    ),
    "python_map": Kind(
        lambda scan, x: scan.layer(torch.ones(SHAPE).map_(torch.ones(SHAPE), lambda a, b: a * 2 + b)),
        1,
        "unseen::lambda",
    ),
    "storage_items": Kind(into(_write_items), 1),
    "numpy_in_an_executor": Kind(lambda scan, x: scan.layer(EXECUTOR.submit(_tanh, x).result()), 1, "unseen::_tanh"),
    "numpy_in_a_pool": Kind(lambda scan, x: scan.layer(POOL.map(_tanh, [x])[0]), 1, "unseen::_tanh"),
    "numpy_in_a_thread": Kind(into(lambda y: _finish(threading.Thread(target=_fill, args=(y,)))), 1, "unseen::_fill"),
    "numpy_in_to_thread": Kind(
        lambda scan, x: scan.layer(asyncio.run(asyncio.to_thread(_tanh, x))), 1, "unseen::_tanh"
    ),
    "numpy_beside_an_op": Kind(numpy_beside_an_op, 1, "unseen::_tanh"),
    "executor_of_another_library": Kind(
        lambda scan, x: WORKER.submit(np.tanh, WAVE).result(30), 0, "unseen::_Worker.submit"
    ),
    "event_loop_of_another_thread": Kind(
        lambda scan, x: asyncio.run_coroutine_threadsafe(_tanh_later(), LOOP).result(30), 0, "unseen::lambda"
    ),
    "raw_thread": Kind(raw_thread, 1),
    "thread_that_ends_later": Kind(beside(lambda *args: threading.Thread(target=_work_later, args=args).start()), 2),
    "future_that_ends_later": Kind(beside(lambda *args: EXECUTOR.submit(_work_later, *args)), 2),
    "pool_that_ends_later": Kind(
        beside(lambda scan, x: POOL.imap_unordered(functools.partial(_work_later, scan), [x, x])), 3
    ),
    "raw_thread_that_ends_later": Kind(beside(lambda *args: _thread.start_new_thread(_work_later, args)), 2),
    "timer": Kind(beside(lambda scan, x: threading.Timer(0.05, scan.layer, (x,)).start()), 2),
    "forked_by_torch": Kind(lambda scan, x: torch.jit.fork(scan.layer, x), 1),
    "process": Kind(
        into(lambda y: _finish(_FORK.Process(target=_fill, args=(y.share_memory_(),)))), 1, "unseen::lambda"
    ),
    "program": Kind(program, 1, "unseen::_of_buffer"),
    "program_without_a_result": Kind(beside(lambda scan, x: subprocess.run(["true"], check=True)), 1, "unseen::lambda"),
    "shell": Kind(beside(lambda scan, x: os.system("true")), 1, "unseen::lambda"),
}
# Name → lazy result: the calls that are counted if it is used, the unseen op if it is not.
RESULTS = {
    "generator": Kind(generator, 3, "unseen::generator"),
    "generator_expression": Kind(lambda scan, x: (scan.layer(item) for item in (x, x, x)), 3, "unseen::genexpr"),
    "generator_of_generators": Kind(lambda scan, x: (generator(scan, x) for _ in range(2)), 6, "unseen::genexpr"),
    "lazy_map": Kind(lambda scan, x: map(scan.layer, [x, x]), 2, "unseen::map"),
    "lazy_filter": Kind(lambda scan, x: filter(lambda item: scan.layer(item) is not None, [x, x]), 2, "unseen::filter"),
    "lazy_zip": Kind(lambda scan, x: zip(map(scan.layer, [x, x]), range(2), strict=True), 2, "unseen::zip"),
    "lazy_chain": Kind(
        lambda scan, x: itertools.chain.from_iterable([scan.layer(x)] for _ in range(2)), 2, "unseen::chain"
    ),
    "iterator_in_a_tuple": Kind(lambda scan, x: (scan.layer(x), map(scan.layer, [x, x])), 3, "unseen::map"),
    "iterator_in_a_dict": Kind(lambda scan, x: {"steps": [generator(scan, x)], "input": x}, 3, "unseen::generator"),
    "iterator_in_a_dataclass": Kind(lambda scan, x: Output(generator(scan, x)), 3, "unseen::generator"),
    "iterator_class": Kind(_Steps, 2, "unseen::_Steps"),
    "coroutine": Kind(coroutine, 1, "unseen::coroutine"),
    "coroutine_with_tasks": Kind(coroutine_with_tasks, 3, "unseen::coroutine_with_tasks"),
    "coroutine_with_a_thread": Kind(coroutine_with_a_thread, 1, "unseen::coroutine_with_a_thread"),
    "async_generator": Kind(async_generator, 2, "unseen::async_generator"),
    "awaitable": Kind(_Awaitable, 1, "unseen::_Awaitable"),
    "async_iterator_class": Kind(_AsyncSteps, 2, "unseen::_AsyncSteps"),
}
# Name → work that cannot be run to its end.
ENDLESS = {
    "thread_that_does_not_end": Kind(
        beside(lambda scan, x: threading.Thread(target=wait_for_release, daemon=True).start()),
        *(1, "unseen::wait_for_release"),
    ),
    "endless_generator": Kind(lambda scan, x: (scan.layer(x) for _ in itertools.count()), 4096, "unseen::genexpr"),
    "coroutine_that_does_not_end": Kind(coroutine_that_does_not_end, 0, "unseen::coroutine_that_does_not_end"),
    "returned_function": Kind(lambda scan, x: lambda: scan.layer(x), 0, "unseen::lambda"),
    "returned_partial": Kind(lambda scan, x: (x, functools.partial(scan.layer, x)), 0, "unseen::partial"),
    "returned_method": Kind(lambda scan, x: scan.forward, 0, "unseen::Scan.forward"),
    "lazy_property": Kind(_Lazy, 0, "unseen::_Lazy"),
    "pending_future": Kind(lambda scan, x: {"result": Future()}, 0, "unseen::Future"),
}
