"""`fvflops plan`: compute and communication of one rank of a mesh in a training step."""

from __future__ import annotations

import argparse

from fvflops.cli.activity import activity
from fvflops.cli.arguments import (
    add_convention,
    add_mesh,
    add_model,
    add_report,
    find_group,
    layout_options,
    model_options,
)
from fvflops.cli.outputs import write_report
from fvflops.cli.values import parse_assumptions, parse_mesh
from fvflops.features.planning.plan import plan_rank
from fvflops.features.planning.report import plan_report
from fvflops.formulas import load_table
from fvflops.sources.load import load_model
from fvflops.sources.loaded_model import with_input_hint

EXAMPLES = (
    "fvflops plan zoo:llama3_8b --mesh dp=8,tp=8",
    "fvflops plan zoo:llama3_8b --mesh fsdp=64 --microbatches 2",
    "fvflops plan zoo:llama3_8b --mesh pp=4,fsdp=8 --microbatches 8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops plan`."""
    add_convention(parser)
    add_model(
        parser,
        shape="shape of an input of one rank (its share of the batch, with cp also of the sequence) and microbatch",
    )
    add_mesh(parser, required=True)
    find_group(parser, "mesh of ranks").add_argument(
        "--device",
        default=None,
        metavar="TORCH_DEVICE",
        help="device whose kernels are simulated: cpu, or cuda (needs no GPU)",
    )
    add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan a training step of the model that the arguments name and write the report; return the exit code."""
    mesh = parse_mesh(arguments.mesh)
    table = load_table(arguments.table)
    with activity(f"loading {arguments.model}"):
        subject = load_model(arguments.model, model_options(arguments, device="meta"))
    subject.train(True)
    options = layout_options(arguments)
    args = subject.inputs if isinstance(subject.inputs, tuple) else (subject.inputs,)
    with activity(f"planning rank {arguments.rank} of {arguments.model}"):
        plan = with_input_hint(
            subject,
            lambda: plan_rank(
                subject.model,
                args,
                subject.kwargs,
                mesh=mesh,
                device=arguments.device,
                assume=parse_assumptions(arguments.assume),
                table=table,
                **options,
            ),
        )
    write_report(plan_report(plan, table, name=arguments.model), arguments)
    return 0
