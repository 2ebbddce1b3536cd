"""Tables in tabulate's "pipe" format that preserve leading blanks of cells.

fvcore-style tables indent submodules with blanks. Up to release 0.9 tabulate preserves them only if a global variable
of its module is set, which other threads would see; since 0.10 `tabulate()` has an argument instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec, module_from_spec
from typing import Any

import tabulate


def pipe_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table aligned by tabulate: left, or in columns of numbers at the decimal point.

    >>> print(pipe_table(["module", "#flops"], [("model", "1K"), (" fc", " 1K")]))
    | module   | #flops   |
    |:---------|:---------|
    | model    | 1K       |
    |  fc      |  1K      |
    """
    if "preserve_whitespace" in inspect.signature(tabulate.tabulate).parameters:
        return tabulate.tabulate(rows, headers, tablefmt="pipe", preserve_whitespace=True)
    return str(_load_private_tabulate().tabulate(rows, headers, tablefmt="pipe"))


@cache
def _load_private_tabulate() -> Any:
    # A second copy of the module, so that the global variable affects no other user of tabulate.
    spec = find_spec("tabulate")
    if spec is None or spec.loader is None:
        raise ImportError("the source of tabulate was not found: install tabulate 0.10 or newer")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PRESERVE_WHITESPACE = True  # type: ignore[attr-defined]
    return module
