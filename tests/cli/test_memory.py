"""`fvflops memory`: command lines and their outputs."""

import csv
import io
import json
import sys

import pytest
import torch

from fvflops import TrainingStepAnalysis, memory_savings, predict_memory
from fvflops.analysis.training_step_analysis import sum_results
from fvflops.cli import main
from fvflops.cli.planning.step_options import DefaultLoss, find_vocabulary
from fvflops.reports.formats import FORMATS
from fvflops.zoo import build
from tests.support.reports.report_formats import check_report
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class WithLoss(Net):
    def forward(self, x):
        return {"logits": super().forward(x), "loss": super().forward(x).square().mean()}

def build():
    return Net(), torch.ones(512, 8)

def with_loss():
    return WithLoss(), torch.ones(512, 8)

def squares(result):
    return result.square().mean()

class Ranks(Net):
    def forward(self, x):
        return super().forward(x).argmax(-1)

def without_gradient():
    return Ranks(), torch.ones(2, 8)
"""
TINY = ("zoo:llama_tiny", "--input", "2,16:int64")
QUICK = (*TINY, "--no-savings")


@pytest.fixture
def factory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(FACTORY)


def run(capsys, *argv):
    code = main(["memory", *argv])
    return code, *capsys.readouterr()


def read(capsys, *argv):
    """Return name → rows of the tables of the JSON report."""
    code, out, err = run(capsys, *argv, "--format", "json")
    assert (code, err) == (0, "")
    return {name: table["rows"] for name, table in json.loads(out)["tables"].items()}


def peak_of(capsys, *argv):
    return read(capsys, *argv, *(() if "--no-savings" in argv else ("--no-savings",)))["peak"][0]["bytes"]


def tiny_step(**options):
    model, tokens = build("llama_tiny", device="meta").train(), torch.ones(2, 16, dtype=torch.int64)
    return TrainingStepAnalysis(model, tokens, **{"loss": sum_results, "table": "default", "warn": False, **options})


def test_the_report_says_what_python_says(capsys):
    tables = read(capsys, *TINY)
    step = tiny_step(optimizer=torch.optim.AdamW, loss=DefaultLoss(vocabulary=256))
    timeline, savings = predict_memory(step), memory_savings(step)
    moment = timeline.at_peak()
    (peak,) = tables["peak"]
    assert (peak["bytes"], peak["before_the_run"]) == (timeline.peak, timeline.baseline)
    assert (peak["op"], peak["module"], peak["phase"]) == moment[1:4]
    assert {row["kind"]: row["bytes"] for row in tables["kinds"] if row["bytes"]} == +moment.by_kind
    assert sum(row["bytes"] for row in tables["kinds"]) == timeline.peak
    assert {row["module"]: row["bytes"] for row in tables["modules"]} == +moment.by_module
    assert {row["phase"]: row["bytes"] for row in tables["phases"]} == timeline.by_phase()
    assert [(row["saved"], row["flops"]) for row in tables["savings"]] == [
        (saving.saved, saving.flops) for saving in savings.changes
    ]


def test_text_is_80_columns_wide_and_collapses_layers(capsys):
    code, text, err = run(capsys, *TINY, "--checkpoint", "Block")
    assert (code, err) == (0, "") and max(map(len, text.splitlines())) <= 80
    assert text.startswith("zoo:llama_tiny on int64[2, 16]: peak memory ")
    words = " ".join(text.split())
    assert "optimizer: AdamW; " in words and "checkpointing: Block; " in words
    assert "recompute" in text and "0–1 × 2" in text and "p parameter, " in text
    assert "What lowers the peak" in text and "dtype bfloat16" in text and "checkpoint Block" not in text
    _, deep, _ = run(capsys, *QUICK, "--depth", "4")
    assert "q_proj" in deep and "below depth" not in deep and "q_proj" not in text


@pytest.mark.parametrize("format", list(FORMATS))
def test_every_format(capsys, tmp_path, format):
    path = str(tmp_path / "report")
    code, out, _ = run(capsys, *QUICK, "--format", format, "--output", path, "--top", "2", "--sort", "bytes")
    assert (code, out) == (0, "")
    with open(path, encoding="utf-8") as file:
        written = check_report(format, file.read(), "memory")
    if format == "csv":
        assert [row["module"] for row in written] == ["", "layers"]
    if format == "html":
        assert written.count("<svg ") == 2 and written.count("<script") == 1


def test_the_curve_as_a_picture(capsys):
    code, out, _ = run(capsys, *QUICK, "--format", "svg")
    assert code == 0 and out.startswith("<svg ") and "zoo:llama_tiny on int64[2, 16]: peak memory" in out
    assert all(f">{name}</text>" in out for name in ("forward", "backward", "optimizer", "optimizer state"))


def test_options_change_the_step_as_they_say(capsys, factory):
    net = ("nets.py:build", "--no-savings")
    step = peak_of(capsys, *net)
    assert peak_of(capsys, *net, "--checkpoint", "Block") < step
    squares = (*net, "--loss", "nets.py:squares")  # the sum of the outputs casts them to float32
    assert peak_of(capsys, *squares, "--dtype", "bf16") == pytest.approx(peak_of(capsys, *squares) / 2, abs=100)
    assert peak_of(capsys, *net, "--optimizer", "none") < peak_of(capsys, *net, "--optimizer", "sgd") + 1
    assert peak_of(capsys, *net, "--optimizer", "SGD") < step
    assert peak_of(capsys, *net, "--optimizer", "adafactor") < step  # a change that the report names
    assert peak_of(capsys, *net, "--first-step") < step
    assert peak_of(capsys, *net, "--microbatches", "2") > step
    assert peak_of(capsys, *net, "--inference") < step / 2
    assert peak_of(capsys, *net, "--device", "cuda") % 512 == 0
    # The sum of the outputs keeps nothing for backward, their squares keep the outputs.
    assert peak_of(capsys, *squares) > step
    assert peak_of(capsys, "nets.py:with_loss") > step


def test_the_loss_of_the_model_is_used(capsys, factory):
    phases = {row["phase"] for row in read(capsys, "nets.py:with_loss", "--no-savings")["phases"]}
    assert phases == {"forward", "backward", "optimizer"}


def test_a_rank_of_a_mesh(capsys):
    alone, rank = (read(capsys, *QUICK, *mesh)["kinds"] for mesh in ((), ("--mesh", "tp=2")))
    full, half = (next(row["bytes"] for row in rows if row["kind"] == "parameter") for rows in (alone, rank))
    assert full / 2 < half < full * 0.6
    # fsdp and pp replace the classes and the names of modules.
    for mesh, checkpoint in (
        ("fsdp=2", ()),
        ("fsdp=2", ("--checkpoint", "Block")),
        ("pp=2", ("--checkpoint", "Block")),
    ):
        phases = {row["phase"] for row in read(capsys, *QUICK, "--mesh", mesh, *checkpoint)["phases"]}
        assert ("recompute" in phases) == bool(checkpoint)
    _, text, _ = run(capsys, *QUICK, "--mesh", "dp=2", "--microbatches", "2")
    words = " ".join(text.split())
    assert "mesh: dp=2; " in words and "Estimated: DDP buckets, as large as the gradients." in words


def test_whether_it_fits_the_memory_of_a_gpu(capsys):
    for size, said in (("23.5 GiB", "Fits: "), ("10KB", "Does not fit: ")):
        code, text, _ = run(capsys, *QUICK, "--device", size)
        assert code == 0 and said in text
    assert "of 10 KB. " in text and "too much for the device" in " ".join(text.split())
    fp32 = (*QUICK, "--precision", "fp32")
    assert peak_of(capsys, *fp32, "--device", "24GB") == peak_of(capsys, *QUICK, "--device", "cuda")
    code, text, _ = run(capsys, *QUICK, "--inference", "--optimizer", "none", "--device", "24GB")
    assert code == 0 and "of 24 GB. " in text and "are left on the device" in " ".join(text.split())


def test_a_result_without_a_gradient(capsys, factory):
    code, out, err = run(capsys, "nets.py:without_gradient")
    assert (code, out) == (2, "") and "or pass memory's --inference" in err
    assert run(capsys, "nets.py:without_gradient", "--inference")[0] == 0


def test_csv_has_every_module(capsys):
    _, out, _ = run(capsys, *QUICK, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    names = [row["module"] for row in rows]
    assert names[0] == "" and {"layers.0", "layers.1", "layers.0.self_attn.q_proj"} <= set(names)
    kinds = [key for key in rows[0] if key not in ("module", "bytes", "share")]
    assert all(int(row["bytes"]) == sum(int(row[kind]) for kind in kinds) for row in rows)


def test_policies_and_master_weights_are_those_of_plan(capsys):
    def predict(*options):
        command = ["memory", "zoo:llama_tiny", "--seq", "64", "--no-savings", "--device", "cuda", "--format", "json"]
        assert main([*command, *options]) == 0
        return json.loads(capsys.readouterr().out)["tables"]["kinds"]["rows"]

    def bytes_of(rows, kind, column="bytes"):
        return sum(row[column] for row in rows if row["kind"] == kind)

    plain, full = predict(), predict("--checkpoint", "full")
    assert bytes_of(full, "activation", "highest") < bytes_of(plain, "activation", "highest")
    assert full == predict("--checkpoint", "Block")
    assert predict("--mesh", "dp=1", "--checkpoint", "full") == predict("--mesh", "dp=1", "--checkpoint", "Block")
    half = predict("--dtype", "bf16")
    masters = predict("--dtype", "bf16", "--master-weights")
    assert bytes_of(masters, "optimizer state") > 2 * bytes_of(half, "optimizer state")


def test_a_language_model_without_a_loss_has_cross_entropy_of_its_logits_in_float32(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "losses.py").write_text(
        "import torch\nfrom torch.nn.functional import cross_entropy\n"
        "def entropy(logits):\n"
        "    labels = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)\n"
        "    return cross_entropy(logits.float().flatten(0, 1), labels.flatten())\n"
        "def total(logits):\n    return logits.sum()\n"
    )

    def peak(*options):
        return read(capsys, "zoo:gpt2", "--arg", "layers=1", "--batch", "4", "--optimizer", "none", *options)["peak"][
            0
        ]["bytes"]

    assert peak() == peak("--loss", "losses.py:entropy") > peak("--loss", "losses.py:total")
    assert find_vocabulary(build("vit_b_16", device="meta")) is None


def test_a_decoder_is_recomputed_without_the_cache_that_it_keeps_by_default(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    define_torchvision_schemas()
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    config = transformers.T5Config(**sizes, architectures=["T5ForConditionalGeneration"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    peaks = []
    for options in (["--checkpoint", "full"], []):
        assert main(["memory", f"hf:{tmp_path}", *options, "--no-savings", "--format", "json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["verdict"]["needed"])
    assert peaks[0] < peaks[1]


LOSSES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.layer, self.result = nn.Linear(4, 4), result
    def forward(self, x):
        y = self.layer(x)
        loss = y.square().mean()
        results = {"tuple": (y, loss), "swapped": (loss, y), "dict": {"loss": loss, "y": y}, "two": (y, loss, loss * 2)}
        return results[self.result]

def build(result): return Net(result), torch.ones(2, 4)
def of_two(result, labels): return result
"""


def test_the_loss_in_a_tuple_is_the_models_own(capsys, tmp_path):
    """As nanoGPT returns it; the report names what was used."""
    (tmp_path / "net.py").write_text(LOSSES)
    reports = {}
    for result in ("tuple", "swapped", "dict", "two"):
        code, text, err = run(capsys, f"{tmp_path}/net.py:build", "--arg", f"result={result}", "--no-savings")
        assert (code, err) == (0, "")
        reports[result] = " ".join(text.split())
    assert all("loss: the model's own;" in reports[result] for result in ("tuple", "swapped", "dict"))
    assert "loss: the sum of the model's outputs;" in reports["two"]
    options = ["--arg", "result=tuple", "--loss", f"{tmp_path}/net.py:of_two"]
    code, _, err = run(capsys, f"{tmp_path}/net.py:build", *options)
    assert code == 2 and "needs labels too: write a function of the result alone" in err


def test_logits_in_a_tuple_have_the_default_loss(capsys, tmp_path):
    """As nanoGPT returns them without labels: (logits, None)."""
    (tmp_path / "gpt.py").write_text(
        "import torch\n"
        "class GPT(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.wte, self.lm_head = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)\n"
        "    def forward(self, tokens): return self.lm_head(self.wte(tokens)), None\n"
        "def build(): return GPT(), torch.zeros(2, 4, dtype=torch.long)\n"
    )
    code, text, err = run(capsys, f"{tmp_path}/gpt.py:build", "--no-savings")
    assert (code, err) == (0, "")
    assert "loss: cross entropy of the model's logits in float32;" in " ".join(text.split())


def test_a_chunked_loss_is_of_a_model_without_labels(capsys, tmp_path):
    (tmp_path / "gpt.py").write_text(
        "import torch\n"
        "class GPT(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.wte, self.lm_head = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32, bias=False)\n"
        "    def forward(self, tokens, labels):\n"
        "        logits = self.lm_head(self.wte(tokens))\n"
        "        return logits, torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))\n"
        "def build():\n"
        "    return GPT(), (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))\n"
    )
    code, _, err = run(capsys, f"{tmp_path}/gpt.py:build", "--loss", "chunked")
    assert code == 2 and "the loss in place of logits: build it without labels" in err
