#!/usr/bin/env python3
"""Writes the catalogue of models, docs/models.md and docs/models.parquet, from the results of sweeps.

tools/sweep.py timm --out timm.csv (and torchvision, transformers) makes the results; then
tools/catalogue.py timm.csv torchvision.csv transformers.csv [--output docs/models.md]. Models that failed are left out,
and printed. Exits with 2 for files that are not of sweeps.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fvflops import paths  # noqa: E402
from fvflops.reports.document import Document, Table, text_column  # noqa: E402
from fvflops.reports.formats import write_document  # noqa: E402
from fvflops.sweep import COLUMNS, ModelCount  # noqa: E402
from fvflops.sweep.result_files import read_rows, write_rows  # noqa: E402
from fvflops.units import format_quantity  # noqa: E402

_WIDTH = 120
_SHOWN = ("parameters", "macs", "activations", "peak_memory")
# The alignment of columns, which doubles the size of the page in HTML: docs/assets/site.css aligns them there.
_ALIGNMENT = re.compile(r"(?<= ):?---:?(?= )")
_INTRODUCTION = (
    "Parameters, multiply-adds (MACs), activations (output elements of convolutions and matrix products) and the "
    "predicted peak memory of the forward pass in float32 on a CPU, of one input of the library's default size. No "
    "weights are loaded. The exact numbers, with memory traffic, inputs and versions, are in "
    "[models.parquet](models.parquet) beside this page. Both are made by `tools/catalogue.py`."
)


def catalogue(rows: Iterable[ModelCount]) -> str:
    by_library: dict[str, list[ModelCount]] = {}
    for row in rows:
        by_library.setdefault(row.model.partition(":")[0], []).append(row)
    sections = [
        f"## {library}\n\n{_ALIGNMENT.sub('---', _write_table(library, found))}"
        for library, found in sorted(by_library.items())
    ]
    return "\n\n".join(["# Models", textwrap.fill(_INTRODUCTION, _WIDTH), *sections]) + "\n"


def _write_table(library: str, rows: Sequence[ModelCount]) -> str:
    columns = [
        text_column("model"),
        *(column for column in COLUMNS if column.key in _SHOWN),
        text_column("inputs", "Inputs"),
    ]
    cells = [
        (row.model, *(getattr(row, name) for name in _SHOWN), row.inputs)
        for row in sorted(rows, key=lambda row: row.model)
    ]
    versions = "; ".join(sorted({row.versions for row in rows}))
    smaller = [f"{row.model} ({row.built})" for row in rows if row.built]
    notes = [f"{format_quantity(len(rows), 'model')}, counted with {versions}."]
    if smaller:
        notes.append(f"Too large to count with weights, counted smaller: {', '.join(smaller)}.")
    table = Table(library, columns, cells, notes=notes)
    return write_document(Document("models", parts=[table]), "markdown")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/catalogue.py", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", metavar="FILE", help="results of sweeps: .csv, .parquet, .jsonl, .sqlite")
    parser.add_argument("--output", default=str(ROOT / "docs" / "models.md"), metavar="PAGE", help="docs/models.md")
    arguments = parser.parse_args(argv)
    missing = [path for path in arguments.results if not paths.exists(path)]
    if missing:
        print(f"catalogue: {missing[0]}: there is no such file: make it with tools/sweep.py", file=sys.stderr)
        return 2
    try:
        rows = [row for path in arguments.results for row in read_rows(path).values()]
    except ValueError as error:
        print(f"catalogue: {error}", file=sys.stderr)
        return 2
    counted = [row for row in rows if not row.failure]
    for row in rows:
        if row.failure:
            print(f"left out {row.model}: {row.failure}: {row.error}", file=sys.stderr)
    paths.write_text(arguments.output, catalogue(counted))
    write_rows(f"{os.path.splitext(arguments.output)[0]}.parquet", (replace(row, seconds=0.0) for row in counted))
    print(f"{format_quantity(len(counted), 'model')} in {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
