"""Signature of a call: the op or region, and everything that its cost can depend on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fvflops.trace.spec import Value

# Calls that bypass the dispatcher are named after a class or a function, whose name may have dots.
_NAMES_WITH_DOTS = ("prim::PythonOp.", "unseen::", "triton::")


@dataclass(frozen=True, slots=True)
class Signature:
    """A distinct op call: its name, its arguments in schema order, its results.

    `op` is the full name (`aten::add.Tensor`), `names` the schema's argument names, `inputs` one value for each of
    them with defaults filled in, `outputs` one value for each result. `schema` is the schema's text, which errors
    quote. `source` is the source line of a call that bypasses the dispatcher, "" elsewhere.

    >>> Signature("aten::relu", ("self",), (None,), (None,)).packet
    'aten::relu'
    """

    op: str
    names: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    schema: str = ""
    source: str = ""

    @property
    def packet(self) -> str:
        """The op's name without its overload: `aten::add` for `aten::add.Tensor`."""
        return packet_of(self.op)


@dataclass(frozen=True, slots=True)
class RegionSignature:
    """A distinct region call: the region's index, and the tensors in its arguments and results, in order."""

    region: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@lru_cache(maxsize=1 << 14)
def packet_of(op: str) -> str:
    """Return an op's name without its overload.

    >>> packet_of("aten::add.Tensor"), packet_of("prim::PythonOp.Swish"), packet_of("unseen::Scan.forward")
    ('aten::add', 'prim::PythonOp.Swish', 'unseen::Scan.forward')
    """
    if op.startswith(_NAMES_WITH_DOTS):
        return op
    namespace, separator, name = op.partition("::")
    return namespace + separator + name.partition(".")[0]
