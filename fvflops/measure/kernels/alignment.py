"""Align profiler events, which are nested, with recorded calls; both are in order."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache

from fvflops.measure.kernels.recorded_calls import NO_WORK, RecordedCall
from fvflops.trace import Trace
from fvflops.trace.kernel_events import KernelRun
from fvflops.trace.module_tree import innermost

# If events and calls differ in order, they are aligned by their longest common subsequence, up to this many pairs of
# event and call; beyond that, each call is matched with the next event of its name among this many events.
_MAX_PAIRS, _WINDOW = 6_000_000, 400
# Op that autograd calls if no dispatch mode is active → the op that it calls under the recorder's mode.
_RECORDED_OPS = {"aten::_index_put_impl_": "aten::index_put_"}
# Op → names that its work may have in compiled code, where `aten::linear` is `aten::addmm`.
_EQUAL_WORK = {
    "aten::linear": re.compile(r"(addmm|baddbmm|bmm|linear|matmul|mm|_int_mm|_scaled_mm)"),
    "aten::convolution": re.compile(r"_?\w*conv(olution\w*|[123]d)"),
    "aten::scaled_dot_product_attention": re.compile(r"_?scaled_dot_product\w*attention\w*"),
    "aten::batch_norm": re.compile(r"\w*batch_norm\w*"),
    "aten::layer_norm": re.compile(r"(native_|_fused_)?layer_norm"),
    "aten::group_norm": re.compile(r"(native_)?group_norm"),
}

Pairs = list[tuple[int, int]]
_Key = Callable[[RecordedCall], Hashable]


def align(events: Sequence[RecordedCall], ends: Sequence[int], calls: Sequence[RecordedCall]) -> Pairs:
    """Return the alignment of two ordered lists as pairs of positions.

    Events nested in an aligned one, up to its end, are not aligned. Events are aligned by name and shapes first, and
    in the gaps by name. An op equals its in-place variant, since autograd accumulates gradients in
    place if no dispatch mode is active. Calls of modules and calls that have FLOPs are aligned first: an event of
    attention is not lost to the transposes inside it. Events of compiled code, of kind "compiled", are aligned with ops
    that may have the same work.
    """
    keys: list[tuple[_Key, _Key]] = [(_name, _name)]
    if any(event.kind == "compiled" for event in events):
        keys.append((_work_of("compiled"), _work_of("op")))
    if any(event.shapes for event in events) and any(call.shapes for call in calls):
        keys.insert(0, (_name_and_shapes, _name_and_shapes))
    pairs: Pairs = []
    anchors = [position for position, call in enumerate(calls) if call.kind == "module" or call.work != NO_WORK]
    for key_of_event, key_of_call in keys:
        event_keys, call_keys = [key_of_event(event) for event in events], [key_of_call(call) for call in calls]
        for positions in (anchors, range(len(calls))):
            pairs = _fill_gaps(pairs, event_keys, ends, call_keys, positions)
    return pairs


@cache
def name_of_work(name: str) -> str:
    """Return the op of the model whose work an op of compiled code may do.

    >>> name_of_work("aten::addmm"), name_of_work("aten::_scaled_dot_product_flash_attention")
    ('aten::linear', 'aten::scaled_dot_product_attention')
    """
    short = name.removeprefix("aten::")
    if short == name or "backward" in name:
        return name
    return next((op for op, names in _EQUAL_WORK.items() if names.fullmatch(short)), name.removesuffix("_"))


def _name(call: RecordedCall) -> Hashable:
    is_op = call.kind == "op"
    return call.kind, _RECORDED_OPS.get(call.name, call.name).removesuffix("_") if is_op else call.name


def _name_and_shapes(call: RecordedCall) -> Hashable:
    return _name(call), call.shapes


def _work_of(kind: str) -> _Key:
    return lambda call: ("work", name_of_work(call.name)) if call.kind == kind else _name(call)


_Keys = Sequence[Hashable]


def _fill_gaps(pairs: Pairs, events: _Keys, ends: Sequence[int], calls: _Keys, positions: Sequence[int]) -> Pairs:
    """Align events and calls in the gaps; `positions` are the calls to align."""
    filled: Pairs = []
    event_start = call_start = 0
    for event, call in (*pairs, (len(events), len(calls))):
        inside = positions[bisect_left(positions, call_start) : bisect_left(positions, call)]
        expected = [calls[position] for position in inside]
        wanted, gap = set(expected), range(event_start, event)
        candidates = [position for position in gap if events[position] in wanted and ends[position] <= event]
        local_ends = [bisect_left(candidates, ends[position]) for position in candidates]
        local = _align_names([events[position] for position in candidates], local_ends, expected)
        filled += [(candidates[position], inside[number]) for position, number in local]
        filled.append((event, call))
        if call < len(calls):
            event_start, call_start = ends[event], call + 1
    return filled[:-1]


def _align_names(names: _Keys, ends: Sequence[int], expected: _Keys) -> Pairs:
    """Return the alignment of one gap: greedy if that aligns all, else the longest, or greedy where that is slow."""
    if not names or not expected:
        return []
    pairs = _align_greedily(names, ends, expected)
    if len(pairs) == len(expected):
        return pairs
    if len(names) * len(expected) <= _MAX_PAIRS:
        return _align_longest(names, ends, expected)
    return _align_greedily(names, ends, expected, window=_WINDOW)


def _align_greedily(names: _Keys, ends: Sequence[int], expected: _Keys, *, window: int | None = None) -> Pairs:
    """Align each expected name with the next equal one within `window` names; without it, stop at the first miss."""
    pairs: Pairs = []
    start = 0
    for expected_position, name in enumerate(expected):
        stop = len(names) if window is None else min(start + window, len(names))
        position = next((position for position in range(start, stop) if names[position] == name), None)
        if position is not None:
            pairs.append((position, expected_position))
            start = ends[position]
        elif window is None:
            break
    return pairs


def _align_longest(names: _Keys, ends: Sequence[int], expected: _Keys) -> Pairs:
    """Return a longest common subsequence as pairs of positions, preferring outer events."""
    count = len(expected)
    # lengths[i][j]: the length of the longest alignment of names[i:] and expected[j:].
    lengths = [array("I", bytes(4 * (count + 1))) for _ in range(len(names) + 1)]
    numbers: dict[Hashable, int] = {}
    expected_numbers = [numbers.setdefault(name, len(numbers)) for name in expected]
    for position in range(len(names) - 1, -1, -1):
        number = numbers.get(names[position], -1)
        row, next_row, end_row = lengths[position], lengths[position + 1], lengths[ends[position]]
        longest = 0
        for column in range(count - 1, -1, -1):
            if next_row[column] > longest:
                longest = next_row[column]
            if expected_numbers[column] == number and end_row[column + 1] >= longest:
                longest = end_row[column + 1] + 1
            row[column] = longest
    pairs: Pairs = []
    position = column = 0
    while position < len(names) and column < count:
        length = lengths[position][column]
        if names[position] == expected[column] and lengths[ends[position]][column + 1] + 1 == length:
            pairs.append((position, column))
            position, column = ends[position], column + 1
        elif lengths[position][column + 1] == length:
            column += 1
        else:
            position += 1
    return pairs


def find_owners(
    run: KernelRun, call_of_event: Mapping[int, int], trace: Trace | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the module and the phase of each event.

    A matched op, and the autograd node that runs it, have the module and phase of the Trace. Any other event in a
    module call belongs to that module, and an autograd node to the module of the last forward op with the node's
    sequence number; a node of gradient accumulation has no sequence number, and belongs to the module of the node
    before it.
    """
    scopes, recorded = ([], ()) if trace is None else (trace.scopes(), trace.events or ())
    located = {
        event_index: (innermost(scopes[recorded[index].stack]), recorded[index].phase)
        for event_index, index in call_of_event.items()
        if run.events[event_index].kind == "op"
    }
    nodes = _locate_nodes(run, located)
    modules: list[str] = []
    phases: list[str] = []
    forward_modules: dict[tuple[int, int], str] = {}
    last_modules: dict[int, str] = {}  # thread → the module of its last node
    for event_index, event in enumerate(run.events):
        parent = event.parent
        module, phase = (modules[parent], phases[parent]) if 0 <= parent < event_index else ("", "forward")
        if event.kind == "module":
            module, phase = event.module, "recompute" if phase in ("backward", "recompute") else phase
        elif event.kind == "optimizer":
            module, phase = "", "optimizer"
        elif event.kind == "node" and (parent < 0 or run.events[parent].kind != "node"):
            phase = "backward"
            last_module = last_modules.get(event.thread, "")
            forward_module = forward_modules.get((event.forward_thread, event.sequence), last_module)
            module = last_modules[event.thread] = nodes.get(event_index, forward_module)
        if event_index in located:
            module, phase = located[event_index]
        if event.kind == "op" and event.sequence >= 0:
            forward_modules[event.thread, event.sequence] = module
        modules.append(module)
        phases.append(phase)
    return tuple(modules), tuple(phases)


def _locate_nodes(run: KernelRun, located: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Return the modules of the autograd nodes in which matched ops of the backward pass ran."""
    nodes: dict[int, str] = {}
    for event_index, (module, phase) in located.items():
        parent = run.events[event_index].parent
        while phase == "backward" and parent >= 0:
            if run.events[parent].kind == "node":
                nodes.setdefault(parent, module)
            parent = run.events[parent].parent
    return nodes
