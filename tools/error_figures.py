#!/usr/bin/env python3
"""Writes the tables of errors in docs/concepts/step_time.md from configs/measured_errors.yaml.

`tools/training_times.py --write`, `tools/kernel_times.py FOLDER --write`, `tools/serving_times.py FOLDER --held-out
--write` and `python -m training_runs.layout_memory --write` (from tools) measure the errors and write both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import yaml  # noqa: E402
from documentation.page_parts import replace_part  # noqa: E402

from fvflops.devices.measured_errors import KERNELS, average, load_errors  # noqa: E402
from fvflops.units import format_quantity, format_thousands  # noqa: E402

FILE = ROOT / "configs" / "measured_errors.yaml"
PAGE = ROOT / "docs" / "concepts" / "step_time.md"
_HEADER = """\
# Errors of estimated times in %, and of verdicts on memory, as compared with measured kernels and runs. The keys are
# described in fvflops/devices/measured_errors.py; tools/error_figures.py names the commands that write this file.

"""


def write_errors(section: str, rows: Iterable[Any]) -> None:
    """Replace a section of configs/measured_errors.yaml by rows of `fvflops.devices.measured_errors`, and the page."""
    document = yaml.safe_load(FILE.read_text())
    given = [{key: value for key, value in asdict(row).items() if value is not None} for row in rows]
    document[section] = given
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=10_000)
    FILE.write_text(_HEADER + text)
    load_errors.cache_clear()
    PAGE.write_text(write_tables(PAGE.read_text()))


def write_tables(text: str) -> str:
    """Return a page with its tables of errors, each between two comments, as the file of errors has them."""
    for name, tabulate in {"kernels": _tabulate_kernels, "runs": _tabulate_runs}.items():
        begin, end = f"<!-- errors of {name} -->\n", f"<!-- end of errors of {name} -->"
        text = replace_part(text, begin, end, f"{tabulate()}\n")
    return text


def _tabulate_kernels() -> str:
    """Return the errors of each class and dtype by GPU, in parentheses with the figures of other GPUs."""
    rows = load_errors().kernels
    gpus = list(dict.fromkeys(row.device for row in rows))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells.setdefault((row.kind, row.dtype), {})[row.device] = f"{row.mean:.0f} ({row.held_out_gpu:.0f})"
    body = [
        (f"{KERNELS[kind]}{'' if dtype == 'all' else f', {dtype}'}", *(of_class.get(gpu, "") for gpu in gpus))
        for (kind, dtype), of_class in cells.items()
    ]
    return _draw(["Class, dtype", *gpus], body, 1)


def _tabulate_runs() -> str:
    """Return the errors of each software, GPU, source and number of nodes."""
    body = [
        (
            *(row.software, row.device, row.nodes, row.source, format_thousands(row.runs)),
            *("yes" if row.fitted else "no", f"{row.mean:.1f}", f"{row.bias:+.1f}".replace("-", "−")),
            *(f"{row.percentile_95:.1f}", "" if row.held_out is None else f"{row.held_out:.1f}"),
        )
        for row in load_errors().runs
    ]
    names = ["Software", "GPU", "On", "Source", "Runs", "Fitted", "Mean", "Bias", "95th percentile", "Held out"]
    held_out = [(row.held_out, row.runs) for row in load_errors().runs if row.held_out is not None]
    mean, runs = average(held_out)
    return f"{_draw(names, body, 4)}\n\nHeld out: {mean:.1f} on average in {format_quantity(runs, 'run')}."


def _draw(heads: Sequence[str], body: Sequence[Sequence[str]], texts: int) -> str:
    """Return a table of Markdown whose first columns are texts and whose others are numbers."""
    rule = "|".join([":---"] * texts + ["---:"] * (len(heads) - texts))
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *body))
    return "\n".join([head, f"|{rule}|", *lines])


if __name__ == "__main__":
    PAGE.write_text(write_tables(PAGE.read_text()))
