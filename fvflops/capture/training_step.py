"""Record a training step in shape execution: forward and backward of each micro-batch, then optimizer steps."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from fvflops.capture.errors.model_errors import noting_remedies
from fvflops.capture.model.meta_copy import quantised_on_meta
from fvflops.capture.model.read_module_tree import describe_inputs, module_paths
from fvflops.capture.model_call import CostEstimate, ShapeOptions, loss_of
from fvflops.capture.recorder.python_reads import DrawFinder
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import (
    ExecutionError,
    Loss,
    choose_device,
    needs_real_execution,
    recording_lock,
    suspend_outer_recordings,
)
from fvflops.capture.session import Session
from fvflops.capture.shapes.symbolic_imports import without_symbolic_imports
from fvflops.garbage_collector import gc_paused
from fvflops.text import Unpack, explaining_arguments, printable, shown
from fvflops.trace import StopsAt, Trace

_LOGGER = logging.getLogger("fvflops")

# An optimizer, or a factory that takes parameters: a class, or a partial of one.
OptimizerMaker = Optimizer | Callable[[Iterable[torch.Tensor]], Optimizer]
# Names of modules, classes of modules, or a predicate of name and module.
Checkpointed = Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]


class StepOptions(ShapeOptions, total=False):
    """Options of a training step, as TrainingStepAnalysis describes them."""

    loss: Annotated[Loss | None, None]
    optimizer: Annotated[OptimizerMaker | Sequence[OptimizerMaker] | None, None]
    checkpoint: Annotated[Checkpointed, ()]
    checkpoint_options: Annotated[Mapping[str, Any] | None, None]
    micro_batches: Annotated[int, 1]
    autocast: Annotated[torch.dtype | None, None]


def list_makers(optimizer: OptimizerMaker | Sequence[OptimizerMaker] | None) -> list[Any]:
    """Return the optimizers of a step, or their factories."""
    return list(optimizer or ()) if optimizer is None or isinstance(optimizer, (list, tuple)) else [optimizer]


@explaining_arguments
def record_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    stops_at: StopsAt,
    estimate_cost: CostEstimate | None = None,
    **step: Unpack[StepOptions],
) -> Trace:
    """Return the Trace of one training step in shape execution; model, inputs and optimizers are restored.

    The step starts without gradients. By default the loss is the result's `loss`, or the result itself if it is a
    scalar. The other arguments are as for `record_call`. A data-dependent step raises ExecutionError.
    """
    weights = [weight for _, module in module_paths(model) for weight in module._parameters.values()]
    kind = choose_device(step["device"], [weight.device for weight in weights if weight is not None]).type
    dtype, loss = step["autocast"], step["loss"]
    forward = nullcontext if dtype is None else partial(autocast_to, dtype, "cpu" if kind == "meta" else kind)

    def run(session: Session) -> dict[str, str]:
        # In a function, so that its tensors are freed while signals are deferred.
        checkpointed = checkpointed_modules(model, step["checkpoint"])
        checkpoints = checkpointed_calls(checkpointed, dict(step["checkpoint_options"] or {}))
        instances = [make_optimizer(item, model) for item in list_makers(step["optimizer"])]
        session.recorder.resume()
        shapes, named_shapes = session.in_shapes((args, dict(kwargs)))
        with checkpoints, torch.enable_grad(), model_runs():
            for _ in range(step["micro_batches"]):
                # As in a trainer, the result is freed when its loss is computed, and the loss after the backward pass.
                with forward():
                    scalar = loss_of(model(*shapes, **named_shapes), loss)
                scalar.backward()
                del scalar
        with model_runs():
            for optimizer in instances:
                optimizer.step()
        return describe_optimizers(instances)

    session: dict[str, Any] = {"stops_at": stops_at, "estimate_cost": estimate_cost}
    session |= {"device": step["device"], "assume": step["assume"], "code": (loss,)}
    return record_run(model, (args, kwargs), run, **session)


def record_run(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    run: Callable[[Session], Mapping[str, str]],
    **options: Any,
) -> Trace:
    """Return the Trace of `run` with a model in shape execution; model, inputs and optimizers are restored.

    The model has no gradients. `run` gets the session, paused, and resumes it, and returns entries for `about`; it is
    called again if the model draws numbers outside torch. `options` are as in Session. A data-dependent run raises
    ExecutionError.
    """
    draws = DrawFinder()
    begin = partial(Session, model, execution="shapes", inputs=inputs, draws=draws, **options)
    with (
        noting_remedies(),
        interrupts.deferred(),
        recording_lock(),
        suspend_outer_recordings(),
        gc_paused(),
        without_symbolic_imports(),
        quantised_on_meta(model),
    ):
        trace = _record_once(begin(), run)
        return _record_once(begin(), run) if draws.needs_second_run else trace


def _record_once(session: Session, run: Callable[[Session], Mapping[str, str]]) -> Trace:
    input_text = ", ".join(describe_inputs(*session.inputs))
    complete = False
    try:
        with session.recording():
            session.recorder.pause()  # some optimizers create their state in the constructor, not in a step
            _clear_gradients(session.model)
            about = copy_context().run(run, session)
        complete = True
    except Exception as error:
        if interrupts.is_interrupt(error) or not needs_real_execution(error):
            raise
        raise ExecutionError(session.describe_failure(error, "count a real step with fvflops.record")) from error
    finally:
        leak_message = session.release(describe=complete)  # the frames of an error keep some alive
        if leak_message:
            _LOGGER.warning("%s", printable(leak_message))
    trace = session.trace()
    del session  # exceptions of signal handlers inside a finalizer are lost
    return replace(trace, about={**trace.about, **about, "inputs": input_text})


def _clear_gradients(model: nn.Module) -> None:
    # A function, so that no frame keeps a shape tensor alive; model.parameters() skips modules that compare equal.
    for _, module in module_paths(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad = None


def describe_optimizers(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the names of optimizers after a step, and the data types of their state, the largest first."""
    names, sizes, left, copies = dict[str, None](), Counter[torch.dtype](), list(optimizers), list[torch.Tensor]()
    while left:
        optimizer = left.pop(0)
        values = [item for value in vars(optimizer).values() for item in (value if type(value) is list else [value])]
        inner = [item for item in values if isinstance(item, Optimizer)]
        left += inner
        names |= {} if inner else {type(optimizer).__name__: None}
        for value in (value for state in optimizer.state.values() for value in state.values()):
            if isinstance(value, torch.Tensor) and value.ndim:
                sizes[value.dtype] += value.nbytes
        copies += getattr(optimizer, "copies", ())  # of master weights
    dtypes = [str(dtype).removeprefix("torch.") for dtype, _ in sizes.most_common()]
    masters = {"master_weights": f"{str(copies[0].dtype).removeprefix('torch.')} copies"} if copies else {}
    return {"optimizer": " and ".join(names) or "none", "optimizer_state": ", ".join(dtypes) or "none", **masters}


def autocast_to(dtype: torch.dtype, device_type: str) -> torch.autocast:
    """Return torch's autocast to a dtype; anything else, such as "bf16" or True, raises TypeError."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"autocast={shown(dtype)} is not a dtype: pass torch.bfloat16 or torch.float16")
    return torch.autocast(device_type, dtype)


def make_optimizer(maker: OptimizerMaker, model: nn.Module) -> Optimizer:
    """Return the optimizer itself or create it; one whose step needs a closure raises ValueError."""
    optimizer: Any = maker if isinstance(maker, Optimizer) else maker(model.parameters())
    if not isinstance(optimizer, Optimizer):
        made = f"{shown(maker)} returned {shown(optimizer)}"
        raise TypeError(f"optimizer= must create a torch.optim.Optimizer from parameters, but {made}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, which it calls a data-dependent number of times: "
            "use fvflops.record"
        )
    return optimizer


def checkpointed_modules(model: nn.Module, checkpointed: Checkpointed) -> list[nn.Module]:
    """Return the modules to checkpoint; a name or class that is not in the model raises ValueError."""
    is_one = isinstance(checkpointed, (str, type, nn.Module))
    if is_one or not (callable(checkpointed) or isinstance(checkpointed, Iterable)):
        raise ValueError(f"checkpoint={shown(checkpointed)} is not a list: pass a list of module names or classes")
    by_name = dict(module_paths(model))
    selected = []
    if callable(checkpointed):
        selected = [module for name, module in by_name.items() if checkpointed(name, module)]
    for item in () if callable(checkpointed) else checkpointed:
        kind = item if isinstance(item, type) else ()
        matches = [module for name, module in by_name.items() if name == item or isinstance(module, kind)]
        if not matches:
            raise ValueError(f"checkpoint={shown(item)} is neither the name nor the class of a module of the model")
        selected += matches
    return list({id(module): module for module in selected}.values())


@contextmanager
def checkpointed_calls(modules: Sequence[nn.Module], options: dict[str, Any]) -> Iterator[None]:
    """Checkpoint the calls of modules while the context lasts."""
    options.setdefault("use_reentrant", False)
    with ExitStack() as stack:
        for module in modules:
            override = module.__dict__.get("forward")
            if override is None:
                stack.callback(module.__dict__.pop, "forward", None)
            else:
                stack.callback(module.__dict__.__setitem__, "forward", override)
            module.__dict__["forward"] = partial(checkpoint, module.forward, **options)
        yield
