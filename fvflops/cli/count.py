"""`fvflops count`: one model, recorded once, counted and reported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TypeVar

from fvflops import paths
from fvflops.analysis import ActivationCountAnalysis, FlopCountAnalysis, summarise
from fvflops.capture.model import describe_inputs
from fvflops.cli.models import Subject, load_model
from fvflops.formulas import load_table
from fvflops.reports import REPORTS, ledger
from fvflops.trace import Status

T = TypeVar("T")


def run(arguments: argparse.Namespace) -> int:
    """Count the model that the arguments name and write the report; return the exit code."""
    report = REPORTS.get(arguments.format)
    if report is None:
        near = get_close_matches(arguments.format, REPORTS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"no format is called {arguments.format!r}: take {near!r}, or another of {', '.join(sorted(REPORTS))}"
        )
    table = load_table(arguments.table)
    subject = load_model(arguments.model, arguments.input, config=arguments.config, device=arguments.device)
    subject.model.train(arguments.train)
    flops = FlopCountAnalysis(
        subject.model,
        subject.inputs,
        kwargs=subject.kwargs,
        table=table,
        execution=arguments.execution,
        assume=parse_assumptions(arguments.assume),
    )
    flops.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    run_on(subject, flops.trace)
    unknown = flops.counts().ledger()[Status.UNKNOWN]
    if arguments.strict and unknown:
        listed = ", ".join(f"{op} ×{calls}" for op, calls in unknown.most_common())
        raise ValueError(f"table {table.name!r} has no row for {listed} (--strict)")
    activations = ActivationCountAnalysis.from_trace(flops.trace(), table=table)
    activations.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    summary = summarise(flops, activations)
    text = report(summary, by=arguments.by, depth=arguments.depth)
    if arguments.format in ("table", "tree"):
        text = f"{text}\n\n{ledger.render(summary)}"
    write(text, arguments.output)
    return 0


def run_on(subject: Subject, analyse: Callable[[], T]) -> T:
    """Return what an analysis of a subject gives; an error says too which inputs nobody but us chose."""
    try:
        return analyse()
    except Exception as error:
        if subject.assumed and error.args:
            shapes = ", ".join(describe_inputs(subject.inputs, subject.kwargs))
            error.args = (
                f"{error.args[0]} (the inputs were assumed: {shapes}; give others by --input)",
                *error.args[1:],
            )
        raise


def parse_assumptions(texts: Sequence[str]) -> dict[str, int | float]:
    """Return the sizes that `--assume` texts give to ops.

    >>> parse_assumptions(["aten::nonzero=100", "aten::index=0.5"])
    {'aten::nonzero': 100, 'aten::index': 0.5}
    """
    sizes: dict[str, int | float] = {}
    for text in texts:
        op, _, size = text.partition("=")
        try:
            sizes[op] = int(size) if size.lstrip("-").isdigit() else float(size)
        except ValueError:
            raise ValueError(f"--assume {text!r} gives no size: write aten::nonzero=100, or a share as 0.5") from None
    return sizes


def write(text: str, path: str | None) -> None:
    """Write a report to a file, or to the terminal where no path is given."""
    text = text if text.endswith("\n") else text + "\n"
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    with paths.open_text(path, "w") as file:
        file.write(text)
