"""`fvflops roofline`: what bounds a model on a device, by published peaks or peaks measured on this machine."""

from __future__ import annotations

import argparse

from fvflops.analysis.trace_file import save_trace
from fvflops.cli import shared_options
from fvflops.cli.argument_values import find_chosen
from fvflops.cli.open_analysis import open_analysis
from fvflops.cli.outputs import write, write_report
from fvflops.cli.parser import add_options, find_group
from fvflops.cli.progress import activity
from fvflops.devices.device_benchmark import measure_device, write_device
from fvflops.devices.devices import load_peaks
from fvflops.formulas import load_table
from fvflops.measure import roofline_plot
from fvflops.measure.op_roofline import SHOWN, VIEWS, roofline, roofline_report
from fvflops.reports.formats import DATA_FORMATS
from fvflops.reports.pictures import picture
from fvflops.sources.loaded_model import parse_dtype

EXAMPLES = (
    "fvflops roofline zoo:resnet50 --device H100 --dtype bf16 --batch 64",
    "fvflops roofline zoo:resnet50 --device A100 --by op --top 10",
)
FIRST = ("--device", "--batch", "--dtype", "--by", "--plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser)
    shared_options.add_model(parser, nargs="?")
    shared_options.add_run(parser, runs_on=False)
    add_options(
        parser,
        """
        device:
        --device DEVICE  device whose peaks apply: a name such as H100, FILE.yaml or FILE.yaml:NAME; with --measure, cpu
            or cuda
        --measure  measure this machine's peaks; without MODEL print them
        """,
    )
    shared_options.add_backward(parser)
    find_group(parser, "report").add_argument(
        "--by", choices=VIEWS, default="module", help="one row per module (default), operator or op (20 without --top)"
    )
    shared_options.add_depth(parser)
    shared_options.add_report(parser)
    shared_options.add_plot(parser)
    shared_options.add_save_trace(parser)


def run(arguments: argparse.Namespace) -> int:
    """Report the roofline of a model, or measure this machine; return the exit code."""
    if arguments.plot is not None:
        if arguments.model is None:
            raise ValueError(f"--plot {arguments.plot}: without a MODEL there is nothing to draw")
        picture.prepare(arguments.plot)
    if arguments.model is None:
        if not arguments.measure:
            raise ValueError("roofline needs a MODEL and a --device such as H100, or --measure")
        measuring_options = ("measure", "device", "output", "format", "debug")
        others = [name for name in arguments.options if name not in measuring_options]
        if option := find_chosen(arguments, others) or ("--format" if arguments.format != "text" else ""):
            raise ValueError(f"{option} applies to a MODEL: name one, or pass --measure without it")
        with activity("measuring the peaks of this device"):
            measured = measure_device(arguments.device)
        write(write_device(measured), arguments.output)
        return 0
    if arguments.depth is not None and arguments.by != "module":
        raise ValueError(f"--depth applies to modules: omit it, or omit --by {arguments.by}")
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    table = load_table(arguments.table)
    if not arguments.measure:
        if arguments.device is None:
            raise ValueError("roofline needs --device, such as H100 or FILE.yaml, or --measure for this machine")
        device = load_peaks(arguments.device, "--device")
    options = shared_options.model_options(arguments, device=arguments.build_on)
    analysis = open_analysis(arguments.model, arguments, table, options=options)
    if arguments.save_trace is not None:
        save_trace(analysis.trace(), arguments.save_trace)
    if arguments.measure:
        with activity("measuring the peaks of this device"):
            device = measure_device(arguments.device)
    result = roofline(analysis, device=device, table=table, float32_matmul="tf32" if dtype == "tf32" else None)
    if arguments.plot is not None:
        roofs = {name: device.peak(name) for name in device.dtypes()}
        roofline_plot.save(result, arguments.plot, by=arguments.by, depth=arguments.depth, roofs=roofs)
    report = roofline_report(result, by=arguments.by, depth=arguments.depth, subject=arguments.model)
    if arguments.by == "op" and arguments.top is None and arguments.format not in DATA_FORMATS:
        report = report.ranked(sort=arguments.sort, top=SHOWN)
    write_report(report, arguments)
    return 0
