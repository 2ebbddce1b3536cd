"""Plain-data descriptions of tensors and arguments: shape, dtype, device, layout, no elements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

_NAMES_BY_SIZE = {
    1: "bool uint8 int8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
    " qint8 quint8 quint4x2 quint2x4",
    2: "uint16 int16 float16 bfloat16 bits16",
    4: "uint32 int32 float32 complex32 qint32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
_ITEM_SIZES = {
    **{name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()},
    # A byte for each element, however few bits it has.
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}
# Two elements in a byte: 4-bit parameters of bitsandbytes and of float4_e2m1fn_x2.
_HALF_BYTES = frozenset({"nf4", "fp4", "float4_e2m1fn"})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape, dtype, device and layout of a tensor.

    `shape` is in elements; `dtype`, `device` and `layout` are torch's names without the `torch.` in front.
    `nnz` is the number of stored elements of a sparse tensor and None for every other layout. `values` are integers
    from a tensor's data that an op's cost depends on, where known: the offsets of packed sequences, or the number of
    unmasked entries of an attention mask. A nested tensor has the layout "nested", as `shape` the largest size of each
    dimension, and as `values` the sizes of its parts, one part after the other.

    >>> TensorSpec((2, 3), "float32").numel
    6
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    layout: str = "strided"
    nnz: int | None = None
    values: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements, 1 for a scalar tensor; of a nested tensor without padding."""
        if self.layout == "nested" and self.values is not None:
            return sum(part.numel for part in self.parts())
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, as torch stores their dtype; an unknown dtype raises KeyError."""
        if self.dtype in _HALF_BYTES:
            return -(-self.numel // 2)
        return self.numel * _ITEM_SIZES[self.dtype]

    @property
    def is_complex(self) -> bool:
        """Whether an element is a complex number."""
        return self.dtype.startswith("complex")

    @property
    def is_floating_point(self) -> bool:
        """Whether an element is a real floating-point number."""
        return self.dtype.startswith(("float", "bfloat"))

    def parts(self) -> tuple[TensorSpec, ...]:
        """Return the parts of a nested tensor, each as a batch of one; () for any other tensor.

        >>> [part.shape for part in TensorSpec((2, 3, 4), layout="nested", values=(3, 4, 1, 4)).parts()]
        [(1, 3, 4), (1, 1, 4)]
        """
        if self.layout != "nested" or self.values is None:
            return ()
        rank = self.ndim - 1
        sizes = (self.values[index * rank : (index + 1) * rank] for index in range(self.shape[0]))
        return tuple(TensorSpec((1, *size), self.dtype, self.device) for size in sizes)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that is neither a number nor a tensor: a dtype, a device, a generator, a graph."""

    kind: str
    name: str


Value: TypeAlias = Union[TensorSpec, Symbol, bool, int, float, complex, str, tuple["Value", ...], None]  # noqa: UP007


def tensors_in(value: Value) -> Iterator[TensorSpec]:
    """Yield the tensor specs in a value, however deeply nested, in order."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def encode_value(value: Value) -> Any:
    """Return a value as plain JSON types; `decode_value` is its inverse.

    >>> encode_value(TensorSpec((2, 3)))
    {'tensor': [2, 3], 'dtype': 'float32', 'device': 'cpu'}
    """
    if isinstance(value, TensorSpec):
        record: dict[str, Any] = {"tensor": list(value.shape), "dtype": value.dtype, "device": value.device}
        if value.layout != "strided":
            record["layout"] = value.layout
        if value.nnz is not None:
            record["nnz"] = value.nnz
        if value.values is not None:
            record["values"] = list(value.values)
        return record
    if isinstance(value, Symbol):
        return {"symbol": value.kind, "name": value.name}
    if isinstance(value, tuple):
        return [encode_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": str(value)}
    return value


def decode_value(record: Any) -> Value:
    """Return the value that `encode_value` wrote; a record of another form raises ValueError."""
    if isinstance(record, list):
        return tuple(decode_value(item) for item in record)
    if not isinstance(record, dict):
        plain: Value = record
        return plain
    if "tensor" in record:
        values = tuple(record["values"]) if "values" in record else None
        shape, layout = tuple(record["tensor"]), record.get("layout", "strided")
        return TensorSpec(shape, record["dtype"], record["device"], layout, record.get("nnz"), values)
    if "symbol" in record:
        return Symbol(record["symbol"], record["name"])
    if "float" in record:
        return float(record["float"])
    if "complex" in record:
        return complex(record["complex"])
    raise ValueError(f"a value of a trace has an unknown form: {record}")
