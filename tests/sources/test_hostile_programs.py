"""Hostile programs run no code, open no connection and write no file, even if the user trusts the file."""

import json
import pickle
import random

import pytest
import torch

import fvflops
from fvflops.analysis.files import program_archive
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model
from tests.support.hostile.forbidden_actions import ForbiddenAction, forbidding_actions
from tests.support.hostile.programs import (
    INPUTS,
    MODEL,
    Opens,
    change_json,
    hostile_programs,
    list_texts,
    put,
    saved_entries,
    write_entries,
)


def load_and_run(path):
    subject = load_model(str(path), SourceOptions(trust=True))
    return fvflops.FlopCountAnalysis(subject.model, subject.inputs, kwargs=subject.kwargs, execution="real").total()


def attempt(path, folder):
    """Return what a program attempted, and whether it was counted."""
    with forbidding_actions(folder) as seen:
        try:
            load_and_run(path)
            counted = True
        except (Exception, ForbiddenAction):
            counted = False
    return seen, counted


def test_the_unchanged_program_is_counted(tmp_path, capsys):
    write_entries(tmp_path / "x.pt2", saved_entries())
    assert main(["count", str(tmp_path / "x.pt2"), "--trust-file"]) == 0
    # 6 rows of 4 x 3 multiply-adds; addition and scaling are ignored by this convention.
    assert load_and_run(tmp_path / "x.pt2") == 6 * 4 * 3


def test_hostile_programs_are_refused_though_they_are_trusted(tmp_path, monkeypatch, capsys):
    (tmp_path / "hostile_module.py").write_text("open('canary', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path, canary = tmp_path / "x.pt2", tmp_path / "canary"
    trace = fvflops.FlopCountAnalysis(torch.nn.Linear(4, 3), torch.ones(2, 4)).trace()
    ways = (
        lambda: main(["count", str(path), "--trust-file"]),
        lambda: main(["diff", "zoo:lenet5", str(path), "--trust-file"]),
        lambda: fvflops.diff(trace, path, trust=True),
        lambda: load_model(str(path), SourceOptions(trust=True)),
    )
    for name, entries in hostile_programs(canary).items():
        write_entries(path, entries)
        for load in ways:
            with forbidding_actions(tmp_path) as seen:
                try:
                    code, message = load(), capsys.readouterr().err
                except ValueError as error:
                    code, message = 2, str(error)
            assert code == 2 and not seen and not canary.exists(), name
            assert str(path) in message and "\n" not in message.strip(), name


def test_without_the_second_wall_hostile_programs_run_code(tmp_path, monkeypatch):
    """The attacks are real: most of them open the canary where torch loads the file unchecked."""
    (tmp_path / "hostile_module.py").write_text("open('canary', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(program_archive, "check_program", lambda path: None)
    succeeded = set()
    for name, entries in hostile_programs(tmp_path / "canary").items():
        write_entries(tmp_path / "x.pt2", entries)
        if attempt(tmp_path / "x.pt2", tmp_path)[0]:
            succeeded.add(name)
        (tmp_path / "canary").unlink(missing_ok=True)
    assert len(succeeded) >= 14, sorted(succeeded)


def changed_programs(canary):
    """Yield programs with one text or entry replaced by code: entries, and what else the archive contains."""
    good, opens = saved_entries(), f"open({str(canary)!r}, 'w')"
    payloads = (opens, f"{opens} or 1", f'"{opens}"', f"x={opens}", "torch.hub.os.system", "torch.ops.load_library")
    for name in (name for name in good if name.endswith(".json")):
        for text in list_texts(json.loads(good[name])):
            for payload in payloads:
                yield change_json(good, name, lambda value, text=text, payload=payload: put(value, text, payload)), ()
    pickled = pickle.dumps(Opens(canary), protocol=0)
    for name in good:
        for data in (pickled, b"\n" + pickled, b"", good[INPUTS], good[MODEL]):
            yield {**good, name: data}, ()
            yield {**good, f"{name}.pt": data}, ()
            yield {**good, f"extra/{name}": data}, ()
            yield good, [(f"net/{name}", data)]
            yield good, [(f"other/{name}", data), (f"../{name}", data), (f"/{name}", data)]
    for name in ("exported_program.json", "state_dict.pt", "constants.pt", "example_inputs.pt"):
        yield good, [(f"serialized_{name}", pickled), ("version", b"8.14")]
        yield {}, [(f"serialized_{name}", pickled), ("version", b"8.14"), ("x/archive_format", b"pt2")]


def check_changed_programs(folder, monkeypatch, programs):
    monkeypatch.chdir(folder)
    counted = 0
    for entries, more in programs:
        write_entries(folder / "x.pt2", entries, more=more)
        seen, is_counted = attempt(folder / "x.pt2", folder)
        assert not seen, (more, entries[MODEL])
        counted += is_counted
    return counted


def test_changed_programs_run_no_code(tmp_path, monkeypatch):
    programs = [*changed_programs(tmp_path / "canary")]
    sample = random.Random(32).sample(programs, 120)
    assert check_changed_programs(tmp_path, monkeypatch, sample) >= 5  # changes of what torch only shows


@pytest.mark.long
def test_all_changed_programs_run_no_code(tmp_path, monkeypatch):
    assert check_changed_programs(tmp_path, monkeypatch, changed_programs(tmp_path / "canary"))
