"""The recorder: it takes down what runs, interns it, and makes the Trace."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any, TypeVar

import torch

from fvflops.capture.instrument.probe import Probe
from fvflops.capture.recorder.autograd_owners import NodeOwners
from fvflops.capture.recorder.call_lines import LocatedEvents
from fvflops.capture.recorder.signature import OpSchema, describe_result, describe_tensor, tensors_of
from fvflops.capture.recorder.thread_state import OpenRegion, ThreadState
from fvflops.capture.restore.interrupts import weak_callback
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.capture.unseen.unseen_work import UNINITIALISED, UnseenWork
from fvflops.torch_internals import (
    CheckpointBackward,
    StopRecomputation,
    current_autograd_node,
    dispatch_mode_stack,
    is_functorch_wrapped,
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

_NO_TENSORS: tuple[Value, ...] = ()
# The node whose backward runs a checkpointed forward again, torch's own and that of libraries which copied it.
_REENTRANT = "CheckpointFunctionBackward"
_TORCHS_OWN: type = CheckpointBackward
# The node that adds to a leaf's gradient.
_ACCUMULATES = "AccumulateGrad"
# NodeOwners that are no modules of the model.
BEFORE = "<before recording>"
OUTSIDE = "<outside the model>"


class Recorder(ThreadState):
    """The growing record of one run: interned regions, stacks, signatures and storages, and the events in order.

    It is the strand of the thread that it was made in, and has others for the threads of autograd. `fresh` maps the
    storages that the run itself made to their ids; what is not in it existed before. `backward` says that ops can run
    inside a backward pass. `events` and `storages` are the rows of what the Trace will hold under these names, and
    `describe` makes the spec of a tensor. `failure` is the first thing that the run could not do: the op's name, the
    module's, and the error. `weigh` says what a call counts for where two things that might be done are compared.
    `unseen` collects the evidence of work that no dispatch mode sees, and `has_threads` says that other threads than
    the first were recorded. `homes` gives the modules of the model's parameters and buffers, by the tensors' ids. With
    a `limit`, of more events than that only their numbers are kept, not their order. With `lines` each op has the line
    of source that called it.
    """

    def __init__(
        self,
        stops_at: StopsAt,
        *,
        backward: bool = True,
        weigh: Callable[[Signature], int] | None = None,
        limit: int | None = None,
        meter: Probe | None = None,
        lines: bool = False,
    ) -> None:
        super().__init__(0)
        self.stops_at = stops_at
        self._estimate_cost = weigh
        self._limit = limit
        self.probe = meter
        self._folded: tuple[_Calls, _Calls] | None = None
        self._let_go = 0
        self.thread = get_ident()
        self.recording = True
        self.failure: tuple[str, str, Exception] | None = None
        self.module_of_tensor: dict[int, str] = {}
        self._home_stacks: dict[int, int] = {}
        self.fresh: dict[int, int] = {}
        self.backward = backward
        self.describe: Callable[[torch.Tensor], Value] = describe_tensor
        self._known: dict[int, int] = {}
        # By the identity of what watches a storage: that, and the storage's key, number and bytes.
        self._watches: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int, int]] = {}
        self._rows: dict[tuple[int, torch.device, str], tuple[int, str, str]] = {}
        self.storages: list[tuple[Any, ...]] = []
        self._regions: dict[Region, int] = {}
        self._inner: dict[tuple[int, int], int] = {}
        self._paths: list[tuple[int, ...]] = [()]
        self._signatures: list[Signature] = []
        self._numbers: dict[int, int] = {}
        self._own: dict[Signature, Signature] = {}
        # Of each region the calls that it had: what went in, what came out, and the number of that signature.
        self._calls: dict[int, list[tuple[tuple[Value, ...], tuple[Value, ...], int]]] = {}
        self._region_signatures: list[tuple[Any, ...]] = []
        self._thread_states: dict[int, ThreadState] = {}
        self.has_threads = False
        self._adopted: set[int] = set()
        self._pauses = 0
        self._kept: list[tuple[Any, ...]] | None = None  # what was taken down, while nothing more is
        self._located = LocatedEvents() if lines else None
        self.events: list[tuple[Any, ...]] = [] if self._located is None else self._located
        self._decomposed: set[str] = set()
        self._active: set[int] = set()
        # An error holds the frames that it went through, with their tensors: that of a checkpoint, which ends a rerun
        # early, is let go, and so is what ends the program.
        self._raised: tuple[BaseException | None, int] = (None, 0)
        self.owners = NodeOwners()
        self.unseen: UnseenWork | None = None

    @property
    def length(self) -> int:
        """How many events were taken down."""
        return self._let_go + len(self._kept or ()) + len(self.events)

    def is_recording_thread(self) -> bool:
        """Return whether what this thread does is recorded: the thread itself, or what autograd does in another."""
        if get_ident() == self.thread or get_ident() in self._adopted:
            return self.recording
        if not (self.recording and self.backward) or current_autograd_node() is None:
            return False
        modes = dispatch_mode_stack()
        return any(getattr(mode, "recorder", None) is self for mode in modes)

    def thread_state(self) -> ThreadState:
        """Return the strand of this thread."""
        thread = get_ident()
        if thread == self.thread:
            return self
        strand = self._thread_states.get(thread)
        if strand is None:
            strand = self._thread_states[thread] = ThreadState(len(self._thread_states) + 1)
            self.has_threads = True
        return strand

    def own_graph(self, results: Any, arguments: Any) -> None:
        """Note that the nodes between results and arguments were made by what runs now, in a thread of the model's."""
        if self.backward and get_ident() in self._adopted:
            self.owners.own_graph(results, arguments, self.thread_state().stack)

    @contextmanager
    def adopted_thread(self, stack: int) -> Iterator[None]:
        """Record what this thread, which the model started, does under a stack, for as long as the context lasts."""
        thread = get_ident()
        strand = self.thread_state()
        outer, strand.stack = strand.stack, stack
        self._adopted.add(thread)
        try:
            yield
        finally:
            self._adopted.discard(thread)
            strand.stack = outer

    @property
    def paused(self) -> bool:
        """Whether nothing is taken down just now."""
        return self._pauses > 0

    def pause(self) -> None:
        """Take nothing down until `resume` was called as often; entering and leaving is kept account of."""
        self._pauses += 1
        if self._kept is None:
            self._kept, self.events = self.events, _Ends()

    def resume(self) -> None:
        """Take down what happens from now on, if this ends the last pause."""
        self._pauses -= 1
        if self.unseen is not None:
            self.unseen.forget_contents()
        if not self._pauses and self.recording and self._kept is not None:
            self._kept += self.events
            self.events, self._kept = self._kept, None

    def region(self, region: Region) -> int:
        """Return the number of a region."""
        return self._regions.setdefault(region, len(self._regions))

    def enter(self, region: int, values: Any) -> int:
        """Push a region and return the token that `leave` wants back; `values` are its arguments."""
        meter = self.probe
        came = 0 if meter is None else meter.clock()
        inputs: tuple[Value, ...]
        if type(values) is tuple and len(values) == 1 and type(values[0]) is ShapeTensor:
            inputs = values[0].metadata.spec_tuple
        else:
            inputs = self._specs(values)
        if self.backward:
            strand = self.thread_state()
            strand.drop_ended_steps()
            base, phase = self._place(strand)
            node = current_autograd_node()
            self.events.append(("enter", region, base, phase, strand.thread_number))
        else:
            strand, node = self.thread_state() if self._thread_states else self, None
            base = strand.stack
            if strand is self:
                self.events.append(("enter", region, base))
            else:
                self.events.append(("enter", region, base, "forward", strand.thread_number))
        opened = strand.opened
        token = len(opened)
        outer = strand.stack
        strand.stack = self.inside(base, region)
        if meter is None:
            opened.append(OpenRegion(region, outer, base, inputs, node, None))
            return token
        begun = meter.begin()
        opened.append(OpenRegion(region, outer, base, inputs, node, begun))
        begun.ns = meter.clock()
        meter.overhead_ns += begun.ns - came
        begun.overhead_ns = meter.overhead_ns
        return token

    def leave(self, token: int, values: Any, error: BaseException | None = None) -> None:
        """Pop a region, and whatever was left open inside it; `values` are its results, `error` what it raised."""
        meter = self.probe
        left = 0 if meter is None else meter.clock()
        strand = self.thread_state() if self.backward or self._thread_states else self
        region, outer, base, inputs, _, begun = strand.opened[token]
        measured: tuple[Any, ...] = ()
        if meter is not None and begun is not None:
            duration = meter.end(begun, left)
            measured = None, *meter.columns(begun, duration)
        del strand.opened[token:]
        if self.backward:
            self.owners.note(strand.stack)
        if isinstance(error, Exception) and error is not self._raised[0] and type(error) is not StopRecomputation:
            self._raised = error, strand.stack
        outputs: tuple[Value, ...]
        if type(values) is ShapeTensor:
            outputs = values.metadata.spec_tuple
        else:
            outputs = _NO_TENSORS if error is not None else self._specs(values)
        calls = self._calls.setdefault(region, [])
        for known_inputs, known_outputs, known in calls:
            if known_inputs == inputs and known_outputs == outputs:
                number = known
                break
        else:
            number = len(self._region_signatures)
            self._region_signatures.append((region, inputs, outputs))
            calls.append((inputs, outputs, number))
        strand.stack = outer
        if error is None and strand is self and not self.backward and not measured:
            self.events.append(("exit", number, base, "forward"))
        else:
            phase = self._phase(strand, current_autograd_node())
            row = ("exit", number, base, phase, strand.thread_number, (), (), error is not None)
            self.events.append((*row, *measured))
        if meter is not None:
            meter.overhead_ns += meter.clock() - left

    def inside(self, stack: int, region: int) -> int:
        """Return the number of the stack that has one more region in it than another."""
        place = stack, region
        inner = self._inner.get(place)
        if inner is None:
            inner = self._inner[place] = len(self._paths)
            self._paths.append((*self._paths[stack], region))
        return inner

    def stack_at(self, module: str) -> int:
        """Return the stack of a module's own, as if each module that it stands in had been called."""
        stack = 0
        for name in (*modules_above(module), module):
            stack = self.inside(stack, self.region(Region("module", name)))
        return stack

    def fail(self, op: str, error: Exception) -> None:
        """Note what a run could not do, unless it has failed before."""
        if self.failure is None:
            self.failure = op, self.where(), error

    def forget_errors(self) -> None:
        """Let go of errors, whose frames hold this recorder and the run's tensors."""
        self.failure, self._raised = None, (None, 0)

    def why_not(self, error: Exception) -> str:
        """Return in one line what a run by shapes could not do, and in which module."""
        if self.failure is not None:
            op, module, cause = self.failure
            return f"{op or 'a tensor'} in module {module!r} cannot be run by shapes ({_first_line(cause)})"
        return f"module {self.where(error)!r} cannot be run by shapes ({_first_line(error)})"

    def where(self, error: BaseException | None = None) -> str:
        """Return the name of the module that an error came from, or that runs now."""
        stack = self._raised[1] if error is not None and error is self._raised[0] else self.stack
        regions = list(self._regions)
        names = [regions[region].name for region in self._paths[stack] if regions[region].kind == "module"]
        return names[-1] if names else ""

    def owner_of(self, node: Any) -> int:
        """Return the stack under which a node of autograd's graph was made, that of `BEFORE` where it was not seen."""
        if type(node).__name__ == _ACCUMULATES:
            key = id(node.variable)
            stack = self._home_stacks.get(key)
            if stack is None:
                stack = self.stack_at(self.module_of_tensor[key]) if key in self.module_of_tensor else 0
                self._home_stacks[key] = stack
            return stack
        owner = self.owners.stack_of(node)
        return self.stack_at(BEFORE) if owner is None else owner

    def note_autograd_nodes(self) -> None:
        """Note that the nodes which autograd made since the last op were made by what runs now."""
        self._place(self.thread_state())

    def begin_rerun(self, stack: int) -> tuple[int, Any]:
        """Note that a checkpointed forward runs again, under a stack, and return what `end_rerun` wants back."""
        strand = self.thread_state()
        self.note_autograd_nodes()
        before = strand.stack, strand.rerun
        strand.stack, strand.rerun = stack, current_autograd_node()
        return before

    def end_rerun(self, before: tuple[int, Any]) -> None:
        """Note that a checkpointed forward has been run again, as far as it was needed."""
        strand = self.thread_state()
        self.owners.note(strand.stack)
        strand.stack, strand.rerun = before

    def activate(self) -> None:
        """Note that something ran under the present stack that is no op."""
        self._active.add(self.thread_state().stack)

    def decompose(self, name: str) -> None:
        """Note that a composite op is looked into."""
        self._decomposed.add(name)
        self._active.add(self._place(self.thread_state())[0] if self.backward or self._thread_states else self.stack)

    def call(
        self, schema: OpSchema, inputs: tuple[Value, ...], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Take down one op call, after it ran; `inputs` are the normalised arguments as they were before."""
        signature = Signature(schema.name, schema.names, inputs, describe_result(result), schema.text)
        reads = self.storages_of((*args, *kwargs.values()), "outside")
        self.append_call(signature, reads, self.storages_of((result,), "op"))

    def record_opaque_call(self, op: str) -> None:
        """Take down one call of an op that runs where no dispatch mode sees it; all that is known of it is its name."""
        self.append_call(Signature(op, (), (), (), f"{op}(...)"), (), ())

    def add(self, number: int, reads: Sequence[int], writes: Sequence[int], measured: tuple[Any, ...] = ()) -> None:
        """Take down one call of the signature with a number, and the storages that it reads and makes.

        `measured` are the event's columns from `start_ns` on.
        """
        strand = self if get_ident() == self.thread else self.thread_state()
        stack, phase = self._place(strand, self._signatures[number].op)
        if phase == "optimizer":
            stack = strand.active_optimizers[-1].stack_of(reads)
        # As tuples, of which Python's collector loses sight: lists would make it look through all there is.
        row = ("op", number, stack, phase, strand.thread_number, tuple(reads), tuple(writes))
        self.events.append((*row, False, None, *measured) if measured else row)
        if self._limit is not None and len(self.events) >= self._limit and not self._pauses:
            self._fold()

    def _fold(self) -> None:
        """Keep of the events how often each call was made: all of a long run would fill the memory."""
        self._folded = self._count(self.events)
        self._let_go += len(self.events)
        self.events.clear()
        self.owners.forget_before(self._limit or 0)

    def _count(self, events: Sequence[tuple[Any, ...]]) -> tuple[_Calls, _Calls]:
        """Return how often each op and each region was called, in these events and in those that were let go."""
        calls, region_calls = self._folded or (Counter(), Counter())
        ops = Counter([event[1:4] for event in events if event[0] == "op"])
        # What raised was no whole call: of a module that a checkpoint's early stop ends, only the ops that ran count.
        exits = Counter([event[1:4] for event in events if event[0] == "exit" and not (len(event) > 7 and event[7])])
        return calls + ops, region_calls + exits

    def append_unseen(self, signature: Signature, stack: int, phase: str, index: int) -> None:
        """Record work that no dispatch mode saw, which wrote to a storage, as one op call."""
        self._active.add(stack)
        number, thread = self.number_of(signature), self.thread_state().thread_number
        self.events.append(("op", number, stack, phase, thread, (), (index,)))

    def uninitialised(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those tensors whose memory no op has written to since an op such as `aten::empty` made it."""
        found = []
        for tensor in tensors:
            for index in self.storages_of((tensor,)):
                writer = next(
                    (event for event in reversed(self.events) if event[0] == "op" and index in event[6]), None
                )
                if writer is not None and self._signatures[writer[1]].op in UNINITIALISED:
                    found.append(tensor)
        return found

    def place(self) -> tuple[int, str]:
        """Return the stack and the phase of what runs now."""
        return self._place(self.thread_state())

    def innermost_region(self, stack: int) -> Region:
        """Return the innermost region of a stack, the model where there is none."""
        path = self._paths[stack]
        return list(self._regions)[path[-1]] if path else Region("module", "")

    def append_call(self, signature: Signature, reads: Sequence[int], writes: Sequence[int]) -> None:
        """Take down one call by its signature."""
        self.add(self.number_of(signature), reads, writes)

    def keep_costliest_branch(self, runs: Sequence[Callable[[], Result]]) -> Result:
        """Run all of these, keep the record of the one that comes to most, the first of equals, and return its result.

        They are compared by what their ops count for, and where that is equal by the elements that these read and make.
        """
        mark = len(self.events)
        kept: tuple[tuple[int, int], list[tuple[Any, ...]], Result] | None = None
        for run in runs:
            result = run()
            events = self.events[mark:]
            del self.events[mark:]
            weight = self._weight_of(events)
            if kept is None or weight > kept[0]:
                kept = weight, events, result
            del result
        assert kept is not None
        del self.events[mark:]  # the ends of what the others made
        self.events += kept[1]
        return kept[2]

    def _weight_of(self, events: Sequence[tuple[Any, ...]]) -> tuple[int, int]:
        self._active.update([event[2] for event in events if event[0] == "op"])
        ops = [self._signatures[event[1]] for event in events if event[0] == "op"]
        flops = 0 if self._estimate_cost is None else sum(map(self._estimate_cost, ops))
        return flops, sum(spec.numel for op in ops for spec in tensors_in((*op.inputs, *op.outputs)))

    def number(self, signature: Signature) -> int:
        """Return the number of a signature; equal ones are to be one object, since to hash one takes long."""
        number = self._numbers.get(id(signature))
        if number is None:
            number = self._numbers[id(signature)] = len(self._signatures)
            self._signatures.append(signature)
        return number

    def number_of(self, signature: Signature) -> int:
        """Return the number of a signature that may be equal to another."""
        return self.number(self._own.setdefault(signature, signature))

    def register_storages(self, storages: Sequence[torch.UntypedStorage], rows: Sequence[tuple[Any, ...]]) -> list[int]:
        """Take down the storages of tensors that exist before the run, and throughout it; return their numbers."""
        keys = list(map(id, storages))
        known = self._known
        if not known and len(set(keys)) == len(keys):
            known.update(zip(keys, count()))
            self.storages += rows
            return list(range(len(rows)))
        for key, row in zip(keys, rows, strict=True):
            if key not in known:
                known[key] = len(self.storages)
                self.storages.append(row)
        return [known[key] for key in keys]

    def storage_of(self, tensor: torch.Tensor, origin: str) -> int:
        """Return the number of a tensor's storage; it is taken down as coming from `origin` if it is new."""
        storage = tensor.untyped_storage()
        index = self._known.get(id(storage))
        if index is None:
            index = self._add_storage(storage, origin)
            if origin == "outside" and self.unseen is not None:
                self.unseen.appeared(tensor, storage, index)
        return index

    def freed(self, index: int) -> None:
        """Take down that nothing refers to a storage any more."""
        if self.recording:
            if not self.backward:
                self.events.append(("free", index, self.stack))
                return
            # Python's collector may run in any thread.
            strand = self._thread_states.get(get_ident(), self)
            self.events.append(
                ("free", index, strand.stack, self._phase(strand, current_autograd_node()), strand.thread_number)
            )

    def close(self) -> None:
        """Take nothing more down, though regions may be left that were entered before."""
        self.recording = False
        self._kept, self.events = self._columns(), []
        if self.probe is not None:
            self._kept = self.probe.resolve(self._kept)
        self._watches.clear()
        self.unseen = None
        for strand in (self, *self._thread_states.values()):
            strand.active_optimizers.clear()  # one that raised holds its frame

    def trace(self, modules: ModuleTree, about: Mapping[str, str], *, complete: bool = True) -> Trace:
        """Return what was taken down so far."""
        events = self._columns()
        if self.recording:
            events = list(events) if self.probe is None else self.probe.resolve(events)
        calls, region_calls = self._count(events)
        self._active.update([stack for _, stack, _ in calls])
        outsiders = self._outsiders({*self._active, *(stack for _, stack, _ in region_calls)})
        return Trace(
            modules=modules.including(outsiders) if outsiders else modules,
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
            decomposed=frozenset(self._decomposed),
            active=frozenset(self._active),
            about=dict(about),
            complete=complete,
            lines=() if self._located is None else tuple(self._located.lines),
        )

    def _outsiders(self, stacks: Collection[int]) -> list[str]:
        """Return those owners that are no modules that are in any of these stacks."""
        owners = {Region("module", name): name for name in (BEFORE, OUTSIDE)}
        numbers = {self._regions[region]: name for region, name in owners.items() if region in self._regions}
        found = {index for stack in stacks for index in self._paths[stack]}
        return [name for index, name in numbers.items() if index in found]

    def _columns(self) -> list[tuple[Any, ...]]:
        if self._kept is None:
            return self.events
        return self._kept + self.events

    def _specs(self, values: Any) -> tuple[Value, ...]:
        """Return the specs of the tensors in nested values, in order."""
        return tuple([self.describe(tensor) for tensor in tensors_of(values)])

    def _place(self, strand: ThreadState, op: str = "") -> tuple[int, str]:
        """Return the stack and the phase of what runs now; in a backward pass, those of what made its node."""
        stack, phase = strand.stack, "forward"
        if not self.backward:
            return stack, phase
        node = current_autograd_node()
        owners = self.owners
        # Nearly all ops of a forward pass come no further.
        if node is not None or strand.active_optimizers or owners.callers:
            phase = self._phase(strand, node)
            # What a module does that is called inside a backward pass is its own, and so is what a checkpoint reruns.
            inside = node is None or node is strand.rerun or strand.has_opened_for(node)
            if not inside and phase != "optimizer":
                stack = self.owner_of(node)
        owners.note(stack, op)
        return stack, phase

    def _phase(self, strand: ThreadState, node: Any) -> str:
        if strand.active_optimizers:
            strand.drop_ended_steps()
            if strand.active_optimizers:
                return "optimizer"
        if not self.backward:
            return "forward"
        if node is None:
            # What autograd calls back when it is done with all nodes runs for none.
            return "backward" if self.owners.callers and self.owners.callers[-1] == get_ident() else "forward"
        again = strand.reruns or strand.rerun is node or _is_rerun_of_others(node)
        return "recompute" if again else "backward"

    def storages_of(self, values: Any, origin: str = "outside") -> tuple[int, ...]:
        """Return the numbers of the storages of nested tensors, each once."""
        ids: dict[int, None] = {}
        for value in values:
            if type(value) is ShapeTensor:
                ids[value.home.index] = None
            elif isinstance(value, torch.Tensor):
                if _has_storage(value):
                    ids[self.storage_of(value, origin)] = None
            elif isinstance(value, (list, tuple, dict)):
                ids.update(dict.fromkeys(self.storages_of(tensors_of(value), origin)))
        return tuple(ids)

    def _add_storage(self, storage: torch.UntypedStorage, origin: str) -> int:
        key = id(storage)
        index = self._known[key] = len(self.storages)
        nbytes = storage.nbytes()
        kind = nbytes, storage.device, origin
        row = self._rows.get(kind)
        if row is None:
            row = self._rows[kind] = nbytes, str(kind[1]), origin
        self.storages.append(row)
        if origin == "op":
            self.fresh[key] = index
            if self.probe is not None:
                self.probe.live += nbytes
        watch = weakref.ref(storage, self._gone)
        self._watches[id(watch)] = watch, key, index, nbytes
        return index

    @weak_callback
    def _gone(self, watch: weakref.ref[torch.UntypedStorage]) -> None:
        if self.recording:
            _, key, index, nbytes = self._watches.pop(id(watch))
            del self._known[key]
            if self.fresh.pop(key, None) is not None and self.probe is not None:
                self.probe.live -= nbytes
            if self.unseen is not None:
                self.unseen.freed(index)
            self.freed(index)


def _is_rerun_of_others(node: Any) -> bool:
    return type(node).__name__ == _REENTRANT and type(node) is not _TORCHS_OWN


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
    """Return the event of a row, in which a storage may stand twice."""
    once = dict.fromkeys
    return Event(kind, item, stack, phase, thread, tuple(once(reads)), tuple(once(writes)), raised, *measured)


class _Ends(list[tuple[Any, ...]]):
    """The events of a pause, of which only the ends of storages are kept."""

    def append(self, event: tuple[Any, ...]) -> None:
        if event[0] == "free":
            super().append(event)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_functorch_wrapped(tensor)
