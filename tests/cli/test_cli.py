"""The command line: commands and their outputs."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fvflops.cli import main
from fvflops.reports import count_json as json_report
from fvflops.reports.formats import FORMATS
from tests.support.checkout import ROOT
from tests.support.reports.report_formats import check_report, run

FACTORY = (ROOT / "tests" / "support" / "models" / "factories.py").read_text()


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "my models.py"
    path.write_text(FACTORY)
    return str(path)


def total_of(capsys, *argv):
    code, out, err = run(capsys, "count", *argv, "--format", "json")
    assert code == 0, err
    return json_report.parse(out).columns["flops"][""]


def test_the_first_command_of_the_readme(capsys):
    code, out, err = run(capsys, "count", "zoo:resnet50")
    assert (code, err) == (0, "")
    assert out.startswith("module ") and " 25.6M " in out and " 4.11G " in out
    assert "Convention: default (1 FLOP per multiply-add).\n" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = run(capsys, "count", "zoo:resnet50", "--format", "fvcore")
    assert code == 0 and out.startswith("| module ") and "25.557M" in out and "4.112G" in out


@pytest.mark.parametrize(
    ("name", "options", "flops"),
    [
        ("build", ["--input", "2,4"], 24),
        ("build", ["--input", "2x4:float32"], 24),
        ("ready", ["--input", "7,4"], 84),
        ("with_inputs", [], 24),
        ("with_inputs", ["--input", "1,4"], 12),
        ("with_names", [], 60),
        ("with_names", ["--input", "x=1,4"], 12),
        ("with_inputs", ["--device", "meta"], 24),
        ("list_of_inputs", [], 24),
        ("routed", [], 96),
        ("routed", ["--execution", "real"], 96),
        ("routed", ["--execution", "shapes", "--assume", "aten::index=6"], 72),
        ("routed", ["--device", "meta", "--assume", "aten::index=0.25"], 24),
        ("one_dict", [], 60),
    ],
)
def test_models_from_a_file(capsys, factory, name, options, flops):
    assert total_of(capsys, f"{factory}:{name}", *options) == flops


def test_a_report_says_what_was_given_for_data_dependent_ops(capsys, factory):
    assert main(["count", f"{factory}:routed", "--device", "meta", "--assume", "aten::index=6"]) == 0
    assert "Given for data-dependent ops: aten::index=6." in capsys.readouterr().out


def test_a_model_from_a_package(capsys, tmp_path, monkeypatch):
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "nets.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert total_of(capsys, "own_package.nets:with_inputs") == 24


@pytest.mark.parametrize(
    ("name", "options", "giga"),
    [
        ("torchvision:resnet18", [], 1.8),
        ("torchvision:r3d_18", ["--input", "1,3,4,56,56", "--device", "meta"], 2.8),
        ("torchvision:lraspp_mobilenet_v3_large", ["--device", "meta"], 2.1),
        ("timm:resnet18", ["--device", "meta"], 1.8),
        ("transformers:BertModel", ["--device", "meta"], 11.2),
        ("transformers:ViTModel", ["--device", "meta"], 17.6),
        ("transformers:T5Model", ["--device", "meta"], 5.9),
        ("zoo:llama3_8b", [], 79_070),
    ],
)
def test_models_of_every_library_on_their_own_inputs(capsys, name, options, giga):
    assert total_of(capsys, name, *options) / 1e9 == pytest.approx(giga, rel=0.05)


def test_a_configuration_changes_a_transformers_model(capsys, tmp_path):
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    small = total_of(capsys, "transformers:BertModel", "--config", json.dumps(settings))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**settings, "num_hidden_layers": 2}))
    assert small < total_of(capsys, "transformers:BertModel", "--config", str(path)) < 2 * small


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "open('data/train.txt')",
            "FileNotFoundError: data/train.txt: No such file or directory (train_it.py:1); importing runs",
        ),
        (
            "import sys\nsys.exit(2)",
            "raised SystemExit: the program asked to exit with 2 (train_it.py:2); importing runs",
        ),
        ("1 / 0", 'put top-level code below `if __name__ == "__main__":`, or the model in a file of its own'),
    ],
)
@pytest.mark.parametrize("name", ["train_it.py", "train_it"])
def test_a_script_that_works_on_import_is_named(capsys, tmp_path, monkeypatch, name, script, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train_it", raising=False)
    (tmp_path / "train_it.py").write_text(script)
    code, _, err = run(capsys, "count", f"{name}:build")
    assert code == 2 and f"importing {name} raised" in err and message in err and err.count("\n") == 1


def test_token_ids_are_suggested_to_a_model_with_an_embedding(capsys, tmp_path):
    (tmp_path / "language.py").write_text("from torch import nn\ndef build(): return nn.Embedding(9, 2)")
    code, _, err = run(capsys, "count", f"{tmp_path}/language.py:build")
    assert (
        code == 2
        and "pass --input SHAPE, such as --input 4,1024:int64 for token ids, or return (module, inputs)" in err
    )


def test_debug_shows_the_traceback(factory):
    with pytest.raises(ZeroDivisionError):
        main(["count", "--debug", f"{factory}:broken"])


def test_strict_makes_an_unknown_op_an_error(capsys, factory):
    code, out, _ = run(capsys, "count", f"{factory}:unknown")
    assert (
        code == 0
        and "Unsupported, so not counted: fvflops_factories::scan (1 call, 8 output elements; in "
        in out.replace("\n", " ")
    )
    code, out, err = run(capsys, "count", f"{factory}:unknown", "--strict")
    assert (code, out) == (2, "") and "no formula for fvflops_factories::scan ×1 (in Linear) (--strict)" in err


def test_strict_makes_an_unknown_mask_an_error_where_masks_count(capsys, tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.mT > 0)\n"
    )
    (tmp_path / "causal.yaml").write_text("extends: default\nconstants: {attention_skips_masked: 1}\n")
    arguments = "count", f"{tmp_path / 'net.py'}:Net", "--input", "1,2,8,4"
    assert run(capsys, *arguments, "--strict")[0] == 0
    arguments = *arguments, "--table", str(tmp_path / "causal.yaml")
    code, out, _ = run(capsys, *arguments, "--format", "json")
    assert code == 0
    assert json_report.parse(out).about["unknown_masks"] == "aten::scaled_dot_product_attention ×1 (in Net)"
    code, out, err = run(capsys, *arguments, "--strict")
    assert (code, out) == (2, "")
    assert "mask unknown, counted as dense: aten::scaled_dot_product_attention ×1 (in Net) (--strict)" in err


@pytest.mark.parametrize(("by", "number"), [("module", "0.417M"), ("operator", "0.358M"), ("both", "0.358M")])
def test_fvcores_format_has_each_view(capsys, by, number):
    assert number in run(capsys, "count", "zoo:lenet5", "--format", "fvcore", "--by", by)[1]


def test_training_mode_is_counted_where_asked(capsys, tmp_path):
    path = tmp_path / "norm.py"
    path.write_text("from torch import nn\ndef build():\n    return nn.BatchNorm1d(4)\n")
    assert total_of(capsys, f"{path}:build", "--input", "3,4") == 24
    assert total_of(capsys, f"{path}:build", "--input", "3,4", "--train") == 60


def test_ops_lists_and_explains(capsys):
    code, out, _ = run(capsys, "ops", "--table", "fvcore")
    assert code == 0 and "aten::linear" in out and "aten::scaled_dot_product_attention" in out
    code, out, _ = run(capsys, "ops", "linear")
    assert code == 0
    assert "aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor" in out
    assert "macs" in out and "example" in out and "default.yaml:" in out
    code, out, _ = run(capsys, "ops", "aten::add.Tensor")
    assert code == 0 and "ignored" in out
    for name, message in (
        ("aten::lineer", "'aten::linear'"),
        ("aten::add.Tenser", "no op or module class is called 'aten::add.Tenser' in table 'default'"),
        ("torch.nn.LSTM", "no op or module class is called 'torch.nn.LSTM' in table 'default'\n"),
        ("LSTM", "did you mean 'aten::lstm'?"),
        ("conv", "in table 'default': ops are aten::conv_tbc, aten::convolution, "),
        ("sdpa", "'sdpa' in table 'default'\n"),
    ):
        code, out, err = run(capsys, "ops", name)
        assert (code, out) == (2, "") and message in err
    code, out, _ = run(capsys, "ops", "conv2d")
    assert code == 0 and "no row, so it is decomposed" in out
    torch.library.custom_op("fvflops_cli_ops::scan", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor")
    code, out, _ = run(capsys, "ops", "fvflops_cli_ops::scan")
    assert code == 0 and "no row, so it is unsupported" in out


def test_ops_tells_the_constants_that_a_row_uses_and_what_a_module_covers(capsys, tmp_path):
    code, out, _ = run(capsys, "ops", "gelu", "--table", "exact")
    assert code == 0 and "\nflops: numel(out)*(" in out and "\nconstants: erf = 8, tanh = 8\n" in out
    path = tmp_path / "mine.yaml"
    path.write_text("modules:\n  torch.nn.LSTM: {flops: 1, covers: false}\n")
    code, out, _ = run(capsys, "ops", "torch.nn.LSTM", "--table", str(path))
    assert code == 0 and "\ncovers: false, so ops inside are counted too\n" in out


def test_ops_of_a_users_table(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a long path would be broken at 80 columns
    path = Path("mine.yaml")
    path.write_text("modules:\n  torch.nn.LSTM: {macs: hidden_size}\n")
    code, out, _ = run(capsys, "ops", "--table", str(path))
    assert code == 0 and "torch.nn.LSTM  macs: hidden_size" in out
    code, out, _ = run(capsys, "ops", "torch.nn.LSTM", "--table", str(path))
    assert code == 0 and f"{path}:2" in out
    path.write_text('ops:\n  aten::gelu: {flops: 8*numel(out), example: "2 3 = 47"}\n')
    code, out, _ = run(capsys, "ops", "--check", "--table", str(path))
    assert code == 1 and f"{path}:2: aten::gelu: the example '2 3 = 47' costs 48" in " ".join(out.split())
    assert run(capsys, "ops", "gelu", "--check", "--table", str(path))[:2] == (1, out)
    path.write_text('ops:\n  aten::gelu: {flops: 8*numel(out), example: "2 3 = 48"}\n')
    code, out, _ = run(capsys, "ops", "--check", "--table", str(path))
    assert (code, out.split()) == (0, f"{path}: 1 of 1 examples hold".split())


@pytest.mark.parametrize("format", list(FORMATS))
def test_every_format_writes_what_a_table_says(capsys, tmp_path, format):
    path, long = tmp_path / "mine.yaml", "package." + "of_a_long_name_" * 12
    gelu = 'aten::gelu: {flops: 8*numel(out), example: "2 3 = 47"}'
    path.write_text(f"ops:\n  {gelu}\nmodules:\n  {long}: {{macs: 1}}\n")
    for arguments, code in ([], 0), ([long], 0), (["--check"], 1):
        options = ["--table", str(path), "--format", format, "--sort", "name", "--top", "1"]
        done, out, _ = run(capsys, "ops", *arguments, *options)
        written = check_report(format, out, "examples" if code else "ops")
        assert done == code
        if format in ("csv", "json"):
            rows = written if format == "csv" else written["tables"]["examples" if code else "rows"]["rows"]
            assert [row["op"] for row in rows] == [long if arguments == [long] else "aten::gelu"]
        elif code:
            assert "0 of 1 examples hold" in " ".join(written.split()) and "costs 48" in written


def test_the_module_runs_and_a_closed_pipe_is_no_error():
    environment = dict(os.environ, PYTHONPATH=os.getcwd())
    command = f"{shlex.quote(sys.executable)} -m fvflops ops --convention fvcore | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.startswith("fvcore") and result.stderr == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["count", "{}.py:build"],
        ["count", "zoo:lenet5", "--table", "{}.yaml"],
        ["diff", "zoo:lenet5", "{}.json"],
        ["check", "zoo:lenet5", "--update", "--budget", "{}.yaml"],
        ["profile", "zoo:lenet5", "--peaks", "{}.yaml:mine"],
    ],
    ids=" ".join,
)
def test_what_a_run_reads_is_not_written_over(argv, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    for ending in (".py", ".yaml", ".json"):
        (tmp_path / f"file{ending}").write_text("mine")
    argv = [text.format(tmp_path / "file") for text in argv]
    ending = next(ending for ending in (".py", ".yaml", ".json") if ending in " ".join(argv))
    path = f"{tmp_path}/folder/../file{ending}"
    assert main([*argv, "--output", path]) == 2
    assert (
        capsys.readouterr().err == f"fvflops: error: --output {path}: this run reads that file: choose another path\n"
    )
    assert (tmp_path / f"file{ending}").read_text() == "mine"


def test_an_error_shows_what_a_terminal_would_obey(capsys):
    assert main(["count", "zoo:\x1b[31mred\u202e\n"]) == 2
    err = capsys.readouterr().err
    assert "\\x1b[31mred\\u202e" in err and err.count("\n") == 1 and err.strip().isprintable()


def test_device_is_where_the_model_would_run_and_build_on_where_it_is_built(capsys):
    def attention(*options):
        argv = [
            *("zoo:gpt2", "--seq", "64", "--train", "--backward", "--dtype", "bf16"),
            *("--build-on", "meta", "--by", "op", "--format", "json"),
        ]
        code, out, err = run(capsys, "count", *argv, *options)
        assert (code, err) == (0, "")
        return {row["target"] for row in json.loads(out)["rows"] if "attention" in row["target"]}

    flash = "aten::_scaled_dot_product_flash_attention"
    assert attention() == attention("--device", "cpu") == set()
    assert attention("--device", "A100") == {f"{flash}.default", f"{flash}_backward.default"}
    assert attention("--device", "cuda") == attention("--device", "H100") != set()


def test_device_meta_of_version_1_is_where_the_model_is_built(capsys):
    older, newer = (run(capsys, "count", "zoo:lenet5", option, "meta") for option in ("--device", "--build-on"))
    assert older == newer and older[0] == 0
