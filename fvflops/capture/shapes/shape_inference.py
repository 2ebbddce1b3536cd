"""Infer the result of an op call that is not in the cache of shape execution, by running it on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.lazy_values.run_values import COUNTS, INDEPENDENT, base_name, is_supported
from fvflops.capture.recorder.tensor_specs import describe, describe_result, intern_signature, normalise, tensors_of
from fvflops.capture.recorder.value_reader import ValueReader, add_values
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.restore import written_arguments
from fvflops.capture.shapes.concrete_tensors import INTEGRAL, ConcreteTensors, is_small
from fvflops.capture.shapes.metadata import META, Metadata, bits_of, intern
from fvflops.capture.shapes.rules.data_dependent import depends_on_values
from fvflops.capture.shapes.rules.shape_rules import Rule, ShapeRules
from fvflops.capture.shapes.shape_cache import (
    SCALARS,
    CachedResult,
    OpCache,
    Output,
    Settings,
    ShapeCall,
    unpack_result,
)
from fvflops.capture.shapes.shape_tensor import DataDependentError, UnsupportedError
from fvflops.capture.shapes.symbolic_imports import without_symbolic_imports
from fvflops.torch_internals import OpOverload, set_conjugate, set_negative
from fvflops.trace import Signature, Symbol


class OpInference:
    """Infer results of ops on a device by shape rules; data-dependent calls without values raise."""

    def __init__(self, device: torch.device, settings: Settings, rules: ShapeRules, concrete: ConcreteTensors) -> None:
        self._device = device
        self._settings = settings
        self._rules = rules
        self._concrete = concrete
        self.values = ValueReader(concrete.have_values)

    def infer(self, call: ShapeCall) -> CachedResult:
        """Return the outcome of a call; cache it under the call's key if possible."""
        func, op, tensors = call.func, call.op, call.tensors
        name = op.schema.name
        metadata = [self._concrete.metadata_of(tensor) for tensor in tensors]
        # Data from other ranks is unknown, since nothing is sent.
        known = not op.needs_other_ranks(call.args, call.kwargs) and all(item.known for item in metadata)
        rule = self._rules.rule_for(func)
        cacheable = True
        try:
            outcome = self._run(call, metadata, rule)
        except Exception as error:
            if interrupts.is_interrupt(error):
                raise
            computable = known and tensors and isinstance(func, OpOverload)
            if computable or (depends_on_values(name) and self._concrete.have_values(tensors)):
                outcome, cacheable = CachedResult(None, concrete=True), bool(computable)
            else:
                outcome, cacheable = self._infer_from_values(call, metadata, rule, error), False
        if known and all(item.metadata is None or _is_computed(item.metadata, op) for item in outcome.outputs):
            outcome.concrete = True
        elif not outcome.concrete:
            outcome.lazy = _is_lazy(func, op, metadata, outcome)
        if outcome.outputs or not outcome.concrete:
            outcome.signature = self.sign(call, outcome.outputs, outcome.build)
        if op.context is None and _is_promoted(metadata, outcome):
            outcome.promoted = torch.get_default_dtype()
        outcome.find_shortcuts()
        outcome.cacheable = cacheable and op.pure and not _contains_objects((call.args, call.kwargs))
        if outcome.cacheable:
            op.outcomes[self._settings][call.key] = outcome
        return outcome

    def sign(self, call: ShapeCall, outputs: Sequence[Output], build: Callable[[list[Any]], Any] | None) -> Signature:
        """Return the signature of a call with these outputs."""
        schema, spec_of = call.op.schema, self._concrete.spec_of
        results = [item.value if item.metadata is None else item.metadata.spec for item in outputs]
        results = [spec_of(item) if isinstance(item, torch.Tensor) else item for item in results]
        inputs = normalise(schema, *call.with_replaced(spec_of, self._concrete.device_for))
        if schema.value_arguments:
            values = self.values.read(schema.value_arguments, call.args, call.kwargs)
            inputs = add_values(inputs, schema.value_arguments, values)
        result = describe_result(results[0] if build is None else build(results))
        return intern_signature(Signature(schema.name, schema.names, inputs, result, schema.text))

    def _infer_from_values(
        self, call: ShapeCall, metadata: Sequence[Metadata], rule: Rule, error: Exception
    ) -> CachedResult:
        """Return the outcome of a data-dependent call from known values or assumptions, or raise the error."""
        if any(item.known for item in metadata):
            try:
                return self._run(call, metadata, rule, use_known=True)
            except DataDependentError as retry_error:
                error = retry_error
            except Exception as retry_error:  # from mixing real and meta tensors; the first error is the op's own
                if interrupts.is_interrupt(retry_error):
                    raise
        name = call.op.schema.name
        size_rule = self._rules.assumed_size(name)
        if size_rule is not None:
            return self._run(call, metadata, size_rule)
        if depends_on_values(name) and not isinstance(error, DataDependentError):
            raise DataDependentError.of_op(name) from error
        raise error

    def _run(
        self, call: ShapeCall, metadata: Sequence[Metadata], rule: Rule, *, use_known: bool = False
    ) -> CachedResult:
        """Return the outcome without its signature; `use_known` passes known values, for a data-dependent result."""
        schema = call.op.schema
        written = {
            id(tensor) for value in written_arguments(schema, call.args, call.kwargs) for tensor in tensors_of(value)
        }
        meta_tensors: dict[int, torch.Tensor] = {}
        for tensor, item in zip(call.tensors, metadata, strict=True):
            if id(tensor) not in meta_tensors:
                use_tensor = use_known and item.known and id(tensor) not in written
                meta_tensors[id(tensor)] = tensor if use_tensor else _meta_tensor_of(item)
        devices: list[torch.device] = []

        def on_meta(device: torch.device) -> torch.device:
            devices.append(self._concrete.device_for(device))
            return META

        args, kwargs = call.with_replaced(lambda tensor: meta_tensors[id(tensor)], on_meta)
        kwargs.pop("pin_memory", None)
        device_position = schema.position.get("device")
        if device_position is not None and not devices and len(args) <= device_position:
            kwargs["device"] = META
        with without_symbolic_imports():
            result = rule(*args, **kwargs)
        metas = [meta_tensors[id(tensor)] for tensor in call.tensors]
        devices += [item.device for item in (*filter(lambda item: item.shape, metadata), *metadata)]  # 0-dim ones last
        outcome = _outcome_of(result, metas, metadata, next(iter(devices), self._device))
        outcome.written = tuple(index for index, tensor in enumerate(call.tensors) if id(tensor) in written)
        return outcome


def _meta_tensor_of(metadata: Metadata) -> torch.Tensor:
    meta_tensor = torch.empty_strided(metadata.shape, metadata.stride, dtype=metadata.dtype, device=META)
    if metadata.bits:
        set_conjugate(meta_tensor, metadata.is_conjugate)
        set_negative(meta_tensor, metadata.is_negative)
    return meta_tensor


def _outcome_of(
    result: Any, metas: Sequence[torch.Tensor], metadata: Sequence[Metadata], device: torch.device
) -> CachedResult:
    """Return the outcome of a rule that returned `result` for these arguments; new tensors are on the device."""
    columns = zip(range(len(metas)), metas, metadata, strict=True)
    changed = [row for row in columns if (row[1].shape, row[1].stride()) != (row[2].shape, row[2].stride)]
    resized = {index: _describe(meta, item.device) for index, meta, item in changed}
    storages = {meta.untyped_storage()._cdata: index for index, meta in reversed(list(enumerate(metas)))}
    identities = {id(meta): index for index, meta in reversed(list(enumerate(metas)))}

    def output(item: Any) -> Output:
        if not isinstance(item, torch.Tensor):
            return Output(None, value=item)
        argument = identities.get(id(item))
        if argument is not None:
            return Output(resized.get(argument, metadata[argument]), argument, True)
        if item.device != META:
            return Output(None, value=item)  # values that the rule computed
        _require_strided(item)
        storage = item.untyped_storage()
        source = storages.get(storage._cdata)
        if source is not None:
            view = _describe(item, metadata[source].device)
            return Output(view, source, offset=int(item.storage_offset()))
        described = _describe(item, device)
        same_size = described.nbytes == storage.nbytes()
        return Output(described, row=described.row if same_size else (storage.nbytes(), *described.row[1:]))

    items, build = unpack_result(result)
    return CachedResult(None, tuple(map(output, items)), build, tuple(resized.items()))


def _describe(tensor: torch.Tensor, device: torch.device) -> Metadata:
    _require_strided(tensor)
    return intern(tuple(tensor.shape), tensor.stride(), tensor.dtype, device, False, bits_of(tensor))


def _require_strided(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UnsupportedError(f"its result is a {layout} tensor, which shape execution does not support")


def _is_computed(metadata: Metadata, op: OpCache) -> bool:
    """Return whether to compute an op's result on known values: not random activations or large results."""
    return metadata.numel <= 1 if op.random and metadata.dtype not in INTEGRAL else is_small(metadata)


def _is_lazy(func: Any, op: OpCache, inputs: Sequence[Metadata], outcome: CachedResult) -> bool:
    """Return whether a call writes to a tensor with lazy values, returns a view of it, or a result with such values."""
    used = {output.source for output in outcome.outputs if output.source is not None} | set(outcome.written)
    if any(inputs[index].lazy for index in used):
        return True
    name = base_name(op.schema.name)
    if name in COUNTS and inputs and inputs[0].lazy:
        return True
    if op.random or len(outcome.outputs) != 1:
        return False
    (output,) = outcome.outputs
    if output.metadata is None or output.source is not None:
        return False
    is_value = all(item.known or item.lazy for item in inputs)
    if name in INDEPENDENT:  # not the states of an optimizer
        is_value = name.startswith("new_") or output.metadata.dtype in INTEGRAL
    return is_value and is_supported(func, op.schema.name)


def _is_promoted(inputs: Sequence[Metadata], outcome: CachedResult) -> bool:
    """Return whether a call promoted integers to floating point, in the default dtype."""
    results = [item.metadata.dtype for item in outcome.outputs if item.metadata is not None]
    if not any(dtype.is_floating_point or dtype.is_complex for dtype in results):
        return outcome.concrete and not outcome.outputs  # its outputs are unknown until computed
    return not any(item.dtype.is_floating_point or item.dtype.is_complex for item in inputs)


def _contains_objects(values: Any) -> bool:
    """Return whether arguments contain objects that may have state, since a key contains only their class."""
    if type(values) in SCALARS:
        return False
    if isinstance(values, (list, tuple)):
        return any(map(_contains_objects, values))
    if isinstance(values, Mapping):
        return any(map(_contains_objects, values.values()))
    return isinstance(values, torch.ScriptObject) and describe(values) == Symbol("object", type(values).__qualname__)
