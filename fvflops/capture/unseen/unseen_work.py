"""Detect work that bypasses the dispatcher, by its effects on tensors.

Kernels called by pointer (ctypes, pybind11), NumPy and other processes compute without op calls. Their results are
detected when a recorded op reads, or a module returns,

- memory that an op such as `aten::empty` left uninitialised and no recorded op wrote to;
- a tensor that no recorded op created, if it is freed during the run or was created after an export of tensor data;
- contents that differ from those after the last recorded op.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_ubyte
from struct import Struct
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from fvflops.capture.recorder.signature import OpSchema, describe_tensor, tensors_of
from fvflops.capture.recorder.source_lines import SourceLine, find_source_line, source_line_of
from fvflops.capture.recorder.thread_state import ThreadState
from fvflops.capture.restore.restore import writes_to_arguments, written_arguments
from fvflops.paths import PACKAGE
from fvflops.torch_internals import StorageBase, current_autograd_node, peek_interpreter
from fvflops.trace import Region, Signature, TensorSpec

# Ops that return uninitialised memory.
UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty.memory_format", "empty.names", "empty.out", "empty_like", "empty_permuted", "empty_strided"),
        *("new_empty", "new_empty_strided", "empty_quantized", "_empty_affine_quantized"),
    )
)
# Ops that read only an argument's shape or dtype, as views do.
METADATA_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "randint_like.low_dtype"),
        *("new_zeros", "new_ones", "new_full", "expand_as", "view_as", "reshape_as", "type_as", "is_same_size"),
        *(
            "_shape_as_tensor",
            "result_type.Tensor",
            "result_type.Scalar",
            "resize_",
            "resize_as_",
            "set_.source_Tensor",
        ),
        *("lift_fresh", "record_stream", "_has_compatible_shallow_copy_type"),
    )
)
# Ops whose result has the contents of the argument.
_COPIES = frozenset(
    f"aten::{name}"
    for name in (
        *("clone", "contiguous", "_to_copy", "to.dtype", "to.dtype_layout", "to.device", "to.other", "alias", "detach"),
        *("cpu", "cuda", "pin_memory", "view_as_real", "view_as_complex"),
    )
)
# Ops that create a tensor on an existing storage.
_SET_STORAGE = "aten::set_.source_Storage"
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# Bytes of a storage that are compared, at its start and at its middle.
_SAMPLE_BYTES = 64
_read_bytes = Struct(f"{_SAMPLE_BYTES}s").unpack_from
_read_fewer = [Struct(f"{size}s").unpack_from for size in range(2 * _SAMPLE_BYTES)]  # by size
# All memory, of which only what torch has allocated is read: this takes a fifth of the time of ctypes.string_at.
_MEMORY = (c_ubyte * sys.maxsize).from_address(0)
# torch's method, unwrapped.
_address_of: Any = StorageBase.data_ptr
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = str(PACKAGE) + os.sep
_ZOO = os.path.join(_PACKAGE, "zoo") + os.sep
_CUSTOM_KERNEL_CALLERS = ("_ops.py", os.path.join("autograd", "graph.py"))

_Sample = tuple[bytes, ...]


class _Site(NamedTuple):
    """Where work is attributed: stack, phase and source line."""

    stack: int
    phase: str
    source: SourceLine


class UnseenRecorder(Protocol):
    """The part of the Recorder that UnseenWork uses."""

    storages: list[tuple[Any, ...]]
    storage_indices: dict[int, int]

    def thread_state(self) -> ThreadState: ...
    def stack_and_phase(self) -> tuple[int, str]: ...
    def storage_of(self, tensor: torch.Tensor, origin: str) -> int: ...
    def storages_of(self, values: Any) -> tuple[int, ...]: ...
    def innermost_region(self, stack: int) -> Region: ...
    def append_unseen(self, signature: Signature, stack: int, phase: str, index: int) -> None: ...


class UnseenWork:
    """Detects unseen work in one run, and reports it to the recorder as op calls.

    Such a call is named `prim::PythonOp.NAME` in the forward of an autograd.Function and `unseen::FUNCTION` elsewhere;
    its output is the detected tensor, its source the line. `has_values`: tensors have values, so that the contents of
    strided tensors in CPU memory can be compared. In shape execution (`is_real` false) kernels have no memory to
    access, and only results of small integer tensors are checked.
    """

    def __init__(self, recorder: UnseenRecorder, *, is_real: bool = True, has_values: bool = True) -> None:
        self.is_real = is_real
        self._recorder = recorder
        self._has_values = has_values
        # Whether data of the run was exported; new tensors may then be results computed from it.
        self._was_exported = False
        self._exports: dict[int, _Site] = {}
        # Tensors that no recorded op created; a result is freed during the run, a constant is not.
        self._suspects: dict[int, tuple[_Site, TensorSpec]] = {}
        self._uninitialised: dict[int, _Site] = {}
        # Contents of uninitialised memory; if unchanged, nothing was computed there.
        self._uninitialised_contents: dict[int, _Sample | None] = {}
        self._has_subclasses = False
        # By address: the storage's index and a sample of its contents.
        self._contents: dict[int, tuple[int, _Sample]] = {}
        self._is_lifting = False
        # Whether an op is running; the work of its kernel, even in Python, belongs to it.
        self.in_op = False
        # The function whose arguments or results are checked.
        self._owner: Any = None

    def record_subclass(self) -> None:
        """Record that tensor subclasses are in use, which may contain pre-existing tensors."""
        self._has_subclasses = True
        self._suspects.clear()

    def record_export(self, tensor: torch.Tensor, frame: FrameType | None) -> None:
        """Record an access to a tensor's data from outside torch; `frame` is that of the accessing code."""
        if self.in_op or tensor.numel() < 2 or frame is None or not self._is_inside():
            return
        path = frame.f_code.co_filename
        if path.startswith((_TORCH, _PACKAGE)) and not path.startswith(_ZOO):
            return
        self._was_exported = True
        for strided, _ in _with_storages(tensor):
            self._check_contents(strided)
            self._exports[self._index(strided)] = self._site(find_source_line(frame))

    def record_import(self, tensor: torch.Tensor) -> None:
        """Record a tensor created on foreign memory, which may be a constant."""
        self._is_lifting = True
        self._index(tensor)
        self._is_lifting = False

    def check_new(self, tensor: torch.Tensor, storage: torch.UntypedStorage, index: int) -> None:
        """Check a tensor that no recorded op created, at its first use."""
        if self.in_op or type(tensor) not in _PLAIN_TENSORS:
            return
        self._contents.pop(_address(storage), None)
        if tensor.numel() < 2 or not self._is_inside() or peek_interpreter() is not None:
            return
        if not self._was_exported and (self._is_lifting or not self.is_real or self._has_subclasses):
            return  # a constant
        site = self._site(None if self._owner is None else source_line_of(self._owner))
        if self._is_lifting:
            self._report(site, describe_tensor(tensor), index)
        else:
            self._suspects[index] = site, describe_tensor(tensor)

    def before(
        self,
        schema: OpSchema,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: Sequence[int],
        storages: Sequence[torch.UntypedStorage] | None,
    ) -> None:
        """Check what an op call reads: the storages `reads`, also given as objects if all are of plain tensors."""
        if self._uninitialised and not self._uninitialised.keys().isdisjoint(reads):
            self._check_initialised(schema, args, kwargs)
        if not self._has_values:
            return
        if storages is None or self._uninitialised or not self._are_unchanged(reads, storages):
            for tensor in tensors_of((args, kwargs)):
                if type(tensor) in _PLAIN_TENSORS:
                    self._check_contents(tensor)

    def _are_unchanged(self, indices: Sequence[int], storages: Sequence[torch.UntypedStorage]) -> bool:
        """Return whether storages of plain tensors have the contents of their last samples; make first samples."""
        contents, rows = self._contents, self._recorder.storages
        for index, storage in zip(indices, storages, strict=True):
            nbytes = storage.nbytes()
            if not nbytes or rows[index][1] != "cpu":
                continue
            try:
                address = _address_of(storage)
            except RuntimeError:  # a functional or fake tensor's
                continue
            if not address:
                continue
            # As in _read, without a call.
            if nbytes < 2 * _SAMPLE_BYTES:
                sample = _read_fewer[nbytes](_MEMORY, address)
            else:
                sample = _read_bytes(_MEMORY, address) + _read_bytes(_MEMORY, address + (nbytes >> 1))
            previous = contents.get(address)
            if previous is None:
                contents[address] = index, sample
            elif previous[1] != sample or previous[0] != index:
                return False
        return True

    def after(
        self,
        schema: OpSchema,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: Sequence[int],
        result: Any,
        writes: Sequence[int],
    ) -> None:
        """Record what an op call wrote."""
        site = None
        if schema.name in UNINITIALISED:
            site = None if _is_called_by_torch(sys._getframe(1)) else self._site()
        elif self._uninitialised and schema.name in _COPIES:
            site = next((self._uninitialised[index] for index in reads if index in self._uninitialised), None)
        if schema.name in UNINITIALISED and site is None:
            for _, storage in _with_storages(result):
                self._contents.pop(_address(storage), None)
        elif site is not None:
            self._uninitialised.update((index, site) for index in writes)
            for tensor, storage in _with_storages(result) if self._has_values else ():
                index = self._index(tensor)
                self._uninitialised_contents[index] = self._sample(storage, index)
        elif schema.name.startswith(_SET_STORAGE):
            for tensor, storage in _with_storages(result):
                self.check_new(tensor, storage, self._index(tensor))
        elif self._has_values:
            if writes and not (len(writes) == 1 and writes[0] in reads and not schema.written):
                self._store_contents(result)
            if writes_to_arguments(schema):
                self._store_contents(tuple(written_arguments(schema, args, kwargs)))

    def store(self, indices: Sequence[int], storages: Sequence[torch.UntypedStorage]) -> None:
        """Record that an op call, of an op without `is_special`, may have written to storages of plain tensors."""
        if self._has_values:
            contents, rows = self._contents, self._recorder.storages
            for index, storage in zip(indices, storages, strict=True):
                nbytes = storage.nbytes()
                if nbytes and rows[index][1] == "cpu" and (address := _address(storage)):
                    contents[address] = index, _read(address, nbytes)

    def record_write(self, values: Any) -> None:
        """Record that a kernel launch wrote to tensors."""
        for tensor, _ in _with_storages(values):
            self._uninitialised.pop(self._index(tensor), None)
        if self._has_values:
            self._store_contents(values)

    def set_lifting(self, is_lifting: bool) -> None:
        """Mark the start or end of an op call that creates a constant, such as `torch.tensor([1, 2])`."""
        self._is_lifting = is_lifting

    def enter(self, values: Any) -> None:
        """Check the arguments of a module or function."""
        if self.in_op:
            return
        if not self._is_inside():
            self.forget_contents()  # work between two calls of the model is not the model's
            self._recorder.storages_of(tensors_of(values))
            if any(type(tensor) not in _PLAIN_TENSORS for tensor in tensors_of(values)):
                self.record_subclass()
        elif self._has_values or self._uninitialised:
            self._check_values(values, None)

    def leave(self, values: Any, owner: Any) -> None:
        """Check the results of a module or function `owner`, whose region is still open."""
        if not self.in_op and (self._has_values or self._uninitialised or self._was_exported):
            self._check_values(values, owner)

    def forget_storage(self, index: int) -> None:
        """Discard a freed storage; report a tensor on it that no recorded op created."""
        suspect = self._suspects.pop(index, None)
        if suspect is not None:
            self._report(*suspect, index)
        self._uninitialised.pop(index, None)
        self._uninitialised_contents.pop(index, None)
        self._exports.pop(index, None)

    def forget_contents(self) -> None:
        """Discard all samples of contents, after work that is not recorded."""
        self._contents.clear()

    def _check_values(self, values: Any, owner: Any) -> None:
        if type(values) is torch.Tensor and self._has_values and not self._uninitialised:
            for _, storage in _with_storages(values):
                index = self._recorder.storage_indices.get(id(storage))
                if index is not None and self._are_unchanged((index,), (storage,)):
                    return
        if not self._has_subclasses and any(type(tensor) not in _PLAIN_TENSORS for tensor in tensors_of(values)):
            self.record_subclass()
        self._owner = owner
        # The model's result is read outside.
        is_final = owner is not None and len(self._recorder.thread_state().opened) == 1
        for tensor, _ in _with_storages(values):
            index = self._index(tensor)
            # Uninitialised memory that a module returns may be written to later.
            if index in self._uninitialised and owner is not None and (is_final or index in self._exports):
                self._report_uninitialised(tensor, index)
            self._check_contents(tensor)
        self._owner = None

    def _check_initialised(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        written = {id(tensor) for value in written_arguments(schema, args, kwargs) for tensor in tensors_of(value)}
        reads_contents = not (schema.is_view or schema.name in METADATA_ONLY or schema.name in _COPIES)
        for tensor, _ in _with_storages((*args, *kwargs.values())):
            index = self._index(tensor)
            if index not in self._uninitialised:
                continue
            if id(tensor) in written:
                if schema.name not in METADATA_ONLY:
                    del self._uninitialised[index]
            elif reads_contents:
                self._report_uninitialised(tensor, index)

    def _report_uninitialised(self, tensor: torch.Tensor, index: int) -> None:
        site = self._uninitialised.pop(index)
        sample = self._sample(tensor.untyped_storage(), index) if self._has_values else None
        is_unchanged = (
            sample is not None and sample == self._uninitialised_contents.get(index) and index not in self._exports
        )
        if tensor.numel() and not is_unchanged:
            self._report(self._exports.get(index, site), describe_tensor(tensor), index)

    def _check_contents(self, tensor: torch.Tensor) -> None:
        """Report a tensor whose contents differ from those after the last recorded op."""
        if not self._has_values:
            return
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # sparse or functorch
            return
        recorder = self._recorder
        index = self._index(tensor)
        sample = self._sample(storage, index)
        if sample is None or index in self._uninitialised:
            return
        address = _address(storage)
        previous = self._contents.get(address)
        self._contents[address] = index, sample
        if previous is None or previous[1] == sample or not self._is_inside():
            return
        # Two storages at one address are one array imported twice, or the address was reused.
        if previous[0] != index and "op" in (recorder.storages[previous[0]][2], recorder.storages[index][2]):
            return
        site = self._exports.get(index)
        if site is None:
            site = self._site(None if self._owner is None else source_line_of(self._owner))
        self._report(site, describe_tensor(tensor), index)

    def _store_contents(self, values: Any) -> None:
        for tensor, storage in _with_storages(values):
            index = self._index(tensor)
            sample = self._sample(storage, index)
            if sample is not None:
                self._contents[_address(storage)] = index, sample

    def _sample(self, storage: torch.UntypedStorage, index: int) -> _Sample | None:
        if self._recorder.storages[index][1] != "cpu":
            return None
        address, nbytes = _address(storage), storage.nbytes()
        return _read(address, nbytes) if address and nbytes else None

    def _index(self, tensor: torch.Tensor) -> int:
        return self._recorder.storage_of(tensor, "outside")

    def _is_inside(self) -> bool:
        """Return whether a call of the model, or its backward pass, is running."""
        return bool(self._recorder.thread_state().opened) or current_autograd_node() is not None

    def _site(self, source: SourceLine | None = None) -> _Site:
        stack, phase = self._recorder.stack_and_phase()
        return _Site(stack, phase, find_source_line(sys._getframe(2)) if source is None else source)

    def _report(self, site: _Site, output: TensorSpec, index: int) -> None:
        recorder = self._recorder
        innermost = recorder.innermost_region(site.stack)
        if innermost.kind == "function" and site.phase != "backward":
            name = f"prim::PythonOp.{innermost.name}"
        else:
            name = f"unseen::{_function_name(site, innermost)}"
        signature = Signature(name, (), (), (output,), f"{name}(...) -> Tensor", site.source.line)
        recorder.append_unseen(signature, site.stack, site.phase, index)


def _read(address: int, nbytes: int) -> _Sample:
    """Return a sample of memory: its start and its middle."""
    if nbytes < 2 * _SAMPLE_BYTES:
        return _read_fewer[nbytes](_MEMORY, address)
    return _read_bytes(_MEMORY, address) + _read_bytes(_MEMORY, address + (nbytes >> 1))


def is_special(schema: OpSchema) -> bool:
    """Return whether an op's results have more to record than their contents."""
    return schema.name in UNINITIALISED or schema.name in _COPIES or schema.name.startswith(_SET_STORAGE)


def _function_name(site: _Site, innermost: Region) -> str:
    if innermost.kind == "function":
        return f"{innermost.name}.backward"
    return site.source.function or innermost.name or "work"


def _is_called_by_torch(frame: FrameType | None) -> bool:
    """Return whether torch's own code made the call; some of its C++ kernels (`_pad_packed_sequence`) write by pointer.

    Calls from torch.ops and the backward engine do not count, since these call custom kernels too.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return False
    path = frame.f_code.co_filename
    if path.endswith("_ops.py") and frame.f_code.co_name == "decompose":
        return str(frame.f_locals["self"]).startswith("aten.")
    return path.startswith(_TORCH) and not path.endswith(_CUSTOM_KERNEL_CALLERS)


def _with_storages(values: Any) -> Iterator[tuple[torch.Tensor, torch.UntypedStorage]]:
    """Yield the plain strided tensors in nested values with their storages."""
    for tensor in tensors_of(values):
        if type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided:
            try:
                storage = tensor.untyped_storage()
            except RuntimeError:  # functorch tensors have none
                continue
            yield tensor, storage


def _address(storage: torch.UntypedStorage) -> int:
    """Return a storage's address, 0 without memory."""
    try:
        return _address_of(storage)
    except RuntimeError:  # the storage of a wrapper subclass
        return 0
