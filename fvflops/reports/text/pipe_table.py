"""Tables in tabulate's "pipe" format, with leading blanks of cells kept.

The blanks are the indentation of fvcore's tables. Up to release 0.9 tabulate keeps them only under a setting of its
module, which other threads see; since 0.10 it has an option of the call and no longer obeys the setting.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec, module_from_spec
from typing import Any

import tabulate


def pipe_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows below their headers, as tabulate aligns them: left, or at the point if all cells are numbers.

    >>> print(pipe_table(["module", "#flops"], [("model", "1K"), (" fc", " 1K")]))
    | module   | #flops   |
    |:---------|:---------|
    | model    | 1K       |
    |  fc      |  1K      |
    """
    if "preserve_whitespace" in inspect.signature(tabulate.tabulate).parameters:
        return tabulate.tabulate(rows, headers, tablefmt="pipe", preserve_whitespace=True)
    return str(_load_own_tabulate().tabulate(rows, headers, tablefmt="pipe"))


@cache
def _load_own_tabulate() -> Any:
    # A second copy of the module, known to nobody else, on which the setting can stay without being seen.
    spec = find_spec("tabulate")
    if spec is None or spec.loader is None:
        raise ImportError("tabulate is loaded, but its source cannot be found: install tabulate 0.10 or newer")
    own = module_from_spec(spec)
    spec.loader.exec_module(own)
    own.PRESERVE_WHITESPACE = True  # type: ignore[attr-defined]
    return own
