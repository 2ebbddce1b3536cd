"""TorchScript that would read or write files, print, or hold foreign objects is refused, even if it is trusted."""

import io
import sys
import types
import warnings
import zipfile

import pytest
import torch
from torch import nn

import fvflops
from fvflops.analysis.files import archive_checks
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model
from tests.support.hostile.forbidden_actions import forbidding_actions
from tests.support.hostile.programs import write_entries

OPTIONS = SourceOptions(inputs=("2,4",), trust=True)
CODE = "code/__torch__/torch/nn/modules/activation.py"


def saved_script():
    """Return the entries of a script of a ReLU, without their folder."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.ReLU()), buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def with_statement(statement, good=None):
    """Return the entries of a script whose forward begins with a statement."""
    good = good or saved_script()
    text = good[CODE].decode()
    assert "    _0 = " in text
    return {**good, CODE: text.replace("    _0 = ", f"    {statement}\n    _0 = ", 1).encode()}


def hostile_scripts(canary):
    """Return name → the entries of a script that would write the canary, or do other input and output."""
    good, path = saved_script(), f'"{canary}"'
    state = "  def __getstate__(self) -> int:\n    return 0\n  def __setstate__(self, state: int) -> None:\n"
    setstate = f"{state}    torch.save(state, {path})\n"
    return {
        "save": with_statement(f"torch.save(input, {path})"),
        "save, another way to write it": with_statement(f"ops.aten.save(input, {path})"),
        "save over two lines": with_statement(f"torch.\\\n      save(input, {path})"),
        "save with blanks": with_statement(f"torch . save (input, {path})"),
        "save by getattr": with_statement(f'getattr(torch, "save")(input, {path})'),
        "save by getattr, escaped": with_statement(f'getattr(torch, "sa\\166e")(input, {path})'),
        "map a file": with_statement(f"y = torch.from_file({path}, True, 4, dtype=6)"),
        "print": with_statement('print("::set-output name=x::y")'),
        "print, another way": with_statement('ops.aten._print("::set-output name=x::y")'),
        "call another machine": with_statement('y = rpc_async("other", torch.relu, (input,))'),
        "state": {**good, CODE: good[CODE].replace(b"  def forward", setstate.encode() + b"  def forward", 1)},
        "object of a library": with_statement("y: __torch__.torch.classes.hostile.Store = annotate(None)"),
        "script of an old format": {**good, "model.json": b"{}"},
    }


def attempt(path, folder):
    with forbidding_actions(folder) as seen:
        try:
            subject = load_model(str(path), OPTIONS)
            fvflops.FlopCountAnalysis(subject.model, subject.inputs, execution="real").total()
            message = ""
        except Exception as error:
            message = str(error)
    return seen, message


def test_an_unchanged_script_is_counted(tmp_path, monkeypatch):
    # A library that other models import changes nothing.
    monkeypatch.setitem(
        sys.modules, "bitsandbytes", sys.modules.get("bitsandbytes") or types.ModuleType("bitsandbytes")
    )
    write_entries(tmp_path / "x.pt", saved_script())
    assert attempt(tmp_path / "x.pt", tmp_path) == ([], "")
    write_entries(tmp_path / "x.pt", with_statement("y = torch.mul(input, 2)"))
    assert attempt(tmp_path / "x.pt", tmp_path) == ([], "")


@pytest.mark.parametrize("name", list(hostile_scripts("canary")))
def test_a_hostile_script_is_refused_though_it_is_trusted(tmp_path, name, capsys):
    path, canary = tmp_path / "x.pt", tmp_path / "canary"
    write_entries(path, hostile_scripts(canary)[name])
    seen, message = attempt(path, tmp_path)
    assert not seen and not canary.exists() and message.startswith(str(path)) and "\n" not in message
    with forbidding_actions(tmp_path) as seen:
        assert main(["count", str(path), "--input", "2,4", "--trust-file", "--execution", "real"]) == 2
    output = capsys.readouterr()
    assert not seen and "::set-output" not in output.out and output.err.count("\n") == 1


def test_without_the_check_hostile_scripts_write_files(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_checks, "check_script", lambda path: None)
    written = set()
    for name, entries in hostile_scripts(tmp_path / "canary").items():
        write_entries(tmp_path / "x.pt", entries)
        if attempt(tmp_path / "x.pt", tmp_path)[0]:
            written.add(name)
        (tmp_path / "canary").unlink(missing_ok=True)
    assert {"save", "save with blanks", "save over two lines", "save by getattr, escaped"} <= written


def test_archives_with_two_meanings_are_refused(tmp_path):
    good, bad = saved_script(), hostile_scripts(tmp_path / "canary")["save"]
    path = tmp_path / "x.pt"
    for entries, more in (
        (good, [(f"net/{CODE}", bad[CODE])]),
        (bad, [(f"net/{CODE}", good[CODE])]),
        (good, [(f"other/{CODE}", bad[CODE])]),
        (good, [("../x.py", b"")]),
    ):
        write_entries(path, entries, more=more)
        seen, message = attempt(path, tmp_path)
        assert not seen and ("several entries of one name" in message or "is a damaged archive" in message)
    # An archive behind the data of another file: some readers take the one, some the other.
    write_entries(path, good)
    for head in (b"GGUF" + bytes(60), b"\x80\x02}q\x00.", b"{}", bytes(64), b"\x18\x00\x00\x00PTMF" + bytes(56)):
        (tmp_path / "y.pt").write_bytes(head + path.read_bytes())
        seen, message = attempt(tmp_path / "y.pt", tmp_path)
        assert not seen and message
