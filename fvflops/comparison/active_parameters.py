"""Compute the share of each parameter that is active for an average token, from a recorded run's matrix products."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from fvflops.formulas import load_table
from fvflops.trace import Event, ModuleTree, Signature, TensorSpec, Trace, TraceError, Value, tensors_in
from fvflops.trace.module_tree import modules_above


def find_expert_groups(tree: ModuleTree) -> Iterator[list[str]]:
    """Yield the names of sibling modules of one class with equal parameter shapes.

    >>> from fvflops.trace import ModuleInfo, ParameterInfo, TensorSpec
    >>> def linear(number: int, name: str, rows: int) -> ModuleInfo:
    ...     weight = ParameterInfo(f"{name}.weight", TensorSpec((rows, 3)), number, True)
    ...     return ModuleInfo(name, name, "Linear", parameters=(weight,))
    >>> root = ModuleInfo("", "", "Net", children=(("a", "a"), ("b", "b"), ("c", "c")))
    >>> tree = ModuleTree({"": root, "a": linear(0, "a", 2), "b": linear(1, "b", 2), "c": linear(2, "c", 4)})
    >>> list(find_expert_groups(tree))
    [['a', 'b']]
    """
    shapes: defaultdict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for parameter in tree.parameters():
        for owner in modules_above(parameter.name)[1:]:
            shapes[owner].append((parameter.name[len(owner) :], parameter.spec.shape))
    for module in tree.modules():
        candidates: defaultdict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], list[str]] = defaultdict(list)
        for _, path in module.children:
            child = tree.by_name.get(path) if path is not None else None
            if child is not None and child.name == child.canonical and child.name in shapes:
                candidates[child.class_name, tuple(shapes[child.name])].append(child.name)
        yield from (names for names in candidates.values() if len(names) > 1)


_GROUPED = frozenset({"aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"})
_PRODUCTS = _GROUPED | {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear", "aten::einsum"),
    *("aten::mv", "aten::addmv", "aten::_scaled_mm"),
}
# Their results depend on values, and select rows.
_SELECTORS = ("topk", "sort", "argsort", "argmax", "argmin", "multinomial", "max.dim", "min.dim")
_SELECTOR_OPS = frozenset(f"aten::{name}" for name in _SELECTORS)
# Their second argument is indexes of rows of the first.
_GATHERS = frozenset(f"aten::{name}" for name in ("index", "index_select", "gather", "take_along_dim", "masked_select"))
# These write rows into a preallocated tensor.
_SCATTERS = frozenset({"aten::index_put", "aten::index_put_", "aten::scatter", "aten::scatter_", "aten::copy_"})
_LOOKUPS = frozenset({"aten::embedding", "aten::embedding_bag", "aten::_embedding_bag"})


_ALL = Fraction(1)
_Specs = Mapping[int, TensorSpec]  # storage → the tensor that is read
_Names = Mapping[int, tuple[str, ...]]  # storage → the parameters that it contains


@dataclass(eq=False, slots=True)
class _ModuleCall:
    """One call of a module: the stack of regions under which its ops ran, the index of its first event, its inputs."""

    path: tuple[int, ...]
    start: int = -1
    inputs: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class _TokenSelection:
    """Rows that were selected from a storage by value.

    `source` is the storage and `spec` the tensor that was read, `call` the call of the module that selected, and
    `caller` the enclosing call, at whose end the selection expires. `of_weights` means that experts' weights were
    selected instead of tokens.
    """

    source: int
    spec: TensorSpec
    call: _ModuleCall
    caller: _ModuleCall
    of_weights: bool

    @property
    def width(self) -> int:
        return self.spec.shape[-1] if self.spec.shape else 1

    def tokens(self) -> int:
        """Return how many rows enter the selecting call, before any is duplicated."""
        specs = _floats_in(self.call.inputs)
        for spec in specs:
            if spec.shape[-1] == self.width:
                return _rows_of(spec)
            if spec.ndim > 3 and spec.shape[1] == self.width:  # an image, channels first
                return spec.numel // self.width if spec.numel else 0
        input_rows = max(map(_rows_of, specs), default=0)
        source_rows = _rows_of(self.spec)
        # The source can contain each input row several times; otherwise it was computed from something else.
        return input_rows if self.of_weights or (input_rows and source_rows % input_rows == 0) else source_rows


@dataclass(slots=True)
class _ExpertStack:
    """The use of a weight that stacks several experts: its MACs, and the selection of each call."""

    macs: Fraction = field(default_factory=Fraction)
    selections: dict[_ModuleCall, _TokenSelection | None] = field(default_factory=dict)

    def share(self, elements: int) -> Fraction:
        """Return the share of its elements that is active for an average token."""
        tokens = 0
        for call, selection in self.selections.items():
            tokens += next(map(_rows_of, _floats_in(call.inputs)), 0) if selection is None else selection.tokens()
        return min(_ALL, self.macs / (elements * tokens)) if elements and tokens else _ALL


def _floats_in(values: tuple[Value, ...]) -> list[TensorSpec]:
    return [spec for spec in tensors_in(values) if _is_float(spec) and spec.shape]


def _is_float(spec: TensorSpec) -> bool:
    return spec.is_floating_point or spec.is_complex


def _is_batch(spec: TensorSpec) -> bool:
    return spec.ndim > 2 and spec.shape[0] > 1


def _rows_of(spec: TensorSpec) -> int:
    """Return how many rows a tensor has along its last axis."""
    return spec.numel // spec.shape[-1] if spec.numel and spec.shape else 0


@dataclass(frozen=True, slots=True)
class Routing:
    """The use of each parameter in a run, by its canonical name.

    `shares` are the active shares for an average token: 1 for a dense weight, 2/8 for experts of which a token is
    routed to 2 of 8, 0 for a parameter that no op read. `looked_up` are embedding tables, which multiply nothing.
    """

    shares: Mapping[str, Fraction]
    looked_up: frozenset[str]
    unused: frozenset[str]


def read_routing(trace: Trace) -> Routing:
    """Return the share of each parameter that is active for an average token of a trace's forward passes.

    A share is the MACs of a weight divided by its elements and by the rows that enter the module whose call selects;
    for experts that are modules, the elements that enter an expert, divided by that module's. So experts that are
    computed for all tokens and then multiplied by zero are fully active, and so are experts whose rows were not
    selected by value, or whose op has no formula. A parameter that shares its storage (a wrapper, weights packed into
    one buffer) counts as used where its module runs. A trace without ordered events raises TraceError.
    """
    if trace.events is None:
        raise TraceError("this Trace has no ordered events; active parameters need them: record the model again")
    walk = _RoutingWalk(trace)
    for position, event in enumerate(trace.events):
        walk.add_event(position, event)
    return walk.routing()


class _RoutingWalk:
    """Walk the events of a trace, tracking which storages contain weights, selectors and selected rows."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._table = load_table("default")
        self._parameters = {parameter.name: parameter for parameter in trace.modules.parameters()}
        # Storage → the parameters that it contains, or a copy of them.
        self._weights: dict[int, tuple[str, ...]] = {
            index: (storage.name,)
            for index, storage in enumerate(trace.storages)
            if storage.origin == "parameter" or storage.name in self._parameters  # packed weights may be buffers
        }
        self._with_storage = {name for names in self._weights.values() for name in names}
        self._selectors: set[int] = set()
        # Storage → the selection that it derives from, and whether no parameter has been applied to it since.
        self._selected: dict[int, tuple[_TokenSelection, bool]] = {}
        self._created_at: dict[int, int] = {}
        self._calls: dict[tuple[int, ...], _ModuleCall] = {(): _ModuleCall(())}
        self._used: set[str] = set()
        self._looked_up: set[str] = set()
        self._computed_with: set[str] = set()
        self._multiplied: set[str] = set()
        self._dense: set[str] = set()
        self._stacks: defaultdict[str, _ExpertStack] = defaultdict(_ExpertStack)
        self._groups = list(find_expert_groups(trace.modules))
        self._grouped = {name for group in self._groups for name in group}
        # Module → its calls that selected rows entered → storage → the selection.
        self._arrivals: defaultdict[str, dict[_ModuleCall, dict[int, _TokenSelection]]] = defaultdict(dict)

    def add_event(self, position: int, event: Event) -> None:
        if event.phase != "forward":
            return
        trace = self._trace
        if event.kind == "op":
            self._add_op(position, event, trace.signatures[event.item])
        elif event.kind == "enter" and trace.regions[event.item].kind == "module":
            path = (*trace.stacks[event.stack], event.item)
            self._calls[path] = _ModuleCall(path, position)
        elif event.kind == "exit":
            signature = trace.region_signatures[event.item]
            call = self._calls.get((*trace.stacks[event.stack], signature.region))
            if call is not None:
                call.inputs = signature.inputs

    def _add_op(self, position: int, event: Event, signature: Signature) -> None:
        op = signature.packet
        specs = _specs_of_reads(signature, event)
        weights = {index: self._weights[index] for index in event.reads if index in self._weights}
        copied = self._copied_weights(op, event, specs, weights)
        for index, names in weights.items():
            if index not in event.writes:
                self._used.update(names)
                if op in _LOOKUPS:
                    self._looked_up.update(names)
                elif not copied:
                    self._computed_with.update(names)
        self._record_arrivals(event)
        if op in _PRODUCTS and weights and len(weights) < len(event.reads):
            self._add_product(event, signature, specs, weights)
        self._propagate(op, event, signature, bool(weights))
        for index in event.writes:
            if index not in event.reads:
                self._created_at[index] = position
                if copied:
                    self._weights[index] = copied

    def _copied_weights(self, op: str, event: Event, specs: _Specs, weights: _Names) -> tuple[str, ...]:
        """Return the parameters that an op casts, concatenates, stacks, or gathers from a stack of experts."""
        others = [index for index in event.reads if index not in weights]
        if not weights or op in _PRODUCTS or op in _LOOKUPS:
            return ()
        if any(index not in specs or _is_float(specs[index]) for index in others):
            return ()
        names = tuple(dict.fromkeys(name for names in weights.values() for name in names))
        # Rows gathered from a matrix may be an embedding lookup, whose result is not a weight.
        return () if op in _GATHERS and not any(self._is_stack(name) for name in names) else names

    def _is_stack(self, name: str) -> bool:
        return name in self._parameters and _is_batch(self._parameters[name].spec)

    def _add_product(self, event: Event, signature: Signature, specs: _Specs, weights: _Names) -> None:
        """Record a matrix product: of selected rows with a stack of experts, or of any rows with a dense weight."""
        for index, names in weights.items():
            spec = specs.get(index)
            if spec is not None and spec.ndim < 2:
                continue  # a bias
            self._multiplied.update(names)
            others = [other for other in event.reads if other not in weights]
            selection = self._find_selection([*others, index], event)
            grouped = signature.packet in _GROUPED
            batched = grouped or (spec is not None and _is_batch(spec))
            if selection is None and not grouped:
                self._dense.update(names)
                continue
            call = self._enclosing_call(self._trace.stacks[event.stack]) if selection is None else selection.call
            elements = sum(self._elements(name) for name in names)
            for name in names:
                if batched or self._is_stack(name):
                    macs = self._table.price(signature).macs
                    self._stacks[name].macs += Fraction(macs * self._elements(name), elements or 1)
                    self._stacks[name].selections.setdefault(call, selection)
                else:
                    self._dense.add(name)

    def _elements(self, name: str) -> int:
        return self._parameters[name].spec.numel if name in self._parameters else 0

    def _find_selection(self, storages: Iterable[int], event: Event) -> _TokenSelection | None:
        """Return the selection that one of some storages derives from, if its module is still running."""
        stack = self._trace.stacks[event.stack]
        for index in storages:
            if index in self._selected:
                selection, _ = self._selected[index]
                path = selection.caller.path
                if stack[: len(path)] == path and self._calls.get(path) is selection.caller:
                    return selection
        return None

    def _enclosing_call(self, path: tuple[int, ...]) -> _ModuleCall:
        while path not in self._calls:
            path = path[:-1]
        return self._calls[path]

    def _record_arrivals(self, event: Event) -> None:
        """Record which of the running modules received selected rows as inputs."""
        selections = {index: self._selected[index][0] for index in event.reads if self._is_unprocessed(index)}
        if not selections:
            return
        stack = self._trace.stacks[event.stack]
        for length, region in enumerate(stack, 1):
            name = self._trace.regions[region].name
            call = self._calls.get(stack[:length])
            if call is None or name not in self._grouped:
                continue
            for index, selection in selections.items():
                if self._created_at.get(index, -1) < call.start:
                    self._arrivals[name].setdefault(call, {})[index] = selection

    def _propagate(self, op: str, event: Event, signature: Signature, with_weights: bool) -> None:
        """Propagate selectors and selections from an op's reads to its writes."""
        reads, writes = event.reads, event.writes
        selection = self._new_selection(op, event, signature, with_weights)
        # Attention weighs values by a softmax, which does not select rows.
        mixes = with_weights or "softmax" in op or "scaled_dot_product" in op
        if op in _SELECTOR_OPS or signature.op in _SELECTOR_OPS or not (mixes or self._selectors.isdisjoint(reads)):
            self._selectors.update(writes)
        if selection is not None:
            self._selected.update(dict.fromkeys(writes, (selection, True)))
            return
        selections = [self._selected[index] for index in reads if index in self._selected]
        if selections:
            written = writes if op in _SCATTERS else ()
            others = [index for index in reads if index not in self._selected and index not in written]
            specs = _specs_of_reads(signature, event) if others else {}
            only_selected = not any(index not in specs or _is_float(specs[index]) for index in others)
            unprocessed = only_selected and not with_weights and all(unprocessed for _, unprocessed in selections)
            self._selected.update(dict.fromkeys(writes, (selections[0][0], unprocessed)))

    def _new_selection(self, op: str, event: Event, signature: Signature, with_weights: bool) -> _TokenSelection | None:
        """Return the selection that an op makes; rows selected from selected rows belong to the first selection."""
        reads = event.reads
        selectors = [index for index in reads if index in self._selectors]
        if op in _GATHERS:
            source = reads[0] if self._selectors.intersection(reads[1:]) else None
        elif op in _PRODUCTS and not with_weights and selectors:
            source = next((index for index in reads if index not in self._selectors), None)
        else:
            return None
        if source is None:
            return None
        if self._is_unprocessed(source):
            return self._selected[source][0]
        spec = _specs_of_reads(signature, event).get(source)
        if spec is None or not _is_float(spec):
            return None
        call = self._enclosing_call(self._trace.stacks[event.stack])
        caller = self._enclosing_call(call.path[:-1])
        return _TokenSelection(source, spec, call, caller, source in self._weights)

    def _is_unprocessed(self, index: int) -> bool:
        return index in self._selected and self._selected[index][1]

    def routing(self) -> Routing:
        running = {scope[-1] for stack in self._trace.active if (scope := self._trace.scopes()[stack])}
        used = self._used | {
            name for name in self._parameters if name not in self._with_storage and self._forward_owner(name) in running
        }
        stacks = {
            name: stack.share(self._elements(name)) for name, stack in self._stacks.items() if name not in self._dense
        }
        # (module, number of experts) → share: for parameters that are added along an axis of experts, such as biases.
        leading = {self._leading_size(name): share for name, share in stacks.items() if self._is_stack(name)}
        experts = self._expert_shares()
        shares = {}
        for name in self._parameters:
            above = [path for path in modules_above(name) if path in experts]
            if name not in used:
                share = Fraction(0)
            elif name in stacks or above:
                share = stacks[name] if name in stacks else experts[above[-1]]
            elif name in self._multiplied or self._parameters[name].spec.ndim < 2:
                share = _ALL
            else:
                share = leading.get(self._leading_size(name), _ALL)
            shares[name] = share
        return Routing(shares, frozenset(self._looked_up - self._computed_with), frozenset(self._parameters) - used)

    def _forward_owner(self, name: str) -> str | None:
        """Return the nearest module above a parameter that has a forward: a container of packed weights has none."""
        by_name = self._trace.modules.by_name
        owners = reversed(modules_above(name))
        return next((owner for owner in owners if owner in by_name and by_name[owner].has_forward), None)

    def _leading_size(self, name: str) -> tuple[str, int]:
        return name.rpartition(".")[0], self._parameters[name].spec.shape[0]

    def _expert_shares(self) -> dict[str, Fraction]:
        shares: dict[str, Fraction] = {}
        for group in self._groups:
            arrivals = {name: self._arrivals[name] for name in group if name in self._arrivals}
            if not self._is_partitioned(arrivals):
                continue
            selections = {selection.call: selection for calls in arrivals.values() for _, selection in _pairs(calls)}
            elements = sum(selection.tokens() * selection.width for selection in selections.values())
            for name, calls in arrivals.items() if elements else ():
                entered = sum(_selected_input(call, calls[call]).numel for call in calls)
                shares[name] = min(_ALL, Fraction(entered, elements))
        return shares

    def _is_partitioned(self, arrivals: Mapping[str, Mapping[_ModuleCall, Mapping[int, _TokenSelection]]]) -> bool:
        """Return whether modules split a selection of one tensor, instead of each processing all of it or its own."""
        names: defaultdict[int, set[str]] = defaultdict(set)
        for name, calls in arrivals.items():
            for _, selection in _pairs(calls):
                names[selection.source].add(name)
        storages = {index for calls in arrivals.values() for index, _ in _pairs(calls)}
        available = sum(self._trace.storages[index].nbytes for index in storages)
        consumed = sum(_selected_input(call, calls[call]).nbytes for calls in arrivals.values() for call in calls)
        return any(len(sharing) > 1 for sharing in names.values()) and consumed <= available


def _pairs(calls: Mapping[_ModuleCall, Mapping[int, _TokenSelection]]) -> Iterator[tuple[int, _TokenSelection]]:
    return (pair for selections in calls.values() for pair in selections.items())


def _selected_input(call: _ModuleCall, selections: Mapping[int, _TokenSelection]) -> TensorSpec:
    """Return the tensor of selected rows that entered a call, an empty one where none is found."""
    widths = {selection.width for selection in selections.values()}
    specs = _floats_in(call.inputs)
    first = specs[0] if specs else TensorSpec((0,))
    return next((spec for spec in specs if spec.shape[-1] in widths), first)


def _specs_of_reads(signature: Signature, event: Event) -> dict[int, TensorSpec]:
    """Return the spec of each storage that a call reads, {} where they cannot be matched."""
    specs = list(tensors_in(signature.inputs))
    return dict(zip(event.reads, specs, strict=True)) if len(specs) == len(event.reads) else {}
