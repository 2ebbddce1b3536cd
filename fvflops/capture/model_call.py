"""Call a model for a recording: the forward pass, and the backward pass from its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import torch
from torch import nn

from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.shapes.metadata import Metadata, metadata_of, metadata_of_leaf
from fvflops.text import shown
from fvflops.torch_internals import below_autograd, is_wrapper_subclass
from fvflops.trace import Region, Signature

Model = nn.Module | Callable[..., Any]
Loss = Callable[[Any], torch.Tensor]
CostEstimate = Callable[[Signature], int]
# Tensors that exist before a run: the tensors, their metadata, their storages, and the storages' rows in the Trace.
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
    """Arguments and options of one call of a model, the same for shape and real execution.

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
        token, called = None, model
        is_forward_of_ddp = isinstance(model, nn.parallel.DistributedDataParallel) and self.loss is None
        if isinstance(model, nn.DataParallel) or is_forward_of_ddp:
            # The wrapper's forward scatters its inputs; a forward pass counts the wrapped model.
            called = model.module  # type: ignore[union-attr, assignment]
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
                loss = loss_of(result, self.loss)
            loss.backward()
        unseen_work.unfinished.end()


def loss_of(result: Any, loss: Loss | None) -> torch.Tensor:
    """Return the scalar loss of a model's result; ValueError if it is not a scalar tensor."""
    if loss is not None:
        check_loss(loss)
    value: Any = loss_in(result) if loss is None else loss(result)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        actual = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        source = "the model's loss is" if loss is None else "loss= returned"
        raise ValueError(f"{source} {actual}, not a scalar: pass loss=, a function from the result to a scalar tensor")
    if not value.requires_grad:
        raise ValueError("the loss has no gradient: no parameter with requires_grad reaches it, or it was detached")
    return value


def check_loss(loss: Loss) -> None:
    """Raise TypeError for a loss that needs more than the model's result, such as a target.

    >>> check_loss(nn.CrossEntropyLoss())
    Traceback (most recent call last):
    TypeError: loss= gets the model's result alone, and CrossEntropyLoss needs target too: write a \
function of the result alone, such as lambda result: loss(result, target)
    """
    if not callable(loss):
        raise TypeError(f"loss must be a function from the model's result to a scalar tensor; got {shown(loss)}")
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [item.name for item in parameters if item.kind in positional and item.default is item.empty]
    if len(needed) > 1:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"loss= gets the model's result alone, and {name} needs {', '.join(needed[1:])} too: write a "
            f"function of the result alone, such as lambda result: loss(result, {', '.join(needed[1:])})"
        )


def loss_in(result: Any) -> Any:
    """Return the `loss` of a model's result, the one scalar of a tuple that has a gradient, or else the result itself.

    >>> loss_in((torch.ones(2, 3), torch.tensor(0.5, requires_grad=True)))
    tensor(0.5000, requires_grad=True)
    """
    if isinstance(result, (tuple, list)) and not hasattr(result, "loss"):
        scalars = [item for item in result if isinstance(item, torch.Tensor) and item.ndim == 0 and item.requires_grad]
        return scalars[0] if len(scalars) == 1 else result
    return result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
