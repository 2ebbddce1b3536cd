"""`fvflops annotate`: add FLOPs, bytes and modules to the events of chrome traces that torch.profiler wrote earlier."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from fvflops import paths
from fvflops.analysis.trace_file import save_trace
from fvflops.cli import shared_options
from fvflops.cli.argument_values import check_model_given
from fvflops.cli.open_analysis import backward_loss, load_subject, open_trace, record_model
from fvflops.cli.outputs import check_file, write_report
from fvflops.cli.parser import add_options, find_group
from fvflops.cli.planning.step_options import find_optimizer, read_assumptions
from fvflops.cli.progress import activity
from fvflops.explain.annotation import annotate_trace, annotation_report, find_device
from fvflops.formulas import FormulaTable, load_table
from fvflops.sources.load import is_saved_trace
from fvflops.trace import Trace

EXAMPLES = ("fvflops annotate trace.json", "fvflops annotate trace.json --model zoo:lenet5 --output annotated.json")
FIRST = ("--model", "--batch", "--seq", "--backward", "--output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser)
    add_options(
        parser,
        """
        traces TRACE  chrome trace of torch.profiler, .json or .json.gz; one for each rank
        --model MODEL  the model that ran, or its saved Trace, named as in fvflops count; without it events are counted
            by their own shapes, which needs record_shapes=True; `fvflops list zoo` names the zoo's models
        """,
        nargs={"traces": "+"},
    )
    shared_options.add_inputs(parser, shape="shape of an input of the traced step")
    shared_options.add_assume(parser)
    run = find_group(parser, "run")
    run.add_argument("--train", action="store_true", help="the model ran in training mode, not in eval mode")
    shared_options.add_backward(parser)
    add_options(
        parser,
        """
        run:
        --optimizer NAME  include the step of an optimizer of torch.optim: AdamW
        --micro-batches N  with --backward: micro-batches of a step
        --device TORCH_DEVICE  device whose ops are counted; default: the trace's
        annotated traces:
        --output PATH  annotated trace, .json or .json.gz; default: NAME.annotated.json beside TRACE
        --folder PATH  folder for the annotated traces, named as the TRACEs
        """,
        type={"micro_batches": int},
        dest={"output": "annotated"},
    )
    shared_options.add_save_trace(find_group(parser, "annotated traces"))
    shared_options.add_report(parser, top=10, output=False)


def run(arguments: argparse.Namespace) -> int:
    """Annotate the traces and print the report; return the exit code."""
    outputs = _name_outputs(arguments)
    check_model_given(arguments, ("table", "annotated", "folder"))
    if not arguments.backward and (arguments.optimizer is not None or arguments.micro_batches is not None):
        raise ValueError("--optimizer and --micro-batches describe a training step: add --backward")
    maker = None if arguments.optimizer is None else find_optimizer(arguments.optimizer)
    table = load_table(arguments.table)
    trace = None if arguments.model is None else _record(arguments, table, maker)
    if arguments.save_trace is not None and trace is not None:
        save_trace(trace, arguments.save_trace)
    annotated = []
    for path, output in zip(arguments.traces, outputs, strict=True):
        with activity(f"annotating {path}"):
            result = annotate_trace(path, trace, table=table)
            result.save(output)
        annotated.append((output, result))
    arguments.output = None  # of the report: the terminal
    write_report(annotation_report(annotated, subject=arguments.model or ""), arguments)
    return 0


def _name_outputs(arguments: argparse.Namespace) -> list[str]:
    """Return the path of each annotated trace; raise ValueError or OSError for one that cannot be written."""
    if arguments.annotated is not None:
        if len(arguments.traces) > 1 or arguments.folder is not None:
            raise ValueError("--output names the annotated trace of a single TRACE: use --folder alone for several")
        check_file("--output", arguments.annotated)
        outputs = [arguments.annotated]
    elif arguments.folder is not None:
        outputs = [os.path.join(arguments.folder, os.path.basename(path)) for path in arguments.traces]
    else:
        outputs = [_name_beside(path) for path in arguments.traces]
    if len(set(map(os.path.realpath, outputs))) < len(outputs):
        raise ValueError("two TRACEs have one name: annotate them one by one, with --output")
    inputs = set(map(os.path.realpath, arguments.traces))
    for path, output in zip(arguments.traces, outputs, strict=True):
        if not paths.exists(path):
            raise FileNotFoundError(f"there is no file {path}")
        if os.path.realpath(output) in inputs:
            raise ValueError(f"{output}: this run reads that file: choose another path")
        paths.check_writable(output)
    return outputs


def _name_beside(path: str) -> str:
    """Return the default path of an annotated trace.

    >>> _name_beside("traces/rank0.pt.trace.json.gz"), _name_beside("trace.json")
    ('traces/rank0.pt.trace.annotated.json.gz', 'trace.annotated.json')
    """
    ending = ".json.gz" if path.endswith(".json.gz") else os.path.splitext(path)[1]
    return f"{path.removesuffix(ending)}.annotated{ending}"


def _record(arguments: argparse.Namespace, table: FormulaTable, optimizer: Callable[..., Any] | None) -> Trace:
    if is_saved_trace(arguments.model):
        return open_trace(arguments.model, arguments, shared_options.model_options(arguments, device=arguments.device))
    device = arguments.device or find_device(arguments.traces)
    subject = load_subject(arguments.model, shared_options.model_options(arguments), arguments)
    settings: dict[str, Any] = {"assume": read_assumptions(arguments), "device": device}
    if (loss := backward_loss(arguments)) is not None:
        settings |= {"optimizer": optimizer or (), "micro_batches": arguments.micro_batches or 1}
    return record_model(arguments.model, subject, table, loss, **settings).trace()
