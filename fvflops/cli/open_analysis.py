"""Open the MODEL argument for analysis: a model, a saved Trace or a git revision."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fvflops.analysis import FlopCountAnalysis, TrainingStepAnalysis
from fvflops.analysis.trace_file import ENDINGS, load_trace
from fvflops.analysis.training_step import sum_results
from fvflops.cli.arguments import model_options, parse_assumptions
from fvflops.cli.revisions import find_revision, record_revision
from fvflops.cli.subprocess_recording import record_in_subprocess
from fvflops.formulas import FormulaTable
from fvflops.sources.files import recognise
from fvflops.sources.load import load_model
from fvflops.sources.loaded_model import cast_model, with_input_hint
from fvflops.trace import Trace

# A convention → the analysis of MODEL by it.
Opened = Callable[[FormulaTable], FlopCountAnalysis]
# Options of a run, which a saved Trace has behind it: attribute → option.
_RUN_OPTIONS = {
    "assume": "--assume",
    "train": "--train",
    "backward": "--backward",
    "dtype": "--dtype",
    "unpickle": "--unpickle",
    "optimizer": "--optimizer",
    "micro_batches": "--micro-batches",
}


def open_analysis(name: str, arguments: argparse.Namespace, table: FormulaTable, **options: Any) -> FlopCountAnalysis:
    """Return the recorded analysis of a MODEL argument; the options are those of `open_model`."""
    return open_model(name, arguments, **options)(table)


def open_model(
    name: str,
    arguments: argparse.Namespace,
    *,
    inputs: Sequence[str] | None = None,
    config: str | None = None,
    build_on: str | None = None,
    dtype: torch.dtype | None = None,
    backward: bool = False,
    lines: bool = False,
    in_subprocess: bool = False,
) -> Opened:
    """Return a function that analyses a MODEL argument by a convention; the model is built once.

    A saved Trace is recognised by its content, `REV:file.py:factory` is a factory in a git revision; any other name is
    passed to `load_model`. `inputs`, `config` and `build_on`, the device, default to those of the arguments. `dtype`
    casts the model, `backward` adds its backward pass, `lines` records source lines. `in_subprocess` records a model in
    a subprocess, since one process cannot import two modules of the same name. An invalid name or argument raises
    ValueError, a Trace that the convention cannot count TraceError.
    """
    inputs = arguments.input if inputs is None else inputs
    config = arguments.config if config is None else config
    build_on = arguments.device if build_on is None else build_on or None
    if is_saved_trace(name):
        trace = open_trace(name, arguments, inputs=inputs, config=config, build_on=build_on)
        return lambda table: _analysis_of(trace, table)
    revision = find_revision(name)
    if revision is not None:
        if config:
            raise ValueError(f"--config applies to transformers:CLASS only; got {name!r}: omit --config")
        return lambda table: _analysis_of(record_revision(revision, inputs, arguments), table)
    if in_subprocess:
        return lambda table: _analysis_of(record_in_subprocess(name, name, inputs, arguments), table)
    subject = load_model(name, model_options(arguments, inputs=inputs, config=config, device=build_on))
    subject.train(arguments.train, option="--train")
    if dtype is not None:
        subject = cast_model(subject, dtype)
    assume = parse_assumptions(arguments.assume)

    def analyse(table: FormulaTable) -> FlopCountAnalysis:
        options: dict[str, Any] = {"kwargs": subject.kwargs, "table": table, "assume": assume, "warn": False}
        analysis: FlopCountAnalysis
        if backward:
            analysis = TrainingStepAnalysis(subject.model, subject.inputs, loss=sum_results, **options)
        else:
            analysis = FlopCountAnalysis(
                subject.model, subject.inputs, execution=arguments.execution, lines=lines, **options
            )
        with_input_hint(subject, analysis.trace)
        return analysis

    return analyse


def is_saved_trace(name: str) -> bool:
    """Return whether a MODEL argument is a file that contains a saved Trace, or names a missing one."""
    if os.path.isfile(name):
        return recognise(name) == "trace"
    return name.endswith(ENDINGS)


def contains_inputs(name: str) -> bool:
    """Return whether a MODEL argument is a file that contains its inputs: a saved Trace or a torch.export program.

    >>> contains_inputs("zoo:lenet5"), contains_inputs("before.json")
    (False, True)
    """
    return is_saved_trace(name) or (os.path.isfile(name) and recognise(name) == "program")


def open_trace(
    name: str, arguments: argparse.Namespace, *, inputs: Sequence[str], config: str | None, build_on: str | None
) -> Trace:
    """Return a saved Trace; options that describe a run raise ValueError, unless another model runs.

    `inputs`, `config` and `build_on` are those of `open_model`.
    """
    given: dict[str, object] = {"--input": inputs, "--config": config}
    if "other" not in arguments:
        given |= {option: getattr(arguments, key, None) for key, option in _RUN_OPTIONS.items()}
        given |= {"--device": build_on, "--execution real": getattr(arguments, "execution", None) == "real"}
    for option, value in given.items():
        if value:
            raise ValueError(f"{name} is a saved Trace and contains its inputs: omit {option}")
    return load_trace(name)


def _analysis_of(trace: Trace, table: FormulaTable) -> FlopCountAnalysis:
    return FlopCountAnalysis.from_trace(trace, table=table, warn=False)
