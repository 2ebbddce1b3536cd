"""The ops by which TorchScript's interpreter reports module calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

NAMESPACE = "fvflops"
ENTER, LEAVE = f"{NAMESPACE}::enter_module", f"{NAMESPACE}::leave_module"


def is_module_call(op: str) -> bool:
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
