"""Record op calls, regions and storages of a run and build its Trace."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any, TypeVar

import torch

from fvflops.capture.attention import PRODUCTS, pairs_of_node, with_pairs
from fvflops.capture.errors.shape_failures import describe_failure
from fvflops.capture.instrument.probe import Probe
from fvflops.capture.recorder.autograd_owners import NodeOwners
from fvflops.capture.recorder.call_lines import LocatedEvents
from fvflops.capture.recorder.indexed_rows import append_row
from fvflops.capture.recorder.python_reads import PythonReads
from fvflops.capture.recorder.repeated_events import copy_rows
from fvflops.capture.recorder.script_calls import ScriptCalls
from fvflops.capture.recorder.tensor_specs import (
    OpSchema,
    describe_result,
    describe_tensor,
    intern_signature,
    tensors_of,
)
from fvflops.capture.recorder.thread_state import OpenRegion, ThreadState
from fvflops.capture.recorder.value_reader import ValueReader, add_values, find_value_arguments, have_values
from fvflops.capture.restore.interrupts import weak_callback
from fvflops.capture.shapes.shape_tensor import ShapeTensor, StorageRef, own_index
from fvflops.capture.unseen.op_kinds import UNINITIALISED
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.torch_internals import (
    CheckpointBackward,
    StopRecomputation,
    current_autograd_node,
    dispatch_mode_stack,
    is_functorch_wrapped,
    is_wrapper_subclass,
)
from fvflops.trace import (
    Event,
    ModuleTree,
    Region,
    RegionSignature,
    Signature,
    StopsAt,
    Storage,
    Trace,
    Value,
    tensors_in,
)
from fvflops.trace.lazy_records import LazyRecords
from fvflops.trace.module_tree import modules_above

Result = TypeVar("Result")

# (signature, stack, phase) → number of calls.
_Calls = Counter[tuple[int, int, str]]

# Of more events that `repeat_events` would copy only call counts are retained: this many take about 100 MB.
_MAX_REPEATED = 1 << 18
_NO_TENSORS: tuple[Value, ...] = ()
# The node whose backward reruns a re-entrantly checkpointed forward: torch's class, and libraries' copies of it.
_REENTRANT = "CheckpointFunctionBackward"
_TORCH_CHECKPOINT_NODE: type = CheckpointBackward
# The node that accumulates a leaf's gradient.
_ACCUMULATES = "AccumulateGrad"
# Owners of backward ops that are not modules of the model.
BEFORE = "<before recording>"
OUTSIDE = "<outside the model>"


class Recorder(ThreadState):
    """Events of one run in order, with interned regions, stacks, signatures and storages.

    It is also the ThreadState of the thread that creates it; threads of autograd or of the model have other ones.
    `fresh` maps ids of the storages that the run created to their indices; all other storages existed before.
    `backward`: ops can run inside a backward pass. `events` and `storages` are rows of the Trace's columns of these
    names; `describe` returns a tensor's spec, `index_of_ref` the index of a shape tensor's
    storage. `of_earlier_steps` has the storages that earlier steps of the same program created, and after `close` those
    of this one. `failure` is the first failure of the run: op name, module name, error.
    `estimate_cost` returns the cost of a call, by which alternative branches are compared. `unseen` detects work that
    bypasses dispatch modes, `scripts` has the open module calls of TorchScript. `has_threads`: other threads than the
    first were recorded. `module_of_tensor` maps ids of parameters and buffers to module names. Beyond `limit` events
    only call counts are retained, not the order. With `lines` each op has the source line that called it.
    `has_attention`: a masked attention was called.
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
        super().__init__(0)
        self.stops_at = stops_at
        self._estimate_cost = estimate_cost
        self._limit = limit
        self.probe = probe
        self._folded: tuple[_Calls, _Calls] | None = None
        self._folded_events = 0
        self.thread = get_ident()
        self.recording = True
        self.ready = probe is None
        self.failure: tuple[str, str, Exception] | None = None
        self.module_of_tensor: dict[int, str] = {}
        self._owner_stacks: dict[int, int] = {}
        self.fresh: dict[int, int] = {}
        self.backward = backward
        self.describe: Callable[[torch.Tensor], Value] = describe_tensor
        self.values = ValueReader(have_values)
        self.index_of_ref: Callable[[StorageRef], int] = own_index
        self.storage_indices: dict[int, int] = {}
        # By id of the weak reference: the reference, the storage's id, index and bytes.
        self._storage_refs: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int, int]] = {}
        self._storage_rows: dict[tuple[int, torch.device, str], tuple[int, str, str]] = {}
        self.storages: list[tuple[Any, ...]] = []
        self.of_earlier_steps: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._regions: dict[Region, int] = {}
        self._stack_children: dict[tuple[int, int], int] = {}
        self._paths: list[tuple[int, ...]] = [()]
        self._signatures: list[Signature] = []
        self._signature_indices: dict[int, int] = {}  # by id of the signature
        # By region: input specs, output specs and index of its signatures.
        self._region_calls: dict[int, list[tuple[tuple[Value, ...], tuple[Value, ...], int]]] = {}
        self._region_signatures: list[tuple[Any, ...]] = []
        self._thread_states: dict[int, ThreadState] = {}
        self._thread_numbers = count(1)
        self.has_threads = False
        self._adopted: set[int] = set()
        self._pauses = 0
        self._saved_events: list[tuple[Any, ...]] | None = None  # before a pause or before close
        self._located = LocatedEvents() if lines else None
        self.events: list[tuple[Any, ...]] = [] if self._located is None else self._located
        self.decomposed: set[str] = set()
        self._active: set[int] = set()
        # The last exception that left a region, and its stack. Errors keep frames alive, with their tensors: those of a
        # checkpoint's early stop, or that end the program, are not stored.
        self._raised: tuple[BaseException | None, int] = (None, 0)
        self.owners = NodeOwners()
        # Whether the recording has a model, and no module of it was called since the last backward pass or optimizer
        # step.
        self.has_modules = False
        self.is_after_pass = False
        self.has_attention = False
        self.unseen: UnseenWork | None = None
        self.scripts: ScriptCalls | None = None
        self.python_reads = PythonReads(self)

    @property
    def length(self) -> int:
        """Number of events recorded so far."""
        return self._folded_events + len(self._saved_events or ()) + len(self.events)

    def has_ops_since(self, length: int) -> bool:
        """Return whether an op was recorded after so many events."""
        first = length - self._folded_events
        return first < 0 or any(event[0] == "op" for event in self._all_events()[first:])

    @property
    def has_lines(self) -> bool:
        """Whether each op has the source line that called it."""
        return self._located is not None

    def is_recording_thread(self) -> bool:
        """Return whether this thread is recorded: the first, one that the model started, or one of autograd."""
        if get_ident() == self.thread or get_ident() in self._adopted:
            return self.recording
        if not (self.recording and self.backward) or current_autograd_node() is None:
            return False
        modes = dispatch_mode_stack()
        return any(getattr(mode, "recorder", None) is self for mode in modes)

    def thread_state(self) -> ThreadState:
        """Return the recording state of the current thread."""
        thread = get_ident()
        if thread == self.thread:
            return self
        state = self._thread_states.get(thread)
        if state is None:
            state = self._thread_states[thread] = ThreadState(next(self._thread_numbers))
            self.has_threads = True
        return state

    def assign_graph(self, results: Any, arguments: Any) -> None:
        """In a thread of the model, assign the autograd nodes between arguments and results to the current stack."""
        if self.backward and get_ident() in self._adopted:
            self.owners.assign_graph(results, arguments, self.thread_state().stack)

    @contextmanager
    def adopted_thread(self, stack: int) -> Iterator[None]:
        """Record the current thread, which the model started, under a stack while the context lasts."""
        thread = get_ident()
        state = self.thread_state()
        outer, state.stack = state.stack, stack
        self._adopted.add(thread)
        try:
            yield
        finally:
            self._adopted.discard(thread)
            state.stack = outer

    @property
    def paused(self) -> bool:
        """Whether recording is paused."""
        return self._pauses > 0

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

    def region(self, region: Region) -> int:
        """Return the index of a region."""
        return self._regions.setdefault(region, len(self._regions))

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
            base, phase = self._stack_and_phase(state)
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
        """Close a region and those still open inside it; `values` are its results, `error` is what it raised."""
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
            self.owners.assign_new(state.stack)
        if isinstance(error, Exception) and error is not self._raised[0] and type(error) is not StopRecomputation:
            self._raised = error, state.stack
        outputs = _NO_TENSORS if error is not None else self._specs(values)
        index = self._region_signature(region, inputs, outputs)
        state.stack = outer
        if error is None and state is self and not self.backward and not measured:
            self.events.append(("exit", index, base, "forward"))
        else:
            phase = self._phase(state, current_autograd_node())
            row = ("exit", index, base, phase, state.thread_number, (), (), error is not None)
            self.events.append((*row, *measured))
        if probe is not None:
            probe.overhead_ns += probe.clock() - left_ns

    def _region_signature(self, region: int, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> int:
        """Return the index of a region's signature."""
        calls = self._region_calls.setdefault(region, [])
        for earlier_inputs, earlier_outputs, earlier_index in calls:
            if earlier_inputs == inputs and earlier_outputs == outputs:
                return earlier_index
        index = append_row(self._region_signatures, (region, inputs, outputs))
        calls.append((inputs, outputs, index))
        return index

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
        add(("exit", self._region_signature(region, inputs, outputs), base, "forward"))

    def own_last_node(self) -> None:
        """Attribute the newest autograd node, created before the open region was entered, to that region."""
        if self.backward and self.is_recording_thread():
            self.owners.assign_last(self.thread_state().stack)

    def extend_stack(self, stack: int, region: int) -> int:
        """Return the index of a stack extended by a region."""
        key = stack, region
        inner = self._stack_children.get(key)
        if inner is None:
            inner = self._stack_children[key] = append_row(self._paths, (*self._paths[stack], region))
        return inner

    def stack_at(self, module: str) -> int:
        """Return the stack of a module, as if all modules that contain it had been called."""
        stack = 0
        for name in (*modules_above(module), module):
            stack = self.extend_stack(stack, self.region(Region("module", name)))
        return stack

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

    def current_module(self, error: BaseException | None = None) -> str:
        """Return the name of the module that is running, or that raised an error."""
        stack = (
            self._raised[1]
            if error is not None and error is self._raised[0]
            else self._thread_states.get(get_ident(), self).stack
        )
        return self.module_at(stack)

    def module_at(self, stack: int) -> str:
        """Return the name of the innermost module of a stack."""
        regions = list(self._regions)
        names = [regions[region].name for region in self._paths[stack] if regions[region].kind == "module"]
        return names[-1] if names else ""

    def owner_of(self, node: Any) -> int:
        """Return the stack under which an autograd node was created, `BEFORE` if that was not recorded."""
        if type(node).__name__ == _ACCUMULATES:
            key = id(node.variable)
            stack = self._owner_stacks.get(key)
            if stack is None:
                stack = self.stack_at(self.module_of_tensor[key]) if key in self.module_of_tensor else 0
                self._owner_stacks[key] = stack
            return stack
        owner = self.owners.stack_of(node)
        return self.stack_at(BEFORE) if owner is None else owner

    def assign_autograd_nodes(self) -> None:
        """Attribute the autograd nodes created since the previous op to the current stack."""
        self._stack_and_phase(self.thread_state())

    def begin_rerun(self, stack: int) -> tuple[int, Any]:
        """Begin the rerun of a checkpointed forward under a stack; return the token for `end_rerun`."""
        state = self.thread_state()
        self.assign_autograd_nodes()
        token = state.stack, state.rerun_node
        state.stack, state.rerun_node = stack, current_autograd_node()
        return token

    def end_rerun(self, token: tuple[int, Any]) -> None:
        """End the rerun of a checkpointed forward."""
        state = self.thread_state()
        self.owners.assign_new(state.stack)
        state.stack, state.rerun_node = token

    def activate(self) -> None:
        """Mark the current stack as active although no op ran."""
        self._active.add(self.thread_state().stack)

    def decompose(self, name: str) -> None:
        """Record that a composite op was decomposed."""
        self.decomposed.add(name)
        self._active.add(
            self._stack_and_phase(self.thread_state())[0] if self.backward or self._thread_states else self.stack
        )

    def call(
        self, schema: OpSchema, inputs: tuple[Value, ...], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Record an op call after it ran; `inputs` are the normalised arguments from before the call."""
        signature = Signature(schema.name, schema.names, inputs, describe_result(result), schema.text)
        reads = self.storages_of((*args, *kwargs.values()), "outside")
        self.append_call(signature, reads, self.storages_of((result,), "op"))

    def record_opaque_call(self, op: str) -> None:
        """Record a call of an op that bypasses dispatch modes, of which only the name is known."""
        self.append_call(Signature(op, (), (), (), f"{op}(...)"), (), ())

    def add(self, signature: int, reads: Sequence[int], writes: Sequence[int], measured: tuple[Any, ...] = ()) -> None:
        """Record a call by its signature's index, with the storages that it reads and creates.

        `measured` are the event's columns from `start_ns` to the last.
        """
        thread = get_ident()
        state = self if thread == self.thread else self.thread_state()
        stack, phase = self._stack_and_phase(state, self._signatures[signature].op)
        if phase == "optimizer":
            stack = state.active_optimizers[-1].stack_of(reads)
        if self.has_attention and self._signatures[signature].op in PRODUCTS:
            signature = self._with_pairs(signature, state)
        # Tuples: the garbage collector untracks them, but would traverse lists.
        row = ("op", signature, stack, phase, state.thread_number, tuple(reads), tuple(writes))
        self.events.append((*row, False, None, *measured) if measured else row)
        if self._limit is not None and len(self.events) >= self._limit and not self._pauses:
            self._fold()

    def _with_pairs(self, signature: int, state: ThreadState) -> int:
        """Return the signature of a product, with the unmasked pairs of the attention that it belongs to."""
        pairs = state.attention
        node = current_autograd_node()
        if pairs is None and node is not None:
            pairs = pairs_of_node(node)
        return signature if pairs is None else self.intern(with_pairs(self._signatures[signature], pairs))

    def _fold(self) -> None:
        """Reduce the events to call counts, since all events of a long run would fill the memory."""
        self.python_reads.update()
        self.python_reads.restart()
        self._folded = self._count(self.events)
        self._folded_events += len(self.events)
        self.events.clear()
        self.owners.keep_last(self._limit or 0)

    def _count(self, events: Sequence[tuple[Any, ...]]) -> tuple[_Calls, _Calls]:
        """Return the call counts of ops and regions, in these events and the folded ones."""
        calls, region_calls = self._folded or (Counter(), Counter())
        ops, exits = self._split(events)
        return calls + ops, region_calls + exits

    @staticmethod
    def _split(events: Sequence[tuple[Any, ...]]) -> tuple[_Calls, _Calls]:
        """Return the call counts of ops and regions in these events."""
        ops = Counter([event[1:4] for event in events if event[0] == "op"])
        # A region that raised is no complete call: of a module that a checkpoint stops early, only the ops count.
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
        self.events.append(("op", number, stack, phase, thread, (), writes))

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

    def stack_and_phase(self) -> tuple[int, str]:
        """Return the current stack and phase."""
        return self._stack_and_phase(self.thread_state())

    def innermost_region(self, stack: int) -> Region:
        """Return the innermost region of a stack, by default the root module's."""
        path = self._paths[stack]
        return list(self._regions)[path[-1]] if path else Region("module", "")

    def append_call(self, signature: Signature, reads: Sequence[int], writes: Sequence[int]) -> None:
        """Record a call by its signature."""
        self.add(self.intern(signature), reads, writes)

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

    def signature_at(self, index: int) -> Signature:
        """Return a signature by its index."""
        return self._signatures[index]

    def index_of(self, signature: Signature) -> int:
        """Return the index of a signature; equal ones must be one object, since hashing is slow."""
        index = self._signature_indices.get(id(signature))
        if index is None:
            index = self._signature_indices[id(signature)] = append_row(self._signatures, signature)
        return index

    def intern(self, signature: Signature) -> int:
        """Intern a signature and return its index."""
        return self.index_of(intern_signature(signature))

    def register_storages(self, storages: Sequence[torch.UntypedStorage], rows: Sequence[tuple[Any, ...]]) -> list[int]:
        """Register storages that exist before the run and throughout it; return their indices."""
        keys = list(map(id, storages))
        indices = self.storage_indices
        if not indices and len(set(keys)) == len(keys):
            indices.update(zip(keys, count()))
            self.storages += rows
            return list(range(len(rows)))
        for key, row in zip(keys, rows, strict=True):
            if key not in indices:
                indices[key] = append_row(self.storages, row)
        return [indices[key] for key in keys]

    def storage_of(self, tensor: torch.Tensor, origin: str) -> int:
        """Return the index of a tensor's storage; a new one is registered with `origin`.

        That of a wrapper subclass has no memory: its inner tensors do.
        """
        storage = tensor.untyped_storage()
        index = self.storage_indices.get(id(storage))
        if index is None:
            has_memory = type(tensor) is torch.Tensor or not is_wrapper_subclass(tensor)
            index = self.add_storage(storage, origin, storage.nbytes() if has_memory else 0)
            if origin == "outside" and self.unseen is not None and storage not in self.of_earlier_steps:
                self.unseen.check_new(tensor, storage, index)
        return index

    def record_freed(self, index: int) -> None:
        """Record that a storage was freed."""
        if self.recording:
            if not self.backward:
                self.events.append(("free", index, self.stack))
                return
            # A thread that is not recorded may free storages too, such as a process group's or the garbage collector's.
            thread = get_ident()
            state = self._thread_states.get(thread, self)
            if state is self and thread != self.thread:
                phase = "optimizer" if self.active_optimizers else "forward"
            else:
                phase = self._phase(state, current_autograd_node())
            self.events.append(("free", index, state.stack, phase, state.thread_number))

    def add_reallocated(self, index: int, nbytes: int) -> int:
        """Register the new memory of a resized storage, and return its index."""
        return append_row(self.storages, (nbytes, self.storages[index][1], "op"))

    def record_resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a real storage was resized: it is one index for each of its allocations."""
        for storage_ref in weakref.getweakrefs(storage):
            registered = self._storage_refs.pop(id(storage_ref), None)
            if registered is not None and registered[0] is storage_ref:
                self._forget_storage(*registered[1:])
        if nbytes := storage.nbytes():
            self.add_storage(storage, "op", nbytes)

    def close(self) -> None:
        """End recording; regions that are still open may close later."""
        self.recording = self.ready = False
        self._saved_events, self.events = self._all_events(), []
        if self.probe is not None:
            self._saved_events = self.probe.finalize_durations(self._saved_events)
        self.of_earlier_steps.update(
            [storage for storage_ref, *_ in self._storage_refs.values() if (storage := storage_ref()) is not None]
        )
        self._storage_refs.clear()
        # Parts of UnseenWork refer to each other and to this recorder: without these the analysis would live on.
        self._estimate_cost = None
        if self.unseen is not None:
            self.unseen.forget_tensors()
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
        pseudo_modules = self._pseudo_modules({*self._active, *(stack for _, stack, _ in region_calls)})
        return Trace(
            modules=modules.with_pseudo_modules(pseudo_modules) if pseudo_modules else modules,
            regions=tuple(self._regions),
            stacks=tuple(self._paths),
            signatures=tuple(self._signatures),
            region_signatures=LazyRecords(RegionSignature, list(self._region_signatures)),
            calls=dict(calls),
            region_calls=dict(region_calls),
            events=LazyRecords(_event, events) if self._folded is None else None,
            storages=LazyRecords(Storage, list(self.storages) if self.recording else self.storages)
            if self._folded is None
            else (),
            stops_at=self.stops_at,
            decomposed=frozenset(self.decomposed),
            active=frozenset(self._active),
            about={**metadata, **self.python_reads.describe(modules)},
            complete=complete,
            lines=() if self._located is None else tuple(self._located.lines),
        )

    def _pseudo_modules(self, stacks: Collection[int]) -> list[str]:
        """Return the owners outside the model (BEFORE, OUTSIDE) that occur in these stacks."""
        owners = {Region("module", name): name for name in (BEFORE, OUTSIDE)}
        numbers = {self._regions[region]: name for region, name in owners.items() if region in self._regions}
        regions = {index for stack in stacks for index in self._paths[stack]}
        return [name for index, name in numbers.items() if index in regions]

    def _all_events(self) -> list[tuple[Any, ...]]:
        if self._saved_events is None:
            return self.events
        return self._saved_events + self.events

    def _specs(self, values: Any) -> tuple[Value, ...]:
        """Return the specs of the tensors in nested values, in order."""
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

    def _stack_and_phase(self, state: ThreadState, op: str = "") -> tuple[int, str]:
        """Return the current stack and phase; in a backward pass, the stack under which its node was created."""
        stack, phase = state.stack, "forward"
        if not self.backward:
            return stack, phase
        node = current_autograd_node()
        owners = self.owners
        # Fast exit: most ops of a forward pass.
        if node is not None or state.active_optimizers or owners.calling_threads or self.is_after_pass:
            phase = self._phase(state, node)
            # Modules called inside a backward pass, or rerun by a checkpoint, own their ops.
            if node is not None and phase != "optimizer" and node is not state.rerun_node:
                opened = state.opened
                if not opened or opened[-1].node is not node:
                    stack = self.owner_of(node)
        owners.assign_new(stack, op)
        return stack, phase

    def _phase(self, state: ThreadState, node: Any) -> str:
        if state.active_optimizers:
            state.drop_ended_steps()
            if state.active_optimizers:
                return "optimizer"
        if not self.backward:
            return "forward"
        if node is None:
            # In callbacks that autograd queues for the end of a pass there is no node.
            if self.owners.calling_threads and self.owners.calling_threads[-1] == get_ident():
                return "backward"
            return "other" if self.is_after_pass and not state.opened and not torch.is_grad_enabled() else "forward"
        if state.reruns or state.rerun_node is node or _is_library_checkpoint(type(node)):
            return "recompute"
        return "backward"

    def storages_of(self, values: Any, origin: str = "outside") -> tuple[int, ...]:
        """Return the indices of the storages of nested tensors, each once."""
        ids: dict[int, None] = {}
        for value in values:
            if type(value) is ShapeTensor:
                ids[self.index_of_ref(value.storage_ref)] = None
            elif isinstance(value, torch.Tensor):
                if _has_storage(value):
                    ids[self.storage_of(value, origin)] = None
            elif isinstance(value, (list, tuple, dict)):
                ids.update(dict.fromkeys(self.storages_of(tensors_of(value), origin)))
        return tuple(ids)

    def add_storage(self, storage: torch.UntypedStorage, origin: str, nbytes: int | None = None) -> int:
        """Register a new storage, by default of its size, and return its index."""
        key = id(storage)
        if nbytes is None:
            nbytes = storage.nbytes()
        row_key = nbytes, storage.device, origin
        row = self._storage_rows.get(row_key)
        if row is None:
            row = self._storage_rows[row_key] = nbytes, str(storage.device), origin
        index = self.storage_indices[key] = append_row(self.storages, row)
        if origin == "op":
            self.fresh[key] = index
            if self.probe is not None:
                self.probe.live_bytes += nbytes
        storage_ref = weakref.ref(storage, self._on_storage_freed)
        self._storage_refs[id(storage_ref)] = storage_ref, key, index, nbytes
        return index

    @weak_callback
    def _on_storage_freed(self, storage_ref: weakref.ref[torch.UntypedStorage]) -> None:
        if self.recording and (registered := self._storage_refs.pop(id(storage_ref), None)) is not None:
            self._forget_storage(*registered[1:])

    def _forget_storage(self, key: int, index: int, nbytes: int) -> None:
        """Record that a storage's memory was freed."""
        del self.storage_indices[key]
        if self.fresh.pop(key, None) is not None and self.probe is not None:
            self.probe.live_bytes -= nbytes
        if self.unseen is not None:
            self.unseen.forget_storage(index)
        self.record_freed(index)


def _name(module: str) -> str:
    return f"module {module!r}" if module else "the model"


def _is_library_checkpoint(node_class: type) -> bool:
    """Return whether a class of nodes is that of a library's copy of torch's CheckpointFunction."""
    return node_class.__name__ == _REENTRANT and node_class is not _TORCH_CHECKPOINT_NODE


def _event(
    kind: str,
    item: int,
    stack: int = 0,
    phase: str = "forward",
    thread: int = 0,
    reads: Sequence[int] = (),
    writes: Sequence[int] = (),
    raised: bool = False,
    *measured: Any,
) -> Event:
    """Return the event of a row, without duplicate storages."""
    unique = dict.fromkeys
    return Event(kind, item, stack, phase, thread, tuple(unique(reads)), tuple(unique(writes)), raised, *measured)


class _PauseEvents(list[tuple[Any, ...]]):
    """Events during a pause: only those of freed storages are retained."""

    def append(self, event: tuple[Any, ...]) -> None:
        if event[0] == "free":
            super().append(event)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_functorch_wrapped(tensor)
