"""torch's private names: this torch has them all, one that is missing says what is lost, and none is used elsewhere."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import fvflops
from fvflops import torch_internals
from fvflops.capture.instrument.autograd import ENGINE_RUNS
from fvflops.capture.instrument.modules import CALLS
from fvflops.capture.instrument.patching import Patch
from fvflops.capture.restore import torch_state
from fvflops.plan.fake_process_group import fake_process_group
from fvflops.plan.plan_options import PlanError
from fvflops.torch_internals import ATTRIBUTES, INTERNALS, MINIMUM, Internal, Missing, MissingInternal, too_old_message
from tests.support.checkout import ROOT
from tests.support.old_torch import VERSION
from tests.support.processes import missing_names

PACKAGE = ROOT / "fvflops"
FILES = [path for path in PACKAGE.rglob("*.py") if path.name != "torch_internals.py"]
# Names of torch's modules that other files may spell out. None of them is looked up in torch.
EXCEPTIONS = {
    # Classes are sorted by the beginnings of their modules' names.
    "capture/restore/containers.py": {
        *("torch._dynamo", "torch._inductor", "torch._C", "torch._ops", "torch._library", "torch._subclasses")
    },
    # The module that a checked program's functions must be of.
    "analysis/files/program_archive.py": {"torch._functorch.predispatch"},
    # What torch's own functions are kept from importing, as they name it.
    "capture/shapes/symbolic_imports.py": {"torch._dynamo", "torch.utils._sympy.functions"},
}
# Private attributes that are of Python's classes.
PYTHONS = {
    *("_asdict", "_field_defaults", "_fields", "_make", "_replace"),  # named tuples
    *("_current_frames", "_getframe"),  # sys
    *("_ActionsContainer", "_AppendAction", "_ArgumentGroup"),  # argparse
    *("_SubParsersAction", "_action_groups", "_group_actions"),  # argparse
}
# Private attributes that are of other libraries.
LIBRARIES = {
    "_import_structure",  # of diffusers: the names of its classes, without their import
    "_quantize",  # of bitsandbytes' Params4bit
    *("_from_config", "_model_mapping"),  # of transformers: a model without weights, the classes of an Auto class
}
distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")


def parameters(internals):
    """Return internals as parameters of a test, torch.distributed's marked."""
    return [
        pytest.param(item, id=item.path, marks=distributed if "c10d" in item.path or "distributed" in item.path else ())
        for item in internals
    ]


# Names that came after the oldest torch, and the minor release with which they came.
LATER = {
    "torch.export.pt2_archive._package.load_pt2": 8,
    "torch._functorch.predispatch": 9,
    "torch._C._clear_DTensor_sharding_propagator_cache": 10,
    "torch.distributed.pipelining.schedules._add_reduce_grad": 10,
    "torch.distributed.pipelining.stage._PipelineStageBase.perform_reduce_grad": 10,
    "torch.distributed.tensor._decompositions": 11,
}


@pytest.mark.parametrize("internal", parameters(INTERNALS.values()))
def test_this_torch_has_the_name(internal):
    assert internal.lost
    if (2, LATER.get(internal.path, 0)) > VERSION:
        with pytest.raises(MissingInternal):
            internal.find()
    elif not internal.optional:
        internal.find()


@pytest.mark.parametrize("internal", parameters(item for item in ATTRIBUTES if not item.optional))
def test_this_torch_has_the_attribute(internal):
    assert internal.lost
    owner_path, _, attribute = internal.name.rpartition(".")
    owner = Internal(internal.module, owner_path, internal.lost).find()
    # What an object gets when it is made stands in the source of its class alone.
    assert hasattr(owner, attribute) or re.search(rf"\b{attribute}\b", inspect.getsource(inspect.getmodule(owner)))


def test_older_and_newer_torch_have_one_of_two_attributes():
    optional = [item for item in ATTRIBUTES if item.optional]
    if torch.distributed.is_available():
        source = inspect.getsource(importlib.import_module(optional[0].module))
        assert any(item.name.rpartition(".")[2] in source for item in optional)


@pytest.mark.parametrize("name", INTERNALS)
def test_a_missing_name_says_what_is_lost(name):
    internal = INTERNALS[name]
    if not internal.name:
        gone = dataclasses.replace(internal, module=f"{internal.module}_gone")
    else:
        gone = dataclasses.replace(internal, name=f"{internal.name}_gone", older="")
    with pytest.raises(MissingInternal) as raised:
        gone.find()
    assert str(raised.value) == f"torch {torch.__version__} has no {gone.path}: no {internal.lost}"
    if internal.fallback is not None and not internal.optional:
        with pytest.warns(UserWarning, match=f"no {internal.lost}"):
            assert gone.get() is internal.fallback
        return
    found = gone.get()
    if internal.optional:
        assert found is internal.fallback
    elif internal.kind == "loaded":
        assert found() is None
    else:
        assert type(found[0] if internal.kind == "target" else found) is Missing


@pytest.mark.parametrize("version", ["2.12.0a0+b4e4ee8", "2.13.0+cpu", "3.0.0"])
def test_a_torch_of_the_minimum_is_not_refused(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert too_old_message("plan and sharded memory") is None


def test_an_older_torch_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    message = "torch 2.9.1+cpu is too old for plan and sharded memory: install torch 2.12 or newer"
    assert too_old_message("plan and sharded memory") == message
    with pytest.raises(PlanError, match=re.escape(message)), fake_process_group(2, 0):
        pass


def test_the_page_lists_the_minimum_of_each_feature():
    rows = re.findall(r"^\| ([\w ]+) \| (2\.\d+) \|$", (ROOT / "docs/reference/versions.md").read_text(), re.MULTILINE)
    assert dict(rows) == MINIMUM


CASES = frozenset(missing_names.CASES)
# What may stop without a name: all counts without names of the recording itself, else the feature that needs it.
STOPPED = {
    **dict.fromkeys(("TorchDispatchMode", "DispatchModeKey", "python_dispatch", "push_dispatch_mode"), CASES),
    **dict.fromkeys(("dispatch_mode_stack", "included_keys", "excluded_keys", "is_wrapper_subclass"), CASES),
    **dict.fromkeys(("OpOverload", "DispatchKey", "has_kernel", "has_kernel_for_key", "pytree"), CASES),
    **dict.fromkeys(("make_wrapper_subclass", "no_torch_function"), CASES & {"count_step_shapes"}),
    **dict.fromkeys(("refuse_data_pointer", "is_mkldnn_enabled"), CASES & {"count_step_shapes"}),
    "below_autograd": CASES & {"count_shapes", "count_real"},
}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("module_call", "function_mode_stack", "pytree"), id="three"),
        pytest.param(tuple(INTERNALS), id="all", marks=pytest.mark.long),
    ],
)
def test_a_count_without_a_name_is_equal_or_stops_in_one_line(names):
    command = [sys.executable, "-m", "tests.support.processes.missing_names", "", *names]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (_, complete), *rows = map(json.loads, told.splitlines())
    assert [name for name, _ in rows] == list(names)
    for name, counts in rows:
        internal = INTERNALS[name]
        message = f"MissingInternal: torch {torch.__version__} has no {internal.path}_gone: no {internal.lost}"
        stopped = {case: count for case, count in counts.items() if count != complete[case]}
        assert stopped.keys() <= STOPPED.get(name, frozenset()), name
        assert set(stopped.values()) <= {message}


@pytest.mark.skipif(not hasattr(torch._C, "_autocast_supported_devices"), reason="torch has no list of them")
def test_autocast_of_each_device_is_restored():
    assert set(torch_state._DEVICES) == set(torch._C._autocast_supported_devices())


def test_what_is_missing_raises_when_it_is_used():
    missing = Internal("torch._C", "_gone", "sines").get()
    for use in (
        lambda: missing(),
        lambda: missing.attribute,
        lambda: isinstance(1, missing),
        lambda: types.new_class("Class", (missing,)),
        lambda: list(missing),
    ):
        with pytest.raises(MissingInternal, match=r"has no torch\._C\._gone: no sines"):
            use()
    with pytest.raises(MissingInternal), missing:
        pass


def test_a_reader_returns_the_value_of_now(monkeypatch):
    monkeypatch.setattr(torch.autograd.forward_ad, "_current_level", 7)
    assert torch_internals.forward_ad_level() == 7


@pytest.mark.parametrize("patch", [CALLS, ENGINE_RUNS], ids=["modules", "backward"])
def test_counts_go_on_where_a_function_cannot_be_wrapped(monkeypatch, patch):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.randn(2, 4)
    expected = fvflops.FlopCountAnalysis(model, x).by_operator()
    monkeypatch.setattr(patch, "missing", "torch 9 has no such function: no feature")
    with pytest.warns(UserWarning, match="no such function: no feature"):
        assert fvflops.FlopCountAnalysis(model, x).by_operator() == expected


def test_a_patch_of_a_missing_function_wraps_nothing():
    patch = Patch(*dataclasses.replace(INTERNALS["module_call"], name="Module._gone").get())
    message = r"no torch\.nn\.Module\._gone: no attribution to modules; counts by operator still work"
    with pytest.warns(UserWarning, match=message), patch.wrapped(lambda original: original):
        pass


def private_names(source):
    """Return the private names of torch that a file imports, reaches through torch, or spells out in full."""
    tree = ast.parse(source)
    roots = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.partition(".")[0], alias.name, alias.asname) for alias in node.names]
            for name, path, renamed in names:
                if path.partition(".")[0] == "torch":
                    roots[name] = path if renamed else "torch"
                    found.add(path)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                roots[alias.asname or alias.name] = path = f"{node.module}.{alias.name}"
                found.add(path)

    def path_of(node):
        if isinstance(node, ast.Name):
            return roots.get(node.id)
        above = path_of(node.value) if isinstance(node, ast.Attribute) else None
        return None if above is None else f"{above}.{node.attr}"

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := path_of(node)) is not None:
            found.add(path)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and (path := path_of(node.args[0])) is not None:
            # getattr(torch.x, "_y"), Patch(torch.x, "_y")
            if isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
                found.add(f"{path}.{node.args[1].value}")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            found.add(node.value)
    return {path for path in found if re.search(r"\._(?!_)", path) and not path.startswith("torch.ops.")}


def private_attributes(tree):
    """Yield the private attributes that a file asks of any object but `self`, `cls` and what torch.ops holds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr[0] == "_" != node.attr[1:2]:
            base = ast.unparse(node.value)
            if base not in ("self", "cls", "_ATEN") and not base.startswith("torch.ops."):
                yield node.attr


def own_attributes(trees):
    """Return the private attributes that classes of fvflops have."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members = [getattr(item, "name", None) or getattr(item, "target", None) for item in node.body]
                found |= {getattr(member, "id", member) for member in members if member is not None}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_are_used_by_their_public_ones(path):
    allowed = EXCEPTIONS.get(path.relative_to(PACKAGE).as_posix(), set())
    assert private_names(path.read_text()) == allowed


def test_private_attributes_are_listed():
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    known = own_attributes(trees.values()) | PYTHONS | LIBRARIES | {item.name.rpartition(".")[2] for item in ATTRIBUTES}
    unknown = {
        (str(path.relative_to(PACKAGE)), name)
        for path, tree in trees.items()
        for name in private_attributes(tree)
        if name not in known
    }
    assert not unknown, "list them in torch_internals.ATTRIBUTES"


def test_private_names_are_seen():
    for line, expected in (
        ("import torch._dynamo", {"torch._dynamo"}),
        ("from torch.utils import _pytree as pytree", {"torch.utils._pytree"}),
        ("def f():\n    from torch._subclasses import FakeTensor", {"torch._subclasses.FakeTensor"}),
        ("from torch import nn\nnn.Module._call_impl", {"torch.nn.Module._call_impl"}),
        ("import torch.nn as nn\nnn.Module._call_impl", {"torch.nn.Module._call_impl"}),
        ("from torch import nn\nPatch(nn.Module, '_call_impl')", {"torch.nn.Module._call_impl"}),
        ("sys.modules.get('torch._dynamo')", {"torch._dynamo"}),
        ("import torch\ntorch._C._get_tracing_state()", {"torch._C", "torch._C._get_tracing_state"}),
        ("import torch\ntorch.ops.aten._softmax(torch.Tensor.__add__, getattr(torch, '__all__'))", set()),
        ("import torch\nx = torch.nn.functional.relu(y)", set()),
    ):
        assert private_names(line) == expected
    tree = ast.parse("self._a\nnode._sequence_nr()\ntorch.ops.aten._b\n_ATEN._c\nx.__d__")
    assert set(private_attributes(tree)) == {"_sequence_nr"}
