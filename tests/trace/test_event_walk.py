"""The walk over a trace's events: how region calls nest, with threads, pauses and recordings that end early."""

import torch
from torch import nn

from fvflops import Trace, record
from fvflops.trace import Event, ModuleInfo, ModuleTree, Region, RegionSignature, Signature
from fvflops.trace.trace import walk_events

NAMES = ("", "a", "b")


def trace_of(*events):
    modules = ModuleTree({name: ModuleInfo(name, name, "Module") for name in NAMES})
    regions = tuple(Region("module", name) for name in NAMES)
    ends = [RegionSignature(index, (), ()) for index in range(len(NAMES))]
    signatures = (Signature("aten::relu", ("self",), (None,), (None,)),)
    return Trace(modules, regions, ((),), signatures, ends, {}, {}, events=events)


def visits(trace):
    return [(kind, NAMES[call.region], call.depth) for kind, _, call, _ in walk_events(trace) if call is not None]


def enter(region, thread=0):
    return Event("enter", region, thread=thread)


def leave(region, thread=0):
    return Event("exit", region, thread=thread)


def test_calls_nest_and_each_thread_by_itself():
    trace = trace_of(enter(0), enter(1, 1), Event("op", 0), Event("op", 0, thread=1), leave(1, 1), leave(0))
    assert visits(trace) == [
        ("enter", "", 0),
        ("enter", "a", 0),
        ("op", "", 0),
        ("op", "a", 0),
        ("exit", "a", 0),
        ("exit", "", 0),
    ]


def test_a_region_that_was_left_without_an_exit_is_unfinished():
    trace = trace_of(enter(0), enter(1), enter(2), leave(1), enter(2))
    assert visits(trace)[3:] == [
        ("unfinished", "b", 2),
        ("exit", "a", 1),
        ("enter", "b", 1),
        ("unfinished", "b", 1),
        ("unfinished", "", 0),
    ]


def test_an_exit_without_an_enter_is_visited_as_both():
    assert visits(trace_of(enter(0), leave(2), leave(0))) == [
        ("enter", "", 0),
        ("enter", "b", 1),
        ("exit", "b", 1),
        ("exit", "", 0),
    ]


def test_a_trace_without_order_has_no_visits_and_what_runs_outside_no_call():
    assert list(walk_events(trace_of().aggregate())) == []
    assert [visit.call for visit in walk_events(trace_of(Event("op", 0)))] == [None]


def test_every_call_of_a_recording_is_left_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with record(model) as run:
        model(torch.ones(2, 3)).sum().backward()
    begun, ended = [], []
    for kind, _, call, _ in walk_events(run.trace()):
        if kind == "enter":
            begun.append(call)
        elif kind in ("exit", "unfinished"):
            ended.append(call)
            assert all(outer not in ended for outer in call.enclosing())
    assert set(begun) == set(ended) and len(begun) == len(ended) == 3
