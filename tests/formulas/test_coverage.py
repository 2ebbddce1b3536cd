"""Every op of the installed torch is in the default table, or is unsupported for a reason that is written down."""

import subprocess
import sys
from collections import defaultdict

import pytest
import torch

from fvflops import load_table
from tests.support.checkout import ROOT
from tests.support.tools import load_tool

coverage = load_tool("op_coverage.py")

TABLE = load_table("default")


@pytest.fixture(scope="module")
def classes():
    coverage.import_namespaces()
    found = defaultdict(set)
    for namespace in coverage.NAMESPACES:
        for name in coverage.list_overloads(namespace):
            found[coverage.classify(TABLE, name)].add(name)
    return found


def test_no_op_is_unclassified(classes):
    assert not classes["unclassified"], "a new torch has ops that the table must learn: give each a row, or a reason"


def test_the_unsupported_ones_are_few_and_have_reasons(classes):
    unknown = {name.partition(".")[0] for name in classes["unsupported"]}
    assert unknown <= coverage.UNSUPPORTED.keys() and len(unknown) < 50
    assert not [packet for packet in coverage.UNSUPPORTED if TABLE.row(packet) is not None]


def test_what_no_mode_sees_has_no_kernel(classes):
    """`script` is not where an op can hide that a model runs."""
    assert len(classes["script"]) > 100
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


def test_an_op_that_is_in_no_table_fails_the_tool(tmp_path, monkeypatch, capsys):
    """With an empty table all ops except composite ones are unclassified; the tool lists them and fails."""
    path = tmp_path / "empty.yaml"
    path.write_text("description: nothing\n")
    monkeypatch.setattr(sys, "argv", ["op_coverage.py", str(path), "--namespace", "aten"])
    assert coverage.main() == 1 and "unclassified: aten::mm\n" in capsys.readouterr().out


@pytest.mark.parametrize("namespace", ["_c10d_functional", "c10d", "fsdp", "prims", "quantized", "torchvision"])
def test_an_op_that_is_new_in_another_namespace_is_unclassified(classes, namespace):
    """The table knows these namespaces op by op, not by their names."""
    assert any(name.startswith(f"{namespace}::") for name in set().union(*classes.values()))
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("an_op_of_a_later_torch(Tensor self) -> Tensor")
    name = f"{namespace}::an_op_of_a_later_torch"
    assert name in coverage.list_overloads(namespace)
    assert coverage.classify(TABLE, name) == "unclassified"


def test_a_namespace_that_nobody_listed_is_seen():
    library = torch.library.Library("a_namespace_of_a_later_torch", "DEF")
    library.define("an_op(Tensor self) -> Tensor")
    assert "a_namespace_of_a_later_torch" in coverage.list_new_namespaces()


@pytest.mark.parametrize("options", [["--namespace", "aten"], pytest.param([], marks=pytest.mark.long)], ids=len)
def test_the_tool_knows_all_that_torch_registers(options):
    """In a process of its own, in which no test has registered anything; by default what `import torch` registers."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "op_coverage.py"), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "new namespace" not in done.stdout, done.stdout
    assert not [namespace for namespace in coverage.SET_ASIDE if namespace in coverage.NAMESPACES]


@pytest.mark.parametrize("namespace", ["prims", "quantized", "_quantized"])
def test_an_op_has_the_class_of_its_aten_twin(classes, namespace):
    """What is left out, or moved, in aten is so elsewhere too."""
    packets = {name.partition(".")[0] for names in classes.values() for name in names}
    own = {packet: TABLE.row(packet) for packet in packets if packet.startswith(f"{namespace}::")}
    twins = {packet: TABLE.row(f"aten::{packet.partition('::')[2]}") for packet in own}
    both = [(packet, own[packet].kind, twin.kind) for packet, twin in twins.items() if twin and own[packet]]
    assert len(both) > (50 if namespace == "prims" else 1)
    assert not [packet for packet, kind, other in both if kind != other]
