"""Effects of a tool beside counting: on the model, with an op that it does not know, and without weights."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress

import torch
from torch import nn
from torch.nn import functional as F

from comparing.cases import Subject
from comparing.counters import Answer, Counter


class _Double(nn.Module):
    """A custom op, whose arithmetic no tool can know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.comparison.mystery(x)


class _Fragile(nn.Module):
    """Raises when it is run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def _define_mystery() -> None:
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    if hasattr(torch.ops.comparison, "mystery"):
        return
    torch.library.define("comparison::mystery", "(Tensor x) -> Tensor")
    torch.library.impl("comparison::mystery", "cpu")(mystery)
    torch.library.register_fake("comparison::mystery")(torch.empty_like)


def names_unknown_ops(counter: Counter) -> str:
    """Return whether a tool says anywhere, in its result, on the terminal or in a log, that it did not count an op."""
    _define_mystery()
    said = io.StringIO()
    logging.basicConfig(stream=said, force=True)
    model = nn.Sequential(nn.Linear(8, 8), _Double())
    with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = counter.ask(Subject(model.eval(), (torch.randn(2, 8),)))
    text = " ".join([said.getvalue(), answer.uncounted, *(str(warning.message) for warning in caught)])
    return "yes" if "mystery" in text else "no"


def leaves_the_model(counter: Counter) -> str:
    """Return the leftovers of a tool after a count, and after a model that raised."""
    found = {
        when: _compare_state(counter, nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), last))
        for when, last in (("", nn.Identity()), (" after an error", _Fragile()))
    }
    if found[""] == found[" after an error"]:
        return ", ".join(found[""]) or "nothing"
    return "; ".join(f"{', '.join(names)}{when}" for when, names in found.items() if names)


def _compare_state(counter: Counter, model: nn.Module) -> list[str]:
    model.train()
    before, functions = _read_state(model), _read_functions()
    with suppress(Exception), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        counter.ask(Subject(model, (torch.randn(2, 3, 8, 8),)))
    after = _read_state(model)
    changed = [name for name in before if before[name] != after[name]]
    return changed + ["functions of torch"] * (functions != _read_functions())


def _read_state(model: nn.Module) -> dict[str, object]:
    modules = list(model.modules())
    own = vars(nn.Module()).keys()
    return {
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
        "training mode": [module.training for module in modules],
        "state_dict": [(name, value.sum().item()) for name, value in model.state_dict().items()],
        "attributes": [sorted(vars(module).keys() - own) for module in modules],
        "gradients": [parameter.grad is None for parameter in model.parameters()],
    }


def _read_functions() -> list[int]:
    return [
        id(value) for space in (F, torch, torch.Tensor) for _, value in sorted(vars(space).items()) if callable(value)
    ]


def counts_without_weights(counter: Counter) -> str:
    """Return whether a tool counts a model on the meta device, and as it does on the CPU."""

    def ask(device: str) -> Answer:
        with torch.device(device):
            model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 4))
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return counter.ask(Subject(model.eval(), (torch.randn(1, 3, 8, 8, device=device),)))

    expected = ask("cpu").macs
    return "yes" if ask("meta").macs == expected else "no"


# Row of the table → the function that finds it out.
PROBES: dict[str, Callable[[Counter], str]] = {
    "names an op that it cannot count": names_unknown_ops,
    "leaves behind in a model in training mode": leaves_the_model,
    "counts on the meta device, without weights": counts_without_weights,
}
