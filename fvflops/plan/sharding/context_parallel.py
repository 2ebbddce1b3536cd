"""Context parallelism: attention over a sequence that is sharded among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from fvflops.torch_internals import all_gather_with_gradient, scaled_dot_product_attention


class ShardedSequence(TorchFunctionMode):
    """Gather keys and values of all ranks of a process group in every attention, as a context manager.

    As in Llama 3's training (Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2). All
    ranks have parts of equal length. The backward pass reduce-scatters the gradients of keys and values. A causal mask
    is wrong for the gathered keys, so the costs are right and the values are not.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else dict(kwargs)
        # Not the attribute of F, which a recording replaces.
        if func is scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
            args = ()
            for name in ("key", "value"):
                kwargs[name] = self._gather(kwargs[name])
        return func(*args, **kwargs)

    def _gather(self, tensor: Any) -> Any:
        return all_gather_with_gradient(tensor, gather_dim=tensor.ndim - 2, group=self._group)
