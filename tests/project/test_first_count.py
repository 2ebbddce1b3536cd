"""The first count of a process: what it must not import, and what keeps it from that."""

import builtins
import gc
import importlib
import itertools
import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis
from fvflops.capture.shapes import symbolic_imports as module
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.capture.shapes.symbolic_imports import without_symbolic_imports
from fvflops.garbage_collector import gc_paused
from tests.support.checkout import ROOT
from tests.support.models.whole_models import build_case
from tests.support.tools import load_tool

SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "torch.utils._sympy", SYMBOLIC)

COUNTS = """
import json, logging, sys, warnings
import torch
imported_by_torch = set(sys.modules)
from fvflops import FlopCountAnalysis
first = {name for name in sys.modules if name.startswith("fvflops.reports.")}
from fvflops import ByteCountAnalysis, TrainingStepAnalysis, flop_count_table, record
from tests.project.test_first_count import tell_mistakes
from tests.support.models.layers import LAYERS
from tests.support.models.whole_models import MODELS, build_case
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
shapes = {"execution": "shapes"}  # nothing is to hide in a fallback

class Attends(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16), 2)
    def forward(self, x):
        return self.layers(x, mask=torch.nn.Transformer.generate_square_subsequent_mask(len(x)))

cases = {name: build_case(name, LAYERS) for name in LAYERS}
cases |= {name: build_case(name) for name in MODELS if ":" not in name or name.startswith("zoo:")}
cases |= {
    "attends": (Attends(), (torch.ones(5, 2, 8),)),
    "transposed": (torch.nn.PReLU(), (torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),)),
    "whole numbers": (torch.nn.Identity(), (torch.ones(3, dtype=torch.int32),)),
}
for name, (model, inputs) in cases.items():
    if name in ("gru, packed", "lstm, packed", "rnn, packed"):
        continue
    FlopCountAnalysis(model, inputs, **shapes).total()
model, inputs = cases["encoder layer"]
ByteCountAnalysis(model, inputs, **shapes).total()
flop_count_table(FlopCountAnalysis(model, inputs, **shapes))
for optimizer in (torch.optim.SGD, torch.optim.AdamW, None):
    model.train()
    TrainingStepAnalysis(
        model, inputs, loss=lambda y: y.square().mean(), optimizer=optimizer
    ).total()
with record(model, execution="shapes"):
    model(*inputs)
added = set(sys.modules) - imported_by_torch
print(json.dumps({"added": sorted(added), "reports": sorted(first), "mistakes": tell_mistakes()}))
print(*sorted(set(sys.modules) - imported_by_torch - added))
"""


def is_heavy(name):
    return any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)


WRONG = {
    "group norm": lambda: (nn.GroupNorm(2, 4), torch.ones(2, 6, 3, 3)),
    "prelu": lambda: (nn.PReLU(3), torch.ones(2, 4, 3)),
    "embedding": lambda: (nn.Embedding(4, 3), torch.ones(2, 3)),
    "product": lambda: (lambda x: torch.bmm(x, x), torch.ones(2, 3, 4)),
    "cat": lambda: (lambda x: torch.cat([x, x[:1, :1]]), torch.ones(2, 3)),
    "where": lambda: (lambda x: torch.where(x, x, x), torch.ones(2, 3)),
}


def tell_mistakes():
    """Return what is said of each wrong input."""
    told = {}
    for name, make in WRONG.items():
        model, x = make()
        with pytest.raises(Exception) as caught:
            FlopCountAnalysis(model, x, execution="shapes").total()
        told[name] = f"{caught.type.__name__}: {caught.value}"
    return told


@pytest.fixture(scope="module")
def process():
    """What a new process imported for its first counts, and said of wrong inputs."""
    command = [sys.executable, "-c", COUNTS]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]
    found, after = result.stdout.splitlines()[-2:]
    return {**json.loads(found), "after": after.split()}


def test_the_first_counts_import_neither_sympy_nor_a_compiler(process):
    names = process["added"] + process["after"]
    assert "fvflops.capture.shapes.shape_mode" in names
    assert not list(filter(is_heavy, names))
    assert not [name for name in names if name.startswith(("torch._decomp", "torch._refs", "torch._meta"))]
    assert not {"pandas", "matplotlib", "networkx", "torchvision"}.intersection(names)
    assert process["reports"] == ["fvflops.reports.escaping"]


def test_a_wrong_input_is_told_as_with_the_symbolic_modules(process):
    importlib.import_module("torch._dynamo")
    assert process["mistakes"] == tell_mistakes() and len(process["mistakes"]) == len(WRONG)


@pytest.fixture
def nothing_heavy():
    """Let the heavy modules be as if they were not imported yet, which other tests have."""
    before = {name: sys.modules[name] for name in filter(is_heavy, list(sys.modules))}
    parents = {name: sys.modules.get(name.rpartition(".")[0]) for name in before}
    # A package may have another object of a module's name.
    attributes = [
        (parents[name], name.rpartition(".")[2], heavy)
        for name, heavy in before.items()
        if getattr(parents[name], name.rpartition(".")[2], None) is heavy
    ]
    for name in before:
        del sys.modules[name]
    clear_cache()
    yield
    clear_cache()
    # A module that was imported anew has classes of its own: put back all that there were, also in their packages.
    for name in filter(is_heavy, list(sys.modules) if before else ()):
        del sys.modules[name]
    sys.modules.update(before)
    for parent, attribute, heavy in attributes:
        setattr(parent, attribute, heavy)


VALUES = (True, False, 0, 1, 3, 1.5)
ARGUMENTS = [*((value,) for value in VALUES), *itertools.product(VALUES, VALUES), ((2, 3), [2, 3]), ((2,), (2, 3)), ()]


@pytest.mark.parametrize("name", [name for name in vars(module._PROXIES[SYMBOLIC]) if not name.startswith("_")])
def test_a_stand_in_answers_as_torch_does(name):
    original = getattr(importlib.import_module(SYMBOLIC), name)
    stand_in = getattr(module._PROXIES[SYMBOLIC], name)

    def outcome(function, arguments):
        try:
            result = function(*arguments)
            return type(result), result
        except Exception as error:
            return type(error), str(error)

    warnings.simplefilter("ignore", FutureWarning)
    tensors = [] if name != "free_unbacked_symbols" else [(torch.ones(2, 3),), (torch.ones(()),)]
    for arguments in tensors:
        assert not original(*arguments) and not stand_in(*arguments)
    for arguments in [] if tensors else ARGUMENTS:
        assert outcome(stand_in, arguments) == outcome(original, arguments), arguments


def test_torch_alone_gets_stand_ins_and_only_in_functions(nothing_heavy):
    code = f"from {SYMBOLIC} import guard_or_false as found\ndef ask():\n from {SYMBOLIC} import guard_or_false\n"
    code += " return guard_or_false"
    for name, in_module, in_function in (("torch._refs", False, True), ("other", False, False)):
        space = {"__name__": name}
        with without_symbolic_imports():
            stand_in = module._PROXIES[SYMBOLIC]
            exec(code.partition("\n")[2], space)
            assert (space["ask"]() is stand_in.guard_or_false) is in_function
            exec(code, space)
            assert (space["found"] is stand_in.guard_or_false) is in_module


def test_the_import_function_is_put_back(nothing_heavy):
    original = builtins.__import__
    with pytest.raises(KeyboardInterrupt), without_symbolic_imports():
        assert builtins.__import__ is not original
        with without_symbolic_imports():
            pass
        assert builtins.__import__ is not original
        raise KeyboardInterrupt
    assert builtins.__import__ is original


def test_an_import_function_of_others_is_left_and_gets_no_stand_ins_later(nothing_heavy):
    original = builtins.__import__
    with without_symbolic_imports():
        ours = builtins.__import__
        sympy = ours("sympy", {"__name__": "torch._refs"})

        def theirs(*args, **options):
            return ours(*args, **options)

        builtins.__import__ = theirs
    try:
        assert builtins.__import__ is theirs
        ours.original = lambda *args: "imported"
        assert sympy.Basic is not None and ours("sympy", {"__name__": "torch._refs"}) == "imported"
        builtins.__import__ = ours
        with without_symbolic_imports():  # as if nothing were left
            assert builtins.__import__ is not ours
            assert builtins.__import__("sympy", {"__name__": "torch._refs"}).Basic is sympy.Basic
    finally:
        builtins.__import__ = original


def test_a_count_leaves_torchs_functions_to_the_compiler(nothing_heavy):
    wrapped = []
    kept = torch._refs.where
    while kept is not None:
        wrapped.append(kept)
        kept = getattr(kept, "__wrapped__", None)
    before = [dict(vars(function)) for function in wrapped]
    for function in wrapped:
        vars(function).pop("__dynamo_disable", None)
    try:
        x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
        FlopCountAnalysis(lambda x: torch.where(x > 0, x, 0.5), x, execution="shapes").total()
        assert not any("__dynamo_disable" in vars(function) for function in wrapped)
        assert not any(map(is_heavy, sys.modules))
    finally:
        for function, attributes in zip(wrapped, before, strict=True):
            vars(function).update(attributes)


def test_nothing_is_replaced_where_all_is_imported():
    importlib.import_module("torch._dynamo")
    original = builtins.__import__
    with without_symbolic_imports():
        assert builtins.__import__ is original


def test_a_burst_of_work_starts_no_full_collection():
    generations = []

    def note(phase, about):
        if phase == "stop":
            generations.append(about["generation"])

    gc.callbacks.append(note)
    try:
        with gc_paused():
            kept = [[index] for index in range(200_000)]
        after = [[index] for index in range(10)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) > len(after) and generations == [0]
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["torchvision:swin_t", "timm:levit_128s", "transformers:LlamaModel"])
def test_a_model_of_a_library_needs_nothing_heavy(name, request):
    pytest.importorskip(name.partition(":")[0])
    case = build_case(name)
    request.getfixturevalue("nothing_heavy")
    FlopCountAnalysis(*case, execution="shapes").total()
    assert not any(map(is_heavy, sys.modules))


def test_the_benchmark_measures_a_new_process():
    processes = load_tool("benchmarking.processes")
    measured = processes.run_apart(processes.measure_imports, "toy")
    assert min(measured.values()) > 0 and measured["modules"] < 30


def test_the_benchmark_says_which_limit_a_first_count_misses(monkeypatch):
    sections = load_tool("benchmarking.sections")
    for count, missed in ((0.1, []), (0.3, ["import fvflops and count / import torch"])):
        measured = {"torch": 1.0, "fvflops": 0.05, "count": count, "modules": 2}
        monkeypatch.setattr(sections, "run_apart", lambda *names, measured=measured: measured)
        lines = sections.count_first("toy", sections.Effort(processes=2)).lines
        assert [line[4:50].strip() for line in lines if "MISSED" in line] == missed
        assert sum(": met" in line for line in lines) == 2 - len(missed)
