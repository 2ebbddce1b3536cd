"""The tables of docs/comparison.md, made from measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from documentation.page_parts import replace_part

from comparing.cases import CASES
from comparing.probes import PROBES
from fvflops.reports.fvcore_format import pipe_table
from fvflops.units import format_seconds

# A count is right within these percentages of the exact multiply-adds: tools also count biases, norms and the like.
LEAST, MOST = 98.0, 110.0
NOTHING = "–"

Results = Mapping[str, Mapping[str, Any]]


def is_right(cell: str) -> bool:
    try:
        return LEAST <= float(cell) <= MOST
    except ValueError:
        return False


def count_table(results: Results) -> str:
    """Return a row for each tool and a column for each model: percentages, wrong ones in bold."""
    titles = [case.title for case in CASES]
    rows = [
        [f"{title} {found['version']}", *(_show_count(found["counts"].get(name, "")) for name in titles)]
        for title, found in results.items()
    ]
    return pipe_table(["multiply-adds, % of the exact", *titles], rows)


def _show_count(cell: str) -> str:
    if not cell:
        return NOTHING
    if cell.startswith("fails"):
        return "fails"
    shown = f"{float(cell):.1f} %" if float(cell) < 1000 else f"{float(cell):,.0f} %"
    return shown if is_right(cell) else f"**{shown}**"


def time_table(results: Results) -> str:
    titles = list(dict.fromkeys(name for found in results.values() for name in found["seconds"]))
    rows = [
        [title, *(_show_time(found["seconds"].get(name, "")) for name in titles)] for title, found in results.items()
    ]
    return pipe_table(["time of a count", *titles], rows)


def _show_time(cell: str) -> str:
    return "fails" if cell.startswith("fails") else format_seconds(float(cell))


def probe_table(results: Results) -> str:
    rows = [[title, *(cell.partition(":")[0] for cell in found["probes"].values())] for title, found in results.items()]
    return pipe_table(["tool", *PROBES], rows)


def error_table(results: Results) -> str:
    """Return a row for each tool and error, with the models in which it was raised."""
    rows = []
    for title, found in results.items():
        by_error: dict[str, list[str]] = {}
        for name, cell in found["counts"].items():
            if cell.startswith("fails"):
                by_error.setdefault(cell.removeprefix("fails: "), []).append(name)
        rows += [[title, error, ", ".join(names)] for error, names in by_error.items()]
    return pipe_table(["tool", "error", "models"], rows)


TABLES = {"counts": count_table, "times": time_table, "probes": probe_table, "errors": error_table}


def write_tables(page: str, results: Results) -> str:
    """Return the page with its tables replaced.

    Each is between a comment with its name, such as `<!-- counts -->`, and `<!-- end -->`.
    """
    for name, make in TABLES.items():
        page = replace_part(page, f"<!-- {name} -->\n", "<!-- end -->", f"\n{make(results)}\n\n")
    return page
