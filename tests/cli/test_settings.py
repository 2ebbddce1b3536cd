"""`fvflops plan` and `fvflops memory` say first whether it fits, then what they assume: in text as in JSON."""

import html
import json
import re
import shlex

import pytest

from fvflops.devices.devices import load_devices
from fvflops.plan.memory.step_settings import describe_settings, name_of, show
from tests.support.reports.report_formats import write_as

TINY = ("zoo:llama_tiny", "--input", "1,16:int64")
FEW = ("--choices", "tp=1,2", "--choices", "pp=1", "--choices", "micro-batch=1", "--choices", "checkpoint=none")
COMMANDS = {
    "memory": ("memory", *TINY, "--no-savings"),
    "memory of a device": ("memory", *TINY, "--no-savings", "--device", "H100", "--checkpoint", "full"),
    "memory of a size": ("memory", *TINY, "--no-savings", "--device", "24GB", "--microbatches", "2"),
    "memory of a rank": ("memory", *TINY, "--no-savings", "--device", "H100", "--mesh", "fsdp=2"),
    "memory of a forward pass": ("memory", *TINY, "--inference", "--device", "V100 16GB"),
    "plan of a rank": ("plan", *TINY, "--mesh", "tp=2", "--sequence-parallel"),
    "plan": ("plan", *TINY, "--mesh", "fsdp=2", "--device", "H100", "--checkpoint", "full", "--fused", "RMSNorm"),
    "plan of a pipeline": (
        *("plan", *TINY, "--mesh", "pp=2,dp=2", "--device", "H100"),
        *("--dtype=bf16", "--master-weights"),
    ),
    "plan of a sharded optimizer": (
        *("plan", *TINY, "--mesh", "dp=2", "--device", "H100", "--optimizer-sharding", "dp"),
        *("--dtype=bf16", "--master-weights", "--gradient-dtype", "fp32"),
    ),
    "search": (
        *("plan", *TINY, "--search", "--gpus", "2", "--global-batch", "2"),
        *("--device", "H100", "--jobs", "1", *FEW),
    ),
}


def write(name, format="json"):
    """Return a command's report in a format; data has more than text in the reports of `memory` alone."""
    data = format == "json" and name.startswith("memory")
    return write_as(format, *COMMANDS[name], *(("--format", "json") if data else ()))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_format_begins_with_the_verdict_and_all_settings(name):
    data = json.loads(write(name))
    lead = data["verdict"]["text"], describe_settings(data["settings"])
    assert lead[0].startswith(("Fits: ", "Does not fit: ", "Needs ")) and None not in data["settings"].values()
    _, *paragraphs = write(name, "text").split("\n\n")
    assert [" ".join(part.split()) for part in paragraphs[:2]] == list(lead)
    markdown = write(name, "markdown").split("\n\n")
    assert [re.sub(r"\\(.)", r"\1", part) for part in markdown[1:3]] == list(lead)
    page = html.unescape(re.sub(r"<[^>]*>", "\n", write(name, "html")))
    assert page.index(lead[0]) < page.index(lead[1]) < page.index("Assumes: ") + len(lead[1])
    fields = re.sub(r"^Assumes: |\.$", "", lead[1]).split("; ")
    assert fields == [f"{name_of(key)}: {show(value)}" for key, value in data["settings"].items()]
    needed = {"weights", "compute"} | (set() if name.endswith(("search", "pass")) else {"batch", "sequence"})
    needed |= set() if name.endswith("pass") else {"optimizer", "loss"}
    needed |= set() if name.endswith(("search", "pass")) else {"checkpointing", "microbatches"}
    assert needed <= data["settings"].keys()


def data_of(*argv):
    return json.loads(write_as("json", *argv, "--format", "json"))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "search"])
def test_the_command_of_a_report_repeats_it(name):
    first = json.loads(write(name))
    command = shlex.split(first["command"])
    assert command[0] == "fvflops"
    again = data_of(*command[1:])
    assert {**again, "command": ""} == {**first, "command": ""}
    assert shlex.split(again["command"]) == command


@pytest.mark.parametrize("device", [pytest.param((), marks=pytest.mark.long), ("--device", "H100")])
@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2,tp=2", "pp=2"])
def test_a_plan_assumes_by_default_what_memory_does(mesh, device):
    shared = (*TINY, "--mesh", mesh, "--microbatches", "2", *device)
    memory = data_of("memory", "--no-savings", *shared)
    plan = data_of("plan", *shared)
    assert memory["settings"].pop("step") == "any but the first"
    assert plan["settings"]["loss"] in memory["settings"].pop("loss")  # a first stage of a pipeline computes none
    assert memory["settings"] == {key: plan["settings"].get(key) for key in memory["settings"]}
    assert plan["verdict"]["needed"] == memory["verdict"]["needed"]
    assert plan["settings"]["optimizer"] == "AdamW"


def test_each_layout_of_a_search_has_its_settings():
    data = json.loads(write("search"))
    for layout in data["layouts"]:
        chosen = [word for word in shlex.split(layout["options"]) if word.startswith(("--no-", "--sequence", "--mesh"))]
        chosen += ["--optimizer-sharding", "dp"] * (layout["optimizer_sharding"] != "none")
        chosen += ["--microbatches", str(layout["microbatches"])]
        chosen.insert(1, ",".join(f"{axis}={size}" for axis, size in layout["mesh"].items()))
        planned = data_of("plan", *TINY, "--device", "H100", *chosen)["settings"]
        assert planned["loss"] in layout["settings"].pop("loss")
        assert layout["settings"] == {key: planned[key] for key in layout["settings"]}


def test_defaults_are_mixed_precision_where_the_accelerator_has_it():
    def settings(*options):
        return data_of("memory", *TINY, "--no-savings", *options)["settings"]

    mixed = settings("--device", "H100")
    assert (mixed["weights"], mixed["compute"], mixed["optimizer_state"]) == ("float32", "bfloat16", "float32")
    assert (mixed["master_weights"], mixed["optimizer"]) == ("the float32 weights", "AdamW")
    plain = settings("--device", "V100 32GB"), settings(), settings("--device", "H100", "--precision", "fp32")
    assert {item["compute"] for item in plain} == {"float32"} and "master_weights" not in plain[0]
    half = settings("--device", "H100", "--dtype", "bf16")
    assert (half["weights"], half["master_weights"]) == ("bfloat16", "none")
    masters = settings("--device", "H100", "--dtype", "bf16", "--master-weights", "--optimizer", "sgd")
    assert (masters["master_weights"], masters["optimizer"]) == ("float32 copies", "SGD")
    assert settings("--device", "H100", "--precision", "bf16")["weights"] == "bfloat16"


def test_memory_of_one_device_is_that_of_a_rank_alone():
    """Autocast around the step of a device, and of a rank of a mesh of one."""
    for options in (("--device", "H100"), ("--device", "H100", "--checkpoint", "full")):
        alone, rank = (data_of("memory", *TINY, "--no-savings", *options, *mesh) for mesh in ((), ("--mesh", "dp=1")))
        assert alone["verdict"]["needed"] == rank["verdict"]["needed"]
        assert alone["tables"]["kinds"] == rank["tables"]["kinds"]
        keys = alone["settings"] | rank["settings"]
        differ = {key for key in keys if alone["settings"].get(key) != rank["settings"].get(key)}
        assert differ <= {"mesh", "mode"}, differ


def test_the_host_bounds_a_forward_pass():
    text = " ".join(write("plan", "text").split())
    data = json.loads(write("plan"))["host_bound"]
    share = data["share_waiting"]["forward"]
    assert data["forward_is_bound"] and 0.5 < share < 1
    assert f"The host bounds the forward pass: {share:.1%} of it waits for the host. Launch overhead: 50 µs an" in text
    assert data["source"].startswith("PyTorch 2024: fitted to 10 runs") and data["source"] in text


def test_memory_of_devices_is_what_torch_reports():
    devices = {device.name: device for device in load_devices()}
    assert devices["H100 SXM"].memory == pytest.approx(84.9e9, rel=0.001)
    assert devices["RTX 4090"].memory == pytest.approx(23.6 * 2**30, rel=0.002)
    for device in devices.values():
        if device.memory_source:  # below the sum of the chips, whose size is named in binary units
            gigabytes = round(device.memory / 1e9)
            assert 0.85 < device.memory / 2**30 / gigabytes < 1.0, device.name
    assert devices["V100 SXM2 32GB"].memory > 1.9 * devices["V100 SXM2 16GB"].memory
