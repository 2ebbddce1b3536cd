"""Worker processes: every model has one row, whatever it does to its worker, which keeps freed memory."""

import platform
import subprocess
import sys

import pytest

from fvflops import count_many
from fvflops.sweep.count_model import Task
from fvflops.sweep.local_pool import WorkerLimits, run_in_workers
from tests.support.models.sweep_candidates import CANDIDATES

# Prints the page faults of 10 blocks of 64 MB that are written to, before and after freed memory is kept, and the MB
# that are held after it is returned.
PROGRAM = """
import resource
from fvflops.sweep import local_pool
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
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
