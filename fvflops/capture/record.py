"""The recording of a model: one forward run, in the composite vocabulary where it can be, the model left as it was."""

from __future__ import annotations

import platform
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fvflops.capture.dispatch import RecordingMode
from fvflops.capture.functions import function_regions
from fvflops.capture.model import canonical_names, describe_inputs, owner_of, read_modules, unwrap_compiled
from fvflops.capture.recorder import Recorder
from fvflops.capture.restore import Snapshot, UndoLog
from fvflops.capture.scopes import module_scopes
from fvflops.capture.signature import tensors_of
from fvflops.trace import StopsAt, Trace

Model = nn.Module | Callable[..., Any]

# Two runs at once of one model would see each other's buffers and random numbers: recordings take turns.
_TURN = threading.RLock()
_NO_STOPS = StopsAt()


def record(
    model: Model,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    stops_at: StopsAt = _NO_STOPS,
    quiet: bool = False,
) -> Trace:
    """Run a model once and return the Trace of what it did.

    Composite ops in `stops_at` are recorded as they are called, others are looked into. The run is made below
    autograd; a model that uses autograd in its forward is run again under it. A model on the meta device gets its
    inputs moved there. `quiet` silences Python's warnings. Whatever the model raises is raised, and the model, its
    buffers, its modules' attributes, the inputs and the random generators are as before. Recordings in several threads
    take turns.

    >>> record(nn.Linear(3, 2), (torch.ones(1, 3),), stops_at=StopsAt(frozenset({"aten::linear"}))).signatures[0].op
    'aten::linear'
    """
    kwargs = {} if kwargs is None else dict(kwargs)
    with _TURN, ExitStack() as stack:
        if quiet:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(_eager())
        if isinstance(model, nn.Module):
            model = unwrap_compiled(model)
            if _on_meta(model):
                args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        try:
            return _run(model, args, kwargs, stops_at, "composite")
        except Exception as error:
            vocabulary, eager = _another_way(error)
            once = any(isinstance(value, Iterator) for value in (*args, *kwargs.values()))
            if once or (vocabulary == "composite" and not eager):
                _say_which_input(error, model, args, kwargs)
                raise
        if eager:
            stack.enter_context(_eager())
        return _run(model, args, kwargs, stops_at, vocabulary)


def _eager() -> AbstractContextManager[None]:
    """Return a context in which compiled code runs eagerly.

    Without it, torch.compile meets the dispatch mode, marks the code as not to be compiled ever again, and refuses to
    run where a whole graph was asked for.
    """
    return torch.compiler.set_stance("force_eager")


def _run(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], stops_at: StopsAt, vocabulary: str) -> Trace:
    recorder = Recorder(stops_at)
    modules = read_modules(model)
    about = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "vocabulary": vocabulary,
        "execution": "real",
        "inputs": ", ".join(describe_inputs(args, kwargs)),
    }
    owner = owner_of(model)
    names = canonical_names(owner) if owner is not None else {}
    _name_storages(recorder, names, args, kwargs)
    with _restored(names, (args, kwargs)) as undo_log, ExitStack() as stack:
        stack.enter_context(module_scopes(recorder, names))
        stack.enter_context(function_regions(recorder))
        if vocabulary == "composite":
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        stack.enter_context(RecordingMode(recorder, undo_log))
        _call(model, args, kwargs, recorder)
        return recorder.trace(modules, about)


def _call(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder) -> None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        # The wrapper's own forward scatters and synchronises; what is counted is the model in it.
        token = recorder.enter("module", "", (args, kwargs))
        result = model.module(*args, **kwargs)
        recorder.leave(token, result)
    elif isinstance(model, nn.Module):
        model(*args, **kwargs)
    else:
        token = recorder.enter("module", "", (args, kwargs))
        recorder.leave(token, model(*args, **kwargs))


@contextmanager
def _restored(names: dict[nn.Module, str], inputs: Any) -> Iterator[UndoLog]:
    snapshot = Snapshot(names, inputs)
    undo_log = UndoLog()
    try:
        yield undo_log
    finally:
        try:
            undo_log.undo()
        finally:
            snapshot.restore()
            # Under a caller's autocast the run cast weights below autograd; its cache would hand them on.
            torch.clear_autocast_cache()


def _name_storages(
    recorder: Recorder, names: dict[nn.Module, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for module, path in names.items():
        prefix = path + "." if path else ""
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    recorder.know(tensor, kind, prefix + name)
    for tensor in tensors_of((args, kwargs)):
        recorder.know(tensor, "input", "")


def _on_meta(model: nn.Module) -> bool:
    devices = {parameter.device.type for parameter in model.parameters()}
    return devices == {"meta"}


def _another_way(error: Exception) -> tuple[str, bool]:
    """Return the vocabulary in which a run that failed may succeed, and whether compiled functions must run eagerly.

    A model that uses autograd in its forward fails below autograd; ("composite", False) is what has failed already.
    """
    if "torch dispatch mode present" in str(error):
        return "composite", True
    files = (frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__))
    says_so = isinstance(error, RuntimeError) and "grad" in str(error)
    uses_autograd = says_so or any("torch/autograd/" in file for file in files)
    return ("core" if uses_autograd else "composite"), False


def _say_which_input(error: Exception, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add to torch's message about devices which input is elsewhere than the model."""
    about_devices = isinstance(error, RuntimeError) and any(word in str(error) for word in ("device", "meta"))
    if not (about_devices and isinstance(model, nn.Module)):
        return
    homes = sorted({str(parameter.device) for parameter in model.parameters()})
    strays = [
        f"{name} is on {tensor.device}"
        for name, value in (*((f"argument {index}", value) for index, value in enumerate(args)), *kwargs.items())
        for tensor in tensors_of(value)
        if homes and str(tensor.device) not in homes
    ]
    if strays and error.args:
        note = f"{'; '.join(strays)}; the model is on {', '.join(homes)}"
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
