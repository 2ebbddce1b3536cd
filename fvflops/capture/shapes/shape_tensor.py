"""The shape tensor: a tensor that has a shape, strides, a dtype and a device, and neither numbers nor memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from fvflops.capture.shapes.metadata import Metadata
from fvflops.torch_internals import (
    make_wrapper_subclass,
    no_torch_function,
    refuse_data_pointer,
    set_conjugate,
    set_negative,
)


class DataDependentError(RuntimeError):
    """The number of a tensor was asked for, and there is none."""

    @classmethod
    def of_op(cls, op: str, what: str = "numbers") -> DataDependentError:
        """Return the error of an op that needs numbers which a run by shapes has not.

        >>> str(DataDependentError.of_op("aten::bincount"))
        'aten::bincount needs numbers, and this run has only shapes'
        """
        return cls(f"{op} needs {what}, and this run has only shapes")


class Run(Protocol):
    """The run in which a shape tensor came to be."""

    def needs_value(self, name: str) -> DataDependentError:
        """Return the error that says who asked for a number."""


class Record(Protocol):
    """Where the end of a storage is taken down."""

    def freed(self, index: int) -> None:
        """Take down that nothing refers to a storage any more."""


class StorageRef:
    """What stands for the storage of shape tensors: views share it; `index` is its number in the record."""

    __slots__ = ("index", "run")

    def __init__(self, run: Run, index: int) -> None:
        self.run = run
        self.index = index


class OwnedStorage(StorageRef):
    """A place that the run made, whose end is taken down."""

    __slots__ = ("record",)

    def __init__(self, run: Run, record: Record, index: int) -> None:
        self.run = run
        self.index = index
        self.record = record

    def __del__(self) -> None:
        try:
            record = self.record
        except AttributeError:
            return  # a signal broke off its making
        record.freed(self.index)


class ShapeStorage:
    """The storage of a shape tensor as a program sees it: torch's own, which has no memory, but may be resized."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def resize_(self, nbytes: int) -> ShapeStorage:
        """Change nothing: FSDP2 so lets go of what it has gathered, and takes it again."""
        return self


class ShapeTensor(torch.Tensor):
    """A tensor without numbers: it answers for its device, and autograd works on it, but only a shape run computes.

    Outside its run, and where a number is asked for, it raises DataDependentError.
    """

    metadata: Metadata
    home: StorageRef

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:  # type: ignore[misc]
        """Return a parameter: code that makes one of a parameter's own class, as accelerate does, gets it from this."""
        return torch.nn.Parameter(data, requires_grad)

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind is not cls for kind in types):
            return NotImplemented  # a wrapper among the arguments, to which the run's mode leaves the call
        for tensor in args:
            if isinstance(tensor, ShapeTensor):  # a thread in which the run's mode is not on, whose errors may be lost
                tensor.home.run.needs_value(str(func))
                break
        raise DataDependentError(
            f"{func}: a tensor without numbers, left over from a run in which fvflops executed shapes only; "
            'analyse with execution="real" if the model keeps tensors'
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShapeTensor({self.metadata.spec}, device={self.metadata.device})"

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise DataDependentError."""
        raise self.home.run.needs_value("Tensor.numpy")

    def tolist(self) -> NoReturn:
        """Raise DataDependentError."""
        raise self.home.run.needs_value("Tensor.tolist")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise self.home.run.needs_value("Tensor.__array__")

    def __format__(self, format_spec: str) -> NoReturn:
        raise self.home.run.needs_value("Tensor.__format__")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self.home.run.needs_value("Tensor.__reduce_ex__")

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def untyped_storage(self) -> ShapeStorage:  # type: ignore[override]
        """Return what stands for the tensor's memory."""
        return ShapeStorage(torch.Tensor.untyped_storage(self))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that the run answers for, which this machine need not have."""
        return self.metadata.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether that device is a CUDA device."""
        return self.metadata.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """Whether that device is the CPU."""
        return self.metadata.device.type == "cpu"

    def get_device(self) -> int:
        """Return the device's number, -1 for the CPU."""
        return -1 if self.metadata.device.index is None else self.metadata.device.index

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its autograd history."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, ShapeTensor):
            raise self.home.run.needs_value("Tensor.data")
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.metadata, self.home = other.metadata, other.home


def make(metadata: Metadata, home: StorageRef, requires_grad: bool = False) -> ShapeTensor:
    """Return a shape tensor of some metadata that lives in a home."""
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
    # A kernel that takes the address, and it would be 0, gets an error instead.
    refuse_data_pointer(tensor)
    if metadata.bits:
        set_conjugate(tensor, bool(metadata.bits & 1))
        set_negative(tensor, bool(metadata.bits & 2))
    tensor.metadata = metadata
    tensor.home = home
    return tensor
