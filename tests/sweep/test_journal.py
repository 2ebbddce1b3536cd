"""The journal: one sweep has it at a time, by whatever name the output is called, and no row is lost."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from fvflops import paths
from fvflops.sources import SourceOptions
from fvflops.sweep import CountSettings, ModelCount
from fvflops.sweep.counted_models import Journal, plan_sweep, run_sweep
from fvflops.sweep.result_files import ResultError, read_rows, write_rows
from tests.support.checkout import ROOT

ROWS = [ModelCount("a", flops=1), ModelCount("b\u2028", error="é"), ModelCount("c", seconds=2.0)]
PROCESSES = 3
FORMATS = ("csv", "jsonl", "sqlite")


def run_known(tasks, on_tick):
    """Yield rows without running a model."""
    return (ModelCount(task.name, flops=1, table="default") for task in tasks)


def sweep(output, *names, executor=run_known):
    return list(run_sweep(plan_sweep(names, str(output), SourceOptions(), CountSettings()), executor))


def test_the_journal_keeps_whole_lines_only(tmp_path):
    output = str(tmp_path / "rows.parquet")
    journal = Journal(output)
    assert journal.read() == {}
    with journal.open() as append:
        append(ROWS[0])
        append(ROWS[1])
    with open(journal.path, "a") as file:
        file.write('{"model": "torn é'[:-1])
    assert list(journal.read().values()) == ROWS[:2]
    with journal.open() as append:
        append(ROWS[2])
    assert list(journal.read().values()) == ROWS
    journal.remove()
    assert journal.read() == {}


def link(folder, name):
    """Return another name of the file `rows.csv` in a folder."""
    if name == "folder":
        os.symlink(folder, folder / "folder")
        return folder / "folder" / "rows.csv"
    if name == "relative":
        return os.path.relpath(folder / "rows.csv")
    os.symlink("rows.csv", folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["other.csv", "folder", "relative"])
def test_an_output_by_another_name_is_the_same(tmp_path, name):
    output = tmp_path / "rows.csv"
    other = link(tmp_path, name)

    def interfere(tasks, on_tick):
        with pytest.raises(ResultError, match=r"rows\.csv\.journal is open in another sweep"):
            sweep(other, "second")
        return run_known(tasks, on_tick)

    sweep(output, "first", executor=interfere)
    sweep(other, "second")
    assert list(read_rows(str(output))) == list(read_rows(str(other))) == ["first", "second"]


def test_a_journal_that_its_holder_removes_is_not_locked(tmp_path, monkeypatch):
    """The holder ends between another sweep's opening of the journal and its lock."""
    fcntl = pytest.importorskip("fcntl")
    output, lock, late = tmp_path / "rows.csv", fcntl.flock, []

    def lock_late(file, flags):
        if not late:
            late.append(file)
            monkeypatch.setattr(fcntl, "flock", lock)
            first.close()
        lock(file, flags)

    first = run_sweep(plan_sweep(["first", "never"], str(output), SourceOptions(), CountSettings()), run_known)
    next(first)
    monkeypatch.setattr(fcntl, "flock", lock_late)
    with Journal(str(output)).open() as append:
        assert late and os.path.exists(Journal(str(output)).path)
        append(ModelCount("second", table="default"))
        with pytest.raises(ResultError, match="is open in another sweep"):
            sweep(output, "third")
    sweep(output, "third")
    assert list(read_rows(str(output))) == ["first", "second", "third"]


def test_a_check_of_an_output_does_not_remove_what_another_sweep_writes_meanwhile(tmp_path, monkeypatch):
    output, calls = str(tmp_path / "rows.csv"), []

    def make_folder(path):
        calls.append(path)
        if len(calls) == 1:
            write_rows(output, ROWS)

    monkeypatch.setattr(paths, "make_folder", make_folder)
    paths.check_writable(output)
    assert calls and len(read_rows(output)) == len(ROWS)


def test_a_file_that_cannot_be_locked_is_named(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(file, flags):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ResultError, match=r"rows.csv.journal cannot be locked \(No locks available\)"):
        sweep(tmp_path / "rows.csv", "a")


def race(folder, rounds):
    """Return how many rows were lost, and how many sweeps were refused, of sweeps by three processes in `rounds`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.processes.sweeps"]
    lost, refused = [], 0
    with ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [
            stack.enter_context(subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)) for _ in range(PROCESSES)
        ]
        os.symlink(folder, folder / "folder")
        for at in range(rounds):
            file = f"{at}.{FORMATS[at % len(FORMATS)]}"
            os.symlink(file, folder / f"link_{file}")
            outputs = [folder / file, folder / "folder" / file, folder / f"link_{file}"]
            if at % 2:
                outputs = [folder / file] * PROCESSES
            names = [[f"{number}-{model}" for model in range(1 + at % 3)] for number in range(PROCESSES)]
            for process, output, models in zip(processes, outputs, names, strict=True):
                process.stdin.write(json.dumps([str(output), *models]) + "\n")
            for process in processes:
                process.stdin.flush()
            answers = [process.stdout.readline().strip() for process in processes]
            assert {*answers} <= {"done", "refused"}, answers
            refused += answers.count("refused")
            done = [name for models, answer in zip(names, answers, strict=True) if answer == "done" for name in models]
            rows = read_rows(str(folder / file))
            lost += [(file, name) for name in done if name not in rows]
            assert not os.path.exists(Journal(str(folder / file)).path)
        for process in processes:
            process.stdin.close()
    return lost, refused


@pytest.mark.long
def test_many_sweeps_of_several_processes_lose_no_row(tmp_path):
    lost, refused = race(tmp_path, rounds=500)
    print(f"{500 * PROCESSES} sweeps, {refused} refused, {len(lost)} rows lost")
    assert not lost
    assert refused < 500 * PROCESSES
