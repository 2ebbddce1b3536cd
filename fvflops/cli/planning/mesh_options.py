"""Options that apply to one axis of a mesh of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from fvflops.plan.layout import AXES

# Option → the axis without which it has no effect.
AXIS_OF: Mapping[str, str] = {
    "shard": "tp",
    "sequence_parallel": "tp",
    "schedule": "pp",
    "stages_per_rank": "pp",
    "stage_layers": "pp",
    "reshard_after_forward": "fsdp",
    "reduce_each_microbatch": "fsdp",
}


def check_mesh_options(arguments: argparse.Namespace, mesh: Mapping[str, int]) -> None:
    """Raise ValueError for an option whose axis the mesh lacks; axes that do not exist are the plan's to report."""
    if not mesh.keys() <= set(AXES):
        return
    for option, axis in AXIS_OF.items():
        default = False if option == "sequence_parallel" else None
        if getattr(arguments, option) is not default and axis not in mesh:
            option = option.replace("_", "-")
            raise ValueError(f"--{option} has no effect on --mesh {arguments.mesh}: omit it, or add the axis {axis}")


def check_replica_options(arguments: argparse.Namespace, mesh: Mapping[str, int]) -> None:
    """Raise ValueError for `--bucket-cap-mb` with a mesh in which DDP reduces no gradients."""
    replicas = mesh.get("dp", 1) * mesh.get("cp", 1)
    if arguments.bucket_cap_mb is not None and (replicas == 1 or mesh.get("fsdp", 1) > 1):
        raise ValueError(
            f"--bucket-cap-mb has no effect on --mesh {arguments.mesh}: omit it, or use the axis dp without fsdp"
        )
