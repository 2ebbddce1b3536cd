"""Shape tensors: shape, strides, dtype and device, without values or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from fvflops.capture.lazy_values.run_values import LazyValue
from fvflops.capture.recorder.run_position import append_row
from fvflops.capture.shapes.metadata import Metadata
from fvflops.torch_internals import (
    make_wrapper_subclass,
    no_torch_function,
    refuse_data_pointer,
    set_conjugate,
    set_negative,
)


class DataDependentError(RuntimeError):
    """A value of a tensor was needed that shape execution does not have."""

    @classmethod
    def of_op(cls, op: str, what: str = "values") -> DataDependentError:
        """Return the error of a data-dependent op.

        >>> str(DataDependentError.of_op("aten::bincount"))
        'aten::bincount is data-dependent: it needs values, which shape execution does not have'
        """
        return cls(f"{op} is data-dependent: it needs {what}, which shape execution does not have")


class UnsupportedError(NotImplementedError):
    """Shape execution does not support an op or a kind of tensor."""


# The ShapeMode that created a shape tensor, and the Recorder of its run; both import this module.
_Mode = Any
_Recorder = Any


class StorageRef:
    """A reference to a storage, shared by views; `index` is its index in the Trace."""

    __slots__ = ("index", "mode")

    def __init__(self, mode: _Mode, index: int) -> None:
        self.mode = mode
        self.index = index

    def move_to(self, mode: _Mode, index: int | None = None) -> None:
        """Move the storage to a later run, by default as a new row for a storage from outside the run."""
        if index is None:
            nbytes, device, *_ = self.mode.recorder.storages[self.index]
            index = append_row(mode.recorder.storages, (nbytes, device, "outside"))
        self.mode, self.index = mode, index


def stored_index(ref: StorageRef) -> int:
    return ref.index


class OwnedStorage(StorageRef):
    """A storage of the run, which records when it is freed; it has no `recorder` while `resize` has freed it."""

    __slots__ = ("recorder",)

    def __init__(self, mode: _Mode, recorder: _Recorder, index: int) -> None:
        self.mode = mode
        self.index = index
        self.recorder = recorder

    def __del__(self) -> None:
        try:
            recorder = self.recorder
        except AttributeError:
            return  # freed by `resize`, or a signal interrupted __init__
        recorder.record_freed(self.index)

    def move_to(self, mode: _Mode, index: int | None = None) -> None:
        """Move the storage to a later run, which records that it is freed."""
        super().move_to(mode, index)
        if hasattr(self, "recorder"):
            self.recorder = mode.recorder

    @property
    def nbytes(self) -> int:
        return self.recorder.storages[self.index][0] if hasattr(self, "recorder") else 0

    def resize(self, nbytes: int) -> None:
        """Record that the memory is freed, and its replacement."""
        if hasattr(self, "recorder"):
            self.recorder.record_freed(self.index)
            del self.recorder
        if nbytes:
            self.index = self.mode.recorder.add_reallocated(self.index, nbytes)
            self.recorder = self.mode.recorder


class ShapeStorage:
    """Storage returned to programs: wraps torch's storage without memory, and records `resize_`.

    FSDP2 frees and reallocates gathered parameters by `resize_`. Storages that existed before the run keep their size.
    """

    def __init__(self, storage: torch.UntypedStorage, storage_ref: StorageRef) -> None:
        self._storage = storage
        self._storage_ref = storage_ref

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def nbytes(self) -> int:
        ref = self._storage_ref
        return ref.nbytes if isinstance(ref, OwnedStorage) else self._storage.nbytes()

    size = __len__ = nbytes

    def resize_(self, nbytes: int) -> ShapeStorage:
        if isinstance(self._storage_ref, OwnedStorage):
            self._storage_ref.resize(nbytes)
        return self


class ShapeTensor(torch.Tensor):
    """A tensor with metadata only, which reports the emulated device and supports autograd.

    Ops on it run only under ShapeMode; outside its run, or where a value is needed, they raise DataDependentError.
    """

    metadata: Metadata
    storage_ref: StorageRef
    lazy: LazyValue | None = None

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:  # type: ignore[misc]
        """Return a parameter, for code that calls a parameter's class to construct one, as accelerate does."""
        return torch.nn.Parameter(data, requires_grad)

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind is not cls for kind in types):
            return NotImplemented  # so that a wrapper subclass among the arguments handles the call
        for tensor in args:
            if isinstance(tensor, ShapeTensor):
                # Called in a thread without ShapeMode, where an exception may be swallowed: record it too.
                tensor.storage_ref.mode.missing_value(str(func))
                break
        raise DataDependentError(
            f"{func} got an fvflops shape tensor (without values) left over from a recording; "
            'if the model stores tensors, use execution="real"'
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShapeTensor({self.metadata.spec}, device={self.metadata.device})"

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise self.storage_ref.mode.missing_value("Tensor.numpy")

    def tolist(self) -> NoReturn:
        raise self.storage_ref.mode.missing_value("Tensor.tolist")

    def as_subclass(self, cls: type) -> NoReturn:
        raise self.storage_ref.mode.concrete.unsupported(f"tensors of class {cls.__name__}")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise self.storage_ref.mode.missing_value("Tensor.__array__")

    def __format__(self, format_spec: str) -> NoReturn:
        raise self.storage_ref.mode.missing_value("Tensor.__format__")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self.storage_ref.mode.missing_value("Tensor.__reduce_ex__")

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def untyped_storage(self) -> ShapeStorage:  # type: ignore[override]
        return ShapeStorage(torch.Tensor.untyped_storage(self), self.storage_ref)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that the run emulates, which this machine may lack."""
        return self.metadata.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.metadata.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.metadata.device.type == "cpu"

    def get_device(self) -> int:
        return -1 if self.metadata.device.index is None else self.metadata.device.index

    @property
    def data(self) -> torch.Tensor:
        """The tensor without autograd history."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, ShapeTensor):
            raise self.storage_ref.mode.missing_value("Tensor.data")
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.metadata, self.storage_ref, self.lazy = other.metadata, other.storage_ref, other.lazy


def make_shape_tensor(metadata: Metadata, storage_ref: StorageRef, requires_grad: bool = False) -> ShapeTensor:
    tensor = make_wrapper_subclass(
        ShapeTensor,
        metadata.shape,
        metadata.stride,
        0,
        None,
        metadata.dtype,
        torch.strided,
        metadata.actual_device,
        False,
        requires_grad,
    )
    # A kernel that accesses the data pointer, which would be 0, raises instead.
    refuse_data_pointer(tensor)
    if metadata.bits:
        set_conjugate(tensor, metadata.is_conjugate)
        set_negative(tensor, metadata.is_negative)
    tensor.metadata = metadata
    tensor.storage_ref = storage_ref
    return tensor
