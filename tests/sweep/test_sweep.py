"""Sweeps that are stopped go on and give what one process gives, also on Ray; worker processes give a row a model."""

import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fvflops import count_many
from fvflops.sources import SourceOptions
from fvflops.sweep import CountSettings, ModelCount
from fvflops.sweep.count_model import Task, run_here
from fvflops.sweep.counted_models import Journal, plan_sweep, run_sweep
from fvflops.sweep.local_pool import NO_LIMITS, WorkerLimits, run_in_workers
from fvflops.sweep.ray_pool import NodeSettings, RayError, _run_on_node, run_on_cluster
from fvflops.sweep.result_files import ResultError, encode_row, read_rows, write_rows
from tests.support.checkout import ROOT
from tests.support.models.sweep_candidates import CANDIDATES

NAMES = [*(f"zoo:{name}" for name in ("lenet5", "resnet50", "mixtral_tiny", "llama_tiny")), "zoo:none"]
OPTIONS, SETTINGS = SourceOptions(), CountSettings(peak_memory=False)
SLOW = 7
SLOW_NAMES = [
    "zoo:lenet5",
    *(f"tests.support.models.sweep_candidates:slow_{width}" for width in range(1, SLOW + 1)),
    "zoo:none",
    "zoo:llama_tiny",
]


def without_seconds(rows):
    return [replace(row, seconds=0.0) for row in rows.values()]


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """Return the rows of a sweep in this process, from its Parquet."""
    output = str(tmp_path_factory.mktemp("sweep") / "rows.parquet")
    list(run_sweep(plan_sweep(NAMES, output, OPTIONS, SETTINGS), run_here))
    return without_seconds(read_rows(output))


def test_a_killed_sweep_goes_on_and_gives_what_one_process_gives(tmp_path, in_one_process):
    output = str(tmp_path / "rows.parquet")
    command = [sys.executable, "-m", "fvflops", "sweep", *NAMES, "--output", output, "--no-peak-memory", "--workers"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "1"], env=environment, stdout=subprocess.DEVNULL) as sweep:
        deadline = time.monotonic() + 100
        while not Journal(output).read():
            assert sweep.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        sweep.send_signal(signal.SIGKILL)
    early = Journal(output).read()
    assert early and not os.path.exists(output)
    result = subprocess.run([*command, "2"], env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 1, result.stderr  # for zoo:none
    assert f"5 models: 4 counted, 1 failed (1 error), {len(early)} of them earlier" in result.stdout
    assert "zoo:none: error: no model 'none' in the zoo" in result.stderr
    assert without_seconds(read_rows(output)) == in_one_process
    assert not os.path.exists(Journal(output).path)


def test_what_is_in_the_output_is_not_done_again(tmp_path):
    output = str(tmp_path / "rows.jsonl")
    table = {"table": "default"}
    write_rows(output, [ModelCount("a", seconds=1, **table), ModelCount("b", failure="timeout", seconds=9, **table)])
    with Journal(output).open() as append:
        append(ModelCount("c", seconds=3, **table))

    def planned(**arguments):
        names = ["a", "b", "c", "d"]
        return [task.name for task in plan_sweep(names, output, OPTIONS, SETTINGS, **arguments).tasks]

    assert planned() == ["d"]
    assert planned(retry_failed=True) == ["d", "b"]
    assert planned(again=True) == ["d", "b", "c", "a"]  # longest first; of d nothing is known
    assert read_rows(output).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (OPTIONS, CountSettings("exact"), "has zoo:lenet5 counted with the table default, not exact"),
        (SourceOptions(inputs=("2,1,28,28",)), SETTINGS, "counted with the options of the defaults, not"),
    ],
)
def test_rows_of_another_table_or_other_options_are_not_mixed(options, settings, message, tmp_path):
    output = str(tmp_path / "rows.csv")
    list(run_sweep(plan_sweep(["zoo:lenet5"], output, OPTIONS, SETTINGS), run_here))
    with pytest.raises(ResultError, match=message):
        plan_sweep(["zoo:lenet5"], output, options, settings)
    assert plan_sweep(["zoo:lenet5"], output, options, settings, again=True).tasks
    assert plan_sweep(["zoo:gpt2"], output, options, settings).tasks


def test_an_interrupted_sweep_writes_its_rows_and_keeps_others(tmp_path):
    output = str(tmp_path / "rows.csv")
    write_rows(output, [ModelCount("kept")])

    def interrupt(tasks, on_tick):
        yield ModelCount(tasks[0].name, flops=1)
        raise KeyboardInterrupt

    plan = plan_sweep(["zoo:lenet5", "zoo:gpt2"], output, OPTIONS, SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        list(run_sweep(plan, interrupt))
    assert [row.flops for row in read_rows(output).values()] == [None, 1]
    assert not os.path.exists(Journal(output).path)


def test_an_output_that_cannot_be_written_leaves_the_journal(tmp_path):
    output = str(tmp_path / "rows.parquet")

    with pytest.raises(ResultError, match=r"choose --output results\.jsonl"):
        list(run_sweep(plan_sweep(["x"], output, OPTIONS, SETTINGS), lambda *_: iter([ModelCount("x", flops=1 << 70)])))
    assert encode_row(Journal(output).read()["x"]) == encode_row(ModelCount("x", flops=1 << 70))


def test_rows_of_a_sweep_that_ended_after_the_plan_are_kept(tmp_path):
    output = str(tmp_path / "rows.csv")
    plan = plan_sweep(["zoo:lenet5"], output, OPTIONS, SETTINGS)
    list(run_sweep(plan_sweep(["zoo:llama_tiny"], output, OPTIONS, SETTINGS), run_here))
    list(run_sweep(plan, run_here))
    assert list(read_rows(output)) == ["zoo:lenet5", "zoo:llama_tiny"]


@pytest.mark.long
def test_a_killed_node_loses_no_row_and_the_parquet_is_that_of_one_process(tmp_path, monkeypatch):
    events = tmp_path / "events"
    monkeypatch.setenv("EVENTS", str(events))
    pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")
    output, expected = str(tmp_path / "rows.parquet"), str(tmp_path / "expected.parquet")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "processes" / "ray_cluster.py"), output, *SLOW_NAMES],
        env={**os.environ, "PYTHONPATH": str(ROOT), "EVENTS": str(events)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    printed = [line for line in result.stdout.splitlines() if line in SLOW_NAMES]
    assert sorted(printed) == sorted(SLOW_NAMES)
    begun = [line.split()[2] for line in events.read_text().splitlines() if "begin" in line]
    assert "killed" in result.stdout.splitlines()
    assert len(begun) == len(set(begun)) + 1 == SLOW + 1  # the model of the killed node was begun again
    settings = CountSettings(peak_memory=False, memory=2 << 30)
    list(run_sweep(plan_sweep(SLOW_NAMES, expected, SourceOptions(), settings), run_here))
    rows, wanted = read_rows(output), read_rows(expected)
    assert [replace(row, seconds=0) for row in rows.values()] == [replace(row, seconds=0) for row in wanted.values()]
    assert [row.model for row in rows.values() if row.failure] == ["zoo:none"]


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"ray is not installed: pip install 'fvflops\[ray\]'"):
        next(run_on_cluster([Task("zoo:lenet5")], address="auto"))


def test_a_node_of_another_version_stops_the_sweep():
    settings = NodeSettings("0.0.1", os.getcwd(), (), NO_LIMITS)
    with pytest.raises(RayError, match=r"a node has fvflops .*, this machine 0\.0\.1: install the same on all"):
        _run_on_node(Task("zoo:lenet5"), settings)


# Prints the page faults of 6 blocks of 64 MB that are written to, before and after freed memory is kept, and the MB
# that are held after it is returned.
PROGRAM = """
import resource
from fvflops.sweep import local_pool
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        block = bytearray(b"1" * (64 << 20))
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
begun = held()
print(faults(), int(local_pool.keep_freed_memory()), faults())
local_pool.return_freed_memory()
print(held() - begun)
"""


def test_each_failure_is_a_row_of_its_own(capfd):
    rows = {row.model: row for row in count_many(CANDIDATES.items(), workers=2, timeout=6, memory=8 << 30)}
    assert rows.keys() == CANDIDATES.keys()
    assert {name: row.flops for name, row in rows.items() if row.flops} == {"w1": 8, "w2": 16, "w3": 24, "w4": 32}
    failures = {name: (row.failure, row.error) for name, row in rows.items() if row.failure}
    assert failures.pop("hangs") == ("timeout", "stopped after 6 s")
    assert failures.pop("crashes") == ("killed", "the worker was killed by SIGKILL (out of memory?)")
    assert failures.pop("exits") == ("killed", "the worker ended with exit code 3")
    assert failures.pop("exhausts")[0] == "out of memory"
    assert failures.pop("raises")[0] == "error"
    assert not failures
    assert all(row.table == "default" and row.versions for row in rows.values())
    assert capfd.readouterr() == ("", "")


def test_a_function_that_cannot_be_sent_is_an_error_of_its_row():
    (row,) = count_many([("local", lambda: None)], workers=1)
    assert row.failure == "error"
    assert "pickle" in row.error.lower()


def test_a_module_that_cannot_be_imported_is_an_error_of_each_row():
    limits = WorkerLimits(imports=("no_such_module",))
    (row,) = run_in_workers([Task("zoo:lenet5")], workers=1, limits=limits)
    assert row.error == "ModuleNotFoundError: No module named 'no_such_module'"


def test_a_timeout_without_workers_is_refused():
    with pytest.raises(ValueError, match="timeout=3: a model in this process cannot be stopped: pass workers=1"):
        count_many([], timeout=3)


def test_without_pebble_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pebble", None)
    with pytest.raises(ValueError, match="pebble is not installed: pip install 'fvflops\\[sweep\\]'"):
        next(count_many(["zoo:lenet5"], workers=1))


def test_only_as_many_tasks_are_taken_as_the_pool_needs_and_workers_stop_when_the_caller_does():
    taken = []

    def models():
        for number in range(1, 100):
            taken.append(number)
            yield f"model {number}", CANDIDATES["w1" if number == 1 else "hangs"]

    rows = count_many(models(), workers=1)
    assert next(rows).flops == 8
    assert len(taken) <= 4
    rows.close()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_freed_memory_is_used_again_and_then_returned():
    output = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    faults, can_keep, kept_faults, held = map(int, output.split())
    assert can_keep
    assert kept_faults < faults / 5
    assert held < 32
