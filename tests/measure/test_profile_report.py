"""Profile tables: figures computed by hand for a fake clock, sums that must agree, and the columns of torch_flops."""

import csv
import io
import json
import math

import pytest
import torch
from torch import nn

from fvflops import ByteCountAnalysis, Device, FlopCountAnalysis, ProfileAnalysis, Trace, record, schedule
from fvflops.measure.profile_analysis import trimmed_mean
from fvflops.measure.profile_report import SORTS, profile_report
from fvflops.measure.profile_rows import Profile, ProfileRow, outlier
from fvflops.reports.display_width import display_width
from fvflops.reports.formats import write_document
from fvflops.trace import TraceError
from fvflops.zoo import build
from tests.support.checkout import DATA
from tests.support.models.layers import Net
from tests.support.models.parts import Applied
from tests.support.reports.timed_traces import measure

# A ReLU takes six times as long as a Linear.
SLOW_RELU = {"aten::relu": 6000}


def profile_of(model, *inputs, memory=False, durations=SLOW_RELU):
    """Return the profile of a model, timed by the fake clock."""
    trace = FlopCountAnalysis(model, inputs, table="exact", execution="real").trace()
    return ProfileAnalysis.from_trace(measure(trace, durations, memory=memory), table="exact")


def profile_net(**options):
    return profile_of(Net(), torch.ones(2, 8), **options)


@torch.library.custom_op("fvflops_report::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@scan.register_fake
def _(x):
    return torch.empty_like(x)


scan.register_autograd(lambda ctx, gradient: gradient)


def test_module_rows_match_figures_by_hand():
    lines = profile_net(memory=True).measured().module_rows()
    found = {name: (line.calls, line.total_ns, line.self_ns, line.flops) for name, line in lines.items()}
    # A Linear takes 1,000 ns, the ReLU 6,000, and each module 100 before anything in it runs.
    assert found == {
        "": (1, 8500, 100, 840),
        "body": (1, 7300, 100, 576),
        "body.0": (1, 1100, 1100, 544),
        "body.1": (1, 6100, 6100, 32),
        "head": (1, 1100, 1100, 264),
    }
    # float32: body.0 reads 2×8, 8×16 and 16 numbers and writes 2×16, the head reads 2×16, 16×4 and 4 and writes 2×4.
    moved = {name: (line.read, line.written) for name, line in lines.items()}
    assert moved["body.0"] == (4 * (16 + 128 + 16), 4 * 32)
    assert moved["body.1"] == (4 * 32, 4 * 32)
    assert moved["head"] == (4 * (32 + 64 + 4), 4 * 8)
    assert moved[""] == tuple(map(sum, zip(moved["body.0"], moved["body.1"], moved["head"], strict=True)))
    memory = {name: (line.before, line.after, line.retained, line.peak) for name, line in lines.items()}
    assert memory == {
        "": (0, 300, 300, 350),
        "body": (0, 200, 200, 250),
        "body.0": (0, 100, 100, 150),
        "body.1": (100, 200, 100, 250),
        "head": (200, 300, 100, 350),
    }
    assert lines["head"].flops_per_second == 264 / 1.1e-6
    assert lines["body.1"].intensity == 32 / 256


def table_of(text):
    """Return the lines of the table in a report, with the notes below it."""
    return text.split("\n\n")[2].splitlines()


def test_the_text_of_a_small_model():
    text = profile_net(memory=True).table()
    head, _, *rows = [line.split() for line in table_of(text)]
    assert head == [
        *["module", "calls", "time", "%", "time", "self", "FLOPs", "FLOP/s", "time:FLOPs", "mark"],
        *["bytes", "FLOP/byte", "retained", "peak", "%", "FLOPs", "read", "written"],
    ]
    assert [" ".join(row) for row in rows] == [
        "model 1 8.5 µs 100.0% 100 ns 840 98.8M 1 1.46K 0.577 300 350 100.0% 1.17K 288",
        "body 1 7.3 µs 85.9% 100 ns 576 78.9M 1.25 1.02K 0.562 200 250 68.6% 768 256",
        "0 1 1.1 µs 12.9% 1.1 µs 544 495M 0.2 fast 768 0.708 100 150 64.8% 640 128",
        "1 1 6.1 µs 71.8% 6.1 µs 32 5.25M 18.8 slow 256 0.125 100 250 3.8% 128 128",
        "head 1 1.1 µs 12.9% 1.1 µs 264 240M 0.412 fast 432 0.611 100 350 31.4% 400 32",
    ]
    assert "\n  1 " in text  # two levels below the root
    assert text.startswith("Net on float32[2, 8]: 8.5 µs\n\nOne run.\n")
    assert "\nProfiling overhead (3 µs, 500 ns per op) is subtracted.\n" in text
    assert max(map(len, text.splitlines())) < 140


def test_operators_and_the_time_between_them_add_up_to_the_total():
    profile = profile_net()
    lines = profile.measured().operator_rows()
    found = {name: (line.calls, line.total_ns, line.flops) for name, line in lines.items()}
    assert found == {"aten::linear": (2, 2000, 808), "aten::relu": (1, 6000, 32)}
    *rows, between = [line.split() for line in table_of(profile.table(by="operator"))]
    assert [row[0] for row in rows[2:]] == ["relu", "linear", "total"]
    # Five modules that take 100 ns each.
    assert " ".join(between) == "Between ops, in Python and PyTorch's dispatch: 500 ns (5.9% of the time)."
    assert sum(float(row[4].rstrip("%")) for row in rows[2:4]) + 5.9 == pytest.approx(100, abs=0.2)


@pytest.mark.parametrize("name", ["lenet5", "llama_tiny"])
def test_self_times_add_up_to_the_whole_forward_pass(name):
    inputs = torch.ones(1, 1, 28, 28) if name == "lenet5" else torch.ones(1, 16, dtype=torch.long)
    profile = profile_of(build(name).eval(), inputs)
    measured = profile.measured()
    lines, whole = measured.module_rows(), measured.total()
    assert sum(line.self_ns for line in lines.values()) == whole.total_ns == profile.times().of_module().total
    assert sum(line.total_ns for name, line in lines.items() if name.count(".") == 0 and name) <= whole.total_ns
    assert whole.flops == profile.total() == sum(line.flops for line in measured.operator_rows().values())
    assert whole.bytes == ByteCountAnalysis.from_trace(profile.trace()).total()
    for line in lines.values():
        assert 0 <= line.self_ns <= line.total_ns and line.flops <= whole.flops


def test_a_module_that_is_never_called_has_the_sum_of_its_submodules():
    blocks = nn.ModuleList([nn.Linear(8, 8), nn.ModuleDict({"a": nn.Linear(8, 8)})])
    model = Applied(lambda self, x: self.blocks[1]["a"](self.blocks[0](x)), blocks=blocks)
    lines = profile_of(model, torch.ones(2, 8), memory=True).measured().module_rows()
    assert {name: (line.calls, line.total_ns, line.flops, line.retained) for name, line in lines.items()} == {
        "": (1, 2300, 544, 200),
        "blocks": (0, 2200, 544, 200),
        "blocks.0": (1, 1100, 272, 100),
        "blocks.1": (0, 1100, 272, 100),
        "blocks.1.a": (1, 1100, 272, 100),
    }


def test_a_module_has_the_flops_of_all_ops_in_its_calls():
    inner = nn.Linear(8, 8)
    model = nn.Sequential(inner, Applied(lambda self, x: self.inner(x), inner=inner))
    lines = profile_of(model, torch.ones(2, 8)).measured().module_rows()
    assert (lines["0"].calls, lines["0"].total_ns, lines["0"].flops) == (2, 2200, 544)
    assert (lines["1"].total_ns, lines["1"].self_ns, lines["1"].flops) == (1200, 100, 272)


def test_phases_have_columns_and_a_table_each():
    with record(model := Net(), table="exact") as run:
        model(torch.ones(2, 8)).sum().backward()
    profile = ProfileAnalysis.from_trace(measure(run.trace()), table="exact")
    measured = profile.measured()
    assert measured.phases == ("forward", "backward")
    outside = [call.name for call in profile.op_calls(phase="forward") if call.module == ""]
    assert "sum" in outside and measured.outside_ns == 1000 * len(outside)
    both = measured.module_rows()
    for phase in measured.phases:
        assert measured.total(phase).flops == sum(profile.by_phase()[phase].values())
    for name in ("", "body", "head"):
        parts = [measured.module_rows(phase)[name] for phase in measured.phases]
        assert both[name].total_ns == sum(part.total_ns for part in parts)
        assert both[name].flops == profile.total(name)
    assert both["head"].calls == 1  # its forward call, not the ops of its backward pass
    head = table_of(profile.table())[0].split()
    assert head[head.index("forward") + 1] == "backward"
    assert f"Ops outside all modules, such as the loss, took {len(outside)} µs" in " ".join(profile.table().split())
    assert "forward" not in "\n".join(table_of(profile.table(phase="backward")))
    ranked = table_of(profile.table(sort="backward"))[2:]
    assert [line.split()[0] for line in ranked[:2]] == ["model", "body"]
    assert {call.phase for call in profile.op_calls(phase="backward")} == {"backward"}


def test_a_training_step_from_a_saved_trace():
    trace = Trace.from_json((DATA / "lenet5_training_trace.json").read_text())
    profile = ProfileAnalysis.from_trace(trace, table="exact")
    profile.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    text = f"{profile.table(depth=1)}\n\n{profile.table(by='operator', top=5)}\n\n{profile.op_table(top=5)}\n"
    assert text == (DATA / "lenet5_training_measured.txt").read_text()
    assert profile.measured().total("forward").total_ns == 41_000_000  # the model's 33 ms, and the loss' 8 ops


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"phase": "backward"}, TraceError, "no backward pass was recorded: pass a loss; recorded phases: forward$"),
        ({"phase": "optimizer"}, TraceError, "no optimizer step was recorded"),
        ({"phase": "backwards"}, ValueError, "phase must be one of forward, recompute"),
        ({"by": "layer"}, ValueError, "no view by 'layer': use 'module' or 'operator'"),
        ({"sort": "tim"}, ValueError, "got 'tim': did you mean 'time'"),
        ({"sort": "peak"}, ValueError, "cannot sort by 'peak': memory was not measured"),
        ({"sort": "roofline"}, ValueError, "cannot sort by 'roofline': name a device"),
        ({"top": 0}, ValueError, "top must be an integer >= 1, not 0"),
        ({"device": "H10"}, ValueError, "did you mean 'H100'"),
    ],
    ids=str,
)
def test_invalid_options_raise_a_message_of_one_line(options, error, message):
    with pytest.raises(error, match=message) as caught:
        profile_net().table(**options)
    assert "\n" not in str(caught.value)


def test_a_trace_that_was_not_measured_is_refused():
    profile = ProfileAnalysis.from_trace(FlopCountAnalysis(Net(), torch.ones(2, 8)).trace())
    with pytest.raises(TraceError, match="has no measured times or memory: record it with measure="):
        profile.table()


def test_op_calls_of_a_trace_that_was_not_measured_have_no_times():
    calls = FlopCountAnalysis(Net(), torch.ones(2, 8), table="exact").op_calls()
    assert [(call.op, call.flops, call.duration_ns, call.memory_before) for call in calls] == [
        (call.op, call.flops, None, None) for call in profile_net().op_calls()
    ]


def test_rows_are_ranked_and_limited():
    profile = profile_net(memory=True)

    def names(**options):
        lines = [line for line in table_of(profile.table(**options))[2:] if " more" not in line]
        return [line.split()[0] for line in lines]

    assert names(sort="self", top=2) == ["body.1", "body.0"]
    assert names(sort="flops", depth=1) == ["model", "body", "head"]
    assert names(sort="name") == ["model", "body", "body.0", "body.1", "head"]
    assert names(top=1) == ["model"]
    assert "3 more modules." in profile.table(sort="self", top=2)
    for sort in SORTS:
        assert len(names(sort=sort) if sort != "roofline" else names(sort=sort, device="H100")) == 5
    # Outliers below the depth are shown too.
    assert names(depth=0) == ["model", "body.0", "body.1", "head"]
    assert "1 more module below depth 0." in profile.table(depth=0)
    assert names(by="operator", sort="self")[:2] == ["relu", "linear"]


def test_an_outlier_differs_by_a_factor_of_two_and_takes_five_percent():
    whole = ProfileRow(total_ns=1000, flops=1000)
    assert outlier(ProfileRow(total_ns=100, flops=51), whole) == ""  # less than twice
    assert outlier(ProfileRow(total_ns=100, flops=50), whole) == "slow"
    assert outlier(ProfileRow(total_ns=49, flops=0), whole) == ""  # less than 5 % of the total
    assert outlier(ProfileRow(total_ns=50, flops=100), whole) == "fast"
    assert outlier(ProfileRow(total_ns=900, flops=10, unsupported=1), whole) == ""  # its FLOPs are unknown
    assert outlier(ProfileRow(total_ns=900), ProfileRow(total_ns=1000)) == ""


def test_the_roofline_share_is_the_least_time_divided_by_the_time():
    device = Device("mine", matrix={"fp32": 1e9}, bandwidth=1e9)  # a FLOP and a byte take a nanosecond each
    profile = profile_net()
    lines = profile.measured(device=device).module_rows()
    # Both Linears and the ReLU move more bytes than they do FLOPs: 768, 256 and 432.
    assert lines["body.0"].roofline_share == pytest.approx(768 / 1100)
    assert lines["body.1"].roofline_share == pytest.approx(256 / 6100)
    assert lines[""].roofline_share == pytest.approx((768 + 256 + 432) / 8500)
    assert "roofline is the least time of mine for the FLOPs" in profile.table(device=device)
    assert "roofline" not in profile.table()


def test_unsupported_flops_are_reported_and_not_counted_as_zero():
    profile = profile_of(Applied(lambda self, x: scan(self.fc(x)), fc=nn.Linear(8, 16)), torch.ones(2, 8))
    head, _, *rows = (line.split() for line in table_of(profile.table()))
    assert head[head.index("FLOPs") + 1] == "unsupported"
    assert rows[0][rows[0].index("544") + 1] == "1" and rows[1][rows[1].index("544") + 1] != "1"
    assert "Unsupported by exact, so not counted in FLOPs: fvflops_report::scan (1 call)." in profile.table()
    [linear, unknown] = profile.op_calls()
    assert (linear.flops, linear.status) == (544, "counted")
    assert (unknown.flops, unknown.status, unknown.duration_ns) == (None, "unsupported", 1000)
    row = next(line for line in profile.op_table().splitlines() if "scan.default" in line)
    assert row.split()[-4:] == ["unsupported", "unsupported", "1", "µs"]
    assert "Unsupported by exact, so not counted: fvflops_report::scan (1 call)." in profile.op_table()


def test_op_calls_are_in_order_with_all_columns():
    calls = profile_net(memory=True).op_calls()
    assert [(call.number, call.name, call.op, call.target, call.module) for call in calls] == [
        (0, "linear", "aten::linear", "aten::linear.default", "body.0"),
        (1, "relu", "aten::relu", "aten::relu.default", "body.1"),
        (2, "linear_1", "aten::linear", "aten::linear.default", "head"),
    ]
    assert calls[0].inputs == ("float32[2, 8]", "float32[16, 8]", "float32[16]")
    assert calls[0].outputs == ("float32[2, 16]",)
    assert [(call.flops, call.duration_ns) for call in calls] == [(544, 1000), (32, 6000), (264, 1000)]
    memory = [(call.memory_before, call.memory_after, call.memory_delta) for call in calls]
    assert memory == [(0, 100, 100), (100, 200, 100), (200, 300, 100)]
    table = profile_net(memory=True).op_table().splitlines()
    shapes = "[2,16] [4,16] [4] [2,4] counted"
    assert table[4].split() == f"2 linear_1 linear aten::linear.default head {shapes} 264 1 µs 200 300 +100".split()
    assert table[5].split() == ["total", "3", "calls", "840", "8", "µs", "+300"]
    ranked = profile_net().op_table(sort="time", top=1).splitlines()
    assert ranked[2].split()[1] == "relu" and ranked[-1] == "2 more calls."


def test_ops_are_ignored_by_name():
    profile = profile_net()
    for name in ("aten::linear", "linear", "aten::linear.default"):
        assert [call.name for call in profile.op_calls(ignore=(name,))] == ["relu"]
    assert "Not listed: aten::linear (2 calls)." in profile.op_table(ignore=("aten::linear",))
    assert len(profile.op_calls(ignore=("aten::view",))) == 3  # a known op that did not run
    with pytest.raises(ValueError, match="no op is named 'aten::linaer': did you mean 'aten::linear'"):
        profile.op_calls(ignore=("aten::linaer",))
    with pytest.raises(ValueError, match=r"no op is named 'aten::relu\.out': did you mean 'aten::relu"):
        profile.op_calls(ignore=("aten::relu.out",))


def test_a_module_that_a_table_counts_as_one_is_one_operator():
    trace = FlopCountAnalysis(build("lenet5"), torch.ones(1, 1, 28, 28), table="torch_flops", execution="real").trace()
    profile = ProfileAnalysis.from_trace(measure(trace), table="torch_flops")
    lines = profile.measured().operator_rows()
    assert lines["torch.nn.Conv2d"].calls == 2 and lines["torch.nn.Conv2d"].total_ns == 2000
    assert lines["torch.nn.Conv2d"].read > 0 and "aten::conv2d" not in lines
    assert sum(line.flops for line in lines.values()) == profile.total() == 836_192
    calls = profile.op_calls()
    assert sum(call.flops for call in calls) == 836_192
    assert [call.status for call in calls if call.op == "aten::conv2d"] == ["covered"] * 2
    assert [call.duration_ns for call in calls if call.op == "Conv2d"] == [None] * 2


def test_the_columns_of_torch_flops():
    """Each call that torch_flops lists has a row with the same module and FLOPs, in the same order."""
    torch_flops = pytest.importorskip("torch_flops", reason="the peer whose table it is")
    model, images = build("lenet5").eval(), torch.ones(1, 1, 28, 28)
    peer = torch_flops.TorchFLOPsByFX(model, mem_func_name="memory_allocated")  # its other memory function needs a GPU
    with torch.no_grad():
        peer.propagate(images)
    rows = [row for row in peer.result_table if row[1].startswith("call_")]
    known = [None if row[4] == "not_recognized" else row[4] for row in rows]
    theirs = [(row[2] if row[1] == "call_module" else "", flops) for row, flops in zip(rows, known, strict=True)]
    profile = ProfileAnalysis(model, images, warmup=0, repeat=1, table="torch_flops")
    calls = [call for call in profile.op_calls() if call.status != "covered"]
    ours = [(call.module, call.flops if call.status == "counted" else None) for call in calls]
    assert ours == theirs and len(ours) == 12
    # Each op has a time and its memory, as in torch_flops, and on a CPU too.
    assert all(call.duration_ns > 0 for call in profile.op_calls() if call.op.startswith("aten::"))
    assert profile.op_calls()[-1].memory_delta == 10 * 4
    assert profile.total() == peer.print_total_flops(show=False)


def test_memory_alone_can_be_measured():
    profile = ProfileAnalysis(Net(), torch.ones(2, 8), warmup=0, repeat=2, measure={"memory"}, table="exact")
    head = table_of(profile.table())[0].split()
    assert "retained" in head and "time" not in head and "FLOP/s" not in head
    line = profile.measured().module_rows()["body.0"]
    assert line.retained == 2 * 16 * 4 and line.calls == 1
    with pytest.raises(ValueError, match="cannot sort by 'time': time was not measured"):
        profile.table(sort="time")


def counted_runs(limit=math.inf, error=RuntimeError):
    """Return a model that records its runs and raises after `limit` of them, and the list of runs."""
    runs = []

    class Counting(Net):
        def forward(self, x):
            runs.append(len(runs))
            if len(runs) > limit:
                raise error("no more")
            return super().forward(x)

    return Counting(), runs


def test_a_training_step_retains_its_gradients_and_its_result():
    model = build("lenet5")
    profile = ProfileAnalysis(model, torch.randn(2, 1, 28, 28), loss=torch.sum, warmup=0, repeat=1)
    kept = {name: line.retained for name, line in profile.measured().module_rows().items()}
    # Gradients of four bytes, the result of 2 × 10, the loss, and its gradient, which autograd holds to the end.
    assert kept[""] == 4 * (sum(parameter.numel() for parameter in model.parameters()) + 2 * 10 + 1 + 1)
    # Outside both blocks: the loss and its gradient, one number each; the result's gradient is a view of the latter.
    assert kept["classifier"] + kept["features"] == kept[""] - 4 * 2


def test_a_schedule_says_which_runs_are_measured():
    model, runs = counted_runs()
    seen = []
    steps = schedule(skip_first=1, wait=1, warmup=1, active=2, repeat=1)
    options = {"schedule": steps, "steps": 6, "on_run": lambda *run: seen.append(run)}
    profile = ProfileAnalysis(model, torch.ones(2, 8), **options)
    text = profile.table()
    # Each measured run is repeated to time its modules.
    assert len(runs) == 6 + 2 and profile.measured_runs == 2 and seen == [(done, 6) for done in range(1, 7)]
    assert "The mean of 2 runs, the active steps among 6." in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": schedule(wait=3, active=1), "steps": 3}, "the schedule makes none of 3 steps active"),
        ({"schedule": schedule(active=1)}, "with a schedule, steps must be the number of runs"),
        ({"steps": 3}, "steps is the number of runs of a schedule"),
    ],
    ids=["never active", "no steps", "no schedule"],
)
def test_an_invalid_schedule_is_refused_before_a_run(options, message):
    model, runs = counted_runs()
    with pytest.raises(ValueError, match=message):
        ProfileAnalysis(model, torch.ones(2, 8), **options)
    assert not runs


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_runs_measured_before_an_error_are_kept(error):
    model, _ = counted_runs(limit=1 + 2 * 2, error=error)  # a warm-up run, and two runs, each repeated to time modules
    profile = ProfileAnalysis(model, torch.ones(2, 8), warmup=1, repeat=5, table="exact")
    with pytest.raises(error):
        profile.table()
    saved = profile.salvage()
    assert saved.total() == 840 and saved.trace().about["runs"] == "2"
    text = " ".join(saved.table().split())
    assert f"Run 4 of 6 raised {error.__name__}: no more; the profile covers the runs before." in text


def test_there_is_nothing_to_keep_before_the_first_run():
    model, _ = counted_runs(limit=1)
    profile = ProfileAnalysis(model, torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="no more"):
        profile.table()
    with pytest.raises(TraceError, match="no measured run was completed"):
        profile.salvage()


def test_the_slowest_and_fastest_runs_do_not_affect_the_mean():
    trace = FlopCountAnalysis(Net(), torch.ones(2, 8), execution="real").trace()
    runs = [measure(trace, {"aten::relu": relu}) for relu in (900_000, 5000, 1, 7000, 6000)]
    middle = trimmed_mean(runs)
    assert ProfileAnalysis.from_trace(middle).times().modules["forward"]["body.1"].total == 6100
    assert middle.about["averaged"] == "the mean of 3 of 5 runs (without the fastest and the slowest)"
    assert trimmed_mean(runs[:1]).about["averaged"] == "one run"


def test_a_model_on_meta_has_nothing_to_measure():
    with pytest.raises(ValueError, match="a profile needs real execution, and the meta device has no values"):
        ProfileAnalysis(nn.Linear(2, 2, device="meta"), torch.ones(1, 2)).table()


def test_a_compiled_model_says_that_it_ran_eagerly():
    profile = ProfileAnalysis(torch.compile(Net(), backend="eager"), torch.ones(2, 8), warmup=0, repeat=1)
    text = " ".join(profile.table().split())
    assert "The model is compiled, but was run eagerly: these are not the times of compiled code." in text


@pytest.mark.parametrize(
    ("name", "format", "begins"),
    [
        ("run.json", None, '{"displayTimeUnit"'),
        ("run.speedscope.json", None, '{"$schema":"https://www.speedscope.app'),
        ("run.txt", None, "forward;Net"),
        ("run.folded", None, "forward;Net"),
        ("run", "flame-graph", "forward;Net"),
    ],
)
def test_an_export_is_in_the_format_that_its_path_says(tmp_path, name, format, begins):
    path = tmp_path / "made" / name
    profile_net().export(path, format=format)
    text = path.read_text()
    assert text.startswith(begins)
    if name.endswith(".json"):
        json.loads(text)


def stacks_of(path):
    return {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in path.read_text().splitlines()}


def test_exports_add_up_to_the_counted_and_measured_totals(tmp_path):
    path = tmp_path / "stacks.txt"
    sums = {}
    for weight in ("time", "flops", "macs", "bytes", "memory"):
        profile_net(memory=True).export(path, weight=weight)
        sums[weight] = sum(stacks_of(path).values())
    whole = profile_net(memory=True).measured().total()
    assert sums == {"time": 8500, "flops": 840, "macs": 384, "bytes": whole.bytes, "memory": 300}
    counted = FlopCountAnalysis(Net(), torch.ones(2, 8), table="exact")
    counted.export(path)
    assert stacks_of(path) == {
        "forward;Net;body (Sequential);body.0 (Linear);aten::linear": 544,
        "forward;Net;body (Sequential);body.1 (ReLU);aten::relu": 32,
        "forward;Net;head (Linear);aten::linear": 264,
    }
    with record(model := Net(), table="exact") as run:
        model(torch.ones(2, 8)).sum().backward()
    run.export(path)
    assert sum(stacks_of(path).values()) == run.total()


def test_a_copy_has_bytes_in_an_export_and_a_view_has_none(tmp_path):
    def reshaped(x):
        return x.t().reshape(-1) + x.reshape(-1)

    counted = ByteCountAnalysis(reshaped, torch.ones(4, 8))
    FlopCountAnalysis(reshaped, torch.ones(4, 8), table="exact").export(tmp_path / "bytes.txt", weight="bytes")
    assert sum(stacks_of(tmp_path / "bytes.txt").values()) == counted.total() == 4 * 32 * (2 + 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "run.svg"}, ValueError, "has no known file extension: use .speedscope.json, .json"),
        ({"path": "run.json", "format": "perfetto"}, ValueError, "export format must be one of .*; got 'perfetto'"),
        ({"path": "run.json", "weight": "watts"}, ValueError, "weight must be one of .*; got 'watts'"),
        ({"path": "file/run.json"}, OSError, "file/run.json cannot be written: .*; choose another path"),
        ({"path": "fvflops://run.json"}, OSError, "fvflops:// is read-only"),
    ],
    ids=["ending", "format", "weight", "folder", "shipped"],
)
def test_an_export_that_cannot_be_written_is_refused_before_a_run(tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    model, runs = counted_runs()
    with pytest.raises(error, match=message):
        ProfileAnalysis(model, torch.ones(2, 8)).export(**options)
    assert not runs and not (tmp_path / "run.json").exists()


def test_a_profile_by_hand_renders_without_a_model():
    tree = profile_net().trace().modules
    lines = {"forward": {"": ProfileRow(calls=1, total_ns=2000, self_ns=2000, flops=10)}}
    report = profile_report(Profile(tree, lines, {"forward": {}}, about={"model": "Net", "table": "mine"}))
    assert write_document(report).startswith("Net: 2 µs\n\nOne run.\n")


@pytest.mark.parametrize("by", ["module", "operator"])
@pytest.mark.parametrize("format", ["text", "csv", "json"])
def test_a_report_has_a_profile_of_a_saved_trace(format, by):
    model = nn.Sequential()
    model.add_module("a_module_with_a_name_that_is_much_longer_than_a_line_of_a_terminal_" * 2, Net())
    measured = profile_of(model, torch.ones(2, 8), memory=True)
    saved = Trace.from_json(measured.trace().to_json())
    report = ProfileAnalysis.from_trace(saved, table="exact").report(by=by, depth=3, sort="flops", device="H100")
    text = write_document(report, format, width=80)
    if format == "csv":
        written = list(csv.DictReader(io.StringIO(text)))
        rows = [(row["time"], row["flops"], row["bytes"]) for row in written][:2]
        timed = {"seconds": "time", **{key: key.removesuffix("_seconds") for key in written[0] if "_seconds" in key}}
        assert {*timed.values()} == {"time", *({"self"} if by == "module" else ())}
        assert all(float(row[key]) == int(row[ns]) / 1e9 for row in written for key, ns in timed.items())
        by_operator = [("2000", "808", "1200"), ("6000", "32", "256")]
        assert rows == (by_operator if by == "operator" else [("8600", "840", "1456"), ("8500", "840", "1456")])
    elif format == "json":
        written = json.loads(text)
        assert written["format"] == "fvflops.profile" and list(written["tables"]) == [f"{by}s"]
        assert {*SORTS} - {"name", "self"} <= {*written["tables"][f"{by}s"]["rows"][0]}
    else:
        assert max(map(display_width, text.splitlines())) <= 80
        assert "840" in text and "8.6 µs" in text and "Columns hidden at width 80: " in text


@pytest.mark.parametrize("sort", ["peak", "memory", "bytes", "intensity", "mismatch"])
def test_the_sort_column_is_shown_on_a_narrow_terminal(sort):
    report = profile_net(memory=True).report(sort=sort, top=2)
    text = write_document(report, width=80)
    heading = next(column.heading for column in report.main_table().columns if column.key == sort)
    assert heading in table_of(text)[0].split() and max(map(len, text.splitlines())) <= 80
