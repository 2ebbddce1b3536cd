"""What a recording installs: all that it puts in the place of something of torch's, or adds to it."""

import sys

import torch
from torch import nn
from torch._higher_order_ops import utils as higher_order
from torch._ops import HigherOrderOperator
from torch.autograd import function as autograd_function
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Every function that it wraps, whatever the patches say of themselves; not torch.compile, which Lightning replaces when
# it is imported.
WRAPPED = (
    (nn.Module, "_call_impl"),
    (nn.Module, "compile"),
    (torch.autograd, "_engine_run_backward"),
    (HigherOrderOperator, "__call__"),
    (higher_order, "_hop_compile_and_call"),
    (checkpoint._CheckpointFrame, "__init__"),
    *((checkpoint._recomputation_hook, name) for name in ("__init__", "__enter__", "__exit__")),
    (checkpoint.CheckpointFunction, "backward"),
)


def installed() -> dict[str, object]:
    """Return what stands now where a recording installs something."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return {
        # Older versions of torch lack some.
        **{f"{owner.__name__}.{name}": vars(owner).get(name) for owner, name in WRAPPED if hasattr(owner, name)},
        # Where `apply` is torch's C function, the look-up of `forward` is wrapped instead.
        "function": (
            vars(autograd_function._SingleLevelFunction).get("apply"),
            vars(autograd_function.FunctionMeta).get("forward"),
        ),
        "modes": _get_current_dispatch_mode_stack(),
        "stance": "default" if dynamo is None else dynamo._stance.stance,
        "optimizer hooks": (
            dict(optimizers._global_optimizer_pre_hooks),
            dict(optimizers._global_optimizer_post_hooks),
        ),
    }


NOTHING = installed()
