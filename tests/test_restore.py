"""After a run, also one that raised, nothing differs: each thing that could is looked at by itself."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from fvflops.capture.record import record


class Touchy(nn.Module):
    """A model that changes whatever a forward run can change, and may raise in the middle of it."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises = raises
        self.norm = nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.fc = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(2, 2))
        self.register_buffer("swapped", torch.zeros(1))
        self.history: list[int] = []
        self.cache: dict[str, torch.Tensor] = {"kept": torch.ones(1)}
        self.calls = 0
        self.outside = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.lazily = x.clone()
        self.cache["new"] = x
        self.steps.view(-1)[1:3].add_(1)
        self.outside += 1
        self.swapped = self.swapped + 1
        self.last.weight.data = self.last.weight.data * 2
        self.last.bias.requires_grad_(False)
        self.last.bias.data.mul_(3)
        self.eval()
        self.train()
        x = self.fc(self.norm(x))
        x = self.instance(x[None].transpose(1, 2)).transpose(1, 2)[0]
        x = x + random.random() + np.random.rand() + torch.rand(1)
        x = torch.nn.functional.dropout(x, 0.5)
        if self.raises:
            raise ZeroDivisionError("in the middle")
        return self.last(x)


def state_of(model: nn.Module) -> dict[str, object]:
    """Return everything about a model that a person could see, by value."""
    tensors = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return {
        "tensors": {name: tensor.tolist() for name, tensor in tensors.items()},
        "identities": {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())},
        "requires_grad": {name: tensor.requires_grad for name, tensor in model.named_parameters()},
        "grads": {name: tensor.grad for name, tensor in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [
                len(value) for key, value in vars(module).items() if key.endswith(("_hooks", "_with_kwargs", "_called"))
            ]
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "calls": getattr(model, "calls", None),
        "history": list(getattr(model, "history", [])),
        "cache": sorted(getattr(model, "cache", {})),
        "outside": model.outside.tolist() if hasattr(model, "outside") else None,
    }


def settings() -> dict[str, object]:
    """Return the settings of torch that a run could leave changed."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "excluded": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        "function apply": "apply" in vars(torch.autograd.function._SingleLevelFunction),
        "global hooks": len(torch.nn.modules.module._global_forward_hooks),
    }


def generators() -> list[object]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("raises", [False, True])
def test_nothing_differs(raises, training):
    model = Touchy(raises).train(training)
    x = torch.ones(5, 4)
    before = state_of(model), settings(), generators()
    if raises:
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            record(model, (x,))
    else:
        record(model, (x,))
    after = state_of(model), settings(), generators()
    for part_before, part_after in zip(before, after, strict=True):
        assert part_before == part_after
    assert torch.equal(x, torch.ones(5, 4))


def test_the_comparison_sees_each_change():
    """Run the model bare: every part that the test above compares, settings apart, must then differ."""
    model = Touchy(False)
    before, before_random = state_of(model), generators()
    model(torch.ones(5, 4))
    after = state_of(model)
    differing = {key for key in before if before[key] != after[key]}
    assert differing >= {"tensors", "identities", "requires_grad", "attributes", "calls", "history", "cache", "outside"}
    assert generators() != before_random


def test_inputs_that_are_written_to_are_restored_through_every_view():
    base = torch.arange(6.0)
    view = base[2:4]
    record(lambda tensor: tensor.mul_(10), (view,))
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


def test_gradients_that_the_model_makes_are_taken_back():
    class Backward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            y = self.fc(x)
            y.sum().backward()
            return y

    model = Backward()
    record(model, (torch.ones(1, 2),))
    assert model.fc.weight.grad is None
    model.fc.weight.grad = torch.full((2, 2), 5.0)
    record(model, (torch.ones(1, 2),))
    assert model.fc.weight.grad.tolist() == [[5, 5], [5, 5]]


def test_a_raising_fused_layer_leaves_no_function_mode():
    class Broken(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            raise ZeroDivisionError

    model = Broken(8, 2, batch_first=True).eval()
    before = settings()
    with pytest.raises(ZeroDivisionError):
        record(model, (torch.ones(1, 3, 8),))
    assert settings() == before
