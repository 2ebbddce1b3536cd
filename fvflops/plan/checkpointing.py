"""Activation checkpointing by policy: which modules are checkpointed, and which results of their ops are kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fvflops.capture.training_step import Checkpointed, checkpointed_modules
from fvflops.plan.sharding.fully_sharded import find_blocks
from fvflops.text import suggest

# Policy → activations that it keeps of members of a model's outermost module lists; "every 2" may have another number.
POLICIES = {
    "full": "their inputs",
    "every 2": "the inputs of every second, all of the others",
    "selective": "their inputs, and the results of attention and of every second matrix product (torchtitan's "
    "selective_ac_option = op)",
}

# A policy, or modules as in TrainingStepAnalysis.
Checkpoint = str | Checkpointed
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_EVERY = re.compile(r"every ([1-9]\d*)")
_MATRIX_PRODUCT = "aten::mm"
# The results that torchtitan keeps (_save_list in its parallelize_llama.py), with the CPU's attention.
_KEPT = frozenset(
    {
        _MATRIX_PRODUCT,
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "_c10d_functional::reduce_scatter_tensor",
        "aten::max",
    }
)


def is_policy(name: str) -> bool:
    return name in POLICIES or _EVERY.fullmatch(name) is not None


def find_checkpointed(model: nn.Module, checkpoint: Checkpoint) -> list[nn.Module]:
    """Return the modules to checkpoint of a model, or of a pipeline stage; an unknown policy raises ValueError.

    >>> from fvflops.zoo import build
    >>> [len(find_checkpointed(build("llama_tiny", device="meta"), policy)) for policy in ("full", "every 2")]
    [2, 1]
    """
    if not isinstance(checkpoint, str):
        return checkpointed_modules(model, checkpoint)
    if not is_policy(checkpoint):
        raise ValueError(
            f"no checkpoint policy {checkpoint!r}{suggest(checkpoint, POLICIES)}: they are {', '.join(POLICIES)}; or "
            "pass a list of module names or classes"
        )
    every = _EVERY.fullmatch(checkpoint)
    step = 1 if every is None else int(every[1])
    return find_blocks(model)[step - 1 :: step]


def make_contexts(
    checkpoint: Checkpoint, around_forward: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], Contexts]:
    """Return the `context_fn` of torch.utils.checkpoint: contexts of the forward pass and of its recomputation.

    A recomputation runs in autograd, outside the forward pass's context, `around_forward`. Schedules that split the
    backward pass recompute several times.
    """

    def make() -> Contexts:
        if checkpoint != "selective":
            return nullcontext(), _Around(around_forward)
        forward, recompute = create_selective_checkpoint_contexts(_make_policy())
        return forward, _Around(around_forward, recompute)

    return make


def _make_policy() -> Callable[..., CheckpointPolicy]:
    """Return torchtitan's policy for a call of one module, whose matrix products it numbers."""
    products: Counter[bool] = Counter()

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name().partition(".")[0]
        if name == _MATRIX_PRODUCT:
            products[context.is_recompute] += 1
        kept = name in _KEPT and not (name == _MATRIX_PRODUCT and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


class _Around(AbstractContextManager[None]):
    """A new context of a forward pass around another one, as often as it is entered."""

    def __init__(
        self,
        around_forward: Callable[[], AbstractContextManager[Any]],
        inner: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._around_forward, self._inner = around_forward, nullcontext() if inner is None else inner

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._around_forward())
            stack.enter_context(self._inner)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)
