"""Detect work that never reaches the dispatcher, by the evidence that it leaves in tensors.

Kernels that are called by pointer (ctypes, pybind11), NumPy and other processes compute without an op call. What they
put out is found where a recorded op, or a module's result, reads

- memory that an op such as `aten::empty` left uninitialised and no recorded op wrote to;
- a tensor that no recorded op made and that came and went during the run, or came after data had left torch;
- contents that differ from what the last recorded op left there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import string_at
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

# Ops whose result is memory as it was found.
UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty.memory_format", "empty.names", "empty.out", "empty_like", "empty_permuted", "empty_strided"),
        *("new_empty", "new_empty_strided", "empty_quantized", "_empty_affine_quantized"),
    )
)
# Ops that ask a tensor for its shape or dtype only. Views do too.
_READ_NO_CONTENTS = frozenset(
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
# Ops whose result holds what their argument holds.
_COPIES = frozenset(
    f"aten::{name}"
    for name in (
        *("clone", "contiguous", "_to_copy", "to.dtype", "to.dtype_layout", "to.device", "to.other", "alias", "detach"),
        *("cpu", "cuda", "pin_memory", "view_as_real", "view_as_complex"),
    )
)
# Ops that make a tensor of memory which they are handed.
_TAKES_MEMORY = "aten::set_.source_Storage"
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# Of a storage's contents so many bytes are compared, at its beginning and in its middle.
_SAMPLE = 64
# torch's own, whatever is put around it.
_address_of: Any = StorageBase.data_ptr
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = str(PACKAGE) + os.sep
_ZOO = os.path.join(_PACKAGE, "zoo") + os.sep
_CALLS_OTHERS = ("_ops.py", os.path.join("autograd", "graph.py"))


class _Site(NamedTuple):
    """Where work is charged to: a stack, a phase and a line of source."""

    stack: int
    phase: str
    source: SourceLine


class Run(Protocol):
    """What unseen work needs from the recorder of a run."""

    storages: list[tuple[Any, ...]]

    def thread_state(self) -> ThreadState: ...
    def place(self) -> tuple[int, str]: ...
    def storage_of(self, tensor: torch.Tensor, origin: str) -> int: ...
    def storages_of(self, values: Any) -> tuple[int, ...]: ...
    def innermost_region(self, stack: int) -> Region: ...
    def append_unseen(self, signature: Signature, stack: int, phase: str, index: int) -> None: ...


class UnseenWork:
    """The evidence of unseen work in one run, reported to its recorder as op calls.

    Such a call is named `prim::PythonOp.NAME` in the forward pass of an autograd.Function and `unseen::FUNCTION`
    elsewhere; its output is the tensor that came out, its source the line. `numbers` says that tensors hold theirs, so
    that contents can be compared; that is done of strided tensors in the CPU's memory. In shape execution (`is_real`
    false) no kernel can get at memory, and only what is made of small integer tensors is inspected.
    """

    def __init__(self, recorder: Run, *, is_real: bool = True, numbers: bool = True) -> None:
        self.is_real = is_real
        self._recorder = recorder
        self._numbers = numbers
        # Whether data of the run left torch: what is made afterwards of nothing may be made of that.
        self._has_left = False
        self._exports: dict[int, _Site] = {}
        # Tensors that no recorded op made: a constant outlives the run, what was computed in it does not.
        self._suspects: dict[int, tuple[_Site, TensorSpec]] = {}
        self._uninitialised: dict[int, _Site] = {}
        # What was in memory that is uninitialised: where that is not written to, nobody worked.
        self._garbage: dict[int, bytes | None] = {}
        self._has_subclasses = False
        # By address: the storage's number and a sample of its contents.
        self._contents: dict[int, tuple[int, bytes]] = {}
        self._is_lifting = False
        # Whether an op runs just now: what its kernel does, in Python too, is that op's.
        self.in_op = False
        # The function whose arguments or results are inspected.
        self._owner: Any = None

    def met_subclass(self) -> None:
        """Note that the run works on tensors of a subclass, in which others may be that existed before."""
        self._has_subclasses = True
        self._suspects.clear()

    def exported(self, tensor: torch.Tensor, frame: FrameType | None) -> None:
        """Note that code outside torch got at a tensor's data; `frame` is that of the code which asked for it."""
        if self.in_op or tensor.numel() < 2 or frame is None or not self._is_inside():
            return
        path = frame.f_code.co_filename
        if path.startswith((_TORCH, _PACKAGE)) and not path.startswith(_ZOO):
            return
        self._has_left = True
        for plain, _ in _with_storages(tensor):
            self._check_contents(plain)
            self._exports[self._index(plain)] = self._site(find_source_line(frame))

    def imported(self, tensor: torch.Tensor) -> None:
        """Note that a tensor was made of somebody else's memory, which may be a constant."""
        self._is_lifting = True
        self._index(tensor)
        self._is_lifting = False

    def appeared(self, tensor: torch.Tensor, storage: torch.UntypedStorage, index: int) -> None:
        """Look at a tensor that no recorded op made, when it is seen for the first time."""
        if self.in_op or type(tensor) not in _PLAIN_TENSORS:
            return
        self._contents.pop(_address(storage), None)
        if tensor.numel() < 2 or not self._is_inside() or peek_interpreter() is not None:
            return
        if not self._has_left and (self._is_lifting or not self.is_real or self._has_subclasses):
            return  # a constant
        site = self._site(None if self._owner is None else source_line_of(self._owner))
        if self._is_lifting:
            self._report(site, describe_tensor(tensor), index)
        else:
            self._suspects[index] = site, describe_tensor(tensor)

    def before(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any], reads: Sequence[int]) -> None:
        """Look at what an op call reads."""
        if self._uninitialised and not self._uninitialised.keys().isdisjoint(reads):
            self._check_initialised(schema, args, kwargs)
        if self._numbers:
            for value in args:
                kind = type(value)
                if kind in _PLAIN_TENSORS:
                    self._check_contents(value)
                elif kind is list or kind is tuple:
                    for item in value:
                        if type(item) in _PLAIN_TENSORS:
                            self._check_contents(item)
            if kwargs:
                for value in tensors_of(kwargs):
                    if type(value) in _PLAIN_TENSORS:
                        self._check_contents(value)

    def after(
        self,
        schema: OpSchema,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: Sequence[int],
        result: Any,
        writes: Sequence[int],
    ) -> None:
        """Note what an op call wrote."""
        site = None
        if schema.name in UNINITIALISED:
            site = None if _is_torchs_own(sys._getframe(1)) else self._site()
        elif self._uninitialised and schema.name in _COPIES:
            site = next((self._uninitialised[index] for index in reads if index in self._uninitialised), None)
        if schema.name in UNINITIALISED and site is None:
            for _, storage in _with_storages(result):
                self._contents.pop(_address(storage), None)
        elif site is not None:
            self._uninitialised.update((index, site) for index in writes)
            for tensor, storage in _with_storages(result) if self._numbers else ():
                index = self._index(tensor)
                self._garbage[index] = self._sample(storage, index)
        elif schema.name.startswith(_TAKES_MEMORY):
            for tensor, storage in _with_storages(result):
                self.appeared(tensor, storage, self._index(tensor))
        elif self._numbers:
            if writes and not (len(writes) == 1 and writes[0] in reads and not schema.written):
                self._note_contents(result)
            if writes_to_arguments(schema):
                self._note_contents(tuple(written_arguments(schema, args, kwargs)))

    def wrote(self, values: Any) -> None:
        """Note that tensors were written to by what is recorded by a name of its own."""
        for tensor, _ in _with_storages(values):
            self._uninitialised.pop(self._index(tensor), None)
        if self._numbers:
            self._note_contents(values)

    def lifting(self, is_lifting: bool) -> None:
        """Note that the next op call takes in a constant, such as `torch.tensor([1, 2])`, or that it is over."""
        self._is_lifting = is_lifting

    def enter(self, values: Any) -> None:
        """Look at what goes into a module or a function."""
        if self.in_op:
            return
        if not self._is_inside():
            self.forget_contents()  # what a program does between two calls of its model is no work of the model
            self._recorder.storages_of(tensors_of(values))
            if any(type(tensor) not in _PLAIN_TENSORS for tensor in tensors_of(values)):
                self.met_subclass()
        elif self._numbers or self._uninitialised:
            self._check_values(values, None)

    def leave(self, values: Any, owner: Any) -> None:
        """Look at what comes out of a module or a function, which is still open; `owner` is that."""
        if not self.in_op and (self._numbers or self._uninitialised or self._has_left):
            self._check_values(values, owner)

    def freed(self, index: int) -> None:
        """Forget a storage that is no more."""
        suspect = self._suspects.pop(index, None)
        if suspect is not None:
            self._report(*suspect, index)
        self._uninitialised.pop(index, None)
        self._garbage.pop(index, None)
        self._exports.pop(index, None)

    def forget_contents(self) -> None:
        """Forget what tensors hold: something ran that is not to be recorded."""
        self._contents.clear()

    def _check_values(self, values: Any, owner: Any) -> None:
        if not self._has_subclasses and any(type(tensor) not in _PLAIN_TENSORS for tensor in tensors_of(values)):
            self.met_subclass()
        self._owner = owner
        is_final = (
            owner is not None and len(self._recorder.thread_state().opened) == 1
        )  # the model's result is read outside
        for tensor, _ in _with_storages(values):
            index = self._index(tensor)
            # What a module passes on as it came is yet to be written to.
            if index in self._uninitialised and owner is not None and (is_final or index in self._exports):
                self._report_uninitialised(tensor, index)
            self._check_contents(tensor)
        self._owner = None

    def _check_initialised(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        written = {id(tensor) for value in written_arguments(schema, args, kwargs) for tensor in tensors_of(value)}
        reads_contents = not (schema.is_view or schema.name in _READ_NO_CONTENTS or schema.name in _COPIES)
        for tensor, _ in _with_storages((*args, *kwargs.values())):
            index = self._index(tensor)
            if index not in self._uninitialised:
                continue
            if id(tensor) in written:
                if schema.name not in _READ_NO_CONTENTS:
                    del self._uninitialised[index]
            elif reads_contents:
                self._report_uninitialised(tensor, index)

    def _report_uninitialised(self, tensor: torch.Tensor, index: int) -> None:
        site = self._uninitialised.pop(index)
        found = self._sample(tensor.untyped_storage(), index) if self._numbers else None
        is_unchanged = found is not None and found == self._garbage.get(index) and index not in self._exports
        if tensor.numel() and not is_unchanged:
            self._report(self._exports.get(index, site), describe_tensor(tensor), index)

    def _check_contents(self, tensor: torch.Tensor) -> None:
        """Report a tensor whose contents are not those that the last recorded op left."""
        if not self._numbers:
            return
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # sparse, or one of torch.func's
            return
        recorder = self._recorder
        index = self._index(tensor)
        sample = self._sample(storage, index)
        if sample is None or index in self._uninitialised:
            return
        address = _address(storage)
        known = self._contents.get(address)
        self._contents[address] = index, sample
        if known is None or known[1] == sample or not self._is_inside():
            return
        # Two storages at one address are one array that was taken in twice, or the later of two.
        if known[0] != index and "op" in (recorder.storages[known[0]][2], recorder.storages[index][2]):
            return
        site = self._exports.get(index)
        if site is None:
            site = self._site(None if self._owner is None else source_line_of(self._owner))
        self._report(site, describe_tensor(tensor), index)

    def _note_contents(self, values: Any) -> None:
        for tensor, storage in _with_storages(values):
            index = self._index(tensor)
            sample = self._sample(storage, index)
            if sample is not None:
                self._contents[_address(storage)] = index, sample

    def _sample(self, storage: torch.UntypedStorage, index: int) -> bytes | None:
        if self._recorder.storages[index][1] != "cpu":
            return None
        address, nbytes = _address(storage), storage.nbytes()
        if not address or not nbytes:
            return None
        if nbytes <= 2 * _SAMPLE:
            return string_at(address, nbytes)
        return string_at(address, _SAMPLE) + string_at(address + nbytes // 2, _SAMPLE)

    def _index(self, tensor: torch.Tensor) -> int:
        return self._recorder.storage_of(tensor, "outside")

    def _is_inside(self) -> bool:
        """Return whether what runs now belongs to a call of the model, or to the backward pass of one."""
        return bool(self._recorder.thread_state().opened) or current_autograd_node() is not None

    def _site(self, source: SourceLine | None = None) -> _Site:
        stack, phase = self._recorder.place()
        return _Site(stack, phase, find_source_line(sys._getframe(2)) if source is None else source)

    def _report(self, site: _Site, output: TensorSpec, index: int) -> None:
        recorder = self._recorder
        around = recorder.innermost_region(site.stack)
        if around.kind == "function" and site.phase != "backward":
            name = f"prim::PythonOp.{around.name}"
        else:
            name = f"unseen::{_function_name(site, around)}"
        signature = Signature(name, (), (), (output,), f"{name}(...) -> Tensor", site.source.line)
        recorder.append_unseen(signature, site.stack, site.phase, index)


def _function_name(site: _Site, around: Region) -> str:
    if around.kind == "function":
        return f"{around.name}.backward"
    return site.source.function or around.name or "work"


def _is_torchs_own(frame: FrameType | None) -> bool:
    """Return whether a function of torch's called what runs: some of its kernels in C++ fill memory by pointer.

    That is `_pad_packed_sequence`, say. Others' kernels are called by torch.ops and by the backward engine too.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return False
    path = frame.f_code.co_filename
    if path.endswith("_ops.py") and frame.f_code.co_name == "decompose":
        return str(frame.f_locals["self"]).startswith("aten.")
    return path.startswith(_TORCH) and not path.endswith(_CALLS_OTHERS)


def _with_storages(values: Any) -> Iterator[tuple[torch.Tensor, torch.UntypedStorage]]:
    """Yield the plain tensors in nested values, with the memory that they stand for."""
    for tensor in tensors_of(values):
        if type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided:
            try:
                storage = tensor.untyped_storage()
            except RuntimeError:  # one of torch.func's has none
                continue
            yield tensor, storage


def _address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage, 0 where it has no memory."""
    try:
        return _address_of(storage)
    except RuntimeError:  # that of a wrapper
        return 0
