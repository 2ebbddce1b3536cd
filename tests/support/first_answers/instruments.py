"""Code that a recording instruments: autograd, checkpoints, optimizers, hooks, threads, exports of data."""

import threading
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.support.first_answers.counts import (
    count,
    count_function,
    describe_trace,
    differentiate,
    train,
    without_trace,
)

X = (3, 4)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))


def _checkpointed(x, **options):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layers(), x, **options)


def _selective(x):
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(layers(), x, use_reentrant=False, context_fn=context)


def _autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layers()(x)


def _inference(x):
    with torch.inference_mode():
        return layers()(x)


def _threaded(x):
    results = []
    thread = threading.Thread(target=lambda: results.append(layers()(x)))
    thread.start()
    thread.join()
    return results[0]


def _pooled(x):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return sum(pool.map(layers(), [x, x]))


def _known_numpy(x):
    import numpy

    return x @ torch.from_numpy(numpy.ones((4, 4), dtype="float32"))


def _default_device(x):
    with torch.device("cpu"):
        return x + torch.ones(3, 4)


def _profiled(x):
    with torch.profiler.record_function("part"):
        return layers()(x)


def _saved_on_cpu(x):
    with torch.autograd.graph.save_on_cpu():
        return layers()(x)


def _statistics(x):
    import statistics

    return x * statistics.fmean([1.0, 2.0])


def _imported_constants(x):
    """Import a module whose body computes."""
    import sys
    from pathlib import Path

    source = "import torch\nTABLE = torch.ones(4, 4) @ torch.ones(4, 4)\nWEIGHT = torch.nn.Linear(4, 4)(TABLE)\n"
    source += "NUMBERS = TABLE.numpy() + 1\n"
    Path("first_answers_constants.py").write_text(source)
    sys.path.insert(0, ".")
    try:
        import first_answers_constants as constants  # type: ignore[import-not-found]
    finally:
        sys.path.remove(".")
    return x @ constants.TABLE if bool((constants.TABLE == 4).all()) else x


FUNCTIONS = {
    "function": Swish.apply,
    "checkpoint": partial(_checkpointed, use_reentrant=False),
    "reentrant checkpoint": partial(_checkpointed, use_reentrant=True),
    "selective checkpoint": _selective,
    "autocast": _autocast,
    "inference mode": _inference,
    "through numpy": lambda x: torch.from_numpy(x.detach().numpy() * 2) @ x.mT,
    "numpy constant": _known_numpy,
    "through dlpack": lambda x: torch.from_dlpack(torch.arange(4.0)) + x,
    "branch by value": lambda x: x @ x.mT if x.sum() > 0 else x,
    "item": lambda x: x * float(x.sum()),
    "default device": _default_device,
    "profiler range": _profiled,
    "saved on cpu": _saved_on_cpu,
    "fork": lambda x: torch.jit.wait(torch.jit.fork(layers(), x)),
    "module imported": _statistics,
    "constants imported": _imported_constants,
}


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.layers[0].register_forward_hook(lambda module, args, result: result + 1)
        self.layers[2].register_full_backward_hook(lambda module, inputs, outputs: None)

    def forward(self, x):
        return self.layers(x)


def _lazy():
    model = nn.Sequential(nn.LazyLinear(5))
    model(torch.rand(X))
    return model


def _tied():
    model = layers()
    model[2].weight = nn.Parameter(model[0].weight.detach().T.clone())
    return model


MODELS = {
    "hooks": Hooked,
    "lazy": _lazy,
    "tied": _tied,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 5)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 5), "weight", 0.5),
    "data parallel": lambda: nn.DataParallel(layers()),
    "frozen": lambda: layers().requires_grad_(False).append(nn.Linear(4, 2)),
}
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]),
    "RMSprop": torch.optim.RMSprop,
}


def _optimise(optimizer):
    return train(layers(), torch.rand(X), optimizer=optimizer)


def _record(execution: str) -> Any:
    from fvflops import record

    model, x = layers(), torch.rand(X)
    optimizer = torch.optim.AdamW(model.parameters())
    with record(model, execution=execution) as recording:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return describe_trace(recording.trace())


CASES = {
    **{name: partial(count_function, function, X) for name, function in FUNCTIONS.items()},
    **{
        f"{name}, training": partial(differentiate, FUNCTIONS[name], X)
        for name in (
            "function",
            "checkpoint",
            "reentrant checkpoint",
            "selective checkpoint",
            "autocast",
            "saved on cpu",
        )
    },
    **{
        f"{name}, real": partial(count_function, FUNCTIONS[name], X, execution="real")
        for name in ("through numpy", "through dlpack", "constants imported", "autocast")
    },
    "thread": lambda: without_trace(count_function(_threaded, X)),
    "thread pool": lambda: without_trace(count_function(_pooled, X)),
    **{name: lambda make=make: count(make(), torch.rand(X)) for name, make in MODELS.items()},
    **{
        f"{name}, training": lambda name=name: train(MODELS[name](), torch.rand(X))
        for name in ("hooks", "weight norm", "spectral norm", "orthogonal", "frozen")
    },
    **{name: partial(_optimise, optimizer) for name, optimizer in OPTIMIZERS.items()},
    "recorded program": partial(_record, "real"),
    "recorded program, shapes": partial(_record, "shapes"),
}
