"""A sweep on a Ray cluster: a node that dies loses no row, and the file is that of one process."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from fvflops.sources import SourceOptions
from fvflops.sweep import CountSettings
from fvflops.sweep.count_model import Task, run_here
from fvflops.sweep.counted_models import plan_sweep, run_sweep
from fvflops.sweep.local_pool import NO_LIMITS
from fvflops.sweep.ray_pool import NodeSettings, RayError, _run_on_node, run_on_cluster
from fvflops.sweep.result_files import read_rows
from tests.support.checkout import ROOT

SLOW = 7
NAMES = [
    "zoo:lenet5",
    *(f"tests.support.models.sweep_candidates:slow_{width}" for width in range(1, SLOW + 1)),
    "zoo:none",
    "zoo:llama_tiny",
]


@pytest.mark.long
def test_a_killed_node_loses_no_row_and_the_parquet_is_that_of_one_process(tmp_path, monkeypatch):
    events = tmp_path / "events"
    monkeypatch.setenv("EVENTS", str(events))
    pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")
    output, expected = str(tmp_path / "rows.parquet"), str(tmp_path / "expected.parquet")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "processes" / "ray_cluster.py"), output, *NAMES],
        env={**os.environ, "PYTHONPATH": str(ROOT), "EVENTS": str(events)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    printed = [line for line in result.stdout.splitlines() if line in NAMES]
    assert sorted(printed) == sorted(NAMES)
    begun = [line.split()[2] for line in events.read_text().splitlines() if "begin" in line]
    assert "killed" in result.stdout.splitlines()
    assert len(begun) == len(set(begun)) + 1 == SLOW + 1  # the model of the killed node was begun again
    settings = CountSettings(peak_memory=False, memory=2 << 30)
    list(run_sweep(plan_sweep(NAMES, expected, SourceOptions(), settings), run_here))
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
