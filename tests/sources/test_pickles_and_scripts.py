"""Recognising files by their contents: TorchScript, pickled modules, weights, and files of other kinds."""

import json
import struct
import sys
import types

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis
from fvflops.analysis.files.archive_checks import recognise
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model
from fvflops.sources.weights.pickled import read_globals

MODEL = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
X = torch.randn(2, 4)


def write_safetensors(path):
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def run(capsys, *arguments):
    code = main([*map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out if code == 0 else output.err


@pytest.mark.parametrize("compile_model", [torch.jit.script, lambda model: torch.jit.trace(model, X)])
@pytest.mark.parametrize("name", ["model.pt", "model.ts", "model"])
def test_torchscript_is_counted_by_its_modules(tmp_path, compile_model, name, capsys):
    path = tmp_path / name
    compile_model(MODEL).save(str(path))
    assert recognise(str(path)) == "script"
    for device in (None, "meta"):
        subject = load_model(str(path), SourceOptions(inputs=("2,4",), device=device, trust=True))
        analysis = FlopCountAnalysis(subject.model, subject.inputs, execution="shapes")
        assert analysis.by_module() == {"": 24, "0": 24, "1": 0}
        assert [info.class_name for info in analysis.module_tree().modules()] == ["Sequential", "Linear", "ReLU"]
    assert run(capsys, "count", path, "--input", "2,4", "--trust-file")[0] == 0
    code, error = run(capsys, "count", path, "--trust-file")
    assert code == 2 and "has no default input shapes: pass --input" in error


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_module_runs_code_only_on_request(tmp_path, zipped, capsys):
    path = tmp_path / "model.pt"
    torch.save(MODEL, path, _use_new_zipfile_serialization=zipped)
    code, error = run(capsys, "count", path, "--input", "2,4")
    assert code == 2
    assert "is a pickle (torch.nn.modules.container.Sequential, " in error
    assert "to load one can run code: if you trust the file, add --trust-file" in error
    subject = load_model(str(path), SourceOptions(inputs=("2,4",), trust=True))
    assert FlopCountAnalysis(subject.model, subject.inputs).total() == 24
    assert run(capsys, "count", path, "--input", "2,4", "--trust-file")[0] == 0


class Harmful:
    """Runs a command where it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


def test_a_refused_pickle_does_not_run(tmp_path, capsys):
    path = tmp_path / "model.pt"
    torch.save({"model": Harmful()}, path)
    code = main(["count", str(path), "--input", "2,4"])
    output = capsys.readouterr()
    assert code == 2 and "unpickled" not in output.out and "is a pickle (builtins.print)" in output.err


def test_a_checkpoint_with_one_module_is_that_module(tmp_path, capsys):
    path = tmp_path / "checkpoint.ckpt"
    torch.save({"model": MODEL, "epoch": 3}, path)
    assert run(capsys, "count", path, "--input", "2,4", "--trust-file")[0] == 0
    torch.save({"model": MODEL, "ema": MODEL}, path)
    code, error = run(capsys, "count", path, "--input", "2,4", "--trust-file")
    assert code == 2 and "contains 2 modules (model, ema), not one torch.nn.Module: write a factory" in error


def test_a_class_that_cannot_be_imported_is_named(tmp_path, capsys, monkeypatch):
    elsewhere = types.ModuleType("elsewhere")
    elsewhere.Net = type("Net", (nn.Module,), {"__module__": "elsewhere"})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "elsewhere", elsewhere)
        torch.save(elsewhere.Net(), tmp_path / "net.pt")
    code, error = run(capsys, "count", tmp_path / "net.pt", "--input", "2,4", "--trust-file")
    assert code == 2 and "a class of the pickle cannot be imported: No module named 'elsewhere'" in error


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_have_no_architecture(tmp_path, zipped, capsys):
    path = tmp_path / "weights.pth"
    torch.save(
        {**MODEL.state_dict(), "step": torch.ones(1, dtype=torch.int64)}, path, _use_new_zipfile_serialization=zipped
    )
    for unpickle in ([], ["--trust-file"], ["--unpickle"]):
        code, error = run(capsys, "count", path, "--input", "2,4", *unpickle)
        assert code == 2 and "has weights (a state_dict) and no architecture: name the model" in error


def test_names_in_a_pickle_are_read_whatever_its_protocol(tmp_path):
    for protocol in (2, 4, 5):
        path = tmp_path / f"{protocol}.pt"
        torch.save([MODEL, MODEL[0]], path, pickle_protocol=protocol)
        names = read_globals(str(path))
        assert {"torch.nn.modules.container.Sequential", "torch.nn.modules.linear.Linear"} <= set(names)


def test_other_files_are_refused_in_one_line(tmp_path, capsys):
    write_safetensors(tmp_path / "model.safetensors")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "cut.pt").write_bytes(b"\x80\x02}q\x00X\x05")
    with torch.serialization._open_zipfile_writer(str(tmp_path / "damaged.pt")) as archive:
        archive.write_record("data.pkl", b"\x80\x02", 2)
        archive.write_record("code/broken.py", b"def", 3)
    for name, message in {
        "model.safetensors": "has weights (safetensors) and no architecture: name the model, such as",
        "model.gguf": "has weights (GGUF) and no architecture",
        "notes.txt": "is a file of no kind that contains a model: pass a program of torch.export (.pt2)",
        "empty.pt": "is a file of no kind that contains a model",
        "cut.pt": "is a damaged pickle",
        "damaged.pt": "torch.jit.load cannot read it",
        "none.pt": "there is no such file",
    }.items():
        code, error = run(capsys, "count", tmp_path / name, "--input", "2,4", "--trust-file")
        assert code == 2 and message in error and error.count("\n") == 1, error
