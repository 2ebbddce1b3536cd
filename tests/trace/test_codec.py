"""Saved traces across versions: a newer schema is refused, a file of an earlier release loads and counts the same."""

import json

import pytest

from fvflops import FlopCountAnalysis, Trace
from fvflops.trace import TraceError
from fvflops.trace.codec import SCHEMA
from tests.support.checkout import DATA

# Written by fvflops 0.1.0, with schema 1: LeNet-5's training step of batch 1024.
SAVED = (DATA / "lenet5_training_trace.json").read_text()


def with_fields(**fields):
    return json.dumps({**json.loads(SAVED), **fields})


def test_a_trace_of_an_earlier_release_loads_and_counts_the_same():
    trace = Trace.from_json(SAVED)
    assert json.loads(SAVED)["schema"] == 1
    analysis = FlopCountAnalysis.from_trace(trace, warn=False)
    # Forward, and backward twice as much, but for the gradient of the images, which conv1 need not compute.
    assert analysis.total() == 1024 * (3 * 416_520 - 117_600)
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize("schema", [SCHEMA + 1, 99, 0, -1, True, "1", None, 1.0])
def test_another_schema_is_refused_in_one_line(schema):
    with pytest.raises(TraceError) as caught:
        Trace.from_json(with_fields(schema=schema))
    message = f"this trace has schema {schema!r}, but this version of fvflops reads up to {SCHEMA}: update fvflops"
    assert str(caught.value) == message


def test_a_newer_schema_is_refused_before_its_fields_are_read():
    with pytest.raises(TraceError, match="update fvflops"):
        Trace.from_json(json.dumps({"format": "fvflops.trace", "schema": SCHEMA + 1, "calls": {"of": "another form"}}))


def test_a_key_that_a_later_release_adds_is_ignored():
    assert Trace.from_json(with_fields(colour="red")) == Trace.from_json(SAVED)


def test_an_unknown_column_of_events_is_refused():
    events = json.loads(SAVED)["events"]
    with pytest.raises(TraceError, match="events have unknown columns: \\['colour'\\]"):
        Trace.from_json(with_fields(events={**events, "colour": [0] * events["length"]}))
