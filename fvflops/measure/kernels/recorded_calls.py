"""Nest the op and module calls of a Trace, with the work of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.counting.count_trace import CostModel, find_covered, region_costs
from fvflops.formulas import OpCost
from fvflops.trace import Status, Trace, tensors_in
from fvflops.trace.event_walk import RegionCall, walk_events


class Work(NamedTuple):
    """Multiply-adds, and FLOPs: 2 per multiply-add and all other operations, whatever the table's `multiply_add`."""

    macs: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.macs + other.macs, self.flops + other.flops)

    def __sub__(self, other: Work) -> Work:
        return Work(self.macs - other.macs, self.flops - other.flops)


NO_WORK = Work()


def add_works(works: Iterable[Work | None]) -> Work | None:
    """Return the sum of the known works, None without any."""
    known = [work for work in works if work is not None]
    return sum(known, NO_WORK) if known else None


def work_of(costs: Sequence[OpCost]) -> Work | None:
    """Return the work of a call by its costs; None if unsupported. The value of a handle is a number of FLOPs.

    >>> work_of([OpCost.in_flops("mm", Status.COUNTED, 1, macs=60, flops=3)])
    Work(macs=60, flops=123)
    """
    supported = [cost for cost in costs if cost.status is not Status.UNSUPPORTED]
    if not supported:
        return None
    flops = [2 * cost.macs + cost.flops if cost.macs or cost.flops else int(cost.value) for cost in supported]
    return Work(sum(cost.macs for cost in supported), sum(flops))


@dataclass(slots=True)
class RecordedCall:
    """A recorded op call, or a module call with the calls inside it; the outermost is the run itself, "root".

    `trace_index` is the index of its event in the Trace, for a module call that of its end. `work` excludes the calls
    inside; None if unsupported. `shapes` are those of an op's input tensors, without scalars.
    """

    kind: str
    name: str
    trace_index: int | None = None
    work: Work | None = NO_WORK
    shapes: tuple[tuple[int, ...], ...] | None = None
    inner: list[RecordedCall] = field(default_factory=list)

    def total(self) -> Work:
        """Return the inclusive work."""
        return add_works([NO_WORK, self.work, *(call.total() for call in self.inner)]) or NO_WORK

    def modules(self) -> set[str]:
        """Return the names of all modules called in this call, including itself."""
        names = {self.name} if self.kind == "module" else set()
        return names.union(*(call.modules() for call in self.inner if call.kind == "module"))

    def ops(self) -> Iterator[RecordedCall]:
        """Yield all op calls in this call, including itself."""
        if self.kind == "op":
            yield self
        for call in self.inner:
            yield from call.ops()


def nest_calls(trace: Trace, cost_model: CostModel) -> RecordedCall:
    """Return the nested calls of a Trace, those of all threads merged in the order of the Trace.

    Threads of the backward pass run while the calling thread waits; those that a model starts may run concurrently.
    The work of a region that is not a module is attributed to the enclosing module.
    """
    root = RecordedCall("root", "")
    costs = region_costs(trace, cost_model)
    covered = find_covered(trace, costs)
    shapes = [
        tuple(spec.shape for spec in tensors_in(signature.inputs) if spec.shape) for signature in trace.signatures
    ]
    modules: dict[RegionCall | None, RecordedCall] = {None: root}  # open region → the call of the innermost module
    for kind, event, region_call, index in walk_events(trace):
        is_covered = (event.stack, event.phase) in covered  # by the formula of an enclosing region
        if kind == "op":
            signature = trace.signatures[event.item]
            work = NO_WORK if is_covered else work_of(cost_model.op_cost(signature))
            modules[region_call].inner.append(RecordedCall("op", signature.packet, index, work, shapes[event.item]))
        elif region_call is None:
            continue
        elif kind == "enter":
            region = trace.regions[region_call.region]
            modules[region_call] = parent = modules[region_call.parent]
            if region.kind == "module" and event.kind == "enter":
                modules[region_call] = RecordedCall("module", region.name)
                parent.inner.append(modules[region_call])
        else:
            call = modules.pop(region_call)
            is_module = trace.regions[region_call.region].kind == "module" and region_call.begin.kind == "enter"
            if kind == "exit" and is_module:
                call.trace_index = index
            if kind == "exit" and event.item in costs and not is_covered and not event.raised:
                call.work = add_works([NO_WORK, call.work, work_of(costs[event.item].costs)])
    return root
