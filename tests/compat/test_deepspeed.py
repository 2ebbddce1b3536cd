"""The FLOPs profiler: calls, results and strings compared with DeepSpeed, and the report of a saved Trace."""

import json
import re

import pytest
import torch
from torch import nn

import fvflops.capture.instrument.probe as probe
from fvflops import Trace, record, units, zoo
from fvflops.compat.deepspeed_profile import read_profile, render
from fvflops.compat.flops_profiler import (
    FlopsProfiler,
    ProfilerConfiguration,
    StepProfiler,
    get_model_profile,
    read_configuration,
)
from fvflops.formulas.yaml_document import TableError
from fvflops.trace import TraceError
from fvflops.zoo.vit_b_16 import EncoderLayer
from tests.support.checkout import DATA
from tests.support.models.parts import Parts
from tests.support.processes.deepspeed_process import CALLS, FORMATS, arguments, get_text
from tests.support.processes.start import run_ranks

MILLISECOND = 1_000_000
# LeNet-5 on one image of 28x28, by hand: 6*28*28*25 + 16*10*10*150 + 400*120 + 120*84 + 84*10 multiply-adds; two flops
# each, and one for the bias of each output of a convolution and for each input of a pooling.
MACS = 117_600 + 240_000 + 48_000 + 10_080 + 840
FLOPS = 2 * MACS + (4704 + 1600) + (4704 + 1600)
# A line of the tree: params, MACs and latency with their shares, and FLOPS.
COLUMNS = re.compile(
    r"([\d.]+ ?[KMB]?) = ([\d.]+)% Params, ([\d.]+ [KMGT]?)MACs = ([\d.]+)% MACs, "
    r"([\d.]+ [mu]?)s = ([\d.]+)% latency, ([\d.]+ [KMGT]?)FLOPS"
)


@pytest.fixture(scope="module")
def theirs():
    return run_ranks("deepspeed_process", 1)[0]


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that advances by a millisecond at the start of each op and module call."""
    now, advance = [0], [0]
    begin = probe.Probe.begin

    def read():
        time = now[0]
        now[0], advance[0] = time + advance[0], 0
        return time

    def begin_and_advance(self):
        advance[0] = MILLISECOND  # after the start has been read
        return begin(self)

    monkeypatch.setattr(probe, "perf_counter_ns", read)
    monkeypatch.setattr(probe.Probe, "begin", begin_and_advance)


def train(model, images=1024):
    x = torch.zeros(images, 1, 28, 28)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(x), torch.zeros(images, dtype=torch.long)).backward()
    optimizer.step()


def run_forward(model, images=2):
    with torch.inference_mode():
        return model(torch.zeros(images, 1, 28, 28))


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_written_as_deepspeed_writes_them(name, theirs):
    ours = [getattr(units, name)(*call) for call in arguments()]
    different = [row for row in zip(arguments(), ours, theirs["strings"][name], strict=True) if row[1] != row[2]]
    assert len(ours) > 900 and not different


@pytest.mark.parametrize("name", CALLS)
def test_results_are_deepspeeds(name, theirs, capsys):
    ours = get_model_profile(zoo.build("lenet5"), print_profile=False, **CALLS[name])
    assert isinstance(ours, tuple)
    assert list(ours) == theirs["results"][name]
    assert capsys.readouterr().out == ""


def test_every_column_of_deepspeeds_text_is_there_with_equal_numbers(theirs):
    ours, text = get_text(get_model_profile, **CALLS["batch 1024"]), theirs["text"]
    rows, expected = COLUMNS.findall(ours), COLUMNS.findall(text)
    assert len(rows) == len(expected) == 14  # LeNet5, two Sequentials and the eleven modules in them
    assert [row[:4] for row in rows] == [row[:4] for row in expected]
    assert all(extra in ours and extra in text for extra in ("kernel_size=(5, 5), stride=(1, 1)", "in_features=400"))
    # Times, and so FLOPS, differ from run to run.
    assert all(float(row[5]) <= 100 for row in rows)


def test_costs_of_ignored_modules_are_attributed_to_their_callers(theirs):
    ours = COLUMNS.findall(get_text(get_model_profile, **CALLS["ignored"]))
    expected = COLUMNS.findall(theirs["ignored"])
    assert [row[:4] for row in ours] == [row[:4] for row in expected]
    linear = [row for row in ours if row[0] == "48.12 K"]
    assert [row[2:] for row in linear] == [("0 ", "0", "0 ", "0", "0 ")]


def test_the_text_of_a_saved_trace():
    trace = Trace.from_json((DATA / "lenet5_training_trace.json").read_text())
    text = render(read_profile(trace), profile_step=10, top_modules=3)
    assert text == (DATA / "lenet5_training_profile.txt").read_text()


def test_the_saved_trace_equals_a_new_recording(clock):
    model = zoo.build("lenet5")
    with record(model, measure={"time"}, table="deepspeed") as run:
        train(model)
    saved = Trace.from_json((DATA / "lenet5_training_trace.json").read_text())
    assert read_profile(run.trace()) == read_profile(saved)


def test_the_costs_in_the_report_equal_a_hand_count():
    profile = read_profile(Trace.from_json((DATA / "lenet5_training_trace.json").read_text()))
    forward, backward, step = (profile.phases[name] for name in ("forward", "backward", "optimizer"))
    # Under autograd a linear layer is addmm, whose bias counts once for all rows.
    assert (forward.macs, forward.flops) == (1024 * MACS, 1024 * FLOPS + 120 + 84 + 10)
    # Each weight and each input of a layer has a gradient, but for the images.
    assert backward.macs == 1024 * (2 * MACS - 117_600)
    assert step.flops == 2 * 61_706
    assert profile.batches == (1024,)
    # A call of LeNet-5 and of each of its 13 modules, an op in 11 of them, a transpose in the linear layers, a detach
    # in the four Tanhs, and the flatten between features and classifier.
    costs = profile.by_module
    assert costs["classifier.0"].duration_ns == 3 * MILLISECOND
    assert costs[""].duration_ns == (14 + 11 + 3 + 4 + 1) * MILLISECOND == forward.duration_ns
    assert costs[""].macs == costs["features"].macs + costs["classifier"].macs


def test_the_top_modules_are_cut_by_depth_and_number():
    profile = read_profile(Trace.from_json((DATA / "lenet5_training_trace.json").read_text()))
    short = render(profile, module_depth=1, top_modules=1, detailed=False)
    assert re.findall(r"^depth \d", short, re.M) == ["depth 0", "depth 1"]
    assert "Modules -" not in short
    deep = render(profile, top_modules=2, detailed=False)
    assert "    params      - Linear: 59.13 K, Conv2d: 2.57 K\n" in deep
    assert "    MACs        - Conv2d: 366.18 MMACs, Linear: 60.33 MMACs\n" in deep


def test_a_shared_module_is_listed_under_each_name_and_counts_once():
    shared = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, shared))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with torch.inference_mode():
        model(torch.ones(2, 4))
    costs = profiler._profile().by_module
    profiler.end_profile()
    assert {name: (cost.macs, cost.parameters) for name, cost in costs.items()} == dict.fromkeys(
        ("", "0", "0.0", "1", "1.0", "1.1"), (3 * 32, 16)
    )


def test_totals_do_not_grow_from_one_profile_to_the_next(capsys):
    model = zoo.build("lenet5")
    before = dict(model.__dict__)
    profiler = FlopsProfiler(model)
    for _ in range(3):
        profiler.start_profile()
        run_forward(model)
        assert profiler.get_total_flops() == 2 * FLOPS  # while the profile is active
        run_forward(model)
        profiler.stop_profile()
        run_forward(model)
        assert profiler.get_total_flops() == 4 * FLOPS
        assert profiler.get_total_macs() == 4 * MACS
        assert profiler.get_total_macs(as_string=True) == "1.67 MMACs"
        assert profiler.get_total_params(as_string=True) == "61.71 K"
        assert profiler.get_total_duration() > 0
        assert re.fullmatch(r"[\d.]+ [mu]?s", profiler.get_total_duration(as_string=True))
    profiler.print_model_aggregated_profile(module_depth=0)
    assert "    flops       - LeNet5: 3.38 M\n" in capsys.readouterr().out
    profiler.end_profile()
    assert model.__dict__ == before
    assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]


def test_a_reset_starts_from_zero():
    model = zoo.build("lenet5")
    with FlopsProfiler(model, table="exact") as profiler:
        run_forward(model)
        profiler.reset_profile()
        run_forward(model, images=1)
        assert profiler.get_total_macs() == MACS
        profiler.start_profile()
        run_forward(model, images=3)
        assert profiler.get_total_macs() == 3 * MACS
    with pytest.raises(RuntimeError, match="before end_profile"):
        profiler.get_total_macs()


@pytest.mark.parametrize(
    ("model", "shape"), [(zoo.build("lenet5"), (2, 1, 28, 28)), (EncoderLayer(32, heads=2, mlp_width=64), (1, 9, 32))]
)
def test_a_training_loop_has_the_forward_numbers_of_deepspeed_but_for_biases(model, shape):
    with FlopsProfiler(model) as profiler:
        model(torch.zeros(shape)).sum().backward()
        flops, macs = profiler.get_total_flops(), profiler.get_total_macs()
    expected = get_model_profile(model, shape, print_profile=False, as_string=False, warm_up=0)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert macs == expected[1]
    assert flops - expected[0] == sum(layer.out_features for layer in layers if layer.bias is not None)


def test_unrecorded_phases_are_reported_and_not_estimated(capsys):
    model = zoo.build("lenet5")
    get_model_profile(model, (2, 1, 28, 28), detailed=False)
    header = capsys.readouterr().out
    assert re.search(r"^bwd: +not recorded$", header, re.M) and re.search(r"^step: +not recorded$", header, re.M)
    assert "bwd MACs" not in header and "batch size:                                       2\n" in header
    assert model.training
    with pytest.raises(RuntimeError, match=r"call start_profile\(\) before"):
        FlopsProfiler(model).get_total_flops()
    with FlopsProfiler(model) as profiler, pytest.raises(TraceError, match="no module of the model was called"):
        profiler.get_total_flops()


def test_the_report_is_written_to_a_file_in_a_new_folder(tmp_path, capsys):
    path = tmp_path / "new" / "profile.txt"
    get_model_profile(zoo.build("lenet5"), (2, 1, 28, 28), output_file=str(path))
    assert capsys.readouterr().out == ""
    assert len(COLUMNS.findall(path.read_text())) == 14


def test_generating_calls_generate():
    class Generator(Parts):
        def forward(self, x):
            return self.step(x)

        def generate(self, x, *, steps):
            assert not self.training
            for _ in range(steps):
                x = self(x)
            return x

    options = {"args": [torch.ones(1, 4)], "kwargs": {"steps": 5}, "print_profile": False, "as_string": False}
    assert get_model_profile(Generator(step=nn.Linear(4, 4, bias=False)), **options, mode="generate") == (160, 80, 16)
    with pytest.raises(TypeError, match="which LeNet5 lacks"):
        get_model_profile(zoo.build("lenet5"), **options, mode="generate")


@pytest.mark.parametrize("section", [True, False])
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_configuration_profiles_the_step_that_it_names(section, suffix, tmp_path, capsys):
    keys = {"enabled": True, "recompute_fwd_factor": 0.0, "profile_step": 1, "top_modules": 3, "detailed": False}
    keys |= {"module_depth": -1, "output_file": None}
    path = tmp_path / f"configuration{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps({"train_batch_size": 8, "flops_profiler": keys} if section else keys, indent=2))
    else:
        lines = "".join(f"  {key}: {'null' if value is None else value}\n" for key, value in keys.items())
        path.write_text(f"flops_profiler:\n{lines}" if section else lines)
    assert read_configuration(path) == ProfilerConfiguration(enabled=True, top_modules=3, detailed=False)
    model = zoo.build("lenet5")
    with StepProfiler(model, path) as profiler:
        for images in (2, 4, 8):
            train(model, images)
            assert capsys.readouterr().out == ""
            profiler.step()
            text = capsys.readouterr().out
            assert ("LeNet5 at step 1," in text) == ("batch size: " + " " * 38 + "4\n" in text) == (images == 4)


def test_a_step_that_is_not_reached_raises(capsys):
    model = zoo.build("lenet5")
    for step in (2, 5):
        with (
            pytest.raises(RuntimeError, match=rf"ended after 2 steps, before step {step} \(counted from 0\)"),
            StepProfiler(model, ProfilerConfiguration(enabled=True, profile_step=step)) as profiler,
        ):
            for _ in range(2):
                run_forward(model)
                profiler.step()
    with StepProfiler(model, ProfilerConfiguration(profile_step=5)):
        run_forward(model)
    assert capsys.readouterr().out == ""


def test_an_exception_passes_through_and_ends_the_profile():
    model = zoo.build("lenet5")
    with pytest.raises(ZeroDivisionError), StepProfiler(model, ProfilerConfiguration(enabled=True, profile_step=0)):
        run_forward(model)
        _ = 1 / 0
    with FlopsProfiler(model) as profiler:
        run_forward(model)
        assert profiler.get_total_macs() == 2 * MACS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enabeld: true", ":1: unknown key 'enabeld': did you mean 'enabled'?"),
        ("enabled: true\nprofile_step: soon", ":2: profile_step must be an integer >= 0, not 'soon'"),
        ("flops_profiler: 3", ":1: flops_profiler is the string '3', not a mapping"),
        ("enabled: 1", ":1: enabled must be true or false; got 1"),
        ("top_modules: 0", ":1: top_modules must be an integer >= 1, not 0"),
    ],
)
def test_a_mistake_in_a_configuration_is_reported_with_its_line(text, message, tmp_path):
    path = tmp_path / "configuration.yaml"
    path.write_text(text)
    with pytest.raises(TableError, match=re.escape(f"{path}{message}")):
        read_configuration(path)


def test_an_unwritable_file_raises_before_the_run(tmp_path):
    class Unrunnable(nn.Linear):
        def forward(self, x):
            raise AssertionError("it ran")

    (tmp_path / "file").write_text("here")
    for path in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=f"^{re.escape(str(path))} cannot be written: .*; choose another path$"):
            get_model_profile(Unrunnable(1, 1), (1, 1), output_file=path)
        configuration = ProfilerConfiguration(enabled=True, output_file=str(path))
        with pytest.raises(OSError, match="cannot be written"):
            StepProfiler(Unrunnable(1, 1), configuration)
    assert (tmp_path / "file").read_text() == "here"
    output = tmp_path / "output"
    with pytest.raises(AssertionError, match="it ran"):
        get_model_profile(Unrunnable(1, 1), (1, 1), output_file=output)
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "the model has no inputs: pass input_shape, args or kwargs"),
        ({"input_shape": ()}, ValueError, r"input_shape must be a tuple of sizes such as \(1, 3, 224, 224\); got \(\)"),
        ({"input_shape": 3}, ValueError, "got 3"),
        ({"input_shape": torch.ones(3)}, ValueError, "got a tensor"),
        ({"input_shape": (1,), "mode": "train"}, ValueError, "mode must be one of 'forward', 'generate'; got 'train'"),
        ({"input_shape": (1,), "warm_up": -1}, ValueError, "warm_up must be an integer >= 0, not -1"),
        ({"input_shape": (1,), "top_modules": 0}, ValueError, "top_modules must be an integer >= 1, not 0"),
        ({"input_shape": (1,), "ignore_modules": ["Linear"]}, TypeError, "must be classes .*; got 'Linear'"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message) as caught:
        get_model_profile(nn.Linear(1, 1), **options)
    assert "\n" not in str(caught.value)


def test_an_invalid_model_and_an_invalid_unit():
    for call in (FlopsProfiler, get_model_profile):
        with pytest.raises(TypeError, match=r"the model must be a torch.nn.Module; got function"):
            call(lambda x: x)
    with pytest.raises(ValueError, match="got 'P'"):
        units.number_to_string(1, "P")
