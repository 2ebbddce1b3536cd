"""Record the unmasked pairs of attention that torch decomposes into matrix products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.nn import functional as F

from fvflops.capture.attention.pairs import find_pairs, mark_nodes
from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.value_reader import ValueArgument, ValueReader

# F creates the attribute on access in some versions of torch; store it, so that the patch can restore it.
vars(F).setdefault("scaled_dot_product_attention", F.scaled_dot_product_attention)
ATTENTION = Patch(F, "scaled_dot_product_attention")
_MASK = (ValueArgument(0, "attn_mask", True),)


def attention_pairs(recorder: Recorder, has_values: Callable[[list[Any]], bool]) -> list[Wrapper]:
    """Return the wrapper that finds the unmasked pairs of each attention.

    With autograd, torch decomposes attention that its kernels on a device do not support: on the CPU and the meta
    device, that with heads of values of another size than those of queries.
    """
    reader = ValueReader(has_values)

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(*args: Any, **kwargs: Any) -> Any:
            return call_with_pairs(recorder, reader, original, args, kwargs)

        return attend

    return [(ATTENTION, around)]


def call_with_pairs(
    recorder: Recorder, reader: ValueReader, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call an attention; if it is masked, mark the matrix products in it, and those of its backward."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    values: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, mask = values.get("query"), values.get("key"), values.get("attn_mask")
    if not (recorder.backward and recorder.is_recording_thread()):
        return call(*args, **kwargs)
    if not (_is_matrix(query) and _is_matrix(key)):
        return call(*args, **kwargs)
    (unmasked,) = reader.read(_MASK, (mask,), {})
    is_causal = bool(values.get("is_causal"))
    pairs = find_pairs(query, key, mask, None if unmasked is None else unmasked[0], is_causal=is_causal)
    state = recorder.thread_state()
    outer, state.attention, recorder.has_attention = state.attention, pairs, True
    try:
        result = call(*args, **kwargs)
    finally:
        state.attention = outer
    if pairs.unmasked != pairs.all:
        mark_nodes(result, [values.get(name) for name in names[:4]], pairs)
    return result


def _is_matrix(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.is_nested and value.ndim > 1
