"""An analysis as text, for `repr` and `print`, and the rows of its views as a dict or a data frame."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fvflops.counting.metrics import METRICS
from fvflops.reports.count_report import write_text
from fvflops.reports.display import WIDTH
from fvflops.reports.document import Table, Value
from fvflops.reports.terminal.collapse import collapse
from fvflops.trace import Counts, Status, Summary, Trace
from fvflops.units import format_quantity, format_short

if TYPE_CHECKING:
    import pandas


def list_facts(trace: Trace | None, counts: Counts | None) -> list[str]:
    """Return the known facts of a run, without computing more: its total, and the op calls that have no formula."""
    if counts is not None:
        title = METRICS[counts.metric].short if counts.metric in METRICS else counts.metric
        unsupported = sum(entry.calls for entry in counts.entries if entry.status is Status.UNSUPPORTED)
        missing = f"{format_quantity(unsupported, 'op call')} unsupported" if unsupported else ""
        return [f"{format_short(counts.total())} {title}", missing]
    return ["not run yet" if trace is None else f"{format_quantity(sum(trace.calls.values()), 'op call')} recorded"]


def write_table(summary: Summary) -> str:
    """Return the table of a summary at 80 columns, equal layers collapsed, down to the depth that fits a screen."""
    collapsed = collapse(summary)
    texts = (write_text(collapsed, depth=depth, width=WIDTH) for depth in (3, 2))
    return next((text for text in texts if text.count("\n") < 50), "") or write_text(collapsed, depth=1, width=WIDTH)


def make_columns(table: Table) -> dict[str, list[Value]]:
    data = table.readable_by("data")
    return {column.key: [row[index] for row in data.rows] for index, column in enumerate(data.columns)}


def make_frame(table: Table, about: Mapping[str, str]) -> pandas.DataFrame:
    """Return a data frame with `about` in its `attrs`; without pandas it raises ImportError."""
    pandas = import_pandas()
    # Without dtype=object pandas would convert a column with unknown numbers to floats.
    columns = {
        heading: pandas.Series(cells, dtype="object" if None in cells else None)
        for heading, cells in make_columns(table).items()
    }
    frame: Any = pandas.DataFrame(columns)
    frame.attrs.update(about)
    return frame


def import_pandas() -> ModuleType:
    """Return the module pandas; if it is not installed, raise ImportError with the remedy."""
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise  # pandas is installed, but one of its dependencies is missing
        raise ImportError("pandas is not installed: pip install 'fvflops[pandas]', or use to_dict()") from None
