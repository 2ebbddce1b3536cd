"""Kinds of places in which a model keeps tensors, each as a module's source, and the comparison of twins."""

import array
import functools
import io
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import nn
from torch.utils.hooks import RemovableHandle

from fvflops.capture.restore.namespaces import dict_getter_of

# `set_up` prepares a model, `keep` returns what its forward adds to its result and keeps tensors while at that.
_FRAME = """
import array, collections, contextvars, dataclasses, enum, functools, io, itertools, queue, random, sys, threading
import types, weakref
import numpy as np
import torch
from torch import nn

def set_up(self): pass

{body}

class Net(nn.Module):
{inside}
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        set_up(self)

    def forward(self, x, fails=False):
        y = self.fc(x)
        y = y + keep(self, y)
        if fails:
            raise LookupError("in the middle")
        return self.drop(y)
"""


_NAME = "a_twin"


class Kind(NamedTuple):
    """One kind of place: its name, the source of `set_up` and `keep`, and of what stands in the model's class."""

    name: str
    body: str
    inside: str = "pass"


@contextmanager
def twin(kind: Kind) -> Iterator[tuple[ModuleType, nn.Module]]:
    """Make a model of a kind, in a module of its own whose globals no other twin shares."""
    module = sys.modules[_NAME] = ModuleType(_NAME)
    source = _FRAME.format(body=kind.body, inside=indent(kind.inside, "    "))
    exec(compile(source, f"<{kind.name}>", "exec"), module.__dict__)
    first, RemovableHandle.next_id = RemovableHandle.next_id, 0
    seed(1)
    try:
        yield module, module.Net()
    finally:
        RemovableHandle.next_id = first
        del sys.modules[_NAME]


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def picture(module: ModuleType, model: nn.Module) -> list[Any]:
    """Return what is in a module's globals and in a model, in plain values that can be compared."""
    seen = {}
    kept = []

    def draw(item):
        kind = type(item)
        if item is None or kind in (bool, int, float, complex, str, bytes, bytearray):
            return item
        if id(item) in seen:
            return f"again {seen[id(item)]}"
        seen[id(item)] = len(seen)
        kept.append(item)
        if issubclass(kind, (ModuleType, type)):
            own = kind is not ModuleType and item.__module__ == _NAME
            return (
                [(name, draw(value)) for name, value in vars(item).items() if name[:2] != "__"] if own else "a module"
            )
        return kind.__qualname__, draw_contents(item, kind), draw_attributes(item, kind)

    def draw_contents(item: Any, kind: type) -> Any:
        if issubclass(kind, torch.Tensor):
            dense = item.detach().to_dense() if item.layout is not torch.strided else item.detach()
            return dense.tolist(), item.requires_grad, draw(item.grad) if item.is_leaf else None
        for base in (dict, list, deque, tuple, set, frozenset):
            if issubclass(kind, base):
                items = dict.items(item) if base is dict else base.__iter__(item)
                return [tuple(map(draw, value)) if base is dict else draw(value) for value in items]
        if kind is MethodType:
            return draw(item.__self__), draw(item.__func__)
        if kind is FunctionType:
            cells = [draw(cell.cell_contents) for cell in item.__closure__ or ()]
            return cells, draw(item.__defaults__), draw(item.__kwdefaults__)
        show = _SHOWN.get(kind)
        return None if show is None else show(item)

    def draw_attributes(item: Any, kind: type) -> Any:
        slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ()) if base.__module__ == _NAME]
        found = [(name, draw(getattr(item, name, None))) for name in slots]
        if kind.__module__.startswith((_NAME, "torch.nn", "types", "weakref", "queue", "enum")) or kind in _OPEN:
            attributes = dict_getter_of(kind)
            found += draw(attributes(item))[1] if attributes is not None and not slots else []
        return found

    own = {name: value for name, value in vars(module).items() if name not in _PRELUDE}
    return [draw(own), draw(model)]


_OPEN = (FunctionType, torch.Tensor, nn.Parameter)
_SHOWN = {
    np.ndarray: lambda item: str(item.tolist()),
    torch.Generator: lambda item: item.get_state().tolist(),
    np.random.Generator: lambda item: str(item.bit_generator.state),
    np.random.RandomState: lambda item: str(item.get_state()),
    random.Random: lambda item: item.getstate(),
    io.StringIO: lambda item: item.getvalue(),
    array.array: lambda item: item.tolist(),
    type(functools.cache(len)): lambda item: item.cache_info().currsize,
}
_PRELUDE = {"__builtins__"}


def _read_kinds() -> Iterator[Kind]:
    for name, source in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
        yield Kind(name, source) if isinstance(source, str) else Kind(name, **source)


KINDS = tuple(_read_kinds())
