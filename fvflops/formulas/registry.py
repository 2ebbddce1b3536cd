"""Registry of the Python formulas that tables refer to with `use`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from fvflops.formulas.cost import Cost
from fvflops.formulas.functions.attention import (
    SEQUENCE_VALUES,
    count_attention,
    count_attention_backward,
    count_attention_bshd,
    count_attention_bshd_backward,
    count_encoder_layer,
    count_multi_head_attention,
)
from fvflops.formulas.functions.convolution import count_convolution, count_convolution_backward
from fvflops.formulas.functions.einsum import count_einsum, count_fvcore_einsum, count_numpy_einsum
from fvflops.formulas.functions.exact.exact_attention import (
    count_exact_attention,
    count_exact_attention_backward,
    count_exact_attention_bshd,
    count_exact_attention_bshd_backward,
    count_exact_encoder_layer,
    count_exact_multi_head_attention,
)
from fvflops.formulas.functions.exact.exact_matmul import count_exact_einsum, count_exact_trilinear
from fvflops.formulas.functions.exact.exact_rnn import count_exact_recurrence, count_exact_recurrence_backward
from fvflops.formulas.functions.exact.indexing import count_exact_index_put
from fvflops.formulas.functions.exact.pooling import (
    count_exact_adaptive_average,
    count_exact_adaptive_average_backward,
    count_exact_adaptive_maximum,
)
from fvflops.formulas.functions.exact.resampling import (
    count_exact_antialiased,
    count_exact_antialiased_backward,
    count_exact_grid_sampler,
    count_exact_grid_sampler_backward,
)
from fvflops.formulas.functions.matmul import count_foreach_matmul, count_matmul, count_trilinear
from fvflops.formulas.functions.peers.ptflops import (
    count_ptflops_attention,
    count_ptflops_convolution,
    count_ptflops_linear,
)
from fvflops.formulas.functions.peers.torch_flops import (
    count_torch_flops_avg_pool,
    count_torch_flops_convolution,
    count_torch_flops_interpolate,
    count_torch_flops_max_pool,
)
from fvflops.formulas.functions.peers.torchinfo import count_torchinfo_layer
from fvflops.formulas.functions.rnn import count_recurrence, count_recurrence_backward
from fvflops.formulas.functions.state_space import count_mamba_inner, count_mamba_split_scan
from fvflops.formulas.language.call import Call
from fvflops.text import suggest, truncate

# A formula returns a Cost, or an integer number of FLOPs.
Formula = Callable[[Call], Cost | int]

FORMULAS: dict[str, Formula] = {
    "attention": count_attention,
    "attention_backward": count_attention_backward,
    "attention_bshd": count_attention_bshd,
    "attention_bshd_backward": count_attention_bshd_backward,
    "convolution": count_convolution,
    "convolution_backward": count_convolution_backward,
    "einsum": count_einsum,
    "encoder_layer": count_encoder_layer,
    "exact_adaptive_average": count_exact_adaptive_average,
    "exact_adaptive_average_backward": count_exact_adaptive_average_backward,
    "exact_adaptive_maximum": count_exact_adaptive_maximum,
    "exact_antialiased": count_exact_antialiased,
    "exact_antialiased_backward": count_exact_antialiased_backward,
    "exact_attention": count_exact_attention,
    "exact_attention_backward": count_exact_attention_backward,
    "exact_attention_bshd": count_exact_attention_bshd,
    "exact_attention_bshd_backward": count_exact_attention_bshd_backward,
    "exact_einsum": count_exact_einsum,
    "exact_encoder_layer": count_exact_encoder_layer,
    "exact_grid_sampler": count_exact_grid_sampler,
    "exact_grid_sampler_backward": count_exact_grid_sampler_backward,
    "exact_index_put": count_exact_index_put,
    "exact_multi_head_attention": count_exact_multi_head_attention,
    "exact_recurrence": count_exact_recurrence,
    "exact_recurrence_backward": count_exact_recurrence_backward,
    "exact_trilinear": count_exact_trilinear,
    "foreach_matmul": count_foreach_matmul,
    "fvcore_einsum": count_fvcore_einsum,
    "mamba_inner": count_mamba_inner,
    "mamba_split_scan": count_mamba_split_scan,
    "matmul": count_matmul,
    "multi_head_attention": count_multi_head_attention,
    "numpy_einsum": count_numpy_einsum,
    "ptflops_attention": count_ptflops_attention,
    "ptflops_convolution": count_ptflops_convolution,
    "ptflops_linear": count_ptflops_linear,
    "recurrence": count_recurrence,
    "recurrence_backward": count_recurrence_backward,
    "torch_flops_avg_pool": count_torch_flops_avg_pool,
    "torch_flops_convolution": count_torch_flops_convolution,
    "torch_flops_interpolate": count_torch_flops_interpolate,
    "torch_flops_max_pool": count_torch_flops_max_pool,
    "torchinfo_layer": count_torchinfo_layer,
    "trilinear": count_trilinear,
}

# Arguments of which a formula reads the values, where they are known.
VALUES: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    (
        *("attention_bshd", "attention_bshd_backward"),
        *("exact_attention_bshd", "exact_attention_bshd_backward"),
    ),
    SEQUENCE_VALUES,
)

_REGISTERED: dict[str, Formula] = {}


def register_formula(name: str, function: Formula) -> None:
    """Make `function` available to all tables of this process as `use: name`.

    `function` takes a `Call` and returns a `Cost`, or an integer number of FLOPs. A name that fvflops ships, or that
    is registered for another function, raises ValueError; registering the same function again has no effect.

    >>> register_formula("convolution", lambda call: Cost(flops=9 * call.tensor("u").numel))
    Traceback (most recent call last):
    ValueError: the formula 'convolution' is shipped with fvflops: choose another name
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a formula name must be an identifier such as 'fused_scan'; got {name!r}")
    if not callable(function):
        raise TypeError(f"the formula {name!r} is {function!r}, which cannot be called")
    if not can_be_called(function, 1):
        raise TypeError(f"the formula {name!r} takes {inspect.signature(function)}: write a function of (call)")
    if name in FORMULAS:
        raise ValueError(f"the formula {name!r} is shipped with fvflops: choose another name")
    if _REGISTERED.setdefault(name, function) is not function:
        raise ValueError(f"the formula {name!r} is registered already, as {_REGISTERED[name]!r}: choose another name")


def can_be_called(function: Callable[..., object], count: int) -> bool:
    """Return whether a function accepts `count` positional arguments alone; True where its signature is unknown.

    >>> can_be_called(lambda call: 0, 1), can_be_called(lambda: 0, 1)
    (True, False)
    """
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a callable of C without a signature
        return True
    return True


def find_formula(name: str) -> Formula:
    """Return the formula of a name; an unknown one raises KeyError with the closest match."""
    for registry in (FORMULAS, _REGISTERED):
        if name in registry:
            return registry[name]
    known = [*FORMULAS, *_REGISTERED]
    hint = suggest(name, known, quote=False) or f": available are {truncate(', '.join(known), 500)}"
    raise KeyError(f"unknown formula {truncate(name)}{hint}")
