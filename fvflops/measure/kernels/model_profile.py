"""Profile the kernels of a model's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_run import InputSize, bind_inputs, check_repeatable, inputs_of_size
from fvflops.analysis.steps import schedule
from fvflops.capture.instrument.module_clock import unchanged
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.read_module_tree import unwrap_data_parallel
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore.interrupts import allowed, deferred
from fvflops.capture.restore.restore import leaves_of
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import Loss, Model, record_call
from fvflops.counting import TableCostModel
from fvflops.formulas import resolve_table
from fvflops.measure.kernels.kernel_profile import KernelOptions, KernelProfile
from fvflops.text import Unpack, explaining_arguments, require_int


@explaining_arguments
def profile_kernels(
    model: Model,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    input_size: InputSize | None = None,
    loss: Loss | None = None,
    warmup: int = 1,
    repeat: int = 3,
    execution: str = "auto",
    **options: Unpack[KernelOptions],
) -> KernelProfile:
    """Return torch.profiler's profile of a model's runs, with FLOPs from a recording of one run.

    The model runs `warmup` times, and then `repeat` times as steps of the profile: without gradients, or with `loss`, a
    function of the result that returns a scalar, through the backward pass. The recording uses `execution`, by
    default shape execution where possible. The model, its buffers and gradients, and the inputs are left
    unchanged. The other arguments are as for `KernelProfile`.

    >>> profile = profile_kernels(torch.nn.Linear(3, 2), torch.ones(4, 3), loss=lambda y: y.sum())
    >>> profile.total(), profile.macs(), profile.ledger().no_event
    (96, 48, ())
    """
    require_int("warmup", warmup, least=0)
    require_int("repeat", repeat, least=1)
    options["table"] = table = resolve_table(options["table"])
    profile = KernelProfile(model, schedule=schedule(warmup=warmup, active=repeat, repeat=1), **options)
    args, keywords = bind_inputs(model, *inputs_of_size(model, inputs, kwargs, input_size))
    check_repeatable(args, keywords)
    inner = unwrap_data_parallel(model) if isinstance(model, nn.Module) else model
    with deferred(), _own_gradients(ModelIndex(inner), (args, keywords)) as clear_gradients:
        stops_at = TableCostModel(table, "flops").stops_at
        with allowed():
            counted = record_call(inner, args, keywords, stops_at=stops_at, execution=execution, loss=loss, quiet=True)
        profile.count_with(counted)
        with profile, torch.set_grad_enabled(loss is not None), model_runs():
            for number in range(warmup + repeat):
                result = model(*args, **keywords)
                if loss is not None:
                    scalar = loss(result)
                    if not number:
                        clear_gradients(leaves_of(scalar))
                    scalar.backward()
                    del scalar
                del result
                profile.step()
                clear_gradients()
    return profile


@contextmanager
def _own_gradients(model_index: ModelIndex, inputs: Any) -> Iterator[Callable[..., None]]:
    """Clear gradients, so that each run creates its own; the yielded function does so again, also for other tensors.

    At the end, the gradients, the model and the inputs are restored.
    """
    gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # by id: a leaf, and its gradient before

    def clear(more: Iterable[torch.Tensor] = ()) -> None:
        gradients.update({id(leaf): (leaf, leaf.grad) for leaf in more if leaf.is_leaf and id(leaf) not in gradients})
        for leaf, _ in gradients.values():
            leaf.grad = None

    with unchanged(model_index, inputs):
        clear([*model_index.tensors, *(tensor for tensor in tensors_of(inputs) if not tensor.is_meta)])
        try:
            yield clear
        finally:
            for leaf, gradient in gradients.values():
                leaf.grad = gradient
