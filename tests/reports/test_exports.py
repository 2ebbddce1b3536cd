"""The exports: chrome traces, speedscope files and collapsed stacks, read back and held against the counts."""

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record
from fvflops.counting import HandleCostModel, TableCostModel, build_timeline, count
from fvflops.formulas import OpCost, load_table
from fvflops.reports import EXPORTS
from fvflops.reports.files import timeline_files
from fvflops.trace import Event, Status, StopsAt, TraceError, tensors_in
from fvflops.trace.timeline import Callee, Frame, Span, Timeline
from tests.support.checkout import DATA
from tests.support.models.layers import Net

SCHEMA = DATA / "speedscope_file_format_schema.json"
# flamegraph.pl's own pattern of a line, and its pattern of a line with two weights, which none of ours may be.
LINE = re.compile(r"^(.*)\s+?(\d+(?:\.\d*)?)$")
HOSTILE = 'a"b\n</script>\x1b[31m;\\' + "\u202e'{}" + "x" * 10_000


@cache
def make_step():
    """Return a training step of Net that reruns `body`: every phase has ops, and one table knows them all."""
    return TrainingStepAnalysis(
        Net(), torch.ones(2, 8), loss=lambda y: y.sum(), optimizer=torch.optim.Adam, checkpoint=["body"], table="exact"
    )


def exact():
    return TableCostModel(load_table("exact"), "flops")


@cache
def make_counted():
    return build_timeline(make_step().trace(), exact())


def clock(trace):
    """Return a trace as if a clock had run: 1 ns to enter or leave a region, 10, 11, 12 ... ns for the ops."""
    now, entered, events = 0, [], []
    for event in trace.events:
        start = now
        if event.kind == "op":
            now += 10 + len(events)
            event = event._replace(start_ns=start, duration_ns=now - start)
        elif event.kind == "enter":
            entered.append(start)
            now += 1
        elif event.kind == "exit":
            now += 1
            start = entered.pop()
            event = event._replace(start_ns=start, duration_ns=now - start)
        events.append(event)
    return replace(trace, events=tuple(events))


@cache
def make_timed():
    return build_timeline(clock(make_step().trace()), exact())


def change(trace, **columns):
    """Return a trace with columns of its events changed; a function is asked for each event's."""
    events = [
        event._replace(**{name: value(event) if callable(value) else value for name, value in columns.items()})
        for event in trace.events
    ]
    return replace(trace, events=tuple(events))


def export(name, timeline, weight=None):
    return "".join(EXPORTS[name](timeline, weight=weight))


# The chrome trace is checked against the "Trace Event Format" document: Perfetto's own reader, in the package
# `perfetto`, downloads its program when it is first used.


def parse_nanoseconds(number):
    nanoseconds = round(number * 1000)
    assert nanoseconds / 1000 == number, f"{number} µs is not a whole number of nanoseconds"
    return nanoseconds


def check_event(event):
    assert isinstance(event["name"], str) and event["name"]
    assert type(event["pid"]) is int and type(event["tid"]) is int and event["pid"] > 0 and event["tid"] > 0
    assert isinstance(event["args"], dict)
    keys = {"name", "ph", "pid", "tid", "args"}
    if event["ph"] == "X":
        assert event.keys() == keys | {"cat", "ts", "dur"} and isinstance(event["cat"], str)
        assert parse_nanoseconds(event["ts"]) >= 0 and parse_nanoseconds(event["dur"]) >= 0
    elif event["ph"] == "C":
        assert event.keys() == keys | {"ts"} and parse_nanoseconds(event["ts"]) >= 0
        assert event["args"] and all(isinstance(value, int) for value in event["args"].values())
    else:
        assert event["ph"] == "M" and event.keys() == keys
        kinds = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
        assert list(event["args"]) == [kinds[event["name"]]]


def nest(slices):
    """Yield the slices of one track with their depths; two that cross raise AssertionError."""
    ends = []
    last = 0
    for item in slices:
        start = parse_nanoseconds(item["ts"])
        end = start + parse_nanoseconds(item["dur"])
        assert start >= last, "the slices of a track are not in order"
        last = start
        while ends and ends[-1] <= start and not (ends[-1] == start == end):
            ends.pop()
        assert not ends or end <= ends[-1], f"{item['name']} crosses the slice that it begins in"
        yield item, len(ends)
        if end > start:
            ends.append(end)


def read_chrome(text):
    """Return a chrome trace after a check of each event, and of each track."""
    trace = json.loads(text)
    assert trace.keys() == {"displayTimeUnit", "otherData", "traceEvents"} and trace["displayTimeUnit"] == "ns"
    assert all(isinstance(value, str) for value in trace["otherData"].values())
    tracks = {}
    named = set()
    for event in trace["traceEvents"]:
        check_event(event)
        if event["ph"] == "M" and event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert tracks.keys() <= named
    for slices in tracks.values():
        list(nest(slices))
    return trace


def slices_of(text, kind=""):
    events = [event for event in read_chrome(text)["traceEvents"] if event["ph"] == "X"]
    return [event for event in events if event["cat"].startswith(kind)]


def read_stacks(text):
    """Return the stacks of collapsed stacks with their weights, as flamegraph.pl reads a line."""
    stacks = Counter()
    for line in text.splitlines():
        stack, weight = LINE.match(line).groups()
        assert not LINE.match(stack), f"{stack!r} would be taken for a stack with two weights"
        path = tuple(stack.split(";"))
        assert path not in stacks and all(path)
        stacks[path] = int(weight)
    return stacks


def read_speedscope(text):
    """Return stack → weight of each profile of a speedscope file, after what its schema cannot say was checked."""
    file = json.loads(text)
    names = [frame["name"] for frame in file["shared"]["frames"]]
    assert len(set(names)) == len(names)
    profiles = []
    for profile in file["profiles"]:
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["startValue"] == 0 and profile["endValue"] == sum(profile["weights"])
        sums = Counter()
        for sample, weight in zip(profile["samples"], profile["weights"], strict=True):
            assert weight > 0
            sums[tuple(names[index] for index in sample)] += weight
        profiles.append(sums)
    return profiles


def by_module(stacks, names):
    """Return module name → weight, of stacks whose frames have these texts; what no module ran is the root's."""
    sums = Counter()
    for path, weight in stacks.items():
        for name in {"", *(names[frame] for frame in path if frame in names)}:
            sums[name] += weight
    return sums


def module_names(timeline):
    return {timeline_files.title(frame): frame.name for frame in timeline.frames if frame.kind == "module"}


def called_by_module(analysis):
    return {name: value for name, value in analysis.by_module().items() if value}


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_what_stands_in_an_export_adds_up_to_the_total(name):
    text = export(name, make_counted())
    if name == "chrome-trace":
        total = sum(event["args"].get("FLOPs", 0) for event in slices_of(text, "op"))
        assert sum(parse_nanoseconds(event["dur"]) for event in slices_of(text, "op")) == total
    elif name == "speedscope":
        [stacks] = read_speedscope(text)
        total = stacks.total()
    else:
        total = read_stacks(text).total()
    assert total == make_step().total() > 2 * 3 * (256 + 128)


def test_the_modules_of_an_export_have_what_by_module_says():
    timeline, expected = make_counted(), called_by_module(make_step())
    names = module_names(timeline)
    assert by_module(read_stacks(export("flame-graph", timeline)), names) == expected
    assert by_module(read_speedscope(export("speedscope", timeline))[0], names) == expected
    sums = Counter()
    for event in slices_of(export("chrome-trace", timeline), "op"):
        parts = event["args"].get("module", "").split(".")
        for length in range(len(parts) + 1):
            sums[".".join(parts[:length])] += event["args"]["FLOPs"] if length < len(parts) or parts[0] else 0
    assert {name: value for name, value in sums.items() if value} == expected


def test_each_op_call_and_each_region_stands_in_a_chrome_trace_once_and_in_order():
    trace = make_step().trace()
    slices = slices_of(export("chrome-trace", make_counted()))
    ops = [trace.signatures[event.item].op for event in trace.events if event.kind == "op"]
    entered = [trace.regions[event.item].name for event in trace.events if event.kind == "enter"]
    assert [item["args"]["op"] for item in slices if item["cat"].startswith("op")] == ops
    assert [item["args"].get("module") for item in slices if item["cat"].startswith("module")] == [
        name for name in entered if not name.startswith("Adam")
    ]
    assert len(slices) == len(ops) + len(entered)


def test_the_args_of_an_op_tell_module_class_phase_shapes_and_counts():
    flops = FlopCountAnalysis(Net(), torch.ones(2, 8))
    timeline = build_timeline(clock(flops.trace()), flops._cost_model())
    [linear, *_] = slices_of(export("chrome-trace", timeline), "op")
    assert linear["name"] == "aten::linear" and linear["cat"] == "op,forward"
    assert linear["args"] == {
        "module": "body.0",
        "class": "Linear",
        "phase": "forward",
        "op": "aten::linear",
        "inputs": ["float32[2, 8]", "float32[16, 8]", "float32[16]"],
        "outputs": ["float32[2, 16]"],
        "dtype": "float32",
        "status": "counted",
        "MACs": 256,
        "FLOPs": 256,
        "FLOP/s": round(256 / 13 * 1e9),  # the third event after three entries takes 13 ns
        "bytes allocated and kept": 2 * 16 * 4,
    }


def test_what_autograd_runs_for_a_module_says_which_and_stands_beside_no_call_of_it():
    slices = slices_of(export("chrome-trace", make_counted()))
    depths = {id(item): depth for item, depth in nest(slices)}
    backward = [item for item in slices if item["cat"] == "op,backward"]
    assert {item["args"].get("module") for item in backward} >= {"body.0", "body.1", "head"}
    # A slice without width at the end of another could be taken to be in it.
    assert {depths[id(item)] for item in backward if item["dur"]} == {0}
    phases = {item["args"]["phase"] for item in slices}
    assert phases == {"forward", "recompute", "backward", "optimizer"}


def test_the_outermost_frame_of_a_stack_is_its_phase():
    sums = Counter()
    for path, weight in read_stacks(export("flame-graph", make_counted())).items():
        sums[path[0]] += weight
    assert sums == {phase: labels.total() for phase, labels in make_step().counts().by_phase().items()}


def test_measured_time_stands_where_the_clock_saw_it():
    timeline, trace = make_timed(), clock(make_step().trace())
    assert timeline.weights == ("time", "flops", "macs", "memory")
    slices = slices_of(export("chrome-trace", timeline))
    measured = [event for event in trace.events if event.duration_ns is not None]
    placed = [(parse_nanoseconds(item["ts"]), parse_nanoseconds(item["dur"])) for item in slices]
    assert sorted(placed) == sorted((event.start_ns, event.duration_ns) for event in measured)
    for item in slices:
        if item["args"].get("FLOPs"):
            assert item["args"]["FLOP/s"] == round(item["args"]["FLOPs"] * 1e6 / item["dur"])


def test_the_times_of_stacks_add_up_to_what_the_clock_saw():
    trace = clock(make_step().trace())
    outermost, depth = 0, 0
    last = max(event.start_ns + event.duration_ns for event in trace.events if event.duration_ns is not None)
    for event in trace.events:
        depth -= event.kind == "exit"
        if not depth and event.duration_ns is not None:
            outermost += event.duration_ns
        depth += event.kind == "enter"
    stacks = read_stacks(export("flame-graph", make_timed()))
    [sampled] = read_speedscope(export("speedscope", make_timed()))
    assert stacks.total() == outermost
    idle = sampled.pop((), 0)
    assert sampled == stacks and sampled.total() + idle == last
    regions = sum(event.kind == "enter" for event in trace.events)
    ops = sum(event.duration_ns for event in trace.events if event.kind == "op")
    assert outermost - ops == 2 * regions  # entering and leaving takes 1 ns each


def test_clocks_that_disagree_are_cut_so_that_nothing_crosses():
    trace = clock(make_step().trace())
    late = change(trace, duration_ns=lambda event: None if event.start_ns is None else event.duration_ns * 3)
    late = replace(late, events=tuple(e._replace(duration_ns=20) if e.kind == "exit" else e for e in late.events))
    timeline = build_timeline(late, exact())
    slices = slices_of(export("chrome-trace", timeline))
    assert len(slices) == len(timeline.spans)
    assert all(item["dur"] <= 0.02 for item in slices if item["cat"].startswith("module"))


def test_an_op_that_was_not_measured_has_no_width_and_is_there():
    trace = clock(make_step().trace())
    odd = lambda event: event.kind == "op" and event.item % 2  # noqa: E731
    columns = ("start_ns", "duration_ns")
    trace = change(trace, **{c: lambda event, c=c: None if odd(event) else getattr(event, c) for c in columns})
    slices = slices_of(export("chrome-trace", build_timeline(trace, exact())), "op")
    unmeasured = [event for event in trace.events if event.kind == "op" and event.duration_ns is None]
    assert len(unmeasured) == sum(item["dur"] == 0 for item in slices) > 0


def test_threads_and_ranks_have_tracks_of_their_own():
    trace = change(make_step().trace(), thread=lambda event: int(event.phase == "backward"), rank=3)
    timeline = build_timeline(trace, exact())
    file = read_chrome(export("chrome-trace", timeline))
    slices = [event for event in file["traceEvents"] if event["ph"] == "X"]
    tracks = {(item["pid"], item["tid"], item["args"]["phase"] == "backward") for item in slices}
    assert tracks == {(4, 1, False), (4, 2, True)}
    names = {event["args"].get("name") for event in file["traceEvents"] if event["ph"] == "M"}
    assert names >= {"Net, rank 3", "thread 0", "thread 1"}
    # Laid end to end: what a second thread does begins where the first has come to.
    forward = max(item["ts"] + item["dur"] for item in slices if item["cat"] == "module,forward")
    assert min(item["ts"] for item in slices if item["tid"] == 2) >= forward > 0
    profiles = read_speedscope(export("speedscope", timeline))
    phases = [{path[0] for path in profile} for profile in profiles]
    assert phases == [{"forward", "recompute", "optimizer"}, {"backward"}]
    assert sum(profile.total() for profile in profiles) == make_step().total()
    assert export("flame-graph", timeline) == export("flame-graph", make_counted())


def test_two_ranks_run_beside_each_other():
    trace = make_step().trace()
    both = [event._replace(rank=rank) for event in trace.events for rank in (0, 1)]
    slices = slices_of(export("chrome-trace", build_timeline(replace(trace, events=tuple(both)), exact())))
    tracks = [[(item["ts"], item["dur"]) for item in slices if item["pid"] == pid] for pid in (1, 2)]
    alone = [(item["ts"], item["dur"]) for item in slices_of(export("chrome-trace", make_counted()))]
    assert tracks == [alone, alone]


def test_a_region_that_raised_is_closed_and_marked():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="cannot be multiplied"), record(model) as run:
        model(torch.ones(4, 3))
    timeline = build_timeline(run.trace(), run._cost_model())
    file = read_chrome(export("chrome-trace", timeline))
    raised = {event["args"]["module"] for event in file["traceEvents"] if event["args"].get("raised")}
    assert raised == {"", "1"}
    assert file["otherData"]["complete"].startswith("no")
    assert read_stacks(export("flame-graph", timeline)).total() == 24


@pytest.mark.parametrize("lost", ["enter", "exit"])
@pytest.mark.parametrize("timed", [False, True], ids=["counted", "timed"])
def test_a_pause_may_have_hidden_ends_of_regions(lost, timed):
    trace = clock(make_step().trace()) if timed else make_step().trace()
    torn = replace(trace, events=tuple(event for event in trace.events if event.kind != lost))
    timeline = build_timeline(torn, exact())
    slices_of(export("chrome-trace", timeline))
    assert read_speedscope(export("speedscope", timeline, "flops"))[0].total() == make_step().total()
    assert export("flame-graph", timeline, "flops") == export("flame-graph", make_counted())


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_an_empty_trace_gives_an_empty_file(name):
    with record(nn.Linear(3, 2)) as run:
        pass
    timeline = build_timeline(run.trace(), run._cost_model())
    text = export(name, timeline)
    if name == "chrome-trace":
        assert slices_of(text) == []
    elif name == "speedscope":
        assert read_speedscope(text) == [Counter()]
    else:
        assert text == ""


def test_a_trace_without_events_has_stacks_and_nothing_in_order():
    timeline = build_timeline(make_step().trace().aggregate(), exact())
    assert export("flame-graph", timeline) == export("flame-graph", make_counted())
    assert timeline.weights == ("flops", "macs")
    for name in ("chrome-trace", "speedscope"):
        with pytest.raises(TraceError, match="not their order: record without folding"):
            EXPORTS[name](timeline)
    with pytest.raises(TraceError, match="has no storages"):
        EXPORTS["flame-graph"](timeline, weight="memory")


def test_macs_are_the_multiply_adds():
    assert read_stacks(export("flame-graph", make_counted(), "macs")).total() == make_step().macs()


def test_what_runs_in_a_module_that_a_handle_prices_counts_with_it():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4))
    flops = FlopCountAnalysis(model, torch.ones(2, 8))
    trace = flops.trace()
    pricer = HandleCostModel(flops._cost_model(), {}, {trace.modules.root.classes[0]: lambda call: 1000})
    counts = count(trace, pricer, "flops")
    timeline = build_timeline(trace, pricer)
    assert counts.total() == 1000  # the outermost Sequential, with all in it
    assert read_stacks(export("flame-graph", timeline)) == {("forward", "Sequential"): 1000}
    assert read_speedscope(export("speedscope", timeline)) == [{("forward", "Sequential"): 1000}]
    root, *inside = slices_of(export("chrome-trace", timeline))
    assert root["args"]["FLOPs"] == 1000 and root["dur"] == 1.0
    assert all("FLOPs" not in item["args"] and item["args"]["status"] == "covered" for item in inside)


class Ignorant:
    stops_at = StopsAt()
    counts_modules = False

    def op_cost(self, signature):
        return (OpCost(signature.packet, Status.UNSUPPORTED),)

    def region_cost(self, region, module, signature):
        return None


def test_what_is_unknown_is_told_and_not_taken_for_zero():
    timeline = build_timeline(FlopCountAnalysis(Net(), torch.ones(2, 8)).trace(), Ignorant())
    file = read_chrome(export("chrome-trace", timeline))
    assert file["otherData"]["unsupported"] == "aten::linear × 2, aten::relu × 1"
    ops = [event["args"] for event in file["traceEvents"] if event.get("cat", "").startswith("op")]
    assert all("FLOPs" not in args and args["status"] == "unsupported" for args in ops)
    modules = [event["args"] for event in file["traceEvents"] if event.get("cat", "").startswith("module")]
    assert [args["unsupported op calls"] for args in modules] == [3, 2, 1, 1, 1]
    assert json.loads(export("speedscope", timeline))["fvflops"]["unsupported"] == "aten::linear × 2, aten::relu × 1"


class Elements(Ignorant):
    """Says that an op moves a byte for each element that it takes or gives."""

    def op_cost(self, signature):
        value = sum(spec.numel for spec in tensors_in((*signature.inputs, *signature.outputs)))
        return (OpCost(signature.packet, Status.COUNTED, value),)


def test_bytes_are_what_their_pricer_says():
    flops = FlopCountAnalysis(Net(), torch.ones(2, 8))
    timeline = build_timeline(flops.trace(), flops._cost_model(), traffic_model=Elements())
    # Linear(8, 16): 16 + 128 + 16 + 32; ReLU: 32 + 32; Linear(16, 4): 32 + 64 + 4 + 8.
    assert list(read_stacks(export("flame-graph", timeline, "bytes")).values()) == [192, 64, 108]
    assert json.loads(export("speedscope", timeline, "bytes"))["profiles"][0]["unit"] == "bytes"
    root, *_ = slices_of(export("chrome-trace", timeline))
    assert root["args"]["bytes"] == 192 + 64 + 108 and root["args"]["FLOPs"] == 384


def counters(text, name="memory"):
    events = [event for event in read_chrome(text)["traceEvents"] if event["ph"] == "C" and event["name"] == name]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    return [event["args"]["bytes"] for event in events]


def test_memory_is_what_the_storages_hold():
    flops = FlopCountAnalysis(Net(), torch.ones(2, 8))
    timeline = build_timeline(flops.trace(), flops._cost_model())
    there = 4 * (8 * 16 + 16 + 16 * 4 + 4 + 2 * 8)  # the parameters and the input
    # The Linears give 2×16 and 2×4, the ReLU 2×16; what the first gave is gone before the last begins.
    assert counters(export("chrome-trace", timeline)) == [there, there + 128, there + 256, there + 128, there + 160]
    assert list(read_stacks(export("flame-graph", timeline, "memory")).values()) == [128, 128, 32]


def test_measured_memory_goes_before_what_the_storages_say():
    flops = FlopCountAnalysis(Net(), torch.ones(2, 8))
    held = iter([1000, 1100, 1100, 1050, 1070, 1090])

    def measure(event):
        if event.kind != "op":
            return event
        return event._replace(memory_before=next(held), memory_after=next(held), memory_peak=1200)

    trace = flops.trace()
    timeline = build_timeline(replace(trace, events=tuple(map(measure, trace.events))), flops._cost_model())
    text = export("chrome-trace", timeline)
    assert counters(text) == [1000, 1100, 1050, 1070, 1090] and counters(text, "peak memory") == [1200] * 3
    assert list(read_stacks(export("flame-graph", timeline, "memory")).values()) == [100, 20]  # the ReLU's are freed


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        ("time", TraceError, "the run was not timed: record with measure="),
        ("bytes", TraceError, "traffic_model; available are flops, macs, memory"),
        ("flop", ValueError, "weight must be one of time, flops, macs, bytes, memory; got 'flop'"),
    ],
)
@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_a_weight_that_is_not_known_is_refused_before_a_piece_is_made(name, weight, error, message):
    with pytest.raises(error, match=message):
        EXPORTS[name](make_counted(), weight=weight)


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_hostile_names_are_text(name):
    model = nn.Sequential()
    model.add_module(HOSTILE.replace(".", ""), nn.Linear(3, 2))
    model.add_module("\ud800 7", nn.Linear(2, 2))
    flops = FlopCountAnalysis(model, torch.ones(4, 3))
    timeline = build_timeline(flops.trace(), flops._cost_model())
    text = export(name, timeline)
    assert "</script>" not in text or name == "flame-graph"
    assert "\x1b" not in text and text.encode()
    if name == "flame-graph":
        stacks = read_stacks(text)
    elif name == "speedscope":
        [stacks] = read_speedscope(text)
    else:
        modules = {item["args"]["module"] for item in slices_of(text, "module")}
        assert modules == {"", "\\ud800 7", HOSTILE.encode("unicode_escape").decode().replace("\\\\", "\\")}
        return
    assert sorted(stacks.values()) == [16, 24] and all(len(path) == 4 for path in stacks)


def test_a_name_that_ends_in_a_number_is_no_weight():
    regions = (Frame("group", "SGD 0"), Frame("module", "block 1", ""), Frame("function", "Scan 2"))
    items = tuple(Callee(frame.kind, frame.name, number) for number, frame in enumerate(regions))
    spans = tuple(Span(number, Event("op", 0, start_ns=number, duration_ns=1)) for number in range(3))
    stacks = read_stacks(export("flame-graph", Timeline(regions, ((),), items, {}, spans, weights=("time",))))
    assert [path[1] for path in stacks] == ["SGD 0 (group)", "block 1 (module)", "Scan 2 (function)"]


def make_long(spans, flops):
    return Timeline(
        (Frame("module", "", "Net"),),
        ((), (0,)),
        (Callee("op", "aten::mm", flops=flops, status="counted"),),
        {},
        tuple(Span(0, Event("op", 0, 1), flops=flops) for _ in range(spans)),
    )


def test_a_total_beyond_the_axis_is_scaled_and_said():
    file = read_chrome(export("chrome-trace", make_long(8, 10**17)))
    assert file["otherData"]["unit"] == "1 ns on the axis = 100 FLOP, counted and not timed"
    last = file["traceEvents"][-1]
    assert parse_nanoseconds(last["ts"]) == 7 * 10**15 and last["args"]["FLOPs"] == 10**17
    assert read_chrome(export("chrome-trace", make_long(8, 10**14)))["otherData"]["unit"].startswith(
        "1 ns on the axis = 1 "
    )


@pytest.mark.parametrize("name", ["chrome-trace", "speedscope"])
def test_a_long_trace_is_written_in_small_pieces(name):
    pieces = list(EXPORTS[name](make_long(20_000, 3)))
    assert len(pieces) > 20_000 and max(map(len, pieces)) < 1000


def test_speedscope_files_obey_its_published_schema():
    jsonschema = pytest.importorskip("jsonschema", reason="checks speedscope files against their schema")
    check = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate
    for timeline in (make_counted(), make_timed(), make_long(0, 0)):
        for weight in timeline.weights:
            check(json.loads(export("speedscope", timeline, weight)))
    file = json.loads(export("speedscope", make_counted()))
    with pytest.raises(jsonschema.ValidationError):
        check({**file, "profiles": [{**file["profiles"][0], "unit": "flops"}]})


def find_flamegraph():
    debian = "/usr/share/perl5/Devel/NYTProf/flamegraph.pl"
    return shutil.which("flamegraph.pl") or (debian if Path(debian).exists() else None)


@pytest.mark.skipif(
    find_flamegraph() is None, reason="flamegraph.pl is not here (Debian has it in libdevel-nytprof-perl)"
)
@pytest.mark.parametrize("weight", ["time", "flops", "memory"])
def test_flamegraph_pl_draws_all_stacks(weight):
    text = export("flame-graph", make_timed(), weight)
    command = ["perl", find_flamegraph(), "--minwidth=0", "--countname=units"]
    drawn = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert drawn.stderr == ""
    total = read_stacks(text).total()
    assert f"<title>all ({total:,} units, 100%)</title>" in drawn.stdout
    assert drawn.stdout.count("<title>") == 1 + len(
        {path[:length] for path in read_stacks(text) for length in range(1, len(path) + 1)}
    )


def test_the_check_of_chrome_traces_sees_slices_that_cross():
    head = {"ph": "X", "pid": 1, "tid": 1, "cat": "op", "args": {}}
    slices = [{**head, "name": "a", "ts": 0.0, "dur": 2.0}, {**head, "name": "b", "ts": 1.0, "dur": 2.0}]
    with pytest.raises(AssertionError, match="b crosses"):
        list(nest(slices))
    with pytest.raises(AssertionError, match="not in order"):
        list(nest(slices[::-1]))
    with pytest.raises(AssertionError):
        check_event({**head, "name": "a", "dur": 1.0})
