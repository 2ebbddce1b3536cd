"""A model that was counted behaves as its twin that was not, wherever it keeps tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fvflops import FlopCountAnalysis, TrainingStepAnalysis
from tests.support.models.kept_tensors import KINDS, Kind, picture, seed, twin

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def count(model: Any, **options: Any) -> None:
    assert FlopCountAnalysis(model, X, **options).total() >= 48


def count_step(model: Any) -> None:
    assert TrainingStepAnalysis(model, X, loss=lambda y: y.sum()).total() >= 3 * 48 - 48


def fail(model: Any, **options: Any) -> None:
    with pytest.raises(LookupError, match="in the middle"):
        FlopCountAnalysis(model, X, kwargs={"fails": True}, **options).total()


def fail_in_step(model: Any) -> None:
    with pytest.raises(LookupError, match="in the middle"):
        TrainingStepAnalysis(model, X, kwargs={"fails": True}, loss=lambda y: y.sum()).total()


WAYS = {
    "count": count,
    "step": count_step,
    "real": lambda model: count(model, execution="real"),
    "error": fail,
    "error in a step": fail_in_step,
    "error in a real run": lambda model: fail(model, execution="real"),
}


def life_of(kind: Kind, way: Any) -> list[Any]:
    """Return what a twin is and gives, step by step, after it was counted in a way, or in none."""
    with twin(kind) as (module, model):
        seed(2)
        if way is not None:
            way(model)
        states = [picture(module, model)]
        for _ in range(2):
            out = model(X)
            out.sum().backward()
            states.append([type(out).__name__, out.tolist(), *picture(module, model)])
        return states


uncounted = cache(lambda kind: life_of(kind, None))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_counted_model_is_as_its_twin(kind, way):
    expected, counted = uncounted(kind), life_of(kind, WAYS[way])
    for before, after in zip(expected, counted, strict=True):
        assert before == after
