"""Open the MODEL argument for analysis: a model, a saved trace, an exported program or a git revision."""

from __future__ import annotations

import argparse
import os

from fvflops.analysis import FlopCountAnalysis
from fvflops.analysis.exported_program import load_program, record_program
from fvflops.analysis.trace_file import load_trace
from fvflops.cli.arguments import model_options, parse_assumptions
from fvflops.cli.revisions import find_revision, record_revision
from fvflops.cli.subprocess_recording import record_in_subprocess
from fvflops.formulas import FormulaTable
from fvflops.sources.load import check_applies, load_model
from fvflops.sources.loaded_model import with_input_hint
from fvflops.sources.options import SourceOptions

# Suffixes of saved traces and of exported programs.
FILES = (".json", ".pt2")


def open_analysis(
    name: str,
    arguments: argparse.Namespace,
    table: FormulaTable,
    *,
    options: SourceOptions | None = None,
    in_subprocess: bool = False,
) -> FlopCountAnalysis:
    """Return the recorded analysis of a MODEL argument.

    A name that ends in .json is a saved trace, one in .pt2 a program of `torch.export`, `REV:file.py:factory` a factory
    in a git revision; any other is passed to `load_model`. `options` default to those of the arguments.
    `in_subprocess` records a model in a subprocess, since one process cannot import two modules of the same name. An
    invalid name or argument raises ValueError.
    """
    if options is None:
        options = model_options(arguments, device=arguments.device)
    if name.endswith(FILES):
        for option, value in (("--input", options.inputs), ("--config", options.config), ("--arg", options.args)):
            if value:
                raise ValueError(f"{name} contains its {'inputs' if option == '--input' else 'model'}: omit {option}")
    if name.endswith(".json"):
        return FlopCountAnalysis.from_trace(load_trace(name), table=table, warn=False)
    assume = parse_assumptions(arguments.assume)
    if name.endswith(".pt2"):
        trace = record_program(load_program(name), table=table, execution=arguments.execution, assume=assume)
        return FlopCountAnalysis.from_trace(trace, table=table, warn=False)
    revision = find_revision(name)
    if revision is not None:
        check_applies(options, "", name)
        trace = record_revision(revision, options, arguments)
        return FlopCountAnalysis.from_trace(trace, table=table, warn=False)
    if in_subprocess:
        trace = record_in_subprocess(name, name, options, arguments)
        return FlopCountAnalysis.from_trace(trace, table=table, warn=False)
    if os.path.isfile(name):
        raise ValueError(f"{name!r} is a file: a saved trace ends in .json, a program of torch.export in .pt2")
    subject = load_model(name, options)
    subject.model.train(arguments.train)
    analysis = FlopCountAnalysis(
        subject.model,
        subject.inputs,
        kwargs=subject.kwargs,
        table=table,
        execution=arguments.execution,
        assume=assume,
        warn=False,
    )
    with_input_hint(subject, analysis.trace)
    return analysis
