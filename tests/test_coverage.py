"""Every aten op of the installed torch is in the default table, or is unknown for a reason that is written down."""

import importlib.util
import subprocess
import sys
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch

from fvflops import load_table

ROOT = Path(__file__).resolve().parent.parent
loader = SourceFileLoader("coverage_of_ops", str(ROOT / "tools" / "coverage"))
spec = importlib.util.spec_from_loader("coverage_of_ops", loader)
assert spec is not None
coverage = importlib.util.module_from_spec(spec)
loader.exec_module(coverage)

TABLE = load_table("default")


@pytest.fixture(scope="module")
def classes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name in coverage.list_overloads():
        found[coverage.classify(TABLE, name)].add(name)
    return found


def test_no_op_is_unclassified(classes):
    assert not classes["unclassified"], "a new torch has ops that the table must learn: give each a row, or a reason"


def test_the_unknown_ones_are_few_and_have_reasons(classes):
    unknown = {name.partition(".")[0] for name in classes["unknown"]}
    assert unknown <= coverage.UNKNOWN.keys() and len(unknown) < 40
    assert not [packet for packet in coverage.UNKNOWN if TABLE.row(packet) is not None]


def test_what_no_mode_sees_has_no_kernel(classes):
    """`script` is not where an op can hide that a model runs."""
    for name in classes["script"]:
        for key in ("CPU", "CUDA", "Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
            with pytest.raises(RuntimeError, match="does not exist"):
                torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_what_is_decomposed_runs_as_other_ops(classes):
    """A composite op without a row has torch's own decomposition, in which the ops are that a table prices."""
    without = [name for name in classes["decomposed"] if TABLE.row(name) is None]
    assert len(without) > 200
    for name in without:
        decomposes = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        assert decomposes, name


def test_an_op_that_is_in_no_table_fails_the_tool(tmp_path):
    """An empty table knows nothing: what is not composite is unclassified, and the tool says so and fails."""
    path = tmp_path / "empty.yaml"
    path.write_text("description: nothing\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "coverage"), str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "unclassified: aten::mm\n" in done.stdout
