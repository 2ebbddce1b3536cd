"""Change the shapes of vectors that have an element for each layer."""

from __future__ import annotations

from dataclasses import replace

from fvflops.trace.signature import Signature
from fvflops.trace.spec import TensorSpec, Value


def replace_shape(spec: Value, shape: tuple[int, ...]) -> Value:
    """Return a tensor spec with another shape; other values as they are."""
    return replace(spec, shape=shape) if isinstance(spec, TensorSpec) else spec


def grow(signature: Signature, before: int, after: int) -> Signature:
    """Return a signature with vectors of `after` elements instead of those of `before`.

    >>> norm = Signature("aten::linalg_vector_norm", ("self",), (TensorSpec((4,)),), (TensorSpec(()),))
    >>> grow(norm, 4, 12).inputs[0].shape
    (12,)
    """

    def grown(value: Value) -> Value:
        return replace_shape(value, (after,)) if isinstance(value, TensorSpec) and value.shape == (before,) else value

    return replace(
        signature,
        inputs=tuple([grown(value) for value in signature.inputs]),
        outputs=tuple([grown(value) for value in signature.outputs]),
    )
