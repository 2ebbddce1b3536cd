"""Infer the result of an op call that is not in the cache of shape execution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.lazy_values.lazy_ops import COUNTS, INDEPENDENT, base_name, is_supported
from fvflops.capture.recorder.tensor_specs import describe, describe_result, intern_signature, normalise
from fvflops.capture.recorder.value_reader import ValueReader, add_values
from fvflops.capture.restore import interrupts
from fvflops.capture.shapes.concrete_tensors import INTEGRAL, ConcreteTensors, is_small
from fvflops.capture.shapes.meta_run import OutputInference, substitute
from fvflops.capture.shapes.metadata import Metadata
from fvflops.capture.shapes.rules.data_dependent import depends_on_values
from fvflops.capture.shapes.rules.shape_rules import ShapeRules
from fvflops.capture.shapes.shape_cache import CachedResult, OpCache, Output, Settings
from fvflops.capture.shapes.shape_tensor import DataDependentError
from fvflops.torch_internals import OpOverload
from fvflops.trace import Signature, Symbol


class OpInference:
    """Infers results of op calls on a device by shape rules; data-dependent calls without values raise."""

    def __init__(self, device: torch.device, settings: Settings, rules: ShapeRules, concrete: ConcreteTensors) -> None:
        self._device = device
        self._settings = settings
        self._rules = rules
        self._concrete = concrete
        self.values = ValueReader(concrete.have_values)

    def infer(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        key: tuple[Any, ...],
    ) -> CachedResult:
        """Return the outcome of a call with these tensor arguments; cache it under the key if possible."""
        name = op.schema.name
        metadata = [self._concrete.metadata_of(tensor) for tensor in tensors]
        # Data from other ranks is unknown, since nothing is sent.
        known = not op.needs_other_ranks(args, kwargs) and all(item.known for item in metadata)
        inference = OutputInference(op.schema, tensors, metadata, self._device, self._concrete.device_for)
        rule = self._rules.rule_for(func)
        cacheable = True
        try:
            outcome = inference.run(rule, args, kwargs)
        except Exception as error:
            if interrupts.is_interrupt(error):
                raise
            computable = known and tensors and isinstance(func, OpOverload)
            if computable or (depends_on_values(name) and self._concrete.have_values(tensors)):
                outcome, cacheable = CachedResult(None, concrete=True), bool(computable)
            else:
                outcome, cacheable = self._infer_from_values(name, inference, rule, args, kwargs, error), False
        if known and all(item.metadata is None or _is_computed(item.metadata, op) for item in outcome.outputs):
            outcome.compute()
        elif not outcome.concrete and _is_lazy(func, op, metadata, outcome):
            outcome.make_lazy()
        if outcome.signature is None and not (outcome.concrete and not outcome.outputs):
            outcome.signature = self.sign(op, args, kwargs, outcome.outputs, outcome.build)
        if op.context is None and _is_promoted(metadata, outcome):
            outcome.promote(torch.get_default_dtype())
        outcome.cacheable = cacheable and op.pure and not _contains_objects((args, kwargs))
        if outcome.cacheable:
            op.outcomes[self._settings][key] = outcome
        return outcome

    def sign(
        self,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[Output],
        build: Callable[[list[Any]], Any] | None,
    ) -> Signature:
        """Return the signature of a call with these outputs."""
        schema, spec_of = op.schema, self._concrete.spec_of
        spec_args, spec_kwargs = substitute((tuple(args), dict(kwargs)), spec_of, self._concrete.device_for)
        results = [item.value if item.metadata is None else item.metadata.spec for item in outputs]
        results = [spec_of(item) if isinstance(item, torch.Tensor) else item for item in results]
        inputs = normalise(schema, spec_args, spec_kwargs)
        if schema.value_arguments:
            inputs = add_values(inputs, schema.value_arguments, self.values.read(schema.value_arguments, args, kwargs))
        return intern_signature(
            Signature(
                schema.name,
                schema.names,
                inputs,
                describe_result(results[0] if build is None else build(results)),
                schema.text,
            )
        )

    def _infer_from_values(
        self,
        name: str,
        inference: OutputInference,
        rule: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        error: Exception,
    ) -> CachedResult:
        """Return the outcome of a data-dependent call from known values or assumptions, or raise the error."""
        if any(item.known for item in inference.metadata):
            try:
                return inference.run(rule, args, kwargs, use_known=True)
            except DataDependentError as retry_error:
                error = retry_error
            except Exception as retry_error:  # from mixing real and meta tensors; the first error is the op's own
                if interrupts.is_interrupt(retry_error):
                    raise
        size_rule = self._rules.assumed_size(name)
        if size_rule is not None:
            return inference.run(size_rule, args, kwargs)
        if depends_on_values(name) and not isinstance(error, DataDependentError):
            raise DataDependentError.of_op(name) from error
        raise error


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
    if (
        op.random
        or len(outcome.outputs) != 1
        or outcome.outputs[0].metadata is None
        or outcome.outputs[0].source is not None
    ):
        return False
    if name in INDEPENDENT:  # not the states of an optimizer
        is_value = name.startswith("new_") or outcome.outputs[0].metadata.dtype in INTEGRAL
    else:
        is_value = all(item.known or item.lazy for item in inputs)
    return is_value and is_supported(func, op.schema.name)


def _is_promoted(inputs: Sequence[Metadata], outcome: CachedResult) -> bool:
    """Return whether a call promoted integers to floating point, in the default dtype."""
    results = [item.metadata.dtype for item in outcome.outputs if item.metadata is not None]
    if not any(dtype.is_floating_point or dtype.is_complex for dtype in results):
        return outcome.concrete and not outcome.outputs  # its outputs are unknown until computed
    return not any(item.dtype.is_floating_point or item.dtype.is_complex for item in inputs)


def _contains_objects(values: Any) -> bool:
    """Return whether arguments contain objects that may have state, since a key contains only their class."""
    if isinstance(values, (list, tuple)):
        return any(map(_contains_objects, values))
    if isinstance(values, Mapping):
        return any(map(_contains_objects, values.values()))
    return isinstance(values, torch.ScriptObject) and describe(values) == Symbol("object", type(values).__qualname__)
