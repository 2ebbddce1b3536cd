"""`fvflops plan --device`: command lines and their outputs."""

import csv
import io
import json
import re
from itertools import pairwise

import pytest
import torch

import fvflops
import fvflops.zoo
from fvflops.cli import main
from fvflops.reports.formats import FORMATS
from tests.support.reports.report_formats import check_report, output_of, write_as

STEP = ["plan", "zoo:llama_tiny", "--input", "1,16:int64", "--device", "H100"]
PIPELINE = [*STEP, "--mesh", "pp=2,fsdp=2", "--microbatches", "4", "--precision", "bf16-mixed"]
PRICED = ["--tokens", "1e9", "--price", "2", "--watts", "700"]


def figures_of(*options):
    return json.loads(write_as("json", *STEP, *options))


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format):
    page = ("--format", "html") if format == "html" else ()  # has a chart more
    text = write_as(format, *PIPELINE, *PRICED, *page)
    report = check_report(format, text, "step_estimate")
    if format == "csv":
        assert [row["metric"] for row in report][:3] == ["seconds", "tokens_per_second", "tokens_per_second_per_gpu"]
    if format == "html":
        assert report.count('<svg height="22">') == 2 and "bytes by kind" in report


def test_the_report_has_each_figure_and_what_it_rests_on(capsys):
    text = write_as("text", *PIPELINE, *PRICED)
    for part in (
        "4 × H100 SXM",
        "Fits: ",
        "of 84.9 GB. ",
        "are left on H100 SXM",
        "at efficiency 1",
        "tokens/s per GPU",
        "model TFLOP/s per GPU",
        "pipeline bubble",
        "exposed communication",
        "waiting for the host",
        "Efficiency of H100 SXM: ",
        "Network HGX H100 3200G: assumed for H100 SXM, since none is given: ",
        "Memory of the rank with the highest peak",
        "optimizer state",
        "slowest",
        "Assumptions:",
    ):
        assert part in text.replace("\n", " ").replace("   ", " "), part
    pictures = [line for line in text.split("\n") if line.startswith(("pp 0  F", "pp 1  ."))]
    assert len(pictures) == 2 and {"F", "B", "O", "."} <= set("".join(pictures))
    named = output_of(capsys, *PIPELINE, "--network", "HGX A100 800G")
    assert "Network HGX A100 800G: NVLink" in named and "since none is given" not in named


def test_json_has_exact_figures(capsys):
    record = json.loads(write_as("json", *PIPELINE, *PRICED))
    assert record["gpus"] == 4 and record["tokens"] == 16 * 4 * 2 and record["fits"] is True
    assert record["training"]["steps"] == 1e9 / record["tokens"]
    assert max(record["ranks"], key=lambda rank: rank["peak_memory"]) == record["ranks"][record["peak_memory_rank"]]
    (row, *_) = csv.DictReader(io.StringIO(write_as("csv", *PIPELINE, *PRICED)))
    assert float(row["value"]) == record["seconds"] and float(row["bound"]) == record["bound_seconds"]


def test_a_model_that_does_not_fit(capsys, tmp_path):
    device = tmp_path / "small.yaml"
    device.write_text(
        "devices:\n  Small:\n    matrix: {fp32: 1e12}\n    bandwidth: 1e11\n    memory: 1e6\n    source: a test\n"
    )
    text = output_of(capsys, *STEP[:-1], str(device), "--mesh", "dp=1").replace("\n", " ")
    assert "Does not fit: " in text and "of 1 MB. " in text and "too much for Small." in text
    assert "`fvflops memory zoo:llama_tiny --mesh dp=1`" in text
    memory = output_of(capsys, "memory", *STEP[1:-1], str(device), "--no-savings")
    assert "Does not fit: " in memory and "too much for Small." in " ".join(memory.split())


def test_a_timeline_has_a_track_for_each_rank_and_group(capsys, tmp_path):
    path = tmp_path / "step.json"
    output_of(capsys, *STEP, "--mesh", "pp=2,tp=2", "--microbatches", "2", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {(1, 1): "compute", (1, 2): "collectives tp=2", (2, 1): "compute", (2, 2): "collectives tp=2"}
    slices = [event for event in events if event["ph"] == "X"]
    for process in (1, 2):
        compute = [event for event in slices if (event["pid"], event["tid"]) == (process, 1)]
        assert {event["name"] for event in compute} == {"forward", "backward", "optimizer", "bubble"}
        # Actions and bubbles follow each other without gaps.
        for one, other in pairwise(compute):
            assert one["ts"] + one["dur"] == pytest.approx(other["ts"], abs=0.002)
    assert {event["name"] for event in slices if event["tid"] == 2} == {"collective tp=2"}


def test_networks_and_efficiencies_of_files(capsys, tmp_path):
    network, efficiency = tmp_path / "net.yaml", tmp_path / "mine.yaml"
    link = "{bandwidth: 1e9, latency: 1e-6}"
    network.write_text(
        f"networks:\n  Mine:\n    gpus_per_node: 2\n    inside: {link}\n    between: {link}\n    source: my cables\n"
    )
    efficiency.write_text("efficiencies:\n  H100 SXM: {matmul: 0.5, source: my GPU}\n")
    options = ["--network", f"{network}:Mine", "--efficiency", str(efficiency)]
    text = output_of(capsys, *STEP, "--mesh", "dp=4", *options)
    assert "Network Mine: my cables." in text and "Efficiency of H100 SXM: my GPU." in text
    assert main([*STEP, "--mesh", "dp=4", "--efficiency", "H100"]) == 2
    assert "no software 'H100'" in capsys.readouterr().err


def test_modules_are_chosen(capsys):
    text = output_of(capsys, *STEP, "--mesh", "dp=1", "--top", "2", "--sort", "seconds")
    assert "model " in text and "layers " in text and "self_attn" not in text
    deep = output_of(capsys, *STEP, "--mesh", "dp=1", "--depth", "4")
    assert "q_proj" in deep and "0–1 × 2" in deep


def test_ranks_of_tp_that_are_not_adjacent_are_told(capsys):
    hint = "tp crosses nodes: name it last in the mesh"
    apart = output_of(capsys, *STEP, "--mesh", "tp=2,dp=8")
    assert hint in apart and hint not in output_of(capsys, *STEP, "--mesh", "dp=8,tp=2")
    assert re.search(r"^tp +2 +\d+ ", apart, re.MULTILINE) and re.search(r"^dp +1 +\d+ ", apart, re.MULTILINE)


def test_torch_devices_have_no_time(capsys):
    arguments = ["plan", "zoo:llama_tiny", "--input", "1,16:int64", "--mesh", "dp=2", "--device"]
    assert "Parameters of this rank" in output_of(capsys, *arguments, "cuda")
    assert "tokens/s" not in output_of(capsys, *arguments, "cpu")


@pytest.mark.parametrize("mesh", ["dp=1", "dp=4", "pp=2,fsdp=2"])
def test_the_mfu_of_a_measured_step_is_that_of_mfu(mesh):
    argv = [*STEP, "--mesh", mesh, "--microbatches", "2", "--checkpoint", "full", "--step-time", "0.25"]
    record = json.loads(write_as("json", *argv))
    measured, estimated = record["measured"], record
    assert measured["seconds"] == 0.25 and measured["hfu"] > measured["mfu"] > 0
    for name in ("mfu", "hfu"):
        assert measured[name] * 0.25 == pytest.approx(estimated[name] * estimated["seconds"])
    text = " ".join(write_as("text", *argv).split())
    assert "Measured: 250 ms a step, MFU <0.1%, HFU <0.1%, " in text
    assert "times the time that is estimated below." in text


def test_a_measured_step_of_one_device_agrees_with_python():
    model = fvflops.zoo.build("llama_tiny", device="meta")
    step = fvflops.TrainingStepAnalysis(model, torch.zeros(1, 16, dtype=torch.long), loss=torch.sum, warn=False)
    expected = fvflops.mfu({"bf16": fvflops.model_flops(step)}, 1e-3, device="H100")
    measured = figures_of("--mesh", "dp=1", "--step-time", "1e-3", "--dtype", "bf16")["measured"]["mfu"]
    assert measured == pytest.approx(expected, rel=0.02)


def test_buckets_of_gradients_are_reduced_beside_the_backward_pass():
    caps = ([], ["--bucket-cap-mb", "0.02"], ["--bucket-cap-mb", "0"])
    default, small, after = (figures_of("--mesh", "dp=2", *cap) for cap in caps)
    for data, text in ((default, "25 MiB (the first: 1 MiB)"), (small, "0.02 MiB"), (after, "after")):
        assert any(line.startswith("DDP reduces") and text in line for line in data["assumptions"])
    # The model has less than 1 MiB of gradients.
    assert default["seconds"] == pytest.approx(after["seconds"]) != small["seconds"]


def test_options_of_the_step():
    plain, masters, recomputed, none, rounded = (
        figures_of("--mesh", "dp=1", *options.split())
        for options in ("", "--dtype bf16 --master-weights", "--checkpoint Block", "--optimizer none", "--dtype tf32")
    )
    assert rounded["settings"]["float32_products"] == "tf32"
    assert masters["ranks"][0]["memory_by_kind"]["optimizer state"] > 0
    assert "recompute" in recomputed["slowest_rank"]["kernels_by_phase"]
    assert "optimizer" in plain["slowest_rank"]["kernels_by_phase"]
    assert "optimizer" not in none["slowest_rank"]["kernels_by_phase"]
    assert "the optimizer's step is not included" in none["assumptions"]


@pytest.mark.parametrize("command", ["plan", "memory"])
def test_a_factory_may_return_its_inputs_by_name(capsys, tmp_path, command):
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nfrom fvflops.zoo import build as of_zoo\n\n\n"
        "def build():\n    return of_zoo('llama_tiny'), {'tokens': torch.zeros(2, 16, dtype=torch.long)}\n"
    )
    options = ["--mesh", "fsdp=2", "--format", "json", *(["--no-savings"] if command == "memory" else [])]
    assert re.search(r"2, ?16", output_of(capsys, command, f"{path}:build", *options))


def test_an_optimizer_that_the_host_bounds_is_told_of_fused_kernels():
    step = [*STEP, "--mesh", "fsdp=2"]
    names = []
    for optimizer in ("AdamW", "AdamW(fused=True)"):
        report = write_as("text", *step, "--optimizer", optimizer)
        assert ("The host bounds the optimizer: " in report) == (optimizer == "AdamW")
        names.append(json.loads(write_as("json", *step, "--optimizer", optimizer))["settings"]["optimizer"])
    assert names == ["AdamW", "AdamW(fused=True)"]
