"""The recorder of a real run: signatures found by keys are those that a description gives, and long runs stay small."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from fvflops import StopsAt, record, summarise
from fvflops.capture.instrument.patching import Patch
from fvflops.capture.real_mode import RecordingMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import describe_call
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.reports import REPORTS
from fvflops.trace import Event

X = torch.arange(12.0).reshape(3, 4)
CALLS = {
    # Values that are not equal in Python: 1, True and 1.0 make equal signatures.
    "a number": (torch.ops.aten.add.Scalar, (X, 2), {}),
    "a truth": (torch.ops.aten.add.Scalar, (X, True), {}),
    "a float": (torch.ops.aten.add.Scalar, (X, 2.5), {}),
    "no number": (torch.ops.aten.add.Scalar, (X, math.nan), {}),
    "a keyword": (torch.ops.aten.add.Tensor, (X, X), {"alpha": 2}),
    "a list of numbers": (torch.ops.aten.sum.dim_IntList, (X, [0]), {}),
    "a list of truths": (torch.ops.aten.sum.dim_IntList, (X, [1], True), {}),
    "a list of tensors": (torch.ops.aten.cat.default, ([X, X], 1), {}),
    "a list of lists": (torch.ops.aten._foreach_add.List, ([X, X], [X, X]), {}),
    "several results": (torch.ops.aten.max.dim, (X, 1), {}),
    "a dtype and a device": (torch.ops.aten.ones.default, ([2, 3],), {"dtype": torch.float64, "device": X.device}),
    "a generator": (torch.ops.aten.bernoulli.default, (X / 12,), {"generator": torch.Generator()}),
    "a sparse tensor": (torch.ops.aten.mul.Tensor, (X.to_sparse(), 2.0), {}),
    "a sparse result": (torch.ops.aten._to_sparse.default, (X,), {}),
    "a scalar result": (torch.ops.aten.equal.default, (X, X), {}),
    "no result": (torch.ops.aten._assert_async.default, (torch.ones(()),), {}),
    "an index with holes": (torch.ops.aten.index.Tensor, (X, [None, torch.tensor([0, 2])]), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_key_finds_the_signature_that_a_description_gives(name):
    op, args, kwargs = CALLS[name]
    recorder = Recorder(StopsAt(everything=True))
    with RecordingMode(recorder, UnseenWork(recorder)):
        for other, other_args, other_kwargs in CALLS.values():
            other(*other_args, **other_kwargs)
        for _ in range(2):
            result = op(*args, **kwargs)
    expected = str(describe_call(op, args, kwargs, result))  # as text, since NaN is not equal to itself
    signatures = list(map(str, recorder._signatures))
    assert signatures.count(expected) == 1
    number = signatures.index(expected)
    assert [event[1] for event in recorder.events if event[0] == "op"].count(number) == 3
    assert len(signatures) == len(CALLS)  # no two of them are taken for one


def test_an_argument_is_described_as_it_was_before_the_call():
    recorder = Recorder(StopsAt(everything=True))
    grown = torch.ones(2)
    with RecordingMode(recorder, UnseenWork(recorder)):
        torch.ops.aten.resize_.default(grown, [5])
    (signature,) = recorder._signatures
    assert signature.inputs[0].shape == (2,)
    assert signature.outputs[0].shape == (5,)


def test_a_result_tells_two_calls_with_the_same_arguments_apart():
    recorder = Recorder(StopsAt(everything=True))
    with RecordingMode(recorder, UnseenWork(recorder)):
        for mask in ([True, False, True], [True, False, False]):
            torch.ops.aten.masked_select.default(torch.ones(3), torch.tensor(mask))
    shapes = [item.outputs[0].shape for item in recorder._signatures if item.op == "aten::masked_select"]
    assert shapes == [(2,), (1,)]


def run_steps(model, count):
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()


def test_a_long_recording_keeps_numbers_of_calls_and_not_their_order(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    run_steps(model, 1)  # the first backward pass makes the gradients, later ones add to them
    with record(model, table="exact") as short:
        run_steps(model, 20)
    monkeypatch.setattr("fvflops.capture.session._MAX_EVENTS", 100)
    with record(model, table="exact") as long:
        run_steps(model, 20)
    assert len(short.trace().events) > 200
    assert long.trace().events is None
    assert not long.trace().storages
    assert long.by_module_and_phase() == short.by_module_and_phase()
    assert long.trace().calls.keys() == short.trace().calls.keys()


def test_a_long_recording_stays_small(monkeypatch):
    monkeypatch.setattr("fvflops.capture.session._MAX_EVENTS", 1000)
    model = nn.Linear(4, 4)
    with record(model):
        run_steps(model, 50)
        gc.collect()
        before = len(gc.get_objects())
        run_steps(model, 200)
        gc.collect()
        grown = len(gc.get_objects()) - before
    assert grown < 2500  # 200 steps of some 30 events each


def test_what_is_let_go_of_a_pause_is_not_what_ends_in_it():
    model = nn.Linear(4, 4)
    with record(model) as run:
        kept = [model(torch.ones(2, 4))]
        run.pause()
        model(torch.ones(2, 4))
        kept.clear()
        run.resume()
    events = run.trace().events
    assert [event for event in events if event.kind == "free" and event.phase == "forward"]
    assert sum(event.kind == "op" and run.trace().signatures[event.item].op == "aten::addmm" for event in events) == 1


def test_watchers_may_leave_in_any_order():
    class Door:
        def open(self):
            return "open"

    original = Door.open
    patch = Patch(Door, "open")
    first = patch.wrapped(lambda call: lambda self: "first " + call(self))
    second = patch.wrapped(lambda call: lambda self: "second " + call(self))
    first.__enter__()
    second.__enter__()
    assert Door().open() == "second first open"
    first.__exit__(None, None, None)
    assert Door().open() == "second open"
    second.__exit__(None, None, None)
    assert Door.open is original


def test_a_patch_keeps_no_wrapper_of_another_of_the_same_function():
    class Door:
        def open(self):
            return "open"

    outer, inner = Patch(Door, "open"), Patch(Door, "open")

    def wrap(call):
        return lambda self: call(self)

    with outer.wrapped(wrap):
        wrapper = weakref.ref(Door.open)
        with inner.wrapped(wrap):
            assert Door.open is not wrapper()
    gc.collect()
    assert wrapper() is None


def test_reports_have_a_column_for_each_phase():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, table="exact") as run:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    summary = summarise(run)
    assert list(summary.columns) == ["parameters", "flops", "forward", "backward", "optimizer"]
    for name, flops in summary.columns["flops"].items():
        assert flops == sum(summary.columns[phase][name] for phase in ("forward", "backward", "optimizer"))
    # The sum of 6 elements, and a multiply and an add for each of 15 parameters.
    assert summary.columns["optimizer"][""] == 30
    assert "| optimizer |" in REPORTS["markdown"](summary)
    assert isinstance(run.trace().events[0], Event)
