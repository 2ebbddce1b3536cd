"""Options that apply to one axis of a mesh of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from fvflops.cli.argument_values import find_chosen, parse_layers, parse_routing
from fvflops.cli.planning.step_options import read_assumptions
from fvflops.formulas import FormulaTable
from fvflops.plan.parallel_axes import AXES
from fvflops.plan.plan_options import PlanOptions
from fvflops.sources.imports import load_function

# Option → the axis without which it has no effect.
AXIS_OF: Mapping[str, str] = {option: name for name, axis in AXES.items() for option in axis.options}


def read_plan_options(arguments: argparse.Namespace, mesh: Mapping[str, int], table: FormulaTable) -> PlanOptions:
    """Return the options of a plan on a mesh that do not depend on the model."""
    return PlanOptions(
        mesh=mesh,
        rank=arguments.rank,
        shard_by=None if arguments.shard is None else load_function(arguments.shard, "--shard"),
        sequence_parallel=arguments.sequence_parallel,
        microbatches=arguments.microbatches,
        schedule=arguments.schedule,
        stages_per_rank=arguments.stages_per_rank,
        stage_layers=None if arguments.stage_layers is None else parse_layers(arguments.stage_layers),
        reshard_after_forward=arguments.reshard_after_forward,
        reduce_each_microbatch=arguments.reduce_each_microbatch is not False,
        routing=None if arguments.routing is None else parse_routing(arguments.routing),
        offload=arguments.offload,
        assume=read_assumptions(arguments),
        table=table,
    )


def check_mesh_options(arguments: argparse.Namespace, mesh: Mapping[str, int]) -> None:
    """Raise ValueError for an option whose axis the mesh lacks; axes that do not exist are the plan's to report."""
    if not mesh.keys() <= set(AXES):
        return
    for name, axis in AXIS_OF.items():
        if axis not in mesh and (option := find_chosen(arguments, [name])):
            raise ValueError(f"{option} has no effect on --mesh {arguments.mesh}: omit it, or add the axis {axis}")


def check_replica_options(arguments: argparse.Namespace, mesh: Mapping[str, int]) -> None:
    """Raise ValueError for `--bucket-cap-mb` with a mesh in which DDP reduces no gradients."""
    replicas = mesh.get("dp", 1) * mesh.get("cp", 1)
    if arguments.bucket_cap_mb is not None and (replicas == 1 or mesh.get("fsdp", 1) > 1):
        raise ValueError(
            f"--bucket-cap-mb has no effect on --mesh {arguments.mesh}: omit it, or use the axis dp without fsdp"
        )
