"""Signature of a call, and records of single op calls, module calls and source lines, each with its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fvflops.text import short_repr, shown_by_fields
from fvflops.trace.spec import Value

if TYPE_CHECKING:
    from fvflops.trace.module_tree import ModuleTree


@shown_by_fields
class OpCall(NamedTuple):
    """One call of an op, in the order of the run.

    `number` is its index among all op calls. `name` is unique among the calls of the op, `op` is without overload,
    `target` with it. `module` is the canonical name of the owning module. `inputs` and `outputs` are its tensors, such
    as "float32[2, 3]". `flops` is None where unsupported. `status` is "counted", "zero_flop", "ignored" (ignored by the
    convention), "unsupported" or "covered" (counted as part of a module or function around it). That module or function
    has a record of its own before its ops', with its class as `op` and without time and memory. Times are in ns, memory
    in bytes, both None where not measured. `macs` are multiply-adds, `activations` output elements that the table
    counts, `nbytes` bytes read and written; None where unknown. `parameters` are the names of the parameters and
    buffers that it reads, and `after` the numbers of the calls that produced its other inputs; for a view, the call
    that produced its base. `line` is the source line that called it, "" where none was recorded.
    """

    number: int
    name: str
    op: str
    target: str
    module: str
    phase: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtype: str
    status: str
    flops: int | None
    duration_ns: int | None = None
    memory_before: int | None = None
    memory_after: int | None = None
    memory_peak: int | None = None
    macs: int | None = None
    activations: int | None = None
    nbytes: int | None = None
    parameters: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    line: str = ""

    @property
    def memory_delta(self) -> int | None:
        """Bytes allocated by the call and not freed in it; None where not measured."""
        if self.memory_before is None or self.memory_after is None:
            return None
        return self.memory_after - self.memory_before


@shown_by_fields
class LineCount(NamedTuple):
    """Sum over the op calls of one source line, "" for calls from outside the model's code.

    `unsupported` is the number of unsupported calls. `nbytes` are bytes read and written.
    """

    line: str
    calls: int
    flops: int
    macs: int
    activations: int | None
    nbytes: int
    unsupported: int


@shown_by_fields
class ModuleCall(NamedTuple):
    """One call of a module, in the order of the run, including everything called inside it.

    `number` is its index among all module calls, `depth` the number of enclosing calls. `module` is the module's
    canonical name, `inputs` and `outputs` are tensors, such as "float32[2, 3]". `parameters` are the elements of its
    parameters, submodules included, `ops` the op calls inside it, `unsupported` the number of unsupported ones. `flops`
    are in the table's convention, `nbytes` bytes read and written.
    """

    number: int
    module: str
    class_name: str
    phase: str
    depth: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: int
    ops: int
    flops: int
    macs: int
    activations: int | None
    nbytes: int
    unsupported: int


class OpGraph(NamedTuple):
    """The op calls of a run, linked by `OpCall.after`, and the module tree."""

    calls: Sequence[OpCall]
    modules: ModuleTree

    def __repr__(self) -> str:
        return short_repr(self, self.modules.root.class_name, f"{len(self.calls):,} op calls")


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
