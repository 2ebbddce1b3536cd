"""Models of FakeTensors are counted, inside their mode and outside it, and never as 0."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from fvflops import ByteCountAnalysis, FlopCountAnalysis, TrainingStepAnalysis, record
from fvflops.capture.run import ExecutionError
from fvflops.zoo import build
from tests.support.models.parts import Applied

EXECUTIONS = ("auto", "shapes", "real")
X = (2, 1, 28, 28)


MAKERS = {
    "lenet5": partial(build, "lenet5"),
    "attention": lambda: nn.Sequential(nn.Flatten(1, 2), nn.TransformerEncoderLayer(28, 4, 32, batch_first=True)),
}


@pytest.fixture(params=MAKERS)
def case(request):
    """Return a fake model, its input, a real model and its input, and what it counts."""
    make = MAKERS[request.param]
    model, real = make().eval(), torch.randn(X)
    expected = FlopCountAnalysis(model, real)
    with FakeTensorMode():
        return make().eval(), torch.randn(X), model, real, expected


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_fake_model_counts_as_a_real_one(case, execution):
    model, fake, _, real, expected = case
    for inputs in (fake, real):
        analysis = FlopCountAnalysis(model, inputs, execution=execution)
        assert analysis.by_module_and_operator() == expected.by_module_and_operator()
        assert analysis.unsupported_ops() == expected.unsupported_ops()
        with fake.fake_mode:
            assert FlopCountAnalysis(model, inputs, execution=execution).total() == expected.total()
    assert fake.fake_mode.allow_non_fake_inputs is False


def test_a_real_model_in_a_fake_mode_counts(case):
    _, _, model, real, expected = case
    with FakeTensorMode():
        assert FlopCountAnalysis(model, real).total() == expected.total()
    assert model(real).isfinite().all()


def test_a_fake_model_s_bytes_count(case):
    model, fake, real_model, real, _ = case
    assert ByteCountAnalysis(model, fake).total() == ByteCountAnalysis(real_model, real).total()


def test_a_recording_counts_a_fake_training_step():
    real = build("lenet5")
    with record(real) as expected:
        real(torch.randn(X)).sum().backward()
    with FakeTensorMode() as mode:
        model, x = build("lenet5"), torch.randn(X)
        with record(model) as inside:
            model(x).sum().backward()
    with mode, record(model) as around:
        model(x).sum().backward()
    with record(model) as outside:
        model(x).sum().backward()
    for run in (inside, around, outside):
        assert run.by_module_and_phase() == expected.by_module_and_phase()


def test_a_training_step_by_shapes_is_refused_in_one_line():
    with FakeTensorMode():
        model, x = build("lenet5"), torch.randn(X)
    with pytest.raises(ExecutionError, match=r"FakeTensors.*build it on the meta device") as caught:
        TrainingStepAnalysis(model, x, loss=torch.Tensor.sum).total()
    assert "\n" not in str(caught.value)


def test_a_model_that_makes_fakes_in_its_forward_counts_them():
    def forward(self, x):
        with FakeTensorMode() as mode:
            torch.nn.functional.linear(mode.from_tensor(x), torch.empty(16, 8))
        return x + 1

    assert FlopCountAnalysis(Applied(forward), torch.ones(4, 8), execution="real").total() == 4 * 16 * 8
