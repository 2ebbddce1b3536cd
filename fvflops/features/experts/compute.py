"""The routing: which share of each parameter works on an average token, told by what a run let it multiply.

Nothing is read from a configuration. A run *picks* rows when it gathers them by a choice (the indexes that a top-k, a
sort or an argmax gave), or multiplies them with such a choice (a one-hot mask). Two kinds of parameters work on picked
rows only: a stack of experts' weights, of which each row meets one, and modules of one kind side by side that share
out what was picked of one tensor. Each other parameter that is used works on every token, however few of the rows it
meets: a pooler that sees one token, a decoder that sees the best queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from fvflops.features.experts.expert_groups import find_expert_groups
from fvflops.features.experts.token_routing import (
    ALL,
    ExpertStack,
    ModuleCall,
    TokenSelection,
    floats_in,
    is_batch,
    is_float,
)
from fvflops.formulas import load_table
from fvflops.trace import Event, Signature, TensorSpec, Trace, TraceError, tensors_in
from fvflops.trace.module_tree import modules_above

_GROUPED = frozenset({"aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"})
_PRODUCTS = _GROUPED | {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear", "aten::einsum"),
    *("aten::mv", "aten::addmv", "aten::_scaled_mm"),
}
# What these return was chosen by value.
_CHOICES = frozenset(
    {
        *("aten::topk", "aten::sort", "aten::argsort", "aten::argmax", "aten::argmin", "aten::multinomial"),
        *("aten::max.dim", "aten::min.dim"),
    }
)
# These take rows of their first argument, by indexes that are the next.
_GATHERS = frozenset(
    {"aten::index", "aten::index_select", "aten::gather", "aten::take_along_dim", "aten::masked_select"}
)
# These lay rows into a tensor that was made for them.
_FILLS = frozenset({"aten::index_put", "aten::index_put_", "aten::scatter", "aten::scatter_", "aten::copy_"})
_LOOKUPS = frozenset({"aten::embedding", "aten::embedding_bag", "aten::_embedding_bag"})


@dataclass(frozen=True, slots=True)
class Routing:
    """What a run did with the parameters, by the first name of each.

    `shares` are the parts of each parameter that work on an average token: 1 for a dense weight, 2/8 for experts of
    whom a token meets 2 of 8, 0 for a parameter that no op read. `looked_up` are tables that multiply nothing.
    """

    shares: Mapping[str, Fraction]
    looked_up: frozenset[str]
    unused: frozenset[str]


def read_routing(trace: Trace) -> Routing:
    """Return the share of each parameter that works on an average token of a trace's forward passes.

    A share is the multiply-adds that a weight does, over its elements and over the rows that enter the module whose
    call picks; of experts that are modules, the elements that enter an expert over those that enter that module. So
    experts that are computed for all tokens, to be weighted by zero, are wholly active, and so are experts whose rows
    were not chosen by value, or that an op multiplies that no formula knows. A parameter whose storage is not its own
    (a wrapper, weights laid in one block) is used where its module runs. A trace without its ordered events raises
    TraceError.
    """
    if trace.events is None:
        raise TraceError("this trace keeps no ordered events, which tell what was routed where: record the model again")
    walk = _Walk(trace)
    for position, event in enumerate(trace.events):
        walk.see(position, event)
    return walk.routing()


class _Walk:
    """The walk over the events of a trace, and what is known of its storages and calls by now."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._table = load_table("default")
        self._parameters = {parameter.name: parameter for parameter in trace.modules.parameters()}
        # Storage → the parameters that it holds, or holds a copy of.
        self._weights: dict[int, tuple[str, ...]] = {
            index: (storage.name,) for index, storage in enumerate(trace.storages) if storage.origin == "parameter"
        }
        self._told = {name for names in self._weights.values() for name in names}
        self._chosen: set[int] = set()
        # Storage → what was picked for it, and whether nothing was computed with it by a parameter since.
        self._picked: dict[int, tuple[TokenSelection, bool]] = {}
        self._made: dict[int, int] = {}
        self._calls: dict[tuple[int, ...], ModuleCall] = {(): ModuleCall(())}
        self._used: set[str] = set()
        self._looked_up: set[str] = set()
        self._computing: set[str] = set()
        self._multiplied: set[str] = set()
        self._whole: set[str] = set()
        self._stacks: defaultdict[str, ExpertStack] = defaultdict(ExpertStack)
        self._groups = list(find_expert_groups(trace.modules))
        self._grouped = {name for group in self._groups for name in group}
        # Module → its calls that picked rows came to → the pick and its storage.
        self._arrivals: defaultdict[str, dict[ModuleCall, dict[int, TokenSelection]]] = defaultdict(dict)

    def see(self, position: int, event: Event) -> None:
        """Take in the next event."""
        if event.phase != "forward":
            return
        trace = self._trace
        if event.kind == "op":
            self._see_op(position, event, trace.signatures[event.item])
        elif event.kind == "enter" and trace.regions[event.item].kind == "module":
            path = (*trace.stacks[event.stack], event.item)
            self._calls[path] = ModuleCall(path, position)
        elif event.kind == "exit":
            signature = trace.region_signatures[event.item]
            call = self._calls.get((*trace.stacks[event.stack], signature.region))
            if call is not None:
                call.inputs = signature.inputs

    def _see_op(self, position: int, event: Event, signature: Signature) -> None:
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
                    self._computing.update(names)
        self._see_arrivals(event)
        if op in _PRODUCTS and weights and len(weights) < len(event.reads):
            self._see_product(event, signature, specs, weights)
        self._pass_on(op, event, signature, bool(weights))
        for index in event.writes:
            if index not in event.reads:
                self._made[index] = position
                if copied:
                    self._weights[index] = copied

    def _copied_weights(
        self,
        op: str,
        event: Event,
        specs: Mapping[int, TensorSpec],
        weights: Mapping[int, tuple[str, ...]],
    ) -> tuple[str, ...]:
        """Return the parameters that an op makes a copy of: cast, merged, stacked, or experts gathered from a stack."""
        others = [index for index in event.reads if index not in weights]
        if not weights or op in _PRODUCTS or op in _LOOKUPS:
            return ()
        if any(index not in specs or is_float(specs[index]) for index in others):
            return ()
        names = tuple(dict.fromkeys(name for names in weights.values() for name in names))
        # Rows of a matrix may be looked up of a table: they are no weights.
        return () if op in _GATHERS and not any(self._is_stack(name) for name in names) else names

    def _is_stack(self, name: str) -> bool:
        return name in self._parameters and is_batch(self._parameters[name].spec)

    def _see_product(
        self,
        event: Event,
        signature: Signature,
        specs: Mapping[int, TensorSpec],
        weights: Mapping[int, tuple[str, ...]],
    ) -> None:
        """Take in what a product multiplies: picked rows with a stack of weights, or whatever with a whole one."""
        for index, names in weights.items():
            spec = specs.get(index)
            if spec is not None and spec.ndim < 2:
                continue  # a bias
            self._multiplied.update(names)
            others = [other for other in event.reads if other not in weights]
            pick = self._pick_among([*others, index], event)
            grouped = signature.packet in _GROUPED
            batched = grouped or (spec is not None and is_batch(spec))
            if pick is None and not grouped:
                self._whole.update(names)
                continue
            call = self._call_around(self._trace.stacks[event.stack]) if pick is None else pick.call
            elements = sum(self._elements(name) for name in names)
            for name in names:
                if batched or self._is_stack(name):
                    macs = self._table.price(signature).macs
                    self._stacks[name].macs += Fraction(macs * self._elements(name), elements or 1)
                    self._stacks[name].picks.setdefault(call, pick)
                else:
                    self._whole.add(name)

    def _elements(self, name: str) -> int:
        return self._parameters[name].spec.numel if name in self._parameters else 0

    def _pick_among(self, storages: Iterable[int], event: Event) -> TokenSelection | None:
        """Return what was picked for one of some storages, in a module that still runs."""
        stack = self._trace.stacks[event.stack]
        for index in storages:
            if index in self._picked:
                pick, _ = self._picked[index]
                path = pick.around.path
                if stack[: len(path)] == path and self._calls.get(path) is pick.around:
                    return pick
        return None

    def _call_around(self, path: tuple[int, ...]) -> ModuleCall:
        """Return the innermost call of a module in which what runs under a stack runs."""
        while path not in self._calls:
            path = path[:-1]
        return self._calls[path]

    def _see_arrivals(self, event: Event) -> None:
        """Take in which of the modules that run were handed picked rows."""
        picks = {index: self._picked[index][0] for index in event.reads if self._is_fresh(index)}
        if not picks:
            return
        stack = self._trace.stacks[event.stack]
        for length, region in enumerate(stack, 1):
            name = self._trace.regions[region].name
            call = self._calls.get(stack[:length])
            if call is None or name not in self._grouped:
                continue
            for index, pick in picks.items():
                if self._made.get(index, -1) < call.began:
                    self._arrivals[name].setdefault(call, {})[index] = pick

    def _pass_on(self, op: str, event: Event, signature: Signature, with_weights: bool) -> None:
        """Take in which of the results were chosen, and for which something was picked."""
        reads, writes = event.reads, event.writes
        pick = self._new_pick(op, event, signature, with_weights)
        # A choice that attention makes among keys ends in a softmax: what it weighs is mixed, not picked.
        ends = with_weights or "softmax" in op or "scaled_dot_product" in op
        if op in _CHOICES or signature.op in _CHOICES or not (ends or self._chosen.isdisjoint(reads)):
            self._chosen.update(writes)
        if pick is not None:
            self._picked.update(dict.fromkeys(writes, (pick, True)))
            return
        known = [self._picked[index] for index in reads if index in self._picked]
        if known:
            others = [index for index in reads if index not in self._picked and not (op in _FILLS and index in writes)]
            specs = _specs_of_reads(signature, event) if others else {}
            alone = not any(index not in specs or is_float(specs[index]) for index in others)
            fresh = alone and not with_weights and all(fresh for _, fresh in known)
            self._picked.update(dict.fromkeys(writes, (known[0][0], fresh)))

    def _new_pick(self, op: str, event: Event, signature: Signature, with_weights: bool) -> TokenSelection | None:
        """Return what an op picks; rows that are picked of picked rows are still those of the first pick."""
        reads = event.reads
        chosen = [index for index in reads if index in self._chosen]
        if op in _GATHERS:
            source = reads[0] if self._chosen.intersection(reads[1:]) else None
        elif op in _PRODUCTS and not with_weights and chosen:
            source = next((index for index in reads if index not in self._chosen), None)
        else:
            return None
        if source is None:
            return None
        if self._is_fresh(source):
            return self._picked[source][0]
        spec = _specs_of_reads(signature, event).get(source)
        if spec is None or not is_float(spec):
            return None
        call = self._call_around(self._trace.stacks[event.stack])
        around = self._call_around(call.path[:-1])
        return TokenSelection(source, spec, call, around, source in self._weights)

    def _is_fresh(self, index: int) -> bool:
        return index in self._picked and self._picked[index][1]

    # --- what it came to ---

    def routing(self) -> Routing:
        """Return the shares."""
        running = {scope[-1] for stack in self._trace.active if (scope := self._trace.scopes()[stack])}
        used = self._used | {
            name for name in self._parameters if name not in self._told and self._computing_module(name) in running
        }
        stacks = {
            name: stack.share(self._elements(name)) for name, stack in self._stacks.items() if name not in self._whole
        }
        # (module, number of experts) → share: what is laid out by expert too, as the experts' biases.
        leading = {self._laid_out(name): share for name, share in stacks.items() if self._is_stack(name)}
        experts = self._share_out()
        shares = {}
        for name in self._parameters:
            if name not in used:
                share = Fraction(0)
            elif name in stacks:
                share = stacks[name]
            elif (above := next((path for path in reversed(modules_above(name)) if path in experts), None)) is not None:
                share = experts[above]
            elif name in self._multiplied or self._parameters[name].spec.ndim < 2:
                share = ALL
            else:
                share = leading.get(self._laid_out(name), ALL)
            shares[name] = share
        return Routing(
            shares,
            frozenset(self._looked_up - self._computing),
            frozenset(self._parameters) - used,
        )

    def _computing_module(self, name: str) -> str | None:
        """Return the nearest module above a parameter that has a forward: one that only keeps packed weights has none.

        None, where no module has one.
        """
        places, above = self._trace.modules.places, reversed(modules_above(name))
        return next((path for path in above if path in places and places[path].has_forward), None)

    def _laid_out(self, name: str) -> tuple[str, int]:
        return name.rpartition(".")[0], self._parameters[name].spec.shape[0]

    def _share_out(self) -> dict[str, Fraction]:
        """Return the share of each module that is one of several experts."""
        shares: dict[str, Fraction] = {}
        for group in self._groups:
            arrivals = {name: self._arrivals[name] for name in group if name in self._arrivals}
            if not self._is_shared_out(arrivals):
                continue
            picks = {pick.call: pick for calls in arrivals.values() for _, pick in _pairs(calls)}
            entering = sum(pick.tokens() * pick.width for pick in picks.values())
            for name, calls in arrivals.items():
                if entering:
                    shares[name] = min(
                        ALL, Fraction(sum(_entered(call, calls[call]).numel for call in calls), entering)
                    )
        return shares

    def _is_shared_out(self, arrivals: Mapping[str, Mapping[ModuleCall, Mapping[int, TokenSelection]]]) -> bool:
        """Return whether modules share out what was picked of one tensor, rather than see all of it or another each."""
        names: defaultdict[int, set[str]] = defaultdict(set)
        for name, calls in arrivals.items():
            for _, pick in _pairs(calls):
                names[pick.source].add(name)
        storages = {index for calls in arrivals.values() for index, _ in _pairs(calls)}
        there = sum(self._trace.storages[index].nbytes for index in storages)
        taken = sum(_entered(call, calls[call]).nbytes for calls in arrivals.values() for call in calls)
        return any(len(sharing) > 1 for sharing in names.values()) and taken <= there


def _pairs(calls: Mapping[ModuleCall, Mapping[int, TokenSelection]]) -> Iterator[tuple[int, TokenSelection]]:
    return (pair for picks in calls.values() for pair in picks.items())


def _entered(call: ModuleCall, picks: Mapping[int, TokenSelection]) -> TensorSpec:
    """Return the tensor of picked rows that entered a call; it is empty where none is to be seen."""
    widths = {pick.width for pick in picks.values()}
    specs = floats_in(call.inputs)
    first = specs[0] if specs else TensorSpec((0,))
    return next((spec for spec in specs if spec.shape[-1] in widths), first)


def _specs_of_reads(signature: Signature, event: Event) -> dict[int, TensorSpec]:
    """Return the spec of each storage that a call reads, {} where they cannot be told apart."""
    specs = list(tensors_in(signature.inputs))
    return dict(zip(event.reads, specs, strict=True)) if len(specs) == len(event.reads) else {}
