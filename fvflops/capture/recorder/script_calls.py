"""Module calls inside TorchScript, whose interpreter reports them by ops: they open and close regions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import get_ident
from typing import Any, Protocol

import torch

from fvflops.trace import Region

NAMESPACE = "fvflops"
ENTER, LEAVE = f"{NAMESPACE}::enter_module", f"{NAMESPACE}::leave_module"


def is_module_call(op: str) -> bool:
    """Return whether an op reports a module call.

    >>> is_module_call("fvflops::enter_module"), is_module_call("aten::add.Tensor")
    (True, False)
    """
    return op in (ENTER, LEAVE)


@cache
def define_ops() -> tuple[Any, Any]:
    """Return the ops before and after a module call, defined on first use.

    They take the call's path in the module that calls it with its tensors, and its results. Their alias analysis is
    conservative: otherwise TorchScript would remove ops without results.
    """
    library = torch.library.Library(NAMESPACE, "DEF")
    for op, arguments in ((ENTER, "str name, Tensor[] inputs"), (LEAVE, "Tensor[] outputs")):
        name = op.partition("::")[2]
        library.define(f"{name}({arguments}) -> ()", alias_analysis="CONSERVATIVE")
        library.impl(name, _do_nothing, "CompositeExplicitAutograd")
    define_ops.library = library  # type: ignore[attr-defined]  # an op exists as long as its library
    return getattr(torch.ops, NAMESPACE).enter_module.default, getattr(torch.ops, NAMESPACE).leave_module.default


def _do_nothing(*_: Any) -> None:
    """Run where nothing is recorded, such as in an interrupted run."""


class Regions(Protocol):
    """What opens and closes regions: the recorder."""

    def region(self, region: Region) -> int:
        """Return the index of a region."""

    def enter(self, region: int, values: Any) -> int:
        """Open a region; return the token for `leave`."""

    def leave(self, token: int, values: Any) -> None:
        """Close a region."""


class ScriptCalls:
    """The open module calls of TorchScript modules, in each thread."""

    def __init__(self, recorder: Regions, canonical: Callable[[str], str]) -> None:
        self._recorder = recorder
        self._canonical = canonical
        self._opened: dict[int, list[tuple[str, int]]] = {}

    def run(self, path: str, script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a TorchScript module, whose region is open, under its path."""
        thread = get_ident()
        outer, self._opened[thread] = self._opened.get(thread, []), [(path, -1)]
        try:
            return script(*args, **kwargs)
        finally:
            self._opened[thread] = outer

    def dispatch(self, op: str, args: Any) -> None:
        """Open or close the region of a module call."""
        opened = self._opened.get(get_ident())
        if not opened:
            return
        if op == ENTER:
            name, inputs = args
            outer = opened[-1][0]
            path = f"{outer}.{name}" if outer else name
            region = self._recorder.region(Region("module", self._canonical(path)))
            opened.append((path, self._recorder.enter(region, tuple(inputs))))
        else:
            self._recorder.leave(opened.pop()[1], tuple(args[0]))
