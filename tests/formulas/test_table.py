"""The table: what a row says, which row wins, what extends what, and what a recorder stops at."""

from pathlib import Path

import pytest
import torch

from fvflops import paths
from fvflops.capture.recorder.tensor_specs import describe_call
from fvflops.formulas import Cost, TableError, load_table, register_formula
from fvflops.trace import ModuleInfo, ParameterInfo, RegionSignature, Signature, Status, TensorSpec
from tests.support.table_folder import TableFolder, signature


@pytest.fixture
def load(tmp_path):
    return TableFolder(tmp_path)


def test_a_row_is_counted_free_omitted_or_unknown(load):
    table = load(
        "zero_flop: [aten::view]\nomitted: [aten::relu]\nmultiply_add: 2\nops:\n"
        "  aten::mm: {shapes: 'm k, k n', macs: m*k*n, flops: numel(out), activations: 3, label: product, source: me}\n"
        "  aten::bmm: zero_flop\n  aten::addmm: {activations: numel(out)}"
    )
    price = table.price(signature("aten::mm", (4, 5), (5, 6), out=(4, 6)))
    assert (price.status, price.label, price.macs, price.flops, price.activations) == (
        Status.COUNTED,
        "product",
        120,
        24,
        3,
    )
    assert table.price(signature("aten::bmm", (1, 1, 1), (1, 1, 1))).status is Status.ZERO_FLOP
    assert table.price(signature("aten::relu", (1,))).status is Status.IGNORED
    unknown = table.price(Signature("mylib::scan", ("u",), (1,), ()))
    assert (unknown.status, unknown.label, unknown.macs, unknown.activations) == (Status.UNSUPPORTED, "scan", 0, None)
    only = table.price(signature("aten::addmm", (6,), (4, 5), (5, 6), out=(4, 6)))
    assert (only.status, only.activations, only.macs) == (Status.IGNORED, 24, 0)
    assert table.multiply_add == 2
    assert table.row("aten::mm").source == "me"
    assert (table.row("aten::mm").line, Path(table.row("aten::mm").file).name) == (5, "mine.yaml")


def test_names_in_an_expression(load):
    table = load(
        "ops:\n  aten::cat: {flops: sum(numel(tensors)) + len(tensors) + len(outputs)}\n"
        "  aten::addmm: {shapes: {mat1: m k, self: '*n'}, macs: m*k*n, flops: 1 if beta == 1 else 2}\n"
    )
    tensors = [torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta")]
    cat = describe_call(torch.ops.aten.cat.default, (tensors,), {}, torch.empty(6, 3, device="meta"))
    assert table.price(cat).flops == 18 + 2 + 1
    price = table.price(signature("aten::addmm", (6,), (4, 5), (5, 6)))
    assert (price.macs, price.flops) == (120, 1)


def test_the_exact_overload_wins_then_the_packet_then_the_functional_form(load):
    table = load(
        "ops:\n  aten::add: {flops: 1}\n  aten::add.Tensor: {flops: 2}\n"
        "  aten::mul_: {flops: 3}\n  aten::mul: {flops: 4}"
    )
    expected = {
        "aten::add.Scalar": 1,
        "aten::add.Tensor": 2,
        "aten::add_.Tensor": 2,
        "aten::add_.Scalar": 1,
        "aten::mul_.Tensor": 3,
    }
    assert {op: int(table.row(op).flops) for op in expected} == expected
    assert table.row("aten::__iand__.Tensor") is None


def test_the_nearer_entry_wins_and_a_nearer_packet_removes_inherited_overloads(tmp_path, load):
    (tmp_path / "base.yaml").write_text(
        "description: base\nmultiply_add: 2\nopaque: true\nfree: [aten::relu_, aten::add.Tensor, aten::mul]\n"
        "ops:\n  aten::sub: {flops: 1}\nmodules:\n  a.B: {macs: 1}\n  a.C: {macs: 1}"
    )
    table = load(
        "extends: base.yaml\nops:\n  aten::add: {flops: 1}\n  aten::relu: {flops: 2}\n"
        "  aten::mul.Tensor: {flops: 3}\nmodules:\n  a.B: {macs: 2}"
    )
    assert table.row("aten::add.Tensor").flops == "1"
    assert table.row("aten::relu_").flops == "2"
    assert table.row("aten::mul.Tensor").flops == "3"
    assert table.row("aten::mul.Scalar").kind == "zero_flop"
    assert table.row("aten::sub.Tensor").flops == "1"
    assert (table.multiply_add, table.opaque, table.description) == (2, True, "")
    assert [table.modules[name].macs for name in ("a.B", "a.C")] == ["2", "1"]
    again = load("extends: base.yaml\nmultiply_add: 1\nopaque: false")
    assert (again.multiply_add, again.opaque) == (1, False)


def test_a_table_extends_a_shipped_one(load):
    table = load("extends: default\nomitted: [aten::mm]")
    assert table.row("aten::mm").kind == "ignored"
    assert table.row("aten::bmm").file == "fvflops://default.yaml"
    assert load("extends: fvflops://fvcore.yaml").opaque


def test_a_uri_with_a_handler_of_the_users(tmp_path):
    from iopath.common.file_io import NativePathHandler, g_pathmgr

    class Handler(NativePathHandler):
        def _get_supported_prefixes(self):
            return ["fvflopstest://"]

        def _open(self, path, mode="r", buffering=-1, **kwargs):
            return super()._open(path.replace("fvflopstest:/", str(tmp_path)), mode, buffering, **kwargs)

        def _isfile(self, path, **kwargs):
            return super()._isfile(path.replace("fvflopstest:/", str(tmp_path)))

    g_pathmgr.register_handler(Handler(), allow_override=True)
    (tmp_path / "base.yaml").write_text("zero_flop: [aten::mm]")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml")
    assert load_table("fvflopstest://mine.yaml").row("aten::mm").file == "fvflopstest://base.yaml"
    with paths.path_manager().open("fvflops://default.yaml") as file:
        assert file.readline().startswith("#")


def test_shipped_tables_are_read_once():
    assert load_table("default") is load_table("fvflops://default.yaml")
    assert load_table("default").name == "default"


def test_a_users_table_is_read_each_time(load):
    assert load("multiply_add: 1").multiply_add == 1
    assert load("multiply_add: 2").multiply_add == 2


COMPUTES = """
    _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _coalesce allclose bartlett_window blackman_window
    coalesce conj_physical fft_fftfreq frac gather_backward hamming_window hann_window histc isclose kaiser_window
    logspace round.decimals round_.decimals scatter.reduce scatter_.value_reduce
"""


@pytest.mark.parametrize("name", COMPUTES.split())
def test_arithmetic_is_not_free(name):
    assert load_table("default").row(f"aten::{name}").kind == "ignored"


@pytest.mark.parametrize("name", ["scatter.src", "scatter_.value", "round", "arange", "dropout", "eq"])
def test_what_only_moves_or_compares_is_free(name):
    assert load_table("default").row(f"aten::{name}").kind == "zero_flop"


def test_a_table_stops_at_its_ops_and_their_in_place_forms(load):
    stops = load("zero_flop: [aten::dropout, aten::add.Tensor]\nops:\n  aten::conv2d: decompose").stops_at
    assert {"aten::dropout", "aten::dropout_", "aten::add.Tensor", "aten::add_.Tensor"} <= stops.names
    assert "aten::conv2d" not in stops
    assert "aten::linear" not in stops


def test_an_opaque_table_stops_at_all_but_decomposed_ops():
    stops = load_table("fvcore").stops_at
    assert "aten::conv2d.padding" not in stops
    assert "aten::conv2d" not in stops
    assert "aten::lstm.input" in stops
    assert "prim::PythonOp.Swish" in stops
    assert "mylib::composite" in stops


def test_an_op_that_is_decomposed_and_ran_whole_is_unknown():
    assert load_table("fvcore").price(Signature("aten::conv2d", (), (), ())).status is Status.UNSUPPORTED


def test_a_function_is_priced_by_its_class_name(load):
    table = load("ops:\n  prim::PythonOp.Swish: {flops: 4*numel(out) + numel(input_1)}")
    spec = TensorSpec((2, 3))
    price = table.price_function("Swish", RegionSignature(0, (spec, TensorSpec((5,))), (spec,)))
    assert (price.status, price.label, price.flops) == (Status.COUNTED, "PythonOp.Swish", 29)
    assert table.price_function("Other", RegionSignature(0, (), ())) is None  # looked into


def lstm():
    weight = ParameterInfo("encoder.rnn.weight_ih_l0", TensorSpec((12, 2)), 0, True)
    classes = ("mine.LSTM", "torch.nn.modules.rnn.LSTM", "torch.nn.modules.rnn.RNNBase")
    return ModuleInfo(
        "encoder.rnn",
        "encoder.rnn",
        "LSTM",
        classes,
        parameters=(weight,),
        attributes={"hidden_size": 3, "mode": "LSTM"},
    )


def test_a_module_is_priced_by_attributes_parameters_and_inputs(load):
    table = load(
        "modules:\n  torch.nn.LSTM:\n    shapes: t b i\n    macs: t*b*numel(weight_ih_l0) + hidden_size\n"
        "    flops: numel(input) + numel(out) if mode == 'LSTM' else 0\n    activations: len(outputs)"
    )
    call = RegionSignature(0, (TensorSpec((5, 1, 2)),), (TensorSpec((5, 1, 3)), TensorSpec((1, 1, 3))))
    row = table.module_row(lstm().classes)
    price = table.price_module(row, lstm(), call)
    assert (price.label, price.macs, price.flops, price.activations) == ("LSTM", 5 * 24 + 3, 25, 2)


def test_the_nearest_class_has_the_row_and_inner_packages_may_be_left_out(load):
    table = load("modules:\n  torch.nn.RNNBase: {macs: 1}\n  torch.LSTM: {macs: 2}\n  nn.LSTM: {macs: 3}")
    assert table.module_row(lstm().classes).macs == "2"
    assert table.module_row(("torch.nn.modules.rnn.RNNBase",)).macs == "1"
    assert table.module_row(("torch.nn.modules.conv.Conv2d",)) is None
    assert load("modules:\n  mine.LSTM: {macs: 4}\n  torch.nn.LSTM: {macs: 5}").module_row(lstm().classes).macs == "4"
    assert load("zero_flop: []").module_row(lstm().classes) is None


def test_a_mistake_in_a_module_row_is_told(load):
    row = load("modules:\n  torch.nn.LSTM: {macs: hidden_siz}")
    with pytest.raises(TableError, match=r"mine.yaml:2: torch.nn.LSTM: unknown name hidden_siz .did you mean hidden"):
        row.price_module(row.modules["torch.nn.LSTM"], lstm(), RegionSignature(0, (), ()))


def test_a_constant_is_a_name_and_the_nearer_table_says_what_it_is(load):
    families = "families:\n- {flops: numel(out)*exp, ops: [aten::exp, aten::exp2]}\n"
    base = load(f"constants: {{exp: 8, log: 4}}\n{families}ops:\n  aten::log: {{flops: log}}", "base.yaml")
    nearer = load("extends: base.yaml\nconstants: {exp: 1}", "nearer.yaml")
    for op, there, here in (("aten::exp", 16, 2), ("aten::exp2", 16, 2), ("aten::log", 4, 4)):
        call = signature(op, (2,), out=(2,))
        assert (base.price(call).flops, nearer.price(call).flops) == (there, here)
    assert nearer.constants == {"exp": 1, "log": 4}


def test_a_formula_reads_constants(load):
    register_formula("test_constant", lambda call: call.constants["exp"] * call.out.numel)
    table = load("constants: {exp: 8}\nops:\n  aten::exp: {use: test_constant, flops: numel(out)}")
    assert table.price(signature("aten::exp", (2,), out=(2,))).flops == 16 + 2


def test_arithmetic_on_whole_numbers_is_free_where_the_table_says_so(load):
    table = load(
        "floating_point_only: true\nops:\n  aten::add: {flops: numel(out)}\n  aten::mm: {macs: numel(out)}"
        "\n  aten::floor: {flops: numel(out)}"
    )

    def price(op, dtype):
        tensor = torch.empty(2, 2, dtype=dtype, device="meta")
        arguments = (tensor,) * (1 if op == "floor" else 2)
        overload = torch.ops.aten.add.Tensor if op == "add" else getattr(torch.ops.aten, op).default
        return table.price(describe_call(overload, arguments, {}, tensor))

    assert price("add", torch.int64).status is Status.ZERO_FLOP and price("add", torch.bool).flops == 0
    assert price("add", torch.float16).flops == price("add", torch.complex64).flops == 4
    assert price("mm", torch.int8).macs == 4, "a product of whole numbers counts"
    assert not load("extends: default").floating_point_only


def test_a_complex_product_counts_what_the_table_says(load):
    row = "ops:\n  aten::mm: {shapes: 'm k, k n', macs: m*k*n, flops: m*n}"
    operands = [torch.empty(shape, dtype=torch.complex64, device="meta") for shape in ((2, 3), (3, 4))]
    product = describe_call(torch.ops.aten.mm.default, operands, {}, operands[0])
    four = f"constants: {{complex_multiply_add: 4}}\n{row}"
    for text, more in ((row, 0), (four, 3 * 24), (f"multiply_add: 2\n{four}", 2 * 3 * 24)):
        price = load(text).price(product)
        assert (price.macs, price.flops) == (24, 8 + more)


def test_a_table_may_omit_what_the_one_that_it_extends_counts(load):
    table = load("extends: default\nignore_inherited: true\nops:\n  aten::mm: {macs: 7}")
    assert table.price(signature("aten::bmm", (1, 2, 3), (1, 3, 4), out=(1, 2, 4))).status is Status.IGNORED
    assert table.price(signature("aten::mm", (2, 3), (3, 4), out=(2, 4))).macs == 7
    assert table.row("aten::view").kind == "zero_flop" and table.row("aten::sigmoid").kind == "ignored"
    assert "aten::linear" in table.stops_at


def test_a_program_registers_a_formula(load):
    def test_scan(call):
        return Cost(macs=2 * call.out.numel, activations=1)

    register_formula("test_scan", test_scan)
    register_formula("test_scan", test_scan)
    price = load("ops:\n  mylib::scan: {use: test_scan}").price(
        Signature("mylib::scan", ("u",), (TensorSpec((2,)),), (TensorSpec((4,)),), "mylib::scan(Tensor u) -> Tensor")
    )
    assert (price.macs, price.activations) == (8, 1)
    row = load("ops:\n  mylib::scan: {use: test_scan, activations: numel(out) + 1}")
    assert row.price(Signature("mylib::scan", ("u",), (1,), (TensorSpec((4,)),))).activations == 5
    register_formula("test_number", lambda call: 7)
    assert load("ops:\n  aten::mm: {use: test_number}").price(signature("aten::mm", (4, 5), (5, 6))).flops == 7


def test_a_taken_name_is_refused():
    register_formula("test_taken", max)
    with pytest.raises(ValueError, match="'test_taken' is registered already"):
        register_formula("test_taken", min)
    with pytest.raises(ValueError, match="'convolution' is shipped"):
        register_formula("convolution", max)
    with pytest.raises(ValueError, match="a formula name must be an identifier"):
        register_formula("a b", max)
    with pytest.raises(TypeError, match="cannot be called"):
        register_formula("test_number_5", 5)
    with pytest.raises(TypeError, match=r"the formula 'test_two' takes \(a, b\): write a function of \(call\)"):
        register_formula("test_two", lambda a, b: 5)


@pytest.mark.parametrize("cost", [{"macs": -1}, {"flops": 1.5}, {"macs": True}, {"activations": -1}, {"macs": None}])
def test_a_cost_is_whole_and_not_negative(cost):
    with pytest.raises(ValueError, match="a Cost has"):
        Cost(**cost)


def test_what_writes_to_an_argument_costs_what_its_overload_costs():
    """`round` compares, `round.decimals` computes, and so does `round.decimals_out`."""
    table = load_table("default")
    assert table.row("aten::round.out").kind == "zero_flop"
    assert table.row("aten::round.decimals_out").kind == "ignored"
    assert table.row("aten::scatter.reduce_out").kind == "ignored"
