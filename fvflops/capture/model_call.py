"""Call a model for a recording: the forward pass, the backward pass from its loss, and their effects on arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import torch
from torch import nn

from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore.restore import Snapshot
from fvflops.capture.shapes.metadata import Metadata, metadata_of, metadata_of_leaf
from fvflops.torch_internals import below_autograd, is_wrapper_subclass
from fvflops.trace import Region, Signature

Model = nn.Module | Callable[..., Any]
Loss = Callable[[Any], torch.Tensor]
CostEstimate = Callable[[Signature], int]
# Tensors that exist before a run: the tensors, their metadata, their storages, and the storages' rows of the Trace.
PreexistingTensors = tuple[
    Sequence[torch.Tensor], list[Metadata], list[torch.UntypedStorage], list[tuple[int, str, str, str]]
]


class ShapeOptions(TypedDict, total=False):
    """Options of shape execution, as `record_call` describes them."""

    device: Annotated[str | torch.device | None, None]
    assume: Annotated[Mapping[str, Any] | None, None]


class RunOptions(ShapeOptions, total=False):
    """Options of a run, as `record_call` describes them."""

    execution: Annotated[str, "auto"]
    lines: Annotated[bool, False]


class CallOptions(RunOptions, total=False):
    """Options of one recorded call, as `record_call` describes them."""

    quiet: Annotated[bool, False]
    measure: Annotated[Collection[str], ()]


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """A call of a model, which is recorded and restored in any execution.

    Its `op_set` is "composite" (ops as called, without autograd) or "core" (ops as decomposed by autograd). With
    `detects_autograd` the model's uses of autograd are recorded.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss | None = None
    autocast: AbstractContextManager[Any] | None = None
    op_set: str = "core"
    detects_autograd: bool = False

    def tensors(self) -> PreexistingTensors:
        tensors = [item for item in tensors_of((self.args, self.kwargs)) if metadata_of_leaf(item) is not None]
        metadata = [metadata_of(tensor) for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        rows = [
            (0 if is_wrapper_subclass(tensor) else storage.nbytes(), item.spec.device, "input", "")
            for tensor, storage, item in zip(tensors, storages, metadata, strict=True)
        ]
        return tensors, metadata, storages, rows

    @contextmanager
    def grad_mode(self) -> Iterator[None]:
        """Switch autograd off for the op set "composite", and on for a backward pass."""
        if self.op_set == "composite":
            with torch.no_grad(), below_autograd():
                yield
        else:
            with nullcontext() if self.loss is None else torch.enable_grad():
                yield

    def run(self, model: Model, recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Call a model with these arguments, and its loss."""
        autocast, unseen_work = self.autocast or nullcontext(), recorder.unseen
        assert unseen_work is not None
        token = None
        if isinstance(model, nn.DataParallel) or (
            isinstance(model, nn.parallel.DistributedDataParallel) and self.loss is None
        ):
            # The wrapper's forward scatters its inputs; a forward pass counts the wrapped model.
            called: Model = model.module
        else:
            called = model
        if called is not model or not isinstance(model, nn.Module):  # else the module's call is the outermost region
            unseen_work.enter((args, kwargs))
            token = recorder.enter(recorder.region(Region("module", "")), (args, kwargs))
        with autocast:
            result = called(*args, **kwargs)
        if token is not None:
            unseen_work.leave(result, called)
            unseen_work.finish(result, called)
            recorder.leave(token, result)
        if self.loss is not None:
            with autocast:
                loss = self.loss(result)
            loss.backward()
        unseen_work.unfinished.end()


def report_changed_arrays(recorder: Recorder, model_index: ModelIndex, snapshot: Snapshot) -> None:
    """Report the NumPy arrays that a run has changed as work of the modules that own them."""
    for array in snapshot.changed_arrays():
        owners = (
            name for module, name in model_index.names.items() if any(item is array for item in vars(module).values())
        )
        if recorder.unseen is not None:
            recorder.unseen.report_array(array, recorder.stack_at(next(owners, "")))
