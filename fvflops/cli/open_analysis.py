"""Open the MODEL argument for analysis: a model, a saved trace, an exported program or a git revision."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from fvflops.analysis import FlopCountAnalysis
from fvflops.analysis.exported_program import load_program, record_program
from fvflops.analysis.trace_file import load_trace
from fvflops.cli.arguments import parse_assumptions
from fvflops.cli.revisions import find_revision, record_revision
from fvflops.cli.subprocess_recording import record_in_subprocess
from fvflops.formulas import FormulaTable
from fvflops.sources.load import load_model
from fvflops.sources.loaded_model import with_input_hint
from fvflops.sources.options import SourceOptions

# Suffixes of saved traces and of exported programs.
FILES = (".json", ".pt2")


def open_analysis(
    name: str,
    arguments: argparse.Namespace,
    table: FormulaTable,
    *,
    inputs: Sequence[str] | None = None,
    config: str | None = None,
    in_subprocess: bool = False,
) -> FlopCountAnalysis:
    """Return the recorded analysis of a MODEL argument.

    A name that ends in .json is a saved trace, one in .pt2 a program of `torch.export`, `REV:file.py:factory` a factory
    in a git revision; any other is passed to `load_model`. `inputs` and `config` default to those of the arguments.
    `in_subprocess` records a model in a subprocess, since one process cannot import two modules of the same name. An
    invalid name or argument raises ValueError.
    """
    inputs = arguments.input if inputs is None else inputs
    config = arguments.config if config is None else config
    if name.endswith(FILES):
        for option, value in (("--input", inputs), ("--config", config)):
            if value:
                raise ValueError(f"{name} contains its inputs: omit {option}")
    if name.endswith(".json"):
        return FlopCountAnalysis.from_trace(load_trace(name), table=table, warn=False)
    assume = parse_assumptions(arguments.assume)
    if name.endswith(".pt2"):
        trace = record_program(load_program(name), table=table, execution=arguments.execution, assume=assume)
        return FlopCountAnalysis.from_trace(trace, table=table, warn=False)
    revision = find_revision(name)
    if revision is not None:
        if config is not None:
            raise ValueError(f"--config applies to transformers:CLASS only; got {name!r}: omit --config")
        trace = record_revision(revision, inputs, arguments)
        return FlopCountAnalysis.from_trace(trace, table=table, warn=False)
    if in_subprocess:
        trace = record_in_subprocess(name, name, inputs, arguments)
        return FlopCountAnalysis.from_trace(trace, table=table, warn=False)
    if os.path.isfile(name):
        raise ValueError(f"{name!r} is a file: a saved trace ends in .json, a program of torch.export in .pt2")
    subject = load_model(name, SourceOptions(tuple(inputs), config, arguments.device))
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
