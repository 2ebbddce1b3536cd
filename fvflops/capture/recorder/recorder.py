"""Record op calls, regions and storages of a run and build its Trace."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any, TypeVar

import torch

from fvflops.capture.decomposed_attention import PRODUCTS, pairs_of_node, with_pairs
from fvflops.capture.errors.model_errors import describe_failure
from fvflops.capture.instrument.probe import Probe
from fvflops.capture.recorder.caller_lines import find_source_line
from fvflops.capture.recorder.python_reads import PythonReads
from fvflops.capture.recorder.recorded_storages import RecordedStorages
from fvflops.capture.recorder.run_position import OpenRegion, ThreadState
from fvflops.capture.recorder.tensor_specs import describe_tensor, tensors_of
from fvflops.capture.recorder.value_reader import ValueReader, add_values, find_value_arguments, have_values
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.capture.unseen.op_kinds import UNINITIALISED
from fvflops.torch_internals import StopRecomputation, current_autograd_node
from fvflops.trace import Event, ModuleTree, RegionSignature, Signature, StopsAt, Storage, Trace, Value, tensors_in
from fvflops.trace.lazy_records import LazyRecords
from fvflops.trace.records import event_of_row

Result = TypeVar("Result")

# (signature, stack, phase) → number of calls.
_Calls = Counter[tuple[int, int, str]]

# If `repeat_events` would copy more events, only call counts are kept: this many events take about 100 MB.
_MAX_REPEATED = 1 << 18
_NO_TENSORS: tuple[Value, ...] = ()


class Recorder(RecordedStorages):
    """Events of one run in order, with interned regions, stacks, signatures and storages.

    `describe` returns a tensor's spec. `failure` is the first failure of the run: op name, module name, error.
    `estimate_cost` returns the cost of a call, by which alternative branches are compared. `scripts` is called with the
    ops by which TorchScript reports module calls. Beyond `limit` events only call counts are retained, not the order.
    With `lines` (`has_lines`) ops have their source lines. `has_attention`: a masked attention was called.
    """

    def __init__(
        self,
        stops_at: StopsAt,
        *,
        backward: bool = True,
        estimate_cost: Callable[[Signature], int] | None = None,
        limit: int | None = None,
        probe: Probe | None = None,
        lines: bool = False,
    ) -> None:
        super().__init__(backward, probe)
        self.stops_at = stops_at
        self._estimate_cost = estimate_cost
        self._limit = limit
        self._folded: tuple[_Calls, _Calls] | None = None
        self._folded_events = 0
        self.ready = probe is None
        self.failure: tuple[str, str, Exception] | None = None
        self.describe: Callable[[torch.Tensor], Value] = describe_tensor
        self.values = ValueReader(have_values)
        self._saved_events: list[tuple[Any, ...]] | None = None  # before a pause or before close
        self.has_lines = lines
        self._lines: dict[str, int] | None = {} if lines else None  # source line → index
        self.decomposed: set[str] = set()
        self._active: set[int] = set()
        self.has_attention = False
        self.scripts: Callable[[str, Any], None] | None = None
        self.python_reads = PythonReads(self)

    @property
    def length(self) -> int:
        return self._folded_events + len(self._saved_events or ()) + len(self.events)

    def has_ops_since(self, length: int) -> bool:
        """Return whether an op was recorded after the first `length` events."""
        first = length - self._folded_events
        return first < 0 or any(event[0] == "op" for event in self._all_events()[first:])

    def pause(self) -> None:
        """Record nothing until as many calls of `resume`; regions are still entered and left."""
        self._pauses += 1
        self.ready = False
        if self._saved_events is None:
            self._saved_events, self.events = self.events, _PauseEvents()

    def resume(self) -> None:
        """Resume recording if this ends the outermost pause."""
        self._pauses -= 1
        if self.unseen is not None:
            self.unseen.forget_contents()
        if not self._pauses and self.recording and self._saved_events is not None:
            self._saved_events += self.events
            self.events, self._saved_events = self._saved_events, None
            self.ready = self.probe is None

    def enter(self, region: int, values: Any, wanted: tuple[str, ...] = ()) -> int:
        """Open a region called with `values`, of whose tensors the `wanted` ones are recorded with their values.

        Returns the token for `leave`.
        """
        probe = self.probe
        entered_ns = 0 if probe is None else probe.clock()
        inputs = self._specs(values[0] if type(values) is tuple and len(values) == 1 else values)
        if wanted:
            inputs = self._add_values(inputs, values, wanted)
        if self.backward:
            self.is_after_pass = False
            state = self.thread_state()
            state.drop_ended_steps()
            base, phase = self.stack_and_phase(state)
            node = current_autograd_node()
            self.events.append(("enter", region, base, phase, state.thread_number))
        else:
            state, node = self.thread_state() if self._thread_states else self, None
            base = state.stack
            if state is self:
                self.events.append(("enter", region, base))
            else:
                self.events.append(("enter", region, base, "forward", state.thread_number))
        opened = state.opened
        token = len(opened)
        outer = state.stack
        state.stack = self.extend_stack(base, region)
        if probe is None:
            opened.append(OpenRegion(region, outer, base, inputs, node, None))
            return token
        start = probe.begin()
        opened.append(OpenRegion(region, outer, base, inputs, node, start))
        start.ns = probe.clock()
        probe.overhead_ns += start.ns - entered_ns
        start.overhead_ns = probe.overhead_ns
        return token

    def leave(self, token: int, values: Any, error: BaseException | None = None) -> None:
        """Close a region and all regions open inside it; `values` are its results, `error` the exception it raised."""
        probe = self.probe
        left_ns = 0 if probe is None else probe.clock()
        state = self.thread_state() if self.backward or self._thread_states else self
        region, outer, base, inputs, _, start = state.opened[token]
        measured: tuple[Any, ...] = ()
        if probe is not None and start is not None:
            duration = probe.end(start, left_ns)
            measured = None, *probe.columns(start, duration)
        del state.opened[token:]
        if self.backward:
            state.assign_nodes(state.stack)
        if isinstance(error, Exception) and error is not self._raised[0] and type(error) is not StopRecomputation:
            self._raised = error, state.stack
        outputs = _NO_TENSORS if error is not None else self._specs(values)
        index = self.region_signature(region, inputs, outputs)
        state.stack = outer
        if error is None and state is self and not self.backward and not measured:
            self.events.append(("exit", index, base, "forward"))
        else:
            phase = self._phase(state, current_autograd_node())
            row = ("exit", index, base, phase, state.thread_number, (), (), error is not None)
            self.events.append((*row, *measured))
        if probe is not None:
            probe.overhead_ns += probe.clock() - left_ns

    def add_module_call(
        self,
        region: int,
        signature: int,
        reads: Sequence[int],
        writes: Sequence[int],
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
    ) -> None:
        """Record a module's call that consists of one op call, in a run without backward and other threads."""
        base = self.stack
        add = self.events.append
        add(("enter", region, base))
        add(("op", signature, self.extend_stack(base, region), "forward", 0, reads, writes))
        add(("exit", self.region_signature(region, inputs, outputs), base, "forward"))

    def fail(self, op: str, error: Exception) -> None:
        """Record a failure, unless there was one before."""
        if self.failure is None:
            self.failure = op, self.current_module(), error

    def forget_errors(self) -> None:
        """Discard errors: their frames keep this recorder and the run's tensors alive."""
        self.failure, self._raised = None, (None, 0)

    def describe_failure(self, error: Exception) -> str:
        """Return in one line which op shape execution cannot run, in which module."""
        if self.failure is not None:
            op, module, error = self.failure
            subject = f"{op or 'a tensor'} in {_name(module)}"
        else:
            subject = _name(self.current_module(error))
        return f"{subject} cannot be run in shape execution ({describe_failure(error)})"

    def activate(self) -> None:
        """Mark the current stack as active although no op ran."""
        self._active.add(self.thread_state().stack)

    def decompose(self, name: str) -> None:
        self.decomposed.add(name)
        self._active.add(self.stack_and_phase()[0] if self.backward or self._thread_states else self.stack)

    def append_call(self, signature: Signature, reads: Sequence[int] = ()) -> None:
        self.add(self.intern(signature), reads, ())

    def add(self, signature: int, reads: Sequence[int], writes: Sequence[int], measured: tuple[Any, ...] = ()) -> None:
        """Record a call by its signature's index, with the storages that it reads and creates.

        `measured` are the event's columns from `start_ns` to the last.
        """
        state = self if get_ident() == self.thread else self.thread_state()
        stack, phase = self.stack_and_phase(state, self._signatures[signature].op)
        if phase == "optimizer":
            stack = state.active_optimizers[-1].stack_of(reads)
        if self.has_attention and self._signatures[signature].op in PRODUCTS:
            signature = self._with_pairs(signature, state)
        # Tuples: the garbage collector untracks them, but would traverse lists.
        row: tuple[Any, ...] = ("op", signature, stack, phase, state.thread_number, tuple(reads), tuple(writes))
        if measured:
            row = (*row, False, None, *measured)
        self.events.append(row if self._lines is None else self._with_line(row))
        if self._limit is not None and len(self.events) >= self._limit and not self._pauses:
            self._fold()

    def _with_line(self, row: tuple[Any, ...]) -> Event:
        """Return an op's event with the innermost line outside torch and the standard library, None without one."""
        assert self._lines is not None
        line = find_source_line(sys._getframe(2)).line
        return Event(*row)._replace(line=self._lines.setdefault(line, len(self._lines)) if line else None)

    def _with_pairs(self, signature: int, state: ThreadState) -> int:
        """Return the signature of a product, with the unmasked pairs of the attention that it belongs to."""
        pairs = state.attention
        node = current_autograd_node()
        if pairs is None and node is not None:
            pairs = pairs_of_node(node)
        return signature if pairs is None else self.intern(with_pairs(self._signatures[signature], pairs))

    def _fold(self) -> None:
        """Reduce the events to call counts, since all events of a long run would fill the memory."""
        self.python_reads.update(discard=True)
        self._folded = self._count(self.events)
        self._folded_events += len(self.events)
        self.events.clear()
        self.keep_last_nodes(self._limit or 0)

    def _count(self, events: Sequence[tuple[Any, ...]]) -> tuple[_Calls, _Calls]:
        """Return the call counts of ops and regions, in these events and the folded ones."""
        ops, exits = self._split(events)
        return (ops, exits) if self._folded is None else (self._folded[0] + ops, self._folded[1] + exits)

    @staticmethod
    def _split(events: Sequence[tuple[Any, ...]]) -> tuple[_Calls, _Calls]:
        ops = Counter([event[1:4] for event in events if event[0] == "op"])
        # A region that raised is not a complete call: if a checkpoint stops a module early, only its ops count.
        exits = Counter([event[1:4] for event in events if event[0] == "exit" and not (len(event) > 7 and event[7])])
        return ops, exits

    def repeat_events(self, first: int, times: int) -> None:
        """Record the events from index `first` on `times` times more."""
        rows = self.events[first:]
        if len(self.events) + times * len(rows) <= _MAX_REPEATED:
            self.events += copy_rows(rows, self.storages, times)
            return
        self._fold()
        calls, region_calls = self._folded or (Counter(), Counter())
        for sums, events in zip((calls, region_calls), self._split(rows), strict=True):
            sums.update({key: times * count for key, count in events.items()})
        self._folded = calls, region_calls
        self._folded_events += times * len(rows)

    def append_unseen(self, signature: Signature, stack: int, phase: str, writes: tuple[int, ...]) -> None:
        """Record work that bypassed dispatch modes and wrote to storages, if known, as one op call."""
        self._active.add(stack)
        number, thread = self.intern(signature), self.thread_state().thread_number
        row: tuple[Any, ...] = ("op", number, stack, phase, thread, (), writes)
        self.events.append(row if self._lines is None else self._with_line(row))

    def uninitialised(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors whose memory no op has written to since an op such as `aten::empty` allocated it."""
        uninitialised = []
        for tensor in tensors:
            for index in self.storages_of((tensor,)):
                writer = next(
                    (event for event in reversed(self.events) if event[0] == "op" and index in event[6]), None
                )
                if writer is not None and self._signatures[writer[1]].op in UNINITIALISED:
                    uninitialised.append(tensor)
        return uninitialised

    def keep_costliest_branch(self, branches: Sequence[Callable[[], Result]]) -> Result:
        """Run all branches, retain the events of the costliest (the first of equals) and return its result.

        Costs are compared by `estimate_cost`, ties by the number of elements that the ops read and write.
        """
        first = len(self.events)
        costliest: tuple[tuple[int, int], list[tuple[Any, ...]], Result] | None = None
        for branch in branches:
            result = branch()
            events = self.events[first:]
            del self.events[first:]
            cost = self._cost_of(events)
            if costliest is None or cost > costliest[0]:
                costliest = cost, events, result
            del result
        assert costliest is not None
        del self.events[first:]  # frees of the storages of other branches
        self.events += costliest[1]
        return costliest[2]

    def _cost_of(self, events: Sequence[tuple[Any, ...]]) -> tuple[int, int]:
        self._active.update([event[2] for event in events if event[0] == "op"])
        ops = [self._signatures[event[1]] for event in events if event[0] == "op"]
        flops = 0 if self._estimate_cost is None else sum(map(self._estimate_cost, ops))
        return flops, sum(spec.numel for op in ops for spec in tensors_in((*op.inputs, *op.outputs)))

    def close(self) -> None:
        """End recording; regions that are still open may close later."""
        self.recording = self.ready = False
        self._saved_events, self.events = self._all_events(), []
        if self.probe is not None:
            self._saved_events = self.probe.finalize_durations(self._saved_events)
        self.of_earlier_steps.update(
            [storage for storage_ref in self._live_storages.values() if (storage := storage_ref()) is not None]
        )
        self._live_storages.clear()
        # Parts of UnseenWork refer to each other and to this recorder: without these the analysis would live on.
        self._estimate_cost = None
        self.unseen = None
        for state in (self, *self._thread_states.values()):
            state.active_optimizers.clear()  # a step that raised keeps its frame alive

    def trace(self, modules: ModuleTree, metadata: Mapping[str, str], *, complete: bool = True) -> Trace:
        """Return the Trace of the recorded events."""
        events = self._all_events()
        if self.recording:
            events = list(events) if self.probe is None else self.probe.finalize_durations(events)
        calls, region_calls = self._count(events)
        self._active.update([stack for _, stack, _ in calls])
        pseudo_modules = self.pseudo_modules({*self._active, *(stack for _, stack, _ in region_calls)})
        return Trace(
            modules=modules.with_pseudo_modules(pseudo_modules) if pseudo_modules else modules,
            regions=tuple(self._regions),
            stacks=tuple(self._paths),
            signatures=tuple(self._signatures),
            region_signatures=LazyRecords(RegionSignature, list(self._region_signatures)),
            calls=dict(calls),
            region_calls=dict(region_calls),
            events=LazyRecords(event_of_row, events) if self._folded is None else None,
            storages=LazyRecords(Storage, list(self.storages) if self.recording else self.storages)
            if self._folded is None
            else (),
            stops_at=self.stops_at,
            decomposed=frozenset(self.decomposed),
            active=frozenset(self._active),
            about={**metadata, **self.python_reads.describe(modules)},
            complete=complete,
            lines=tuple(self._lines or ()),
        )

    def _all_events(self) -> list[tuple[Any, ...]]:
        if self._saved_events is None:
            return self.events
        return self._saved_events + self.events

    def _specs(self, values: Any) -> tuple[Value, ...]:
        kind = type(values)
        if kind is ShapeTensor:
            spec_tuple: tuple[Value, ...] = values.metadata.spec_tuple
            return spec_tuple
        if kind is torch.Tensor:
            return (self.describe(values),)
        return tuple([self.describe(tensor) for tensor in tensors_of(values)])

    def _add_values(self, inputs: tuple[Value, ...], values: Any, wanted: tuple[str, ...]) -> tuple[Value, ...]:
        names = [f"input_{index}" if index else "input" for index in range(len(inputs))]
        arguments = find_value_arguments("", names, wanted)
        return add_values(inputs, arguments, self.values.read(arguments, list(tensors_of(values)), {}))


def _name(module: str) -> str:
    return f"module {module!r}" if module else "the model"


class _PauseEvents(list[tuple[Any, ...]]):
    """Events during a pause: only frees of storages are retained."""

    def append(self, event: tuple[Any, ...]) -> None:
        if event[0] == "free":
            super().append(event)


def copy_rows(rows: Sequence[tuple[Any, ...]], storages: list[tuple[Any, ...]], times: int) -> list[tuple[Any, ...]]:
    """Return an iteration's event rows repeated, and append the storages of each repetition to `storages`.

    A storage that the iteration frees is created by it; the others, such as weights, are shared by all repetitions.

    >>> storages = [(4, "cpu", "op")]
    >>> copy_rows([("op", 7, 1, "forward", 0, (), (0,)), ("free", 0, 1)], storages, 2)[2:]
    [('op', 7, 1, 'forward', 0, (), (2,)), ('free', 2, 1)]
    >>> len(storages)
    3
    """
    freed = sorted({row[1] for row in rows if row[0] == "free"})  # as they were created
    copies: list[tuple[Any, ...]] = []
    for _ in range(times):
        indices: dict[int, int] = {}
        for index in freed:
            indices[index] = len(storages)
            storages.append(storages[index])
        for row in rows:
            if row[0] == "op":
                mapped = (tuple([indices.get(index, index) for index in group]) for group in row[5:7])
                copies.append((*row[:5], *mapped, *row[7:]))
            elif row[0] == "free":
                copies.append(("free", indices[row[1]], *row[2:]))
            else:
                copies.append(row)
    return copies
