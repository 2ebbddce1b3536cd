"""Replay calls of torch's leaf modules, such as Conv2d, in shape execution: most calls of a model repeat earlier ones.

A call that dispatches one op is cached as it runs, with all that the forward depends on: the kind of module, and the
metadata of its tensors and of the input. A later equal call appends the same events and returns an equal result,
without torch's Python code and the dispatch. A call runs if something may change its forward: hooks, modes, autocast,
torch.func, tracing, and attributes, parameters or functions that were replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fvflops.capture.model.attribute_plan import LeafKind
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.run_position import append_row
from fvflops.capture.shapes.metadata import Metadata
from fvflops.capture.shapes.shape_cache import LeafCall, leaf_calls_of
from fvflops.capture.shapes.shape_mode import ShapeMode, graph_tracer
from fvflops.capture.shapes.shape_tensor import OwnedStorage, ShapeTensor, make_shape_tensor
from fvflops.torch_internals import (
    dispatch_stack_length,
    function_stack_length,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
    is_any_autocast_enabled,
    message_of_missing,
    module_call,
    tracing_state,
    transform_depth,
)

_CALL_IMPL = None if message_of_missing(module_call[0]) else getattr(*module_call)
_INPUT = -1  # stands for the input among the positions of the tensors that a call reads
_FUNCTIONAL = vars(F)
_TENSOR_TYPES = frozenset({torch.Tensor, nn.Parameter, type(None)})


class Leaf(NamedTuple):
    """A module in a run: its contents before the run, its tensors' storages, its cached calls by input metadata."""

    kind: LeafKind
    values: list[Any]
    empty: tuple[Any, ...]
    parameters: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor | None]
    tensors: list[torch.Tensor | None]
    storages: list[int]
    calls: dict[Metadata, LeafCall]


class LeafCalls:
    """The leaf modules of a run in shape execution without autograd."""

    def __init__(self, recorder: Recorder, mode: ShapeMode, model_index: ModelIndex) -> None:
        self._recorder = recorder
        self._mode = mode
        self._values = model_index.values
        self._calls = leaf_calls_of(mode.settings, recorder.stops_at)
        self._modes = dispatch_stack_length() + 1  # with this run's mode, which is not active yet
        sizes = model_index.sizes[: len(model_index.modules)]
        originals = {kind: kind.is_original() for kind in set(model_index.kinds) if kind is not None}
        # By id of the module: its kind, and where its values begin and end.
        self._found = {
            id(module): (kind, end - size, end)
            for module, kind, size, end in zip(
                model_index.modules, model_index.kinds, sizes, accumulate(sizes), strict=True
            )
            if kind is not None and originals[kind]
        }
        self._leaves: dict[int, Leaf] = {}

    def find(self, module: nn.Module, value: Any) -> Leaf | None:
        """Return a module whose call with this argument can be replayed or cached, None for other modules."""
        key = id(module)
        if type(value) is not ShapeTensor or key not in self._found:
            return None
        leaf = self._leaves.get(key)
        if leaf is None:
            leaf = self._read(*self._found[key])
            if leaf is None:
                del self._found[key]
                return None
            self._leaves[key] = leaf
        kind, values, empty, parameters, buffers, tensors, _, _ = leaf
        attributes = module.__dict__
        if (
            all(map(is_, attributes.values(), values))
            and len(attributes) == len(values)
            and all(map(is_, (*parameters.values(), *buffers.values()), tensors))
            and len(parameters) + len(buffers) == len(tensors)
            and not any(empty)
            and type(module) is kind.cls
            and _FUNCTIONAL.get(kind.name) is kind.function
            and not function_stack_length()
            and dispatch_stack_length() == self._modes
            and not is_any_autocast_enabled()
            and not transform_depth()
            and not (global_forward_pre_hooks or global_forward_hooks)
            and not (global_backward_pre_hooks or global_backward_hooks)
            and tracing_state() is None
            and graph_tracer() is None
            and not self._recorder.has_threads
        ):
            return leaf
        return None

    def replay(self, leaf: Leaf, region: int, value: ShapeTensor) -> ShapeTensor | None:
        """Record a call that equals a cached one, and return its result; None if no cached call is equal."""
        metadata = value.metadata
        call = leaf.calls.get(metadata)
        if call is None or (call.context is not None and call.context() != call.setting):
            return None
        recorder, outcome, own = self._recorder, call.outcome, value.storage_ref.index
        if call.composite:
            recorder.decomposed.add(call.composite)
        storages = leaf.storages
        reads = [own if position < 0 else storages[position] for position in call.reads]
        index = self._mode.index_of(outcome)
        fresh = outcome.fresh
        if fresh is None:
            recorder.add_module_call(region, index, reads, (own,), metadata.spec_tuple, metadata.spec_tuple)
            return value
        written = append_row(recorder.storages, (*outcome.row,))
        result = make_shape_tensor(fresh, OwnedStorage(self._mode, recorder, written))
        recorder.add_module_call(region, index, reads, (written,), metadata.spec_tuple, fresh.spec_tuple)
        return result

    def cache(
        self, leaf: Leaf, value: ShapeTensor, metadata: Metadata, events: list[tuple[Any, ...]], result: Any
    ) -> None:
        """Cache a call with its events if it is one op on the input that returns a new tensor or the input."""
        outcome = self._mode.last_outcome
        if outcome is None or [event[0] for event in events] != ["enter", "op", "exit"]:
            return
        _, index, _, _, _, reads, writes = events[1]
        signature = outcome.signature
        if signature is None or not outcome.cacheable or index != self._mode.index_of(outcome):
            return
        if outcome.fresh is not None:
            is_simple = type(result) is ShapeTensor and result.metadata is outcome.fresh
        else:
            is_simple = result is value and outcome.source is not None and outcome.view is None
        own = value.storage_ref.index
        positions = {own: _INPUT, **{storage: position for position, storage in enumerate(leaf.storages)}}
        is_distinct = len(positions) == len(leaf.storages) + 1
        if not (is_simple and is_distinct and positions.keys() >= set(reads) and value.metadata is metadata):
            return
        op = self._mode.last_op
        composite = "" if op is None or op.schema.name == signature.op else op.schema.name
        if op is None or (composite and not (op.schema.composite and composite.startswith(f"aten::{leaf.kind.name}"))):
            return
        if tuple(writes) == (result.storage_ref.index,):
            leaf.calls[metadata] = LeafCall(outcome, tuple([positions[storage] for storage in reads]), composite)

    def _read(self, kind: LeafKind, start: int, end: int) -> Leaf | None:
        values = self._values[start:end]
        parameters, buffers = kind.pick_tensors(values)
        tensors = [*parameters.values(), *buffers.values()]
        if not _TENSOR_TYPES.issuperset(map(type, tensors)):
            return None  # a subclass, such as a quantised weight, may replace the op
        found = [None if tensor is None else self._mode.concrete.resolve(tensor) for tensor in tensors]
        key = (kind, *[None if item is None else item[1] for item in found])
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = {}
        storages = [item[2] for item in found if item is not None]
        return Leaf(kind, values, kind.pick_empty(values), parameters, buffers, tensors, storages, calls)


def find_leaf_calls(
    recorder: Recorder, mode: Any, model_index: ModelIndex, call_impl: Callable[..., Any]
) -> LeafCalls | None:
    """Return the leaf modules of a run; None if every call must run.

    Calls must run with autograd, in real execution, with source lines, inside another run, or with another wrapper of
    module calls.
    """
    is_plain = not (recorder.backward or recorder.has_lines) and call_impl is _CALL_IMPL
    can_replay = is_plain and type(mode) is ShapeMode and not mode.nested
    return LeafCalls(recorder, mode, model_index) if can_replay else None
