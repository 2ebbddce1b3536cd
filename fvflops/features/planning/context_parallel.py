"""The shared sequence: attention where each rank holds a part of the tokens, as in context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class ShardedSequence(TorchFunctionMode):
    """While it is on, attention gathers the keys and values of all ranks of a process group, each the same part long.

    So was Llama 3 trained (Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2). In the
    backward pass the gradients of keys and values are summed and scattered again. Every rank's queries meet all keys;
    which of them are earlier a causal mask no longer says, so that this is right for what it costs, not for numbers.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else dict(kwargs)
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
            args = ()
            for name in ("key", "value"):
                kwargs[name] = self._gather(kwargs[name])
        return func(*args, **kwargs)

    def _gather(self, tensor: Any) -> Any:
        from fvflops.torch_internals import all_gather_with_gradient

        return all_gather_with_gradient(tensor, gather_dim=tensor.ndim - 2, group=self._group)
