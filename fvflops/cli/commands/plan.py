"""`fvflops plan`: what one rank of a mesh of any size computes and sends in a training step."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fvflops.cli.arguments import add_model, add_output, parse_assumptions
from fvflops.cli.models import load_function, load_model, with_input_hint
from fvflops.cli.outputs import write
from fvflops.features.communication import report
from fvflops.features.planning.plan import RankPlan, plan_rank
from fvflops.formulas import load_table
from fvflops.reports.names import printable, printable_short
from fvflops.trace import Status
from fvflops.units import format_size, format_thousands

FORMATS = ("text", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops plan`."""
    add_model(parser)
    add_output(parser)
    parser.add_argument(
        "--mesh", required=True, metavar="AXIS=N,...", help="axes pp, dp, fsdp, cp and tp, outermost first"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the rank that is planned; default: 0")
    parser.add_argument(
        "--shard", metavar="PATH:FUNCTION", help="a function of (model, DeviceMesh of tp) that splits the model"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="split the sequence over tp too, between the layers"
    )
    parser.add_argument(
        "--microbatches", type=int, default=1, metavar="N", help="how often the inputs go through in a step; default: 1"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="dtype of the weights, such as bfloat16")
    parser.add_argument("--device", default=None, help="the device whose kernels are shown: cpu or cuda")
    parser.add_argument("--format", default="text", metavar="F", help="text or json")


def run(arguments: argparse.Namespace) -> int:
    """Plan a training step of the model that the arguments name and write the report; return the exit code."""
    if arguments.format not in FORMATS:
        raise ValueError(f"plan writes {' or '.join(FORMATS)}, not {arguments.format!r}")
    mesh = parse_mesh(arguments.mesh)
    table = load_table(arguments.table)
    subject = load_model(arguments.model, arguments.input, config=arguments.config, device="meta")
    if arguments.dtype is not None:
        subject.model.to(_dtype(arguments.dtype))
    subject.model.train()
    shard_by: Callable[[nn.Module, Any], Any] | None = None
    if arguments.shard is not None:
        shard_by = load_function(arguments.shard, "--shard")
    args = subject.inputs if isinstance(subject.inputs, tuple) else (subject.inputs,)
    plan = with_input_hint(
        subject,
        lambda: plan_rank(
            subject.model,
            args,
            subject.kwargs,
            mesh=mesh,
            rank=arguments.rank,
            shard_by=shard_by,
            sequence_parallel=arguments.sequence_parallel,
            microbatches=arguments.microbatches,
            device=arguments.device,
            assume=parse_assumptions(arguments.assume),
            table=table,
        ),
    )
    text = _to_json(plan, table.name) if arguments.format == "json" else _render(arguments.model, plan, table.name)
    write(text, arguments.output)
    return 0


def parse_mesh(text: str) -> dict[str, int]:
    """Return axis → size of a `--mesh` text, outermost first; a mistake raises ValueError that replays the text.

    >>> parse_mesh("dp=128,tp=8")
    {'dp': 128, 'tp': 8}
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis or not size.isdecimal() or axis in mesh:
            raise ValueError(f"--mesh {text}: {part!r} is no axis with its size: write dp=128,tp=8, each axis once")
        mesh[axis] = int(size)
    return mesh


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"--dtype {name}: weights have a floating dtype of torch, such as float32 or bfloat16")
    return dtype


def _render(name: str, plan: RankPlan, table: str) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    place = ", ".join(f"{axis} {index}" for axis, index in plan.coordinates.items())
    flops = plan.flops(table)
    phases = {phase: sum(labels.values()) for phase, labels in flops.by_phase().items()}
    parts = ", ".join(f"{phase} {format_size(value)}" for phase, value in phases.items())
    lines = [
        f"{printable(name)} on {mesh}: {format_thousands(plan.world)} ranks; rank {plan.rank} is {place}.",
        f"Inputs of this rank: {printable_short(plan.trace.about['inputs'])}.",
        "",
        f"Parameters: {format_thousands(plan.parameters)} here ({format_thousands(plan.parameter_bytes)} bytes) of "
        f"the model's {format_thousands(plan.model_parameters)}.",
        f"Multiply-adds: {format_thousands(flops.macs())}.",
        f"Flops by the table {printable(table)}: {format_thousands(flops.total())} ({parts}).",
    ]
    unknown = flops.counts().ledger()[Status.UNKNOWN]
    if unknown:
        named = ", ".join(f"{printable_short(op)} ({calls})" for op, calls in unknown.most_common())
        lines.append(f"UNKNOWN, so missing from the flops: {named}.")
    if "supposed" in plan.trace.about:
        lines.append(f"SUPPOSED, for want of a number: {printable(plan.trace.about['supposed'])}.")
    lines += ["", report.render(plan.communication())]
    lines += ["", *(f"Derived, not run: {rule}." for rule in plan.derived)]
    lines += [f"Left out: {printable(what)}." for what in plan.left_out]
    return "\n".join(lines)


def _to_json(plan: RankPlan, table: str) -> str:
    flops = plan.flops(table)
    communication = plan.communication()
    return json.dumps(
        {
            "mesh": dict(plan.mesh),
            "world": plan.world,
            "rank": plan.rank,
            "coordinates": dict(plan.coordinates),
            "inputs": plan.trace.about["inputs"],
            "parameters": plan.parameters,
            "parameter_bytes": plan.parameter_bytes,
            "model_parameters": plan.model_parameters,
            "table": table,
            "macs": flops.macs(),
            "flops": flops.total(),
            "flops_by_phase": {phase: sum(labels.values()) for phase, labels in flops.by_phase().items()},
            "unknown_ops": dict(flops.counts().ledger()[Status.UNKNOWN]),
            "communication": [
                {**route._asdict(), **volume._asdict()} for route, volume in communication.by_route().items()
            ],
            "communication_by_phase": {phase: volume._asdict() for phase, volume in communication.by_phase().items()},
            "unknown_communication": dict(communication.unknown),
            "derived": list(plan.derived),
            "left_out": list(plan.left_out),
        },
        indent=2,
    )
