"""The measured training runs: their fields, checked against each other and against figures computed by hand."""

import csv

import pytest

from fvflops.devices.devices import load_devices
from tests.support.tools import load_tool

rows = load_tool("training_runs.rows")
RUNS = {dataset: rows.read_runs(dataset) for dataset in rows.DATASETS}


def read_file(dataset):
    with (rows.FOLDER / rows.DATASETS[dataset][0]).open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_is_read_and_is_of_a_known_device():
    assert {dataset: len(runs) for dataset, runs in RUNS.items()} == {
        "single node": 288,
        "multi node": 37,
        "mpt": 70,
        "published": 16,
    }
    assert {run.device for runs in RUNS.values() for run in runs} <= {device.name for device in load_devices()}


def test_batches_and_meshes_multiply_to_the_stated_ones():
    for dataset in ("single node", "multi node"):
        for row, run in zip(read_file(dataset), RUNS[dataset], strict=True):
            assert run.gpus == int(row["# GPUs"])
            assert run.micro_batch * run.microbatches * run.replicas == int(row["global batch"])
            assert run.config.padded_vocab_size % (128 * run.mesh.get("tp", 1)) == 0
            assert list(run.mesh) == [axis for axis in ("pp", "dp", "tp") if axis in run.mesh]
    for row, run in zip(read_file("mpt"), RUNS["mpt"], strict=True):
        assert run.tokens == int(row["GlobalBatchSize_T"])


def test_mpt_has_the_parameters_and_the_mfu_that_its_authors_state():
    # Peaks by which the MFU is stated, dense bf16.
    peaks = {"h100_80gb": 989.5e12, "a100_80gb": 312e12, "a100_40gb": 312e12}
    for row, run in zip(read_file("mpt"), RUNS["mpt"], strict=True):
        layers, hidden = run.config.layers, run.config.hidden_size
        embeddings = (run.config.vocab_size + run.sequence) * hidden
        parameters = embeddings + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
        assert parameters == int(row["NumParams"]), run.place
        flops = (6 * parameters + 12 * layers * hidden * run.sequence) * run.tokens
        mfu = flops / run.step_seconds / run.gpus / peaks[row["GPU"]]
        assert 100 * mfu == pytest.approx(float(row["MFU"]), rel=0.01)


def test_mpt_models_are_those_of_the_zoo():
    run = min(RUNS["mpt"], key=lambda run: run.config.hidden_size)
    assert sum(parameter.numel() for parameter in run.build_model().parameters()) == int(
        read_file("mpt")[run.line - 2]["NumParams"]
    )


def test_megatron_rates_are_times_by_the_formula_of_its_paper():
    run = next(run for run in RUNS["published"] if run.name == "gpt 1.7b")
    assert run.mesh == {"dp": 32} and (run.local_batch, run.sequence) == (16, 2048)
    # 96 * 512 * 2048 * 24 * 2304^2 * (1 + 2048 / (6 * 2304) + 51,200 / (16 * 24 * 2304)), over 32 GPUs at 137 TFLOP/s
    factor = 1 + 2048 / (6 * 2304) + 51_200 / (16 * 24 * 2304)
    assert run.step_seconds == pytest.approx(96 * 512 * 2048 * 24 * 2304**2 * factor / (32 * 137e12))
    large = next(run for run in RUNS["published"] if run.name == "gpt 529.6b")
    assert (large.mesh, large.microbatches, large.virtual_stages) == ({"pp": 35, "dp": 9, "tp": 8}, 280, None)


@pytest.mark.parametrize(("name", "parameters"), [("llama3 7b", 8.03e9), ("llama3 13b", 14.84e9)])
def test_llamas_of_kempner_have_the_stated_parameters(name, parameters):
    run = next(run for run in RUNS["published"] if run.name == name)
    assert sum(parameter.numel() for parameter in run.build_model().parameters()) == pytest.approx(parameters, rel=1e-3)
    assert run.step_seconds is None and run.local_batch is None


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("# GPUs", "3", "pp 1 x dp 1 x tp 2 must be 3 GPUs"),
        ("micro batch", "3", "micro batch 3 must divide the 4 sequences"),
        ("# layers", "13", "13 layers must be divisible by 2 stages"),
        ("iteration time (ms)", "0", "step seconds must be positive"),
    ],
)
def test_a_row_that_does_not_divide_is_refused(tmp_path, column, value, message):
    row = dict(
        zip(
            read_file("single node")[0], ["2", "4", "2", "1024", "16", "12", "1024", "2", "1", "1", "99.5"], strict=True
        )
    )
    if column == "# layers":
        row |= {"tensor parallelism": "1", "pipeline parallelism": "2"}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row | {column: value})
    with pytest.raises(ValueError, match=f"rows.csv:2: .*{message}"):
        rows.read_runs("single node", path)
