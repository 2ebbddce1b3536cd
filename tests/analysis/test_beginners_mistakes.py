"""Mistakes of a first day, each answered by a message, or a note on the model's own error, that names the remedy."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fvflops
from fvflops import (
    ActivationCountAnalysis,
    ByteCountAnalysis,
    Device,
    FlopCountAnalysis,
    ProfileAnalysis,
    TrainingStepAnalysis,
    compare,
    diff,
    estimate_op,
    find_device,
    flop_count,
    flop_count_table,
    memory_savings,
    model_flops,
    parameter_count,
    parameter_count_table,
    plan_step,
    predict_memory,
    profile_kernels,
    roofline,
    summarise,
)
from fvflops.integrations.accelerate import FlopsRecording
from tests.support.models.parts import Applied

X = torch.randn(1, 4)
CONV = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
LINEAR = nn.Sequential(nn.Linear(4, 2))
EMBEDDING = nn.Sequential(nn.Embedding(10, 4))
POOLED = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8))
OPTIMIZED = {"loss": torch.sum}


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, left, right):
        return self.layer(right) + self.layer(left["x"] if isinstance(left, dict) else left)


class Product(nn.Module):
    def forward(self, left, right):
        return left @ right


def wrap(model):
    """Return a module of a class with the name of Ultralytics' wrapper, which has the network as `model`."""
    names = {"__module__": "ultralytics.engine.model", "__qualname__": "Model"}
    yolo = type("YOLO", (type("Model", (nn.Module,), names),), {})()
    yolo.model = model
    return yolo


count, step, kernels, meter = FlopCountAnalysis, TrainingStepAnalysis, profile_kernels, fvflops.StepMeter
# What is called → its error, and what the message, or else a note, says. All are run by the one test below.
MISTAKES = {
    "sizes": (lambda: count(CONV, (1, 3, 32, 32)), TypeError, "pass torch.randn(1, 3, 32, 32), or input_size="),
    "a shape": (lambda: ProfileAnalysis(CONV, torch.ones(1, 3, 8, 8).shape), TypeError, "pass torch.randn(1, 3, 8, 8)"),
    "sizes in a list": (lambda: count(CONV, [(1, 3, 8, 8)]).total(), TypeError, "note: torch.randn(1, 3, 8, 8), "),
    "both": (lambda: count(LINEAR, X, input_size=(1, 4)), ValueError, "inputs and input_size are both passed"),
    "a wrong size": (lambda: count(LINEAR, input_size=4), ValueError, "pass a shape such as (1, 3, 224, 224)"),
    "a wrong dtype": (lambda: count(LINEAR, input_size="1,4:int46"), ValueError, "such as float32, bfloat16"),
    "channels": (lambda: count(CONV, torch.ones(1, 1, 8, 8)).total(), RuntimeError, "note: Conv2d '0' expects 3 inp"),
    "features": (lambda: compare(LINEAR, torch.ones(1, 5)), RuntimeError, "note: [1, 5]; pass torch.randn(1, 4)"),
    "a step's features": (lambda: step(LINEAR, torch.ones(1, 5), loss=torch.sum).total(), RuntimeError, "note: 4 inp"),
    "ids as floats": (lambda: count(EMBEDDING, X).total(), RuntimeError, "note: torch.ones(1, 4, dtype=torch.int64)"),
    "an image of bytes": (
        lambda: count(CONV, torch.ones(1, 3, 8, 8, dtype=torch.uint8)).total(),
        RuntimeError,
        "note: expects float32, as its weights are, got uint8[1, 3, 8, 8]; pass torch.randn(1, 3, 8, 8)",
    ),
    "a small image": (lambda: count(CONV, torch.ones(1, 3, 2, 2)).total(), RuntimeError, "note: torch.randn(1, 3, 3"),
    "no batch": (lambda: count(nn.BatchNorm2d(3), torch.ones(3, 4, 4)).total(), ValueError, "note: (batch, channels"),
    "one value": (lambda: count(POOLED, torch.ones(1, 3, 4, 4)).total(), ValueError, "note: call model.eval() first"),
    "ids out of range": (
        lambda: count(EMBEDDING, torch.tensor([11]), execution="real").total(),
        IndexError,
        "note: expects indices from 0 to 9 (one is 11)",
    ),
    "shapes of own code": (
        lambda: count(Product(), (torch.ones(1, 2), torch.ones(3, 2))).total(),
        RuntimeError,
        "note: the model's inputs are float32[1, 2], float32[3, 2]: pass others",
    ),
    "no inputs": (lambda: count(LINEAR).total(), TypeError, 'note: or by name: kwargs={"input": ...}'),
    "no inputs of two": (lambda: diff(LINEAR, LINEAR), TypeError, "note: needs input: pass it as inputs, or by name"),
    "an input too few": (lambda: count(Product(), X).total(), TypeError, "note: needs right: pass it as inputs"),
    "a batch with labels": (lambda: count(LINEAR, (X, X)).total(), TypeError, "note: a tuple is several inputs"),
    "a misspelt name": (lambda: count(Product(), {"left": X, "rihgt": X}).total(), TypeError, "note: is 'right'"),
    "an array": (lambda: count(LINEAR, np.ones((1, 4))).total(), TypeError, "note: pass torch.from_numpy(array)"),
    "an array among tensors": (
        lambda: count(Sum(), (X, np.ones((1, 4)))).total(),
        TypeError,
        "note: for right: pass to",
    ),
    "an array in a dict": (
        lambda: count(Sum(), {"left": {"x": np.ones(4)}, "right": X}).total(),
        TypeError,
        "note: left['x']",
    ),
    "a dict": (
        lambda: count(CONV, {"image": X}).total(),
        TypeError,
        "note: for input: pass one of its values, such as",
    ),
    "a list of tensors": (
        lambda: count(LINEAR, [[X]]).total(),
        TypeError,
        "note: for input: pass torch.stack(tensors)",
    ),
    "a path of an image": (lambda: count(CONV, "a.png").total(), TypeError, "note: type str for input: pass"),
    "a value of own class": (lambda: count(LINEAR, SimpleNamespace()).total(), TypeError, "note: for input: pass a te"),
    "numbers": (lambda: count(LINEAR, [[1.0, 2.0]]).total(), TypeError, "note: pass torch.tensor(values)"),
    "a text": (lambda: count(EMBEDDING, "hello").total(), TypeError, "note: pass token ids"),
    "a loader": (lambda: count(LINEAR, DataLoader(TensorDataset(X))).total(), TypeError, "note: next(iter(loader))"),
    "a dataset": (lambda: count(LINEAR, TensorDataset(X)).total(), TypeError, "note: pass one batch"),
    "a class": (lambda: count(nn.Linear, X), TypeError, "create a module of it, such as Linear(...)"),
    "a name": (lambda: count("resnet50", X), TypeError, "counted by the command `fvflops count MODEL`"),
    "a name's parameters": (lambda: parameter_count("resnet50"), TypeError, "pass a torch.nn.Module"),
    "weights": (lambda: count(LINEAR.state_dict(), X), TypeError, "pass them to its load_state_dict"),
    "a pair": (lambda: count((LINEAR, X)), TypeError, "and its inputs as the second argument"),
    "no model": (lambda: count(None, X), TypeError, "pass a torch.nn.Module or a function"),
    "YOLO": (lambda: count(wrap(LINEAR), X), TypeError, "of type YOLO, around a module: count yolo.model"),
    "a trainer": (lambda: count(SimpleNamespace(model=LINEAR), X), TypeError, "count simplenamespace.model"),
    "a Trace": (lambda: count(count(LINEAR, X).trace()), TypeError, "FlopCountAnalysis.from_trace"),
    "a path of a Trace": (lambda: count.from_trace("run.json"), TypeError, "read a file by Trace.from_json(text)"),
    "a roofline": (lambda: roofline(LINEAR, device="H100"), TypeError, "pass FlopCountAnalysis(model, inputs)"),
    "a model to memory": (lambda: predict_memory(LINEAR), TypeError, "pass FlopCountAnalysis(model, inputs)"),
    "a model to savings": (
        lambda: fvflops.memory_savings(LINEAR),
        TypeError,
        "pass TrainingStepAnalysis(model, inputs,",
    ),
    "a model to a summary": (lambda: fvflops.summarise(LINEAR), TypeError, "pass FlopCountAnalysis(model, inputs)"),
    "a model's traffic": (lambda: fvflops.read_communication(LINEAR), TypeError, "pass FlopCountAnalysis(model, inp"),
    "a model's MFU": (
        lambda: fvflops.mfu(LINEAR, 1, device="H100"),
        TypeError,
        "pass FlopCountAnalysis(model, inputs)",
    ),
    "a model's time": (
        lambda: fvflops.estimate_step(LINEAR, device="H100"),
        ValueError,
        "pass a StepPlan of plan_step",
    ),
    "a lazy model": (lambda: count(nn.LazyLinear(4), X).total(), ValueError, "run the model once"),
    "a criterion": (lambda: step(LINEAR, X, loss=nn.MSELoss()).total(), TypeError, "a function of the result alone"),
    "a kernels' criterion": (
        lambda: kernels(LINEAR, X, loss=nn.MSELoss()),
        TypeError,
        "a function of the result alone",
    ),
    "a vector": (lambda: ProfileAnalysis(LINEAR, X, loss=abs).total(), ValueError, "a function from the result to a"),
    "a loss's name": (lambda: kernels(LINEAR, X, loss="mse"), TypeError, "loss must be a function from the model's"),
    "a meter's optimizer": (lambda: meter(LINEAR, optimizer="adam"), TypeError, "must be a torch.optim.Optimizer"),
    "a meter's class": (lambda: meter(LINEAR, optimizer=torch.optim.Adam), TypeError, "a torch.optim.Optimizer"),
    "no loss": (lambda: step(LINEAR, X).total(), ValueError, "pass loss=, a function from the result"),
    "a frozen model": (
        lambda: step(nn.Linear(4, 2).requires_grad_(False), X, loss=torch.sum).total(),
        ValueError,
        "no parameter with requires_grad reaches it",
    ),
    "a phase": (lambda: count(LINEAR, X).macs(phase="forwrad"), ValueError, "one of forward, recompute, backward"),
    "a module of one": (lambda: count(nn.Linear(4, 2), X).total("fc"), KeyError, "no module is named 'fc'"),
    "a checkpointed class": (
        lambda: step(LINEAR, X, loss=torch.sum, checkpoint=nn.Linear).total(),
        ValueError,
        "torch.nn.modules.linear.Linear'> is not a list: pass a list of module names or classes",
    ),
    "a checkpointed module": (
        lambda: step(LINEAR, X, loss=torch.sum, checkpoint=[LINEAR[0]]).total(),
        ValueError,
        "checkpoint=Linear(in_features=4, out_features=2, bias=True) is neither the name nor the class",
    ),
    "options in a list": (lambda: count(LINEAR, X, assume=["aten::nonzero"]).total(), TypeError, "pass a dict such"),
    "arguments in a list": (lambda: count(LINEAR, X, kwargs=[X]).total(), TypeError, "pass a dict of the model's"),
    "an optimizer's name": (lambda: step(LINEAR, X, optimizer="adam"), TypeError, "must be a torch.optim.Optimizer"),
    "a device": (lambda: count(LINEAR, X, device="gpu").total(), ValueError, "pass 'cpu', 'cuda' or 'cuda:1'"),
    "an execution": (lambda: count(LINEAR, X, execution="fast"), ValueError, "one of auto, shapes, real"),
    "a convention": (lambda: count(LINEAR, X, table="fvcor"), ValueError, "did you mean 'fvcore'? Shipped are default"),
    "an option's word": (lambda: count(LINEAR, X, convention="thop"), TypeError, "'convention': did you mean 'table'?"),
    "a third position": (lambda: ActivationCountAnalysis(LINEAR, X, "thop"), TypeError, "(model, inputs, *, kwargs,"),
    "inputs of parameters": (lambda: parameter_count(LINEAR, X), TypeError, "(model): too many positional arguments"),
    "a table's inputs": (lambda: parameter_count_table(LINEAR, X), ValueError, "max_depth must be an integer >= 0"),
    "a table's depth": (lambda: flop_count_table(count(LINEAR, X), -1), ValueError, "max_depth must be an integer >="),
    "a schedule": (lambda: fvflops.record(LINEAR, schedule=3), TypeError, "pass fvflops.schedule(wait=1, active=2)"),
    "a model to a table": (lambda: flop_count_table(LINEAR, X), TypeError, "pass FlopCountAnalysis(model, inputs)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_by_the_remedy(name, caplog):
    mistake, kind, expected = MISTAKES[name]
    POOLED.train()
    with pytest.raises(kind) as caught:
        mistake()
    notes = getattr(caught.value, "__notes__", None) or [record.getMessage() for record in caplog.records]
    if expected.startswith("note: "):
        (note,) = notes
        assert note.startswith("fvflops: ") and "\n" not in note
        assert expected.removeprefix("note: ") in note
    else:
        assert expected in str(caught.value) and not notes
        assert "\n" not in str(caught.value)


def test_errors_in_a_recording_have_the_note_too(caplog):
    for execution in ("real", "shapes"):
        with pytest.raises(RuntimeError) as caught, fvflops.record(LINEAR, execution=execution):
            LINEAR(torch.ones(1, 5))
        notes = getattr(caught.value, "__notes__", None) or [record.getMessage() for record in caplog.records[-1:]]
        assert notes == ["fvflops: Linear '0' expects 4 input features, got float32[1, 5]; pass torch.randn(1, 4)"]


def test_sizes_are_inputs_of_every_analysis():
    state = torch.get_rng_state()
    image = torch.randn(2, 3, 8, 8)
    torch.set_rng_state(state)
    size = (2, 3, 8, 8)
    for analysis in (FlopCountAnalysis, ActivationCountAnalysis, ByteCountAnalysis, ProfileAnalysis):
        options = {"warmup": 0, "repeat": 1} if analysis is ProfileAnalysis else {}
        expected = analysis(CONV, image, **options).total()
        assert analysis(CONV, input_size=size, **options).total() == expected > 0
    step = TrainingStepAnalysis(CONV, input_size=size, **OPTIMIZED)
    assert step.varied(micro_batches=2).macs() == 2 * TrainingStepAnalysis(CONV, image, **OPTIMIZED).macs()
    assert compare(CONV, input_size=[size], tables=["exact"]).totals == compare(CONV, image, tables=["exact"]).totals
    assert not diff(CONV, CONV, input_size="2,3,8,8")
    assert profile_kernels(CONV, input_size=size, warmup=0, repeat=1).macs() == FlopCountAnalysis(CONV, image).macs()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("model", "size", "inputs"),
    [
        (LINEAR, (4,), "float32[4]"),
        (LINEAR, [3, 4], "float32[3, 4]"),
        (Product(), [(1, 2), (2, 3)], "float32[1, 2], float32[2, 3]"),
        (Product(), {"right": (2, 3), "left": "1,2"}, "right=float32[2, 3], left=float32[1, 2]"),
        (Product(), ["1x2", "right=2,3:float32"], "float32[1, 2], right=float32[2, 3]"),
        (EMBEDDING, "1,16:int64", "int64[1, 16]"),
        (nn.Linear(4, 2, dtype=torch.bfloat16), (1, 4), "bfloat16[1, 4]"),
        (nn.Linear(4, 2, device="meta"), (1, 4), "float32[1, 4]"),
    ],
)
def test_sizes_have_the_dtype_and_the_device_of_the_model(model, size, inputs):
    analysis = FlopCountAnalysis(model, input_size=size)
    assert analysis.trace().info.inputs == inputs
    args, kwargs = analysis._run.arguments()
    assert {tensor.device for tensor in (*args, *kwargs.values())} == {
        next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    }


def test_sizes_that_are_arguments_are_no_mistake():
    assert (
        FlopCountAnalysis(
            Applied(lambda self, height, width: torch.ones(height, width) @ torch.ones(width, height)), (2, 3)
        ).total()
        == 12
    )
    assert FlopCountAnalysis(lambda *sizes: torch.ones(sizes) @ torch.ones(3, 5), (4, 3)).total() == 60


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        self.path, self.drop, self.flat = Applied(lambda self, x: x), nn.Dropout(), nn.Sequential()
        self.functional, self.unused = nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        x = self.drop(self.path(self.flat(self.encoder(x))))
        return nn.functional.linear(x, self.functional.weight)


@pytest.mark.parametrize("analysis", [FlopCountAnalysis, TrainingStepAnalysis])
def test_modules_without_work_of_their_own_are_not_warned_of(analysis, caplog):
    model = Net().eval() if analysis is FlopCountAnalysis else Net()
    counted = analysis(model, torch.ones(1, 4, 8), **({} if analysis is FlopCountAnalysis else OPTIMIZED))
    with caplog.at_level(logging.WARNING):
        counted.total()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("No op was seen in the modules unused.1, and none reads their parameters")
    assert {"path", "unused.1"} <= counted.uncalled_modules()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda wrong: FlopCountAnalysis(nn.ReLU(), torch.ones(1), table=wrong).total(), "a table must be a name"),
        (lambda wrong: FlopCountAnalysis(nn.ReLU(), torch.ones(1), device=wrong).total(), "device="),
        (
            lambda wrong: FlopCountAnalysis(nn.ReLU(), torch.ones(1), execution=wrong).total(),
            "execution must be one of",
        ),
        (
            lambda wrong: TrainingStepAnalysis(nn.Linear(1, 1), torch.ones(1), checkpoint=wrong, **OPTIMIZED).total(),
            "checkpoint=",
        ),
        (
            lambda wrong: TrainingStepAnalysis(nn.Linear(1, 1), torch.ones(1), autocast=wrong, **OPTIMIZED).total(),
            "autocast=",
        ),
        (lambda wrong: ProfileAnalysis(nn.ReLU(), torch.ones(1), autocast=wrong).total(), "autocast="),
        (
            lambda wrong: flop_count_table(FlopCountAnalysis(nn.ReLU(), torch.ones(1)), sort=wrong),
            "sort must be one of",
        ),
        (lambda wrong: FlopsRecording(wrong), "must be an accelerate.Accelerator"),
        (lambda wrong: flop_count(nn.ReLU(), (X,), wrong), "flop_count: supported_ops must be a mapping or None"),
        (lambda wrong: compare(nn.ReLU(), X, kwargs=wrong), "kwargs"),
        (lambda wrong: plan_step(LINEAR, X, mesh=wrong, **OPTIMIZED), "mesh"),
        (lambda wrong: estimate_op(wrong, [(8, 8), (8, 8)], device="H100"), "op"),
        (lambda wrong: find_device("H100", file=wrong), "file must be"),
        (lambda wrong: Device("X", matrix=wrong), "matrix must be a mapping"),
        (lambda wrong: TrainingStepAnalysis(LINEAR, X, checkpoint_options=wrong, **OPTIMIZED).total(), "checkpoint_"),
        (summarise, "instead of an analysis"),
        (memory_savings, "instead of an analysis"),
        (model_flops, "instead of an analysis"),
    ],
)
@pytest.mark.parametrize(
    "wrong", [nn.Sequential(nn.ReLU(), nn.ReLU()), torch.ones(3, 3), True], ids=["model", "tensor", "bool"]
)
def test_a_value_of_a_wrong_type_is_named_in_one_line(call, message, wrong):
    with pytest.raises((TypeError, ValueError)) as raised:
        call(wrong)
    assert message in str(raised.value)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "call",
    [
        lambda model: FlopCountAnalysis(model, X).total(),
        lambda model: ProfileAnalysis(model, X).total(),
        lambda model: plan_step(model, X, mesh={"dp": 1}, loss=torch.sum),
    ],
    ids=["count", "profile", "plan"],
)
def test_a_lazy_module_without_a_shape_is_named(call):
    with pytest.raises(ValueError, match=r"^'0\.weight' has no shape yet: run the model once"):
        call(nn.Sequential(nn.LazyLinear(2)))
