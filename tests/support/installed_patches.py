"""What a recording installs: all that it puts in the place of something of torch's, or adds to it."""

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def installed() -> dict[str, object]:
    """Return what stands now where a recording installs something."""
    dynamo = torch.__dict__.get("_dynamo")
    return {
        "modes": _get_current_dispatch_mode_stack(),
        "module call": nn.Module._call_impl,
        "compilers": nn.Module.compile,  # not torch.compile, which Lightning replaces when it is imported
        "stance": "default" if dynamo is None else dynamo.eval_frame._stance.stance,
        "higher-order ops": HigherOrderOperator.__call__,
        "optimizer hooks": (
            dict(optimizers._global_optimizer_pre_hooks),
            dict(optimizers._global_optimizer_post_hooks),
        ),
        "backward": torch.autograd._engine_run_backward,
        # Where `apply` is torch's C function, the look-up of `forward` is wrapped instead.
        "function": (
            vars(torch.autograd.function._SingleLevelFunction).get("apply"),
            vars(torch.autograd.function.FunctionMeta).get("forward"),
        ),
        "frame": checkpointing._CheckpointFrame.__init__,
        "hook": dict(vars(checkpointing._recomputation_hook)),
        "reentrant": checkpointing.CheckpointFunction.backward,
    }


NOTHING = installed()
