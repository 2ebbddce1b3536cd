"""The calls: each call of an op or of a module in the order of the run, with what it comes to; plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fvflops.trace.module_tree import ModuleTree


class OpCall(NamedTuple):
    """One call of an op, in the order of the run.

    `number` is its place among all op calls, from 0 on. `name` tells it from other calls of the op, `op` has no
    overload, `target` has the full name. `module` is the canonical name of the module that it belongs to. `inputs` and
    `outputs` are its tensors, such as "float32[2, 3]". `flops` are None where they are not known, and `status` says
    what the table says of the op; "covered" is what is counted with a module around it. Such a module has a line of its
    own before, whose `op` is its class, without time and memory. Times are in ns, memory in bytes, both None where not
    measured. `macs` are multiply-adds, `activations` output elements that the table counts, `nbytes` bytes read and
    written; None where not known. `parameters` are the names of the parameters and buffers that it reads, and `after`
    the numbers of the calls that computed the rest of what it reads; a view computes nothing. `line` is the line of
    source that called it, "" where none was recorded.
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
        """What the call left behind."""
        if self.memory_before is None or self.memory_after is None:
            return None
        return self.memory_after - self.memory_before


class LineCount(NamedTuple):
    """What the op calls come to that one line of source makes, "" for those that none of the model's makes.

    The FLOPs of `unknown` calls are not known. `nbytes` are bytes read and written.
    """

    line: str
    calls: int
    flops: int
    macs: int
    activations: int | None
    nbytes: int
    unknown: int


class ModuleCall(NamedTuple):
    """One call of a module, in the order of the run, with all that ran in it.

    `number` is its place among all module calls, `depth` how many calls are around it. `module` is the module's
    canonical name, `inputs` and `outputs` are tensors, such as "float32[2, 3]". `parameters` are the elements of the
    module's parameters, those of the modules in it included, `ops` the op calls that ran in it, of which `unknown` are
    those whose FLOPs nobody knows. `flops` are in the table's convention, `nbytes` bytes read and written.
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
    unknown: int


class OpGraph(NamedTuple):
    """The op calls of a run, which name the calls whose results they read, and the modules that they belong to."""

    calls: Sequence[OpCall]
    modules: ModuleTree
