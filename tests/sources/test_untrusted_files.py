"""Files that can run code are not loaded unless the user trusts them, whatever they are named."""

import io
import shutil
import warnings
import zipfile

import pytest
import torch
from torch import nn

import fvflops
from fvflops.analysis.files.archive_checks import recognise
from fvflops.analysis.trace_file import load_trace
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model
from fvflops.sweep.count_model import count_model
from tests.support.hostile.forbidden_actions import forbidding_actions
from tests.support.hostile.programs import Opens
from tests.support.models.parts import Parts
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()  # onnx2torch imports torchvision
X = torch.randn(2, 4)


class Saves(Parts):
    """Saves its input where it runs."""

    def forward(self, x):
        torch.save(x, self.path)
        return x


def rewrite(source, target, change):
    """Copy a zip archive, with `change(name, data)` instead of the data of each entry."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def write_program(path, canary):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good = io.BytesIO()
        torch.export.save(torch.export.export(nn.Linear(4, 3), (X,)), good)
    guard = f'"guards_code": ["open({str(canary)!r}, \'w\') is None"]'.encode()
    rewrite(good, path, lambda name, data: data.replace(b'"guards_code": []', guard))
    assert guard in zipfile.ZipFile(path).read(f"{archive_name(path)}/models/model.json")


def archive_name(path):
    return zipfile.ZipFile(path).namelist()[0].partition("/")[0]


def write_script(path, canary):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Saves(path=str(canary))), path)


def write_pickle(path, canary):
    torch.save({"model": Opens(canary), "net": nn.Linear(4, 3)}, path)


def write_old_pickle(path, canary):
    torch.save([Opens(canary)], path, _use_new_zipfile_serialization=False)


WRITERS = {"program": write_program, "script": write_script, "pickle": write_pickle, "old pickle": write_old_pickle}
# Names, and whether a file of that name is data.
NAMES = {
    **dict.fromkeys(("x.pt2", "x.pt", "x.bin", "x", "x.json.pt2"), False),
    **dict.fromkeys(("x.json", "x.JSON", "x.json.gz", "x.csv", "x.parquet", "x.onnx"), True),
}


def loaders(path):
    """Return the ways to load a file as a model, on the command line and in Python: each must raise, or return 2."""
    name = str(path)
    trace = fvflops.FlopCountAnalysis(nn.Linear(4, 3), X).trace()
    return {
        "count": lambda: main(["count", name, "--input", "2,4"]),
        "diff": lambda: main(["diff", name, "zoo:lenet5", "--input", "1,1,28,28"]),
        "diff, second": lambda: main(["diff", "zoo:lenet5", name]),
        "memory": lambda: main(["memory", name, "--inference", "--input", "2,4"]),
        "load_model": lambda: load_model(name, SourceOptions(inputs=("2,4",))),
        "load_trace": lambda: load_trace(name),
        "fvflops.diff": lambda: fvflops.diff(trace, name),
        "fvflops.diff, a path": lambda: fvflops.diff(path, path),
        "count_model": lambda: 2 if count_model(name, SourceOptions(inputs=("2,4",))).error else 0,
    }


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", NAMES)
def test_code_is_refused_before_anything_of_it_runs(tmp_path, kind, name, capsys):
    path, canary = tmp_path / name, tmp_path / "canary"
    WRITERS[kind](path, canary)
    assert (recognise(str(path)) in ("program", "script", "pickle")) is not NAMES[name]
    for way, load in loaders(path).items():
        with forbidding_actions(tmp_path) as seen:
            try:
                code = load()
            except ValueError as error:
                message, code = str(error), 2
            else:
                message = capsys.readouterr().err
        assert code == 2 and not seen and not canary.exists(), (way, seen)
        assert "\n" not in message.strip(), way
        if way in ("count", "load_model") and not NAMES[name]:
            assert "if you trust the file, add --trust-file (trust=True in Python)" in message


def test_what_must_not_happen_happens_to_a_trusted_file(tmp_path, capsys):
    """The pickle and the script would write the canary: what the tests above deny is real."""
    write_pickle(tmp_path / "x.pt", tmp_path / "canary")
    assert main(["count", str(tmp_path / "x.pt"), "--input", "2,4", "--trust-file"]) == 0
    assert (tmp_path / "canary").exists()
    with forbidding_actions(tmp_path) as seen, pytest.raises(BaseException, match="open"):
        load_model(str(tmp_path / "x.pt"), SourceOptions(inputs=("2,4",), trust=True))
    assert seen


def test_only_traces_are_compared_on_request(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("open('canary', 'w')\n")
    write_program(tmp_path / "x.pt2", tmp_path / "canary")
    shutil.copy(tmp_path / "x.pt2", tmp_path / "x.json")
    assert main(["count", "zoo:lenet5", "--save-trace", "good.json"]) == 0
    assert main(["check", "good.json", "--budget", "budget.yaml", "--update", "--trace-only"]) == 0
    assert main(["check", "good.json", "--budget", "budget.yaml", "--trace-only"]) == 0
    assert main(["diff", "good.json", "good.json", "--trace-only"]) == 0
    capsys.readouterr()
    for name in ("x.pt2", "net.py:build", "zoo:lenet5", "net:build", "HEAD:net.py:build"):
        for command in (
            ["diff", name, "good.json"],
            ["diff", "good.json", name],
            ["check", name, "--name", "good.json", "--budget", "budget.yaml"],
        ):
            with forbidding_actions(tmp_path) as seen:
                assert main([*command, "--trace-only", "--trust-file"]) == 2
            assert not seen and f"--trace-only: {name} is not a saved Trace" in capsys.readouterr().err
    assert main(["diff", "x.json", "good.json", "--trace-only", "--trust-file"]) == 2
    assert "x.json: not a trace" in capsys.readouterr().err
