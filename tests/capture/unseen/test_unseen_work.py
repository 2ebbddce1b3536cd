"""Work outside the dispatcher is reported with its module and line, fails --strict, and can get a formula."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, Trace, record
from fvflops.analysis.fvcore_text import summarise
from fvflops.cli import main
from fvflops.counting.uncounted_work import find_unsupported_locations
from fvflops.reports import REPORTS
from tests.support.models.parts import Applied
from tests.support.models.unseen_work import KINDS, Net, NumpyFunction, PointerFunction
from tests.support.random_cases import long_except

SOME = list(KINDS)[::5]  # by default of the tests to which a kind is but a name
PREFIXES = ("unseen::", "prim::PythonOp.", "triton::")
LINEAR = 512


def analyse(model, execution="auto", **options):
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    return FlopCountAnalysis(model, x, execution=execution, **options).unsupported_ops_warnings(False)


def unseen(analysis):
    return {op: calls for op, calls in analysis.unsupported_ops().items() if op.startswith(PREFIXES)}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from NumPy about torch's __array_wrap__
        yield


@pytest.mark.parametrize("execution", ["auto", "real"])
@pytest.mark.parametrize("kind", KINDS)
def test_unseen_work_is_reported_with_its_module_and_line(kind, execution):
    compute, op = KINDS[kind]
    analysis = analyse(Net(compute), execution)
    assert analysis.total() == LINEAR
    assert unseen(analysis) == {op: 1}
    trace = analysis.trace()
    (location,) = find_unsupported_locations(trace, analysis.counts())[op]
    module, _, source = location.partition(" at ")
    assert module == "'scan'"
    path, _, line = source.partition(":")
    assert path == "tests/support/models/unseen_work.py" and line.isdecimal()
    assert analysis.counts().unsupported_elements()[op] == 32
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize("kind", KINDS)
def test_unseen_work_is_reported_by_a_recording(kind):
    compute, op = KINDS[kind]
    model = Net(compute)
    with record(model) as run:
        model(torch.linspace(-1, 1, 32).reshape(4, 8))
    assert unseen(run) == {op: 1}


@pytest.mark.parametrize("kind", ["dispatch_disabled", "worker_that_waits"])
def test_unseen_work_is_reported_after_an_op_whose_result_autograd_saves(kind):
    model = Net(lambda x: KINDS[kind].compute(torch.softmax(x, -1).detach()))
    with torch.enable_grad(), record(model) as run:
        model(torch.linspace(-1, 1, 32).reshape(4, 8))
    assert unseen(run) == {KINDS[kind].op: 1}


@pytest.mark.parametrize("kind", long_except(SOME, KINDS))
def test_unseen_work_is_counted_by_a_formula(kind, tmp_path):
    compute, op = KINDS[kind]
    table = tmp_path / "rows.yaml"
    table.write_text(f'extends: default\nops:\n  "{op}": {{flops: 3*numel(out)}}\n')
    analysis = analyse(Net(compute), table=str(table))
    assert analysis.total() == LINEAR + 3 * 32
    assert not unseen(analysis)
    with_handle = analyse(Net(compute)).set_op_handle(op, lambda call: 5)
    assert with_handle.total() == LINEAR + 5


@pytest.mark.parametrize("kind", long_except(SOME, KINDS))
def test_the_command_line_names_unseen_work_and_strict_fails(kind, tmp_path, monkeypatch, capsys):
    (tmp_path / "unseen_net.py").write_text(
        "from tests.support.models.unseen_work import KINDS, Net\n"
        f"def build():\n    return Net(KINDS[{kind!r}].compute)\n"
    )
    monkeypatch.chdir(tmp_path)
    op = KINDS[kind].op
    assert main(["count", "unseen_net.py:build", "--input", "4,8"]) == 0
    assert (
        f"{op} (1 call, 32 output elements; in 'scan' at tests/support/models/unseen_work.py:"
        in capsys.readouterr().out.replace("\n", " ")
    )
    assert main(["count", "unseen_net.py:build", "--input", "4,8", "--strict"]) == 2
    assert f"{op} ×1 (in 'scan' at tests/support/models/unseen_work.py:" in capsys.readouterr().err


def test_every_report_names_unseen_work():
    analysis = analyse(Net(KINDS["from_numpy"].compute))
    summary = summarise(analysis)
    assert summary.unsupported_locations["unseen::from_numpy"]
    assert "unseen::from_numpy" in analysis.to_html()
    for name in ("markdown", "json", "latex"):
        assert "unseen::from_numpy" in REPORTS[name](summary), name


def test_the_warning_names_the_module_and_the_line(caplog):
    FlopCountAnalysis(Net(KINDS["from_numpy"].compute), torch.ones(4, 8)).total()
    assert "unseen::from_numpy ×1 (in 'scan' at tests/support/models/unseen_work.py:" in caplog.text


@pytest.mark.parametrize("function", [NumpyFunction, PointerFunction])
def test_unseen_work_in_a_backward_pass_is_reported(function):
    model = Net(function.apply)
    with torch.enable_grad(), record(model) as run:
        model(torch.linspace(-1, 1, 32).reshape(4, 8)).sum().backward()
    reported = unseen(run)
    assert reported == {f"prim::PythonOp.{function.__name__}": 1, f"unseen::{function.__name__}.backward": 1}
    phases = {entry.op: entry.phase for entry in run.counts().entries if entry.op in reported}
    assert phases[f"unseen::{function.__name__}.backward"] == "backward"


def test_each_call_is_reported():
    model = nn.Sequential(*(Net(KINDS["from_numpy"].compute) for _ in range(3)))
    analysis = analyse(model)
    assert unseen(analysis) == {"unseen::from_numpy": 3}
    locations = find_unsupported_locations(analysis.trace(), analysis.counts())["unseen::from_numpy"]
    assert [location.partition(" at ")[0] for location in locations] == ["'0.scan'", "'1.scan'", "'2.scan'"]


CONSTANT = torch.arange(8.0)
RECURRENT = nn.LSTM(8, 8)


def _uninitialised_but_never_read(x):
    torch.empty_like(x)
    return x.type_as(torch.empty(1)).expand_as(torch.empty_like(x))


def _partly_written(x):
    cache = torch.empty(8, 8)
    cache[:4] = x
    return cache[:4]


def _lists_of_numbers(x):
    lengths = torch.tensor([4, 8]).tolist()
    return x.reshape(lengths) + torch.tensor([1.0] * lengths[1])


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


DISPATCHED = {
    "a constant of the program": lambda x: x + CONSTANT,
    "a constant of NumPy": lambda x: x + torch.from_numpy(np.linspace(0, 1, 8, dtype=np.float32)),
    "a constant list": lambda x: x + torch.tensor([1.0] * 8),
    "a constant buffer": lambda x: x + torch.frombuffer(bytearray(32), dtype=torch.float32),
    "a constant by DLPack": lambda x: x + torch.from_dlpack(np.ones(8, dtype=np.float32)),
    "lengths as a list": _lists_of_numbers,
    "memory that is not read": _uninitialised_but_never_read,
    "memory that is written in part": _partly_written,
    "memory of no elements": lambda x: torch.cat([torch.empty(0, 8), x]),
    "random numbers in place": lambda x: x * x.new_empty(x.shape[0], 1).bernoulli_(0.5),
    "an identity": _Identity.apply,
    "a copy": _Scale.apply,
    "a tensor of the module": Applied(lambda self, x: x * self.table, table=torch.linspace(0, 1, 8)),
    "training batch norm": nn.Sequential(nn.BatchNorm1d(8), nn.Dropout()),
    "a recurrent layer": lambda x: RECURRENT(x)[0],
    "a scripted constant": torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.GELU())),
    "data that is only exported": lambda x: (x.detach().numpy(), x)[1],
    "in-place ops": lambda x: x.clone().mul_(2).add_(1).relu_(),
    "an out= argument": lambda x: torch.add(x.detach(), 1, out=torch.empty(4, 8)),
    "resized memory": lambda x: torch.mul(x.detach(), 2, out=torch.empty(0)),
}


@pytest.mark.parametrize("execution", ["auto", "real"])
@pytest.mark.parametrize("kind", DISPATCHED)
def test_dispatched_work_is_not_reported(kind, execution):
    assert unseen(analyse(Net(DISPATCHED[kind]), execution)) == {}


@pytest.mark.parametrize("kind", DISPATCHED)
def test_dispatched_work_is_not_reported_in_a_training_step(kind):
    model = Net(DISPATCHED[kind])
    with torch.enable_grad(), record(model) as run:
        model(torch.linspace(-1, 1, 32).reshape(4, 8)).sum().backward()
    assert unseen(run) == {}


def test_work_between_calls_of_the_model_is_not_reported():
    model = nn.Linear(8, 8)
    x = torch.ones(4, 8)
    with record(model) as run:
        for _ in range(3):
            y = model(x)
            x.numpy()[...] += y.numpy()
            x = torch.from_numpy(x.numpy().copy())
    assert run.total() == 3 * 256
    assert unseen(run) == {}


def test_writes_during_a_pause_are_not_reported():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with record(model) as run:
        x = model(torch.ones(4, 8))
        run.pause()
        x.mul_(2)
        run.resume()
        model(x)
    assert unseen(run) == {}
