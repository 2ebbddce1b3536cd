"""Describe errors in one line: the module in which a model's forward raised one, its inputs, and the remedy."""

from __future__ import annotations

import inspect
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from fvflops.capture.errors.expected_inputs import find_mismatch
from fvflops.capture.model.input_specs import is_shape
from fvflops.capture.model.read_module_tree import describe_inputs, module_paths
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.paths import PACKAGE
from fvflops.text import describe_import_error, list_nearest, printable, printable_short

_LOGGER = logging.getLogger("fvflops")
_MAX_MESSAGE = 400  # characters
_MODULE_CALL = "_call_impl"  # of nn.Module: it has the arguments of forward
_MEMORY = re.compile(r"not enough memory|can't allocate memory|out of memory|Unable to allocate", re.IGNORECASE)
_AMOUNT = re.compile(r"tried to allocate ([\d.]+ \w+)|Unable to allocate ([\d.]+ \w+)", re.IGNORECASE)
_CUDA = re.compile(
    r"CUDA (enabled|support|build|driver)|CUDA GPUs|NVIDIA driver|'_cuda_\w+'|dummy base class|accelerator device"
)
_SHAPES = re.compile(r"\b(sizes?|shapes?|dimensions?|dims?|channels|broadcast\w*|range|elements)\b|mat[12]\b")


def describe_error(error: BaseException, *, hint: str = "") -> str:
    """Return an error in one line: the message of an error of fvflops; for others also the type, file and line.

    One that a model's forward raised begins with the module and its inputs. `hint` follows the file and line.

    >>> describe_error(ZeroDivisionError("no\\ninputs"))
    'ZeroDivisionError: no inputs'
    """
    if isinstance(error, Exception) and (explanation := explain_error(error)):
        return explanation
    text = printable(" ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split()))
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = printable(f"{error.filename}: {error.strerror}")
    if isinstance(error, ImportError) and text.startswith("Could not import module"):  # of transformers, lazily
        text = f"{text.partition('. ')[0].rstrip('.')}: {describe_import_error(error)}"
    text = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " ..."
    frames = traceback.extract_tb(error.__traceback__)
    is_own_error = bool(frames) and frames[-1].filename.startswith(str(PACKAGE))
    if text and is_own_error and isinstance(error, (ValueError, KeyError, TypeError, OSError)):
        return text
    if isinstance(error, SystemExit):
        text = printable(f"the program asked to exit with {error.code!r}")
    kind = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if calls := _find_calls(error):
        is_about_shapes = isinstance(error, (RuntimeError, ValueError, IndexError, AssertionError, AttributeError))
        advice = _advise(error, calls, COMMAND) if is_about_shapes and "--input" not in str(error) else ""
        kind = f"{describe_module(error)}: {kind}{advice}"
    libraries = (str(PACKAGE), "site-packages", "dist-packages", os.path.dirname(os.__file__), "<")
    others = [frame for frame in frames if not any(part in frame.filename for part in libraries)]
    if not others:
        return text if isinstance(error, OSError) and error.filename is not None else kind
    place = f"{printable(os.path.basename(others[-1].filename))}:{others[-1].lineno}"
    return f"{kind} ({place}{f'; {hint}' if hint else ''})"


def describe_module(error: BaseException) -> str:
    """Return the innermost module whose forward raised an error, with its inputs, or "" if no module did.

    >>> try:
    ...     nn.Sequential(nn.Embedding(4, 2))(torch.ones(3))
    ... except RuntimeError as error:
    ...     print(describe_module(error))
    Embedding '0' on float32[3]
    """
    calls = _find_calls(error)
    if not calls:
        return ""
    inputs = describe_inputs(*_read_arguments(calls[-1][1]))
    return f"{_name(calls)} on {', '.join(inputs) or 'no inputs'}"


@dataclass(frozen=True, slots=True)
class Remedies:
    """Remedies for an error; `tensor` gets a shape and a dtype, `keyword` the name of an argument."""

    tensor: Callable[[tuple[int, ...], str], str]
    others: str
    meta: str
    keyword: str
    each: str
    cuda: str
    eval_mode: str


def _option(shape: tuple[int, ...], dtype: str) -> str:
    return f"--input {','.join(map(str, shape))}{'' if dtype == 'float32' else f':{dtype}'}"


def _expression(shape: tuple[int, ...], dtype: str) -> str:
    is_float = getattr(torch, dtype).is_floating_point
    kind = "" if dtype == "float32" else f", dtype=torch.{dtype}"
    return f"torch.{'randn' if is_float else 'ones'}({', '.join(map(str, shape))}{kind})"


COMMAND = Remedies(
    tensor=_option,
    others="try others by --input",
    meta="--build-on meta",
    keyword="--input {0}=SHAPE, such as --input {0}=1,16",
    each="one --input for each",
    cuda="--device cuda",
    eval_mode="omit --train, or pass a larger batch",
)
PYTHON = Remedies(
    tensor=_expression,
    others="pass others",
    meta='with torch.device("meta"): model = ...',
    keyword='it as inputs, or by name: kwargs={{"{0}": ...}}',
    each="one input for each (a tuple is several inputs)",
    cuda='device="cuda"',
    eval_mode="call model.eval() first, or pass a larger batch",
)


@contextmanager
def noting_remedies() -> Iterator[None]:
    """Add a note to an error that a model's forward raises inside: the module, its requirement and the remedy."""
    try:
        yield
    except Exception as error:
        note_remedy(error)
        raise


def note_remedy(error: BaseException) -> None:
    """Add a note to an error that a model's forward raised: the module, its requirement and the remedy.

    >>> try:
    ...     nn.Linear(4, 2)(torch.ones(3, 5))
    ... except RuntimeError as error:
    ...     note_remedy(error)
    ...     print(*error.__notes__)
    fvflops: Linear expects 4 input features, got float32[3, 5]; pass torch.randn(3, 4)
    """
    if not isinstance(error, Exception) or not (calls := _find_calls(error)):
        return
    explanation = explain_error(error, PYTHON) or f"raised by {describe_module(error)}"
    if explanation.startswith("raised"):
        explanation += _advise(error, calls, PYTHON)
    note = printable(f"fvflops: {explanation}")
    if note in getattr(error, "__notes__", ()):
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # before Python 3.11
        _LOGGER.error("%s", note)


def explain_error(error: BaseException, remedies: Remedies = COMMAND) -> str:
    """Return in one line the requirement and the remedy, or "" for errors of other kinds.

    It explains a lack of memory, inputs that a layer does not accept, and arguments that a forward does not take.

    >>> try:
    ...     nn.Sequential(nn.Linear(4, 2))(torch.ones(3, 5))
    ... except RuntimeError as error:
    ...     print(explain_error(error))
    Linear '0' expects 4 input features, got float32[3, 5]; pass --input 3,4
    """
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _MEMORY.search(str(error))):
        match = _AMOUNT.search(str(error))
        amount = f": {match[0]}" if match else ""
        return f"not enough memory{amount}; build the model without weights, on the meta device: {remedies.meta}"
    calls = _find_calls(error)
    if not calls:
        return ""
    explanation = _explain_types(calls) if isinstance(error, (TypeError, AttributeError)) else ""
    if explanation:
        return explanation
    return _explain_call(error, calls, remedies) if isinstance(error, TypeError) else _explain_inputs(calls, remedies)


def _advise(error: BaseException, calls: list[tuple[nn.Module, FrameType]], remedies: Remedies) -> str:
    """Return what to try for an error about CUDA or shapes, with the model's inputs; "" for other errors."""
    if _CUDA.search(str(error)) and not torch.cuda.is_available():
        advice = f"{remedies.cuda} simulates tensors on a GPU, and torch.cuda.is_available() guards other calls"
        return f"; this machine has no CUDA: {advice}"
    return f"; {_try_others(calls, remedies)}" if _SHAPES.search(str(error)) else ""


def _try_others(calls: list[tuple[nn.Module, FrameType]], remedies: Remedies) -> str:
    arguments = _read_arguments(calls[0][1])
    inputs = ", ".join(describe_inputs(*arguments)) or "none"
    images = [x for x in tensors_of(arguments) if x.ndim == 3 and x.shape[0] == 3 and x.is_floating_point()]
    kind = str(images[0].dtype).removeprefix("torch.") if images else ""
    batch = f" (a batch of one image: {remedies.tensor((1, *images[0].shape), kind)})" if images else ""
    return f"the model's inputs are {inputs}: {remedies.others}{batch}"


def _explain_types(calls: list[tuple[nn.Module, FrameType]]) -> str:
    """Return which tensor to pass for an input of the model that a layer got in place of one, or where no input is."""
    module, frame = calls[0]
    args, kwargs = _read_arguments(frame)
    parameters = inspect.signature(module.forward).parameters
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    items = [pair for name, value in given.items() for pair in _items_of(value, name)]
    is_layer = type(calls[-1][0]).__module__.startswith("torch.nn.modules.")
    received = [value for value in _read_arguments(calls[-1][1])[0][:1] if is_layer and value is not None]
    others = [(path, item) for path, item in items if not isinstance(item, torch.Tensor)]
    same = [(path, item) for path, item in others if any(item is value for value in received)]
    remedies = {path: _find_tensor(item) or "a tensor" for path, item in same}
    if not remedies and not list(tensors_of((args, kwargs))):
        remedies = {path: _find_tensor(item) for path, item in items if not isinstance(item, Mapping)}
    found = next((path for path, remedy in remedies.items() if remedy), None)
    if found is None:
        return ""
    kind = type(dict(items)[found]).__name__
    return f"inputs are tensors, got a value of type {kind} for {found}: pass {remedies[found]}"


def _items_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of an input, and of what it contains."""
    yield path, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if type(value) in (list, tuple) else ()
    for key, item in items:
        yield from _items_of(item, f"{path}[{key!r}]")


def _find_tensor(value: Any) -> str:
    """Return how to get a tensor from a value, "" if that is not known."""
    if is_shape(value):
        return f"torch.randn{tuple(value)}, or input_size={tuple(value)}"
    if isinstance(value, Mapping):
        return f"one of its values, such as batch[{next(iter(value))!r}]" if value else ""
    if list(tensors_of(value)):
        return "torch.stack(tensors), or one of them"
    names = {f"{base.__module__.partition('.')[0]}.{base.__qualname__}" for base in type(value).__mro__}
    return next((_TENSORS[name] for name in names & _TENSORS.keys()), "")


# Types → how to get a tensor from a value of one.
_TENSORS = {
    "numpy.ndarray": "torch.from_numpy(array)",
    "PIL.Image": "torchvision.transforms.functional.to_tensor(image)[None]",
    "torch.DataLoader": "one batch, such as next(iter(loader))",
    "torch.Dataset": "one batch, such as next(iter(torch.utils.data.DataLoader(dataset)))",
    "builtins.str": 'token ids, such as tokenizer(text, return_tensors="pt")',
    **dict.fromkeys(("builtins.list", "builtins.int", "builtins.float"), "torch.tensor(values)"),
}


def _explain_inputs(calls: list[tuple[nn.Module, FrameType]], remedies: Remedies) -> str:
    module, frame = calls[-1]
    tensors = _read_tensors(frame)
    expectation = find_mismatch(module, tensors)
    if expectation is None:
        return ""
    tensor = tensors[expectation.index]
    got = ", ".join(describe_inputs((tensor,), {}))
    inputs = _read_tensors(calls[0][1])
    # The model's only input, unchanged: the module's requirement on it is the model's.
    is_model_input = len(inputs) == 1 and inputs[0].shape == tensor.shape and inputs[0].dtype == tensor.dtype
    if expectation.in_training:
        remedy = remedies.eval_mode
    elif is_model_input and expectation.shape is not None:
        remedy = f"pass {remedies.tensor(expectation.shape, expectation.dtype or 'float32')}"
    elif expectation.shape is not None and expectation.dtype and (name := _find_argument(calls[0], tensor)):
        remedy = f"pass {remedies.tensor(expectation.shape, expectation.dtype)} for {name}"
    else:
        remedy = _try_others(calls, remedies)
    return f"{_name(calls)} expects {expectation.text}, got {got}; {remedy}"


def _find_argument(call: tuple[nn.Module, FrameType], tensor: torch.Tensor) -> str:
    """Return the name of the argument of a call that is a tensor, or the only one of its shape and dtype; else ""."""
    module, frame = call
    args, kwargs = _read_arguments(frame)
    arguments = [*zip(inspect.signature(module.forward).parameters, args, strict=False), *kwargs.items()]
    same = [name for name, value in arguments if value is tensor]
    tensors = [(name, value) for name, value in arguments if isinstance(value, torch.Tensor)]
    alike = [name for name, value in tensors if (value.shape, value.dtype) == (tensor.shape, tensor.dtype)]
    return next((names[0] for names in (same, alike) if len(names) == 1), "")


def _explain_call(error: TypeError, calls: list[tuple[nn.Module, FrameType]], remedies: Remedies) -> str:
    """Return which arguments a forward lacks or does not take, if the call of a module failed for that."""
    module, text = calls[-1][0], str(error)
    match = re.search(r"forward\(\) (missing|got an unexpected|takes)", text)
    if match is None:
        return ""
    parameters = [
        item for item in inspect.signature(module.forward).parameters.values() if item.kind is not item.VAR_KEYWORD
    ]
    shown = f"{_name(calls)}.forward({', '.join(item.name for item in parameters)})"
    quoted = re.findall(r"'([^']*)'", text)
    if len(calls) > 1:
        return f"{shown} was called with wrong arguments: {text}"
    if match[1] == "missing":
        return f"{shown} needs {', '.join(quoted)}: pass {remedies.keyword.format(quoted[0])}"
    if match[1] == "takes":
        return f"{shown} {text.partition('forward() ')[2]}: pass {remedies.each}"
    names = [item.name for item in parameters]
    return f"{shown} has no input {quoted[0]!r}{list_nearest(quoted[0], names)}"


def _find_calls(error: BaseException) -> list[tuple[nn.Module, FrameType]]:
    """Return (module, frame) of each call of a module in the traceback, the outermost first."""
    calls: list[tuple[nn.Module, FrameType]] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module: Any = frame.f_locals.get("self")
        if not issubclass(type(module), nn.Module) or frame.f_code.co_name not in (_MODULE_CALL, "forward"):
            continue
        # Arguments are read from _call_impl where there is one: forward may have rebound its own.
        if not calls or calls[-1][0] is not module:
            calls.append((module, frame))
    return calls


def _name(calls: list[tuple[nn.Module, FrameType]]) -> str:
    """Return the class and the path of the last module in the first one, such as "Conv2d 'conv1'"."""
    module = calls[-1][0]
    path = next((path for path, item in module_paths(calls[0][0]) if item is module), "")
    return type(module).__name__ + (f" {printable_short(path)!r}" if path else "")


def _read_tensors(frame: FrameType) -> list[torch.Tensor]:
    return list(tensors_of(_read_arguments(frame)))


def _read_arguments(frame: FrameType) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    values = frame.f_locals
    code = frame.f_code
    if code.co_name == _MODULE_CALL:
        return values.get("args", ()), values.get("kwargs", {})
    names = code.co_varnames[1 : code.co_argcount]
    return tuple(values[name] for name in names if name in values), {}


_NO_MEMORY = "it reads a tensor's memory, which shape execution does not have"
_NO_RULE = "torch cannot infer its result without values"
# Part of a message → the reason.
_REASONS = {
    "data is not allocated yet": _NO_MEMORY,
    "Cannot access data pointer": _NO_MEMORY,
    "Cannot access storage": _NO_MEMORY,
    "Attempted to set the storage": _NO_MEMORY,
    "ShapeStorage": _NO_MEMORY,
    "no fake impl": _NO_RULE,
    "could not find the fake impl": _NO_RULE,
    "Meta tensors": _NO_RULE,
    "'Meta' backend": _NO_RULE,
    "INTERNAL ASSERT FAILED": _NO_RULE,
}


def find_reason(error: BaseException) -> str:
    """Return why shape execution cannot run code that raised an error, "" if the error may be the model's own.

    >>> find_reason(RuntimeError("x INTERNAL ASSERT FAILED at y, please report a bug to PyTorch"))
    'torch cannot infer its result without values'
    """
    return next((reason for part, reason in _REASONS.items() if part in str(error)), "")


def describe_failure(error: BaseException) -> str:
    """Return the reason for a failure in one line, or else the type and message of the error.

    >>> describe_failure(ValueError("no\\nsuch scale"))
    'ValueError: no'
    """
    if reason := find_reason(error):
        return reason
    text = str(error).strip().partition("\n")[0]
    if type(error).__module__.startswith("fvflops") and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
