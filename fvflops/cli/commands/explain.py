"""`fvflops explain`: where the time of a step went, from chrome traces that torch.profiler wrote."""

from __future__ import annotations

import argparse

from fvflops.cli import shared_options
from fvflops.cli.outputs import write_report
from fvflops.cli.parser import add_options
from fvflops.cli.planning.accelerator import find_accelerator
from fvflops.cli.progress import activity
from fvflops.explain.explain_report import explain_report
from fvflops.explain.explained_trace import explain_trace

EXAMPLES = ("fvflops explain trace.json", "fvflops explain trace.json --device H100 --output page.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops explain`."""
    add_options(
        parser,
        """
        traces TRACE  chrome trace of torch.profiler, .json or .json.gz; one for each rank
        --device DEVICE  the GPU for expected times: a name such as H100, FILE.yaml or FILE.yaml:NAME; default: the one
            that the trace names
        """,
        nargs={"traces": "+"},
    )
    shared_options.add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain the traces and print the report; return the exit code."""
    with activity(f"reading {', '.join(arguments.traces)}"):
        explained = explain_trace(arguments.traces, device=find_accelerator(arguments.device))
    write_report(explain_report(explained), arguments)
    return 0
