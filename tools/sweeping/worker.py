"""A worker: a process that builds and counts one model after the other, and tells the results through a pipe."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import sys
import time
import warnings
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from fvflops import ActivationCountAnalysis, FlopCountAnalysis, FormulaTable, load_table, parameter_count
from fvflops.counting.unsupported_locations import find_unsupported_locations
from fvflops.reports.terminal.op_coverage import format_locations
from fvflops.trace import Status
from sweeping.case import Case, Library
from sweeping.result import Result
from tests.support.torchvision_schemas import define_torchvision_schemas

_LONGEST_CAUSE = 200
# Words in the cause of a failure that more memory may cure.
WANTS_MEMORY = ("memory", "allocate")
_LIGHT = 6 << 30  # bytes that a worker may allocate while others work too
# How the names of ops begin that ran outside the dispatcher.
_UNSEEN = ("unseen::", "prim::PythonOp.", "triton::")


@dataclass(frozen=True, slots=True)
class Task:
    """One model to be built in one way; one that is `heavy` runs while no other heavy one does."""

    name: str
    way: str
    heavy: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker says of a task: the result, the bytes of the model's weights (None if it could not be built).

    `final` says that building it in another way would fail for the same cause; `exhausted` that a model with real
    weights failed for want of memory, as it seems.
    """

    result: Result
    weight_bytes: int | None
    final: bool
    exhausted: bool


def load_library(name: str) -> Library:
    """Return the module of a library, with what must be there before the library is imported."""
    define_torchvision_schemas()
    # A configuration that names a model to be fetched must fail, not wait for a network.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    return importlib.import_module(f"sweeping.{name}")


def serve(connection: Connection, library_name: str, table_name: str, execution: str, memory: int) -> None:
    """Answer tasks until the pipe is closed; `memory` bytes may be allocated for a heavy one."""
    _silence()
    table = load_table(table_name)
    torch.set_num_threads(1)
    library = load_library(library_name)
    library.list_names()  # so that the first model does not pay for the import
    connection.send(None)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        _limit_memory(memory if task.heavy else min(memory, _LIGHT))
        connection.send(answer(library, table, task, execution))


def answer(library: Library, table: FormulaTable, task: Task, execution: str) -> Answer:
    """Build and count one model by a table, whatever it raises."""
    random.seed(0)
    torch.manual_seed(0)
    begun = time.perf_counter()
    case = weight_bytes = None
    try:
        case = library.build(task.name, task.way)
        weight_bytes = sum(tensor.nbytes for tensor in (*case.model.parameters(), *case.model.buffers()))
        result = count_case(task.name, case, table, execution)
        final = True
    except Exception as error:
        result = Result(task.name, error=explain(error), built=case.built if case else "")
        final = isinstance(error, ImportError)
    seconds = round(time.perf_counter() - begun, 3)
    del case
    if task.way != "meta":
        gc.collect()
    exhausted = task.way != "meta" and any(word in result.error for word in WANTS_MEMORY)
    return Answer(replace(result, seconds=seconds), weight_bytes, final, exhausted)


def count_case(name: str, case: Case, table: FormulaTable, execution: str = "auto") -> Result:
    """Return the figures of a model on its inputs, by a table."""
    inputs = case.make_inputs()
    args, kwargs = (None, inputs) if isinstance(inputs, dict) else (inputs, None)
    flops = FlopCountAnalysis(case.model, args, kwargs=kwargs, table=table, execution=execution, warn=False)
    total = flops.total()
    trace = flops.trace()
    activations = ActivationCountAnalysis.from_trace(trace, table=table, warn=False)
    ledger = flops.counts().ledger()
    places = find_unsupported_locations(trace, flops.counts())
    return Result(
        model=name,
        params=parameter_count(case.model)[""],
        flops=total,
        activations=activations.total(),
        counted=ledger[Status.COUNTED].total(),
        free=ledger[Status.ZERO_FLOP].total(),
        omitted=ledger[Status.IGNORED].total(),
        unknown_ops="; ".join(f"{op} {calls}" for op, calls in sorted(ledger[Status.UNSUPPORTED].items())),
        unseen="; ".join(
            f"{op} {calls} in {format_locations(places[op])}"
            for op, calls in sorted(ledger[Status.UNSUPPORTED].items())
            if op.startswith(_UNSEEN)
        ),
        execution=trace.about["execution"],
        built=case.built,
        inputs=trace.about["inputs"],
    )


def explain(error: BaseException) -> str:
    """Return an exception as one line.

    >>> explain(ValueError("too\\n  many"))
    'ValueError: too many'
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_LONGEST_CAUSE]


def _silence() -> None:
    """Let nothing that a library prints reach the terminal."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())


def _limit_memory(memory: int) -> None:
    """Make an allocation beyond `memory` bytes raise in this process, instead of getting some process killed."""
    if sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
