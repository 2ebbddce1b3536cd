"""Open the MODEL argument for analysis: a model, a saved Trace or a git revision."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fvflops import paths
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.trace_file import load_trace
from fvflops.analysis.training_step_analysis import TrainingStepAnalysis, sum_results
from fvflops.capture.restore.global_state import seeded
from fvflops.capture.run import Loss
from fvflops.cli import format_error
from fvflops.cli.argument_values import parse_assumptions
from fvflops.cli.planning.accelerator import built_on, runs_on
from fvflops.cli.progress import activity
from fvflops.cli.revisions import REQUEST, RESULT, find_revision, record_in_subprocess, record_revision
from fvflops.cli.shared_options import model_options
from fvflops.formulas import FormulaTable, load_table
from fvflops.sources.imports import load_function
from fvflops.sources.load import check_applies, check_trace_options, find_source, is_saved_trace, load_model
from fvflops.sources.loaded_model import LoadedModel, with_input_hint
from fvflops.sources.options import SourceOptions
from fvflops.trace import Trace

# Options of a run, which a saved Trace has behind it.
_RUN_OPTIONS = ("assume", "train", "backward", "loss", "optimizer", "run_device", "micro_batches")


def open_analysis(name: str, arguments: argparse.Namespace, table: FormulaTable, **options: Any) -> FlopCountAnalysis:
    """Return the recorded analysis of a MODEL argument; the options are `open_model`'s."""
    return open_model(name, arguments, **options)(table)


def open_model(
    name: str,
    arguments: argparse.Namespace,
    *,
    options: SourceOptions | None = None,
    lines: bool = False,
    in_subprocess: bool = False,
) -> Callable[[FormulaTable], FlopCountAnalysis]:
    """Return a function that analyses a MODEL argument by a convention; the model is built once.

    A saved Trace is recognised by its content, `REV:file.py:factory` is a factory in a git revision; any other name is
    passed to `load_model`. `options` default to the arguments'; --backward, where a command has it,
    adds the backward pass. `lines` records source lines. `in_subprocess` records a model in a
    subprocess, since one process cannot import two modules of the same name. An invalid name or argument raises
    ValueError, a Trace that the convention cannot count TraceError.
    """
    if getattr(arguments, "backward", False) and arguments.execution == "real":
        raise ValueError("--backward uses shape execution: omit --execution real")
    built = options or model_options(arguments, device=built_on(arguments))
    if is_saved_trace(name):
        trace = open_trace(name, arguments, built)
        return lambda table: _analysis_of(trace, table)
    if getattr(arguments, "trace_only", False):
        raise ValueError(f"--trace-only: {name} is not a saved Trace (.json, .json.gz): save one by --save-trace")
    revision = find_revision(name)
    if revision is not None:
        check_applies(built, "", name)
        return lambda table: _analysis_of(record_revision(revision, built, arguments), table)
    if in_subprocess:
        return lambda table: _analysis_of(record_in_subprocess(name, name, built, arguments), table)
    subject = load_subject(name, without_weights(name, built, arguments.execution), arguments)
    loss = backward_loss(arguments)
    device, emulated = runs_on(arguments)
    settings: dict[str, Any] = {"assume": parse_assumptions(arguments.assume), "device": device}
    if loss is None:
        settings |= {"execution": arguments.execution, "lines": lines}

    def analyse(table: FormulaTable) -> FlopCountAnalysis:
        with emulated():
            return record_model(name, subject, table, loss, **settings)

    return analyse


def load_subject(name: str, options: SourceOptions, arguments: argparse.Namespace) -> LoadedModel:
    """Return a model, in the mode of the arguments."""
    with activity(f"loading {name}"):
        subject = load_model(name, options)
    subject.train(arguments.train, option="--train")
    return subject


def record_model(
    name: str, subject: LoadedModel, table: FormulaTable, loss: Loss | None, **settings: Any
) -> FlopCountAnalysis:
    """Return the recorded analysis of a model, with a loss of its training step; the settings are the analysis's."""
    settings |= {"kwargs": subject.kwargs, "table": table, "warn": False}
    analysis: FlopCountAnalysis
    if loss is None:
        analysis = FlopCountAnalysis(subject.model, subject.inputs, **settings)
    else:
        analysis = TrainingStepAnalysis(subject.model, subject.inputs, loss=loss, **settings)
    with activity(f"recording {name}"):
        with_input_hint(subject, analysis.trace)
    return analysis


def backward_loss(arguments: argparse.Namespace) -> Loss | None:
    """Return the loss of `--backward` and `--loss`, None for a forward pass."""
    if not getattr(arguments, "backward", False):
        return None
    return sum_results if arguments.loss is None else load_function(arguments.loss, "--loss")


def without_weights(name: str, options: SourceOptions, execution: str) -> SourceOptions:
    """Return the options on the meta device for a model of the zoo, which counts the same there and is built faster."""
    if options.device is None and execution != "real" and find_source(name) == "zoo":
        return replace(options, device="meta")
    return options


def open_trace(name: str, arguments: argparse.Namespace, options: SourceOptions) -> Trace:
    """Return a saved Trace; options that describe a run raise ValueError, unless another model runs."""
    if "other" in arguments:
        check_trace_options(name, SourceOptions(options.inputs, options.config, args=options.args))
    else:
        names = [name for name in _RUN_OPTIONS if name in arguments.options]
        run = {arguments.options[name][0]: getattr(arguments, name) for name in names}
        check_trace_options(name, options, run | {"--execution real": getattr(arguments, "execution", None) == "real"})
    return load_trace(name)


def _analysis_of(trace: Trace, table: FormulaTable) -> FlopCountAnalysis:
    return FlopCountAnalysis.from_trace(trace, table=table, warn=False)


def answer() -> None:
    """Record a request of `record_in_subprocess`, and write its Trace: the main program of the subprocess."""
    exchange = sys.argv[1]
    with open(os.path.join(exchange, REQUEST), "rb") as file:
        path, model, arguments, table, options = pickle.load(file)
    sys.path[1:] = [entry for entry in dict.fromkeys(path) if entry != sys.path[0]]
    try:
        with seeded(0):  # as in the process that asks
            trace = open_analysis(model, arguments, load_table(table), options=options).trace()
            paths.write_text(os.path.join(exchange, RESULT), trace.to_json())
    except (Exception, SystemExit) as error:
        print(format_error(error), file=sys.stderr)
        sys.exit(1)
