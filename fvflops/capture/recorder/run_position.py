"""Where a run is: its threads, its stacks of open regions and its phase; regions, stacks and signatures by index."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any, NamedTuple

import torch

from fvflops.capture.decomposed_attention import Pairs
from fvflops.capture.instrument.probe import StartMark
from fvflops.capture.recorder.tensor_specs import intern_signature, nodes_between
from fvflops.torch_internals import CheckpointBackward, current_autograd_node, dispatch_mode_stack, next_sequence_number
from fvflops.trace import Region, Signature, Value
from fvflops.trace.module_tree import modules_above


def append_row(rows: list[Any], row: Any) -> int:
    """Append an object that the list does not hold yet and return its index, which no other thread gets.

    It holds no lock, which a signal could leave held.

    >>> append_row(["first"], "second")
    1
    """
    index = len(rows)
    rows.append(row)
    while rows[index] is not row:  # another thread or a signal's handler came between
        index += 1
    return index


class OpenRegion(NamedTuple):
    """An open region: the stack to restore, the stack of its call, input specs, current autograd node, readings."""

    region: int
    outer: int
    base: int
    inputs: tuple[Value, ...]
    node: Any
    start: StartMark | None


class ThreadState:
    """Recording state of one thread.

    `thread_number` is 0 for the thread that starts the recording. `stack` is the current stack, `opened` are the open
    regions that this thread entered. `rerun_node` is the node whose backward reruns a checkpointed forward; `reruns`
    counts the open reruns while a saved tensor is unpacked. `attention` are the pairs of the masked attention that is
    running, `active_optimizers` the running optimizer steps. `node_owners` maps the sequence numbers of the autograd
    nodes that this thread created to their stack and op, "" if unknown.

    Autograd numbers nodes in the order of their creation, just before the op is dispatched (for a write through a view,
    just after). `assign_nodes` is called at each op and whenever the stack changes, so all numbers since its previous
    call belong to the current stack.
    """

    def __init__(self, thread_number: int) -> None:
        self.thread_number = thread_number
        self.stack = 0
        self.opened: list[OpenRegion] = []
        self.reruns = 0
        self.rerun_node: Any = None
        self.attention: Pairs | None = None
        self.active_optimizers: list[Any] = []  # OptimizerStep of `instrument`, which imports this
        self.next_node = -1  # sequence number of the thread's next node, -1 before the first call of `assign_nodes`
        self.node_owners: dict[int, tuple[int, str]] = {}

    def assign_nodes(self, stack: int, op: str = "") -> None:
        """Attribute the nodes created since the previous call of this method to `stack`, and the newest one to `op`."""
        number = next_sequence_number()
        first = self.next_node
        if first < 0:
            # The owners of this thread's earlier nodes are unknown, but the op's node has just been created.
            first = number - (bool(op) and torch.is_grad_enabled() and number > 0)
        if number != first:
            if number - 1 != first:
                self.node_owners.update(dict.fromkeys(range(first, number - 1), (stack, "")))
            self.node_owners[number - 1] = stack, op
        self.next_node = number

    def drop_ended_steps(self) -> None:
        """Discard optimizer steps that raised: torch does not report their end."""
        while self.active_optimizers and not self.active_optimizers[-1].is_running():
            self.active_optimizers.pop()


# The node whose backward reruns a re-entrantly checkpointed forward: torch's class, and libraries' copies of it.
_REENTRANT = "CheckpointFunctionBackward"
_TORCH_CHECKPOINT_NODE: type = CheckpointBackward
# The node that accumulates a leaf's gradient.
_ACCUMULATES = "AccumulateGrad"
# Owners of backward ops that are not modules of the model.
BEFORE = "<before recording>"
OUTSIDE = "<outside the model>"


class RunPosition(ThreadState):
    """The current stack and phase of each thread of a run, and the tables of a Trace to which their indices refer.

    It is also the ThreadState of the thread that creates it; threads of autograd or of the model have other ones.
    `backward`: ops can run inside a backward pass. `module_of_tensor` maps ids of parameters and buffers to module
    names. `has_threads`: other threads than the first were recorded. `calling_threads` are the threads that are calling
    backward passes, the innermost last. `has_modules` and `is_after_pass`: the recording has a model, and no module of
    it was called since the last backward pass or optimizer step.
    """

    def __init__(self, backward: bool) -> None:
        super().__init__(0)
        self.next_node = next_sequence_number()
        self.thread = get_ident()
        self.recording = True
        self.backward = backward
        self.module_of_tensor: dict[int, str] = {}
        self.calling_threads: list[int] = []
        self.has_modules = False
        self.is_after_pass = False
        self.has_threads = False
        self._thread_states: dict[int, ThreadState] = {}
        self._thread_numbers = count(1)
        self._adopted: set[int] = set()
        # The last exception that left a region, and its stack. Errors keep frames alive, with their tensors: errors of
        # a checkpoint's early stop, or that end the program, are not stored.
        self._raised: tuple[BaseException | None, int] = (None, 0)
        self._owner_stacks: dict[int, int] = {}
        # Key of the stack in the metadata of autograd nodes that `assign_graph` attributed.
        self._mark = object()
        self._has_marks = False
        self._regions: dict[Region, int] = {}
        self._stack_children: dict[tuple[int, int], int] = {}
        self._module_stacks: dict[str, int] = {}
        self._paths: list[tuple[int, ...]] = [()]
        self._signatures: list[Signature] = []
        self._signature_indices: dict[int, int] = {}  # by id of the signature
        # By region: input specs, output specs and index of its signatures.
        self._region_calls: dict[int, list[tuple[tuple[Value, ...], tuple[Value, ...], int]]] = {}
        self._region_signatures: list[tuple[Any, ...]] = []

    def is_recording_thread(self) -> bool:
        """Return whether this thread is recorded: the first, one that the model started, or one of autograd."""
        if get_ident() == self.thread or get_ident() in self._adopted:
            return self.recording
        if not (self.recording and self.backward) or current_autograd_node() is None:
            return False
        return any(getattr(mode, "recorder", None) is self for mode in dispatch_mode_stack())

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

    def region(self, region: Region) -> int:
        return self._regions.setdefault(region, len(self._regions))

    def extend_stack(self, stack: int, region: int) -> int:
        key = stack, region
        inner = self._stack_children.get(key)
        if inner is None:
            inner = self._stack_children[key] = append_row(self._paths, (*self._paths[stack], region))
        return inner

    def stack_at(self, module: str) -> int:
        """Return the stack of a module, as if all modules that contain it had been called."""
        stack = self._module_stacks.get(module)
        if stack is None:
            outer = self.stack_at(above[-1]) if (above := modules_above(module)) else 0
            stack = self._module_stacks[module] = self.extend_stack(outer, self.region(Region("module", module)))
        return stack

    def module_at(self, stack: int) -> str:
        regions = list(self._regions)
        names = [regions[region].name for region in self._paths[stack] if regions[region].kind == "module"]
        return names[-1] if names else ""

    def current_module(self, error: BaseException | None = None) -> str:
        """Return the name of the module that is running, or that raised an error."""
        is_raised = error is not None and error is self._raised[0]
        return self.module_at(self._raised[1] if is_raised else self._thread_states.get(get_ident(), self).stack)

    def innermost_region(self, stack: int) -> Region:
        path = self._paths[stack]
        return list(self._regions)[path[-1]] if path else Region("module", "")

    def pseudo_modules(self, stacks: Collection[int]) -> list[str]:
        """Return the owners outside the model (BEFORE, OUTSIDE) that occur in these stacks."""
        regions = {index for stack in stacks for index in self._paths[stack]}
        return [name for name in (BEFORE, OUTSIDE) if self._regions.get(Region("module", name)) in regions]

    def signature_at(self, index: int) -> Signature:
        return self._signatures[index]

    def index_of(self, signature: Signature) -> int:
        """Return the index of a signature; equal ones must be one object, since hashing is slow."""
        index = self._signature_indices.get(id(signature))
        if index is None:
            index = self._signature_indices[id(signature)] = append_row(self._signatures, signature)
        return index

    def intern(self, signature: Signature) -> int:
        return self.index_of(intern_signature(signature))

    def region_signature(self, region: int, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> int:
        """Return the index of a region's signature."""
        calls = self._region_calls.setdefault(region, [])
        for earlier_inputs, earlier_outputs, earlier_index in calls:
            if earlier_inputs == inputs and earlier_outputs == outputs:
                return earlier_index
        index = append_row(self._region_signatures, (region, inputs, outputs))
        calls.append((inputs, outputs, index))
        return index

    def begin_rerun(self, stack: int) -> tuple[int, Any]:
        """Begin the rerun of a checkpointed forward under a stack; return the token for `end_rerun`."""
        state = self.thread_state()
        self.stack_and_phase(state)
        token = state.stack, state.rerun_node
        state.stack, state.rerun_node = stack, current_autograd_node()
        return token

    def end_rerun(self, token: tuple[int, Any]) -> None:
        state = self.thread_state()
        state.assign_nodes(state.stack)
        state.stack, state.rerun_node = token

    def stack_and_phase(self, state: ThreadState | None = None, op: str = "") -> tuple[int, str]:
        """Return a thread's stack and phase; in a backward pass, the stack under which its node was created.

        The autograd nodes created since the previous call are attributed to the stack, the newest one to `op`.
        """
        if state is None:
            state = self.thread_state()
        stack, phase = state.stack, "forward"
        if not self.backward:
            return stack, phase
        node = current_autograd_node()
        # Fast exit: most ops of a forward pass.
        if node is not None or state.active_optimizers or self.calling_threads or self.is_after_pass:
            phase = self._phase(state, node)
            # Modules called inside a backward pass, or rerun by a checkpoint, own their ops.
            if node is not None and phase != "optimizer" and node is not state.rerun_node:
                opened = state.opened
                if not opened or opened[-1].node is not node:
                    stack = self.owner_of(node)
        state.assign_nodes(stack, op)
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
            if self.calling_threads and self.calling_threads[-1] == get_ident():
                return "backward"
            return "other" if self.is_after_pass and not state.opened and not torch.is_grad_enabled() else "forward"
        is_checkpoint = type(node).__name__ == _REENTRANT and type(node) is not _TORCH_CHECKPOINT_NODE
        return "recompute" if state.reruns or state.rerun_node is node or is_checkpoint else "backward"

    def owner_of(self, node: Any) -> int:
        """Return the stack under which a node was created, whose innermost module owns its ops; `BEFORE` if unknown."""
        if type(node).__name__ == _ACCUMULATES:
            key = id(node.variable)
            stack = self._owner_stacks.get(key)
            if stack is None:
                stack = self.stack_at(self.module_of_tensor[key]) if key in self.module_of_tensor else 0
                self._owner_stacks[key] = stack
            return stack
        if self._has_marks and self._mark in node.metadata:
            mark: int = node.metadata[self._mark]
            return mark
        number = node._sequence_nr()
        owner = self._owner_among_threads(node, number) if self._thread_states else self.node_owners.get(number)
        return self.stack_at(BEFORE) if owner is None else owner[0]

    def _owner_among_threads(self, node: Any, number: int) -> tuple[int, str] | None:
        """Return the stack and op of a node: each thread counts from 0, so nodes of several can have one number.

        The owner is then an op that fits the node's name, preferably in the thread that called the backward pass.
        """
        states = {self.thread: self, **self._thread_states}
        owners = {thread: state.node_owners[number] for thread, state in states.items() if number in state.node_owners}
        if len(owners) > 1:
            name = node.name()
            owners = {thread: owner for thread, owner in owners.items() if _can_create(owner[1], name)} or owners
        caller = self.calling_threads[-1] if self.calling_threads else None
        return owners[caller] if caller in owners else next(iter(owners.values()), None)

    def own_last_node(self) -> None:
        """Attribute the newest autograd node, created before the open region was entered, to that region."""
        if self.backward and self.is_recording_thread():
            state = self.thread_state()
            state.assign_nodes(state.stack)
            state.node_owners[state.next_node - 1] = state.stack, ""

    def assign_graph(self, results: Any, arguments: Any) -> None:
        """In a thread of the model, assign the autograd nodes between arguments and results to the current stack.

        Nodes assigned by an earlier call stay as they are. Needed since nodes of equal ops can have equal numbers.
        """
        if not (self.backward and get_ident() in self._adopted):
            return
        self._has_marks = True
        stack = self.thread_state().stack
        for node in nodes_between(results, arguments, lambda node: self._mark in node.metadata):
            node.metadata[self._mark] = stack

    def keep_last_nodes(self, count: int) -> None:
        """Discard all but the last `count` nodes of each thread: graphs are short-lived."""
        for state in (self, *self._thread_states.values()):
            if len(state.node_owners) > count:
                state.node_owners = dict(list(state.node_owners.items())[-count:])


def _can_create(op: str, node: str) -> bool:
    """Return whether an op can have created a node: `aten::add.Tensor` creates `AddBackward0`."""
    node_class = node.rstrip("0123456789")
    if not op or not node_class.endswith("Backward") or "::" in node:
        return True
    packet = op.partition("::")[2].partition(".")[0]
    return node_class.removesuffix("Backward").lower() == packet.replace("_", "").lower()
