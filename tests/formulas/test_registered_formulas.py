"""Formulas that a program gave torch's flop counter: they count for ops that a table has no row for."""

import pytest
import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from fvflops import FlopCountAnalysis, load_table
from fvflops.analysis.fvcore_text import summarise
from fvflops.formulas import Cost, TableError
from fvflops.formulas.torch_registry import count_registered
from fvflops.reports.terminal import op_coverage
from fvflops.trace import Signature, Status, TensorSpec
from tests.support.models.whole_models import Function
from tests.support.table_folder import TableFolder

SCHEMAS = (
    "project(Tensor x, Tensor weight, int repeat=1, *, bool dense=True, ScalarType? dtype=None) -> Tensor",
    "split(Tensor[] xs, Device? device=None) -> (Tensor, Tensor)",
    "mix_(Tensor(a!) x, float scale) -> Tensor(a!)",
)
LIBRARY = torch.library.Library("registered_formulas", "DEF")
for schema in SCHEMAS:
    LIBRARY.define(schema)


def project(x, weight, repeat=1, *, dense=True, dtype=None):
    return x.new_empty(x.shape[0], weight.shape[0])


def split(xs, device=None):
    return torch.empty_like(xs[0]), torch.empty_like(xs[-1])


for key in ("Meta", "CPU"):
    LIBRARY.impl("project", project, key)
    LIBRARY.impl("split", split, key)
    LIBRARY.impl("mix_", lambda x, scale: x, key)

OPS = torch.ops.registered_formulas


@pytest.fixture(autouse=True)
def _registry():
    before = dict(flop_counter.flop_registry)
    yield
    flop_counter.flop_registry.clear()
    flop_counter.flop_registry.update(before)


class Project(nn.Module):
    """Calls the op once, after a linear layer of 4 * 8 * 6 multiply-adds."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 6), nn.Parameter(torch.rand(5, 6))
        self.args, self.kwargs = args, kwargs

    def forward(self, x):
        return OPS.project(self.linear(x), self.weight, *self.args, **self.kwargs)


X = torch.rand(4, 8)


def register(op=OPS.project, **options):
    """Register a formula that takes whatever it is called with, and return the list of its calls."""
    calls = []

    def formula(*args, **kwargs):
        calls.append((args, kwargs))
        return 2 * 4 * 6 * 5

    register_flop_formula(op, **options)(formula)
    return calls


@pytest.mark.parametrize("options", [{}, {"get_raw": True}])
def test_a_formula_counts(options):
    """One multiply-add is two flops to torch, and one in the default table."""
    register(**options)
    analysis = FlopCountAnalysis(Project(), X)
    assert analysis.by_operator() == {"linear": 4 * 8 * 6, "project": 4 * 6 * 5}
    assert not analysis.unsupported_ops()
    assert analysis.counts().ledger()[Status.COUNTED] == {"aten::linear": 1, "registered_formulas::project": 1}


def test_a_formula_of_an_op_that_was_unknown_before():
    """What a table keeps of an earlier analysis does not hide it."""
    model = Project()
    before = FlopCountAnalysis(model, X)
    assert before.total() == 4 * 8 * 6 and before.unsupported_ops() == {"registered_formulas::project": 1}
    register()
    assert FlopCountAnalysis(model, X).total() == 4 * 8 * 6 + 4 * 6 * 5


def test_the_number_is_torchs(tmp_path):
    """In a table in which a multiply-add is two flops the total is FlopCounterMode's, odd or not."""
    register_flop_formula(OPS.project)(lambda x, weight, *args, out_shape=None, **kwargs: 2 * x[0] * x[1] + 1)
    model = Project()
    with FlopCounterMode(display=False) as mode, torch.no_grad():
        model(X)
    table = TableFolder(tmp_path)("extends: default\nmultiply_add: 2")
    analysis = FlopCountAnalysis(model, X, table=table)
    assert analysis.total() == mode.get_total_flops() == 2 * 4 * 8 * 6 + 2 * 4 * 6 + 1
    assert FlopCountAnalysis(model, X, table="torch").total() == mode.get_total_flops()
    assert FlopCountAnalysis(model, X).total() == 4 * 8 * 6 + 4 * 6 + 1


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1,), {"dense": True}), ((3,), {}), ((), {"dense": False, "dtype": torch.float16})]
)
def test_it_is_called_as_torch_calls_it(args, kwargs):
    """Shapes for tensors; what is left at its default is not there."""
    calls = register()
    model = Project(*args, **kwargs)
    with FlopCounterMode(display=False), torch.no_grad():
        model(X)
    FlopCountAnalysis(model, X).total()
    (torchs, own) = calls
    assert own == torchs
    assert own[1]["out_shape"] == (4, 5) and own[0][:2] == ((4, 6), (5, 6))


def test_a_raw_formula_gets_tensors_without_numbers():
    calls = register(get_raw=True)
    FlopCountAnalysis(Project(2, dtype=torch.float16).to(torch.bfloat16), X.bfloat16()).total()
    ((x, weight, repeat), kwargs) = calls[0]
    assert repeat == 2 and kwargs["dtype"] is torch.float16
    for tensor, shape in ((x, (4, 6)), (weight, (5, 6)), (kwargs["out_val"], (4, 5))):
        assert tensor.is_meta and tensor.shape == shape and tensor.dtype is torch.bfloat16


def test_lists_devices_and_several_results():
    calls = register(OPS.split)
    FlopCountAnalysis(Function(lambda x: OPS.split([x, x[1:]], device=torch.device("cpu"))), X).total()
    ((shapes, device), kwargs) = calls[0]
    assert shapes == [(4, 8), (3, 8)] and device == torch.device("cpu")
    assert tuple(kwargs["out_shape"]) == ((4, 8), (3, 8))


def test_an_op_that_writes_to_its_argument():
    calls = register(OPS.mix_)
    analysis = FlopCountAnalysis(Function(lambda x: OPS.mix_(x + 1, 0.5)), X)
    assert analysis.by_operator() == {"mix_": 4 * 6 * 5} and calls[0][0] == ((4, 8), 0.5)


def test_a_whole_number_may_be_a_float():
    register_flop_formula(OPS.project)(lambda *args, **kwargs: 2 * 4 * 0.5)
    assert FlopCountAnalysis(Project(), X).by_operator()["project"] == 2


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (lambda *args, **kwargs: 1 // 0, "ZeroDivisionError"),
        (lambda *args, **kwargs: 0.5, "returned 0.5, not an integer"),
        (lambda *args, **kwargs: -1, "returned -1"),
        (lambda *args, **kwargs: None, "returned None"),
        (lambda x, out_shape=None: 1, "multiple values for argument 'out_shape'"),
    ],
)
def test_a_formula_that_fails_is_named(formula, message):
    register_flop_formula(OPS.project)(formula)
    analysis = FlopCountAnalysis(Project(), X)
    with pytest.raises(TableError, match=rf"^registered_formulas::project: the formula <lambda>, .*{message}.*schema"):
        analysis.total()


LIBRARY.define("twist(Tensor x) -> Tensor", tags=torch.Tag.pointwise)
for key in ("Meta", "CPU"):
    LIBRARY.impl("twist", lambda x: x.clone(), key)


@pytest.mark.parametrize("table", ["default", "torch", "exact"])
def test_the_flops_of_an_elementwise_op_are_not_halved(table):
    """Of an op that torch's tag calls elementwise there are no multiply-adds, whatever a convention makes of one."""
    register_flop_formula(OPS.twist)(lambda x, **kwargs: 7 * 4 * 8)
    analysis = FlopCountAnalysis(Function(lambda x: OPS.twist(x)), X, table=table)
    assert (analysis.total(), analysis.macs()) == (7 * 4 * 8, 0)


def test_a_report_says_how_a_formula_is_read():
    register()
    register_flop_formula(OPS.twist)(lambda x, **kwargs: 7 * 4 * 8)
    model = nn.Sequential(Function(lambda x: OPS.twist(x)), Project())
    text = op_coverage.render(summarise(FlopCountAnalysis(model, X)))
    halved = "Counted by formulas registered with torch's register_flop_formula, halved to multiply-adds: "
    assert halved + "registered_formulas::project." in text
    taken = "Counted by formulas registered with torch's register_flop_formula, taken as FLOPs (elementwise ops): "
    assert taken + "registered_formulas::twist." in text
    handled = FlopCountAnalysis(model, X).set_op_handle("registered_formulas::project", lambda call: 11)
    assert "project" not in op_coverage.render(summarise(handled))
    assert "register_flop_formula" not in op_coverage.render(summarise(FlopCountAnalysis(model, X, table="fvcore")))
    assert "register_flop_formula" not in op_coverage.render(summarise(FlopCountAnalysis(nn.Linear(8, 6), X)))


def test_a_row_wins(tmp_path):
    calls = register()
    table = TableFolder(tmp_path)("extends: default\nops:\n  registered_formulas::project: {flops: 7}")
    assert FlopCountAnalysis(Project(), X, table=table).by_operator()["project"] == 7
    assert not calls


def test_a_handle_wins():
    calls = register()
    analysis = FlopCountAnalysis(Project(), X).set_op_handle("registered_formulas::project", lambda call: 11)
    assert analysis.by_operator()["project"] == 11 and not calls


def test_torchs_own_formulas_are_left_alone(tmp_path):
    """A table without a row for mm does not know it, whatever torch says."""
    assert torch.ops.aten.mm in flop_counter.flop_registry
    table = TableFolder(tmp_path)("description: nothing\nfree: [aten::t]")
    analysis = FlopCountAnalysis(Function(torch.mm), (torch.rand(2, 3), torch.rand(3, 4)), table=table)
    assert analysis.total() == 0 and "aten::mm" in analysis.unsupported_ops()


def test_a_program_may_say_something_of_an_op_of_torchs(tmp_path):
    del flop_counter.flop_registry[torch.ops.aten.mm]
    register(torch.ops.aten.mm)
    table = TableFolder(tmp_path)("description: nothing")
    analysis = FlopCountAnalysis(Function(torch.mm), (torch.rand(2, 3), torch.rand(3, 4)), table=table)
    assert analysis.total() == 4 * 6 * 5
    assert FlopCountAnalysis(Function(torch.mm), (torch.rand(2, 3), torch.rand(3, 4))).total() == 24


@pytest.mark.parametrize("name", ["fvcore", "thop"])
def test_a_convention_that_follows_a_tool_without_formulas_asks_for_none(name):
    calls = register()
    analysis = FlopCountAnalysis(Project(), X, table=name)
    assert analysis.total() == 4 * 8 * 6 and not calls
    assert analysis.unsupported_ops()["registered_formulas::project"] == 1


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("extends: default", True),
        ("extends: default\nregistered_formulas: false", False),
        ("extends: fvcore", False),
        ("extends: fvcore\nregistered_formulas: true", True),
        ("extends: default\nignore_inherited: true", False),
        ("extends: default\nignore_inherited: true\nregistered_formulas: true", True),
        ("description: nothing\nopaque: true", False),
    ],
)
def test_a_table_says_whether_it_asks(tmp_path, text, asks):
    assert TableFolder(tmp_path)(text).registered_formulas is asks


def test_a_program_that_has_not_imported_torchs_counter_has_no_formulas(monkeypatch):
    register()
    spec = TensorSpec((4, 6))
    signature = Signature("registered_formulas::project", (), (spec, TensorSpec((5, 6))), (TensorSpec((4, 5)),))
    assert count_registered(signature) == Cost(macs=120)
    monkeypatch.delitem(__import__("sys").modules, "torch.utils.flop_counter")
    assert count_registered(signature) is None
    assert load_table("default").price(signature).status is Status.UNSUPPORTED
