"""Measured collectives of the GPUs of one node, of NCCL and of engines."""

from __future__ import annotations

from fvflops.devices.kernel_models.collectives import (
    Collective,
    CollectiveFigures,
    Fabric,
    PeerFigures,
    collective_seconds,
    peer_seconds,
)
from kernel_fitting.kernel_class import US, KernelClass, Row

_FABRICS = {
    "a100_sxm": Fabric(300e9),
    "h100_sxm": Fabric(450e9, adds=True),
    "h200_sxm": Fabric(450e9, adds=True),
    "b200_sxm": Fabric(900e9, adds=True),
    "l40s": Fabric(32e9),
    "rtx_pro_6000_server": Fabric(64e9),
}
# With a switch for all GPUs of a node.
_SWITCHED = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm")
_BYTES = {"half": 2, "int8": 1, "bfloat16": 2}
_KINDS = {"alltoall": "all_to_all"}
# Bytes of the largest buffer for which an engine has its own all-reduce, and of the smallest for which none has.
_SMALL, _LARGE = 4 << 20, 64 << 20


def _read(row: Row) -> Collective | None:
    dtype = row.get("nccl_dtype") or row["allreduce_dtype"]
    kind = row.get("op_name", "all_reduce")
    nbytes = float(row["message_size"]) * _BYTES[dtype]
    if "allreduce_dtype" in row and not _is_nccl(row, nbytes):
        return None
    return Collective(_KINDS.get(kind, kind), int(row["num_gpus"]), nbytes, dtype != "int8")


def _is_nccl(row: Row, nbytes: float) -> bool:
    """Return whether an engine's rows are like NCCL's own; those over PCIe are of other machines."""
    return nbytes >= _LARGE and not row["kernel_source"].endswith("eager") and row["gpu"] in _SWITCHED


def _read_small(row: Row) -> Collective | None:
    """Return an engine's all-reduce, if it is in a CUDA graph: others wait for the host."""
    nbytes = float(row["message_size"]) * _BYTES[row["allreduce_dtype"]]
    if row["kernel_source"].endswith("eager") or nbytes > _SMALL or row["gpu"] not in _SWITCHED:
        return None
    return Collective("all_reduce", int(row["num_gpus"]), nbytes)


def _fabric(gpu: str, _: str) -> Fabric:
    return _FABRICS[gpu]


CLASSES = (
    KernelClass(
        name="collective",
        file="collectives.csv",
        dtype="",
        read=_read,
        seconds=collective_seconds,
        figures=CollectiveFigures,
        bounds={
            "start": (0.5 * US, 4 * US, 40 * US),
            "step": (0.1 * US, 0.8 * US, 10 * US),
            "flagged": (0.05, 0.5, 1),
            "fence": (0.2 * US, 15 * US, 60 * US),
            "fenced": (0.1, 0.7, 1),
            "local": (0.01, 0.6, 2),
            "scattered": (0.5, 1, 1.5),
            "sharing": (0.001, 0.1, 3),
        },
        fixed={},
        shipped={"": ""},
        machine=_fabric,
        more=("all_reduce_in_engines.csv",),
    ),
    KernelClass(
        name="peers",
        file="all_reduce_in_engines.csv",
        dtype="",
        read=_read_small,
        seconds=peer_seconds,
        figures=PeerFigures,
        bounds={
            "start": (0.5 * US, 4 * US, 40 * US),
            "barrier": (0.1 * US, 2 * US, 40 * US),
            "peers": (0.1, 0.7, 1),
        },
        fixed={},
        shipped={"": ""},
        machine=_fabric,
    ),
)
