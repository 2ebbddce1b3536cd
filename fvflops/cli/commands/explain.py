"""`fvflops explain`: where the time of a step went, from chrome traces that torch.profiler wrote."""

from __future__ import annotations

import argparse

from fvflops.cli import shared_options
from fvflops.cli.argument_values import check_model_given
from fvflops.cli.outputs import write_report
from fvflops.cli.parser import add_options, find_group
from fvflops.cli.planning import step_options
from fvflops.cli.planning.accelerator import find_accelerator
from fvflops.cli.planning.planned_estimate import estimate_arguments, find_classes
from fvflops.cli.progress import activity
from fvflops.explain.explain_report import explain_report
from fvflops.explain.explained_trace import explain_trace
from fvflops.explain.findings.planned_step import expect_step

EXAMPLES = (
    "fvflops explain trace.json",
    "fvflops explain trace.json --device H100 --output page.html",
    "fvflops explain trace.json --model zoo:llama_tiny --mesh fsdp=8 --device H100",
)
FIRST = ("--device", "--model", "--mesh", "--top", "--output")
RARE = ("--image-size", "--master-weights", "--loss", "--offload", "--sort")
_OPTIMIZER = "AdamW"  # default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops explain`."""
    add_options(
        parser,
        """
        traces TRACE  chrome trace of torch.profiler, .json or .json.gz; one for each rank
        --device DEVICE  the GPU for expected times: a name such as H100, FILE.yaml or FILE.yaml:NAME; default: the one
            that the trace names
        --model MODEL  plan a training step of this model, as `fvflops plan` does, and compare it with the trace
        """,
        nargs={"traces": "+"},
    )
    shared_options.add_inputs(parser, shape="shape of an input of one rank and microbatch")
    shared_options.add_assume(parser)
    shared_options.add_mesh(parser)
    step_options.add_step(find_group(parser, "training step"), default=_OPTIMIZER)
    add_options(
        find_group(parser, "time"),
        """
        --network NAME  links within and among nodes, as in `fvflops plan`; default: the device's usual nodes
        --efficiency NAME  speed of kernels and launches, as in `fvflops plan`; default: the newest software stack
        --fused CLASS ...  class of modules whose ops run as one kernel for each call; may be repeated
        --bucket-cap-mb N  MiB of the buckets of gradients that DDP reduces; default: DDP's
        """,
        type={"bucket_cap_mb": float},
    )
    shared_options.add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain the traces and print the report; return the exit code."""
    accelerator = find_accelerator(arguments.device)
    check_model_given(arguments, ("device",))
    with activity(f"reading {', '.join(arguments.traces)}"):
        explained = explain_trace(arguments.traces, device=accelerator)
    planned = None
    if arguments.model is not None:
        if explained.device is None:
            raise ValueError("the trace names no GPU that is known: add --device, such as --device H100")
        arguments.mesh = arguments.mesh or "dp=1"
        subject, estimate = estimate_arguments(arguments, explained.device, _OPTIMIZER)
        fused = find_classes(subject, arguments.fused)
        planned = expect_step(estimate, explained.timelines[0].rank, fused=fused, bucket_cap_mb=arguments.bucket_cap_mb)
    write_report(explain_report(explained, planned), arguments)
    return 0
