"""The analyses as people use them: inputs, handles, tables, names, warnings, loaded traces."""

import logging
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fvflops
from fvflops import (
    ActivationCountAnalysis,
    FlopCountAnalysis,
    JitModelAnalysis,
    ModelAnalysis,
    Trace,
    flop_count_str,
    flop_count_table,
)
from fvflops.formulas import Cost
from fvflops.trace import TraceError
from tests.support.models.parts import Applied
from tests.support.models.whole_models import Toy, build_case

X = torch.ones(1, 4)


def similar(self, x):
    return F.cosine_similarity(self.fc(x), x)


# default takes cosine_similarity for one op; this table looks inside.
LOOKS_INSIDE = "extends: default\nops:\n  aten::cosine_similarity: decompose\n"


def table_file(tmp_path, text):
    path = tmp_path / "table.yaml"
    path.write_text(text)
    return str(path)


def test_the_toy_network_of_fvcores_page():
    """conv 1→6 3×3 on 32×32, pool, conv 6→16 3×3, pool, 576→120→84→10: the page's figures, to the unit.

    By hand: 6·9·30·30 = 48600, 16·6·9·13·13 = 146016, 576·120 = 69120, 120·84 = 10080, 84·10 = 840.
    """
    flops = FlopCountAnalysis(Toy(), torch.randn(1, 1, 32, 32))
    assert flops.total() == 274656
    assert flops.by_operator() == Counter(conv=194616, linear=80040)
    modules = {"conv1": 48600, "conv2": 146016, "fc1": 69120, "fc2": 10080, "fc3": 840}
    assert flops.by_module() == Counter({"": 274656, **modules})
    assert flops.total("fc2") == 10080
    assert flops.by_operator("conv1") == Counter(conv=48600)
    assert flops.by_module_and_operator()["fc1"] == Counter(linear=69120)


@pytest.mark.parametrize(
    ("inputs", "kwargs"),
    [
        (X, {"scale": 2.0}),
        ((X,), {"scale": 2.0}),
        ([X, 2.0], None),
        ({"x": X, "scale": 2.0}, None),
        (None, {"x": X, "scale": 2.0}),
    ],
)
def test_inputs_of_every_kind(inputs, kwargs):
    assert (
        FlopCountAnalysis(
            Applied(lambda self, x, scale: self.fc(x) * scale, fc=nn.Linear(4, 4)), inputs, kwargs=kwargs
        ).total()
        == 16
    )


def test_an_argument_given_twice_is_refused():
    with pytest.raises(TypeError, match="'x' is in both"):
        FlopCountAnalysis(nn.Linear(4, 4), {"x": X}, kwargs={"x": X}).total()


def test_a_mapping_is_one_argument_where_the_model_takes_no_such_names():
    class Detector(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["image"])

    assert FlopCountAnalysis(Detector(4, 4), {"image": X}).total() == 16
    assert FlopCountAnalysis(Detector(4, 4), {"batch": {"image": X}}).total() == 16


def test_lstms_without_biases_count_the_same_in_both_vocabularies():
    def forward(self, x):
        with torch.enable_grad():
            t = torch.ones(1, requires_grad=True)
            torch.autograd.grad(t * 2, t)
        return self.model(x)

    for bias in (True, False):
        model, x = nn.LSTM(6, 5, 2, bias=bias, bidirectional=True), torch.ones(4, 3, 6)
        core = FlopCountAnalysis(Applied(forward, model=model), x)
        assert core.trace().about["vocabulary"] == "core"
        # 4 steps of 3 samples; 4 gates of 5; layer 1 sees 6 + 5, layer 2 sees 10 + 5; two directions.
        assert core.total() == FlopCountAnalysis(model, x).total() == 12 * 2 * 20 * (11 + 15)


def test_a_handle_set_late_on_a_decomposed_op_records_again(tmp_path):
    analysis = FlopCountAnalysis(Applied(similar, fc=nn.Linear(4, 4)), X, table=table_file(tmp_path, LOOKS_INSIDE))
    assert analysis.total() == 16
    first = analysis.trace()
    assert "aten::cosine_similarity" in first.decomposed
    analysis.set_op_handle("aten::cosine_similarity", lambda call: 7)
    assert analysis.by_operator() == Counter(linear=16, cosine_similarity=7)
    assert analysis.trace() is not first


def test_a_handle_on_an_op_that_was_seen_counts_the_same_trace_again():
    analysis = FlopCountAnalysis(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X)
    first = analysis.trace()
    analysis.set_op_handle("aten::relu", lambda call: call.out.numel)
    assert analysis.by_operator() == Counter(linear=16, relu=4)
    assert analysis.trace() is first


def test_a_loaded_trace_says_that_it_cannot_record_again(tmp_path):
    table = table_file(tmp_path, LOOKS_INSIDE)
    trace = Trace.from_json(FlopCountAnalysis(Applied(similar, fc=nn.Linear(4, 4)), X, table=table).trace().to_json())
    loaded = FlopCountAnalysis.from_trace(trace, table=table)
    assert loaded.total() == 16
    loaded.set_op_handle("aten::cosine_similarity", lambda call: 7)
    with pytest.raises(TraceError, match=r"has decomposed aten::cosine_similarity.*record the model again"):
        loaded.total()


def test_a_row_on_a_module_class_covers_what_runs_inside(tmp_path):
    class Own(nn.LSTM):
        """Inherits LSTM's forward, so LSTM's row holds for it."""

    class Other(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    path = table_file(
        tmp_path, "extends: default\nmodules:\n  torch.nn.LSTM: {macs: '1000 * hidden_size + size(weight_ih_l0, 1)'}\n"
    )
    x = torch.ones(2, 3, 5)
    for cls, covered in ((nn.LSTM, True), (Own, True), (Other, False)):
        model = nn.Sequential(nn.Linear(5, 5), cls(5, 7))
        flops = FlopCountAnalysis(model, x, table=path)
        lstm = FlopCountAnalysis(model, x).total("1")
        assert flops.total("1") == (7005 if covered else lstm)
        assert flops.total() == flops.total("0") + flops.total("1")
        assert ("LSTM" in flops.by_operator()) == covered


def test_an_outer_module_row_wins_over_an_inner_one(tmp_path):
    path = table_file(
        tmp_path, "extends: default\nmodules:\n  torch.nn.Sequential: {flops: '5'}\n  torch.nn.Linear: {flops: '3'}\n"
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert FlopCountAnalysis(model, X, table=path).by_module() == Counter({"": 5, "0": 0, "1": 0})


def test_fused_attention_counts_the_same_in_every_grad_mode():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.ones(2, 8, 16)
    with_grad = FlopCountAnalysis(layer, x).by_module_and_operator()
    with torch.no_grad():
        without = FlopCountAnalysis(layer, x).by_module_and_operator()
    assert with_grad == without
    # 2·8 tokens: qkv 3·16·16, output 16·16, mlp 2·16·32; attention 2 heads · 8·8 · (8+8) a sample.
    assert without[""]["linear"] == 16 * (3 * 256 + 256 + 2 * 512)
    assert without["self_attn"]["scaled_dot_product_attention"] == 2 * 2 * 64 * 16


def test_what_one_table_looks_into_another_may_not():
    model, x = torch.nn.Conv2d(3, 4, 3, padding="same"), torch.ones(1, 3, 8, 8)
    for _ in range(2):
        assert FlopCountAnalysis(model, x).total() == 4 * 8 * 8 * 3 * 9
        assert FlopCountAnalysis(model, x, table="fvcore").total() == 0  # fvcore's gap


def test_none_makes_an_op_ignored_also_where_a_handle_or_a_row_stands():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    analysis = FlopCountAnalysis(model, X)
    assert analysis.by_operator() == Counter(linear=16, batch_norm=8)
    analysis.set_op_handle("aten::batch_norm", None)
    assert analysis.by_operator() == Counter(linear=16)
    assert not analysis.unsupported_ops()
    analysis.set_op_handle("aten::linear", lambda call: 5).set_op_handle("aten::linear", None)
    assert analysis.total() == 0


def test_handles_can_name_labels_and_are_checked():
    analysis = FlopCountAnalysis(nn.Linear(4, 4), X)
    analysis.set_op_handle("aten::linear", lambda call: Counter(multiply=16, add=4))
    assert analysis.by_operator() == Counter(multiply=16, add=4)
    with pytest.raises(TypeError, match="pairs"):
        analysis.set_op_handle("aten::linear")
    with pytest.raises(TypeError, match="must be a function, or None to ignore the op"):
        analysis.set_op_handle("aten::linear", 3)
    with pytest.raises(TypeError, match=r"handle of aten::linear takes \(a, b, c\): write a function of \(call\)"):
        analysis.set_op_handle("aten::linear", lambda a, b, c: 1)
    with pytest.raises(ValueError, match=r"'Fused' is not an op name: .* prim::PythonOp\.Fused"):
        analysis.set_op_handle("Fused", lambda call: 1)
    with pytest.raises(TypeError, match="must be the name of an op, such as 'aten::linear'; got a function"):
        analysis.set_op_handle(lambda call: 1, "aten::linear")
    with pytest.raises(TypeError, match=r"by name: write 'prim::PythonOp\.Function'"):
        analysis.set_op_handle(torch.autograd.Function, lambda call: 1)
    with pytest.raises(ValueError, match=r"no attribute 'in_features': write call\.attributes\['in_features'\]"):
        FlopCountAnalysis(nn.Linear(4, 4), X).set_module_handle(nn.Linear, lambda call: call.in_features).total()
    with pytest.raises(TypeError, match=r"takes a class or its name, torch\.nn\.\S*Linear, got a Linear first"):
        analysis.set_module_handle(nn.Linear(4, 4), lambda call: 1)
    with pytest.raises(TypeError, match="takes a class or its name, got a function first"):
        analysis.set_module_handle(lambda call: 1, nn.Linear)
    with pytest.raises(ValueError, match=r"return a Python int, .* a Cost is what a formula returns"):
        analysis.set_op_handle("aten::linear", lambda call: Cost(macs=1)).total()
    with pytest.raises(ValueError, match="aten::linear returned 'many'"):
        analysis.set_op_handle("aten::linear", lambda call: "many").total()
    analysis.set_op_handle("aten::linear", lambda call: 1.5e9)
    assert type(analysis.total()) is int and analysis.total() == 1_500_000_000
    for wrong in (True, 2.5, -3, -1.0, float("nan"), float("inf"), Counter(part=0.5)):

        def halved(inputs, outputs, result=wrong):
            return result

        with pytest.raises(ValueError, match=r"^the handle halved of aten::linear returned .*: return a Python int, 0"):
            analysis.set_op_handle("aten::linear", halved).total()
    numpy = pytest.importorskip("numpy", reason="a handle may return NumPy numbers; NumPy is in the extra `test`")
    assert analysis.set_op_handle("aten::linear", lambda call: numpy.int64(3)).total() == 3
    with pytest.raises(ValueError, match="int32"):
        analysis.set_op_handle("aten::linear", lambda call: numpy.int32(3)).total()


def test_a_module_handle_counts_at_the_module(caplog):
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.LSTM(8, 4))
    analysis = FlopCountAnalysis(model, X).set_module_handle(nn.Linear, lambda call: call.shape("input")[-1])
    assert analysis.by_module()["0"] == 4 and analysis.by_module()["1"] == 8
    assert analysis.by_operator() == Counter(Linear=12, lstm=4 * 4 * (8 + 4))
    analysis.set_module_handle("torch.nn.RNNBase", None, nn.Sequential, lambda call: Counter(all=1, of=2))
    assert analysis.by_operator() == Counter(all=1, of=2), "the outermost module covers the others"
    assert (
        FlopCountAnalysis(model, X).total()
        == analysis.copy(new_inputs=X).clear_op_handles().total() + 4 * 8 + 8 * 8 + 192
    )
    with pytest.raises(ValueError, match=r"no module class is named torch.nn.LSTMM: did you mean torch.nn.LSTM\?"):
        analysis.set_module_handle("torch.nn.LSTMM", None)
    with pytest.raises(TypeError, match="pairs of a class and a handle"):
        analysis.set_module_handle(nn.LSTM)
    with pytest.raises(ValueError, match=r"the handle <lambda> of torch\.nn\.Linear returned 'many'"):
        FlopCountAnalysis(model, X).set_module_handle(nn.Linear, lambda call: "many").total()


def test_a_module_row_covers_what_is_inside_or_adds_to_it(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))

    def total(row):
        path = tmp_path / "mine.yaml"
        path.write_text(f"extends: default\nmodules:\n  torch.nn.Sequential: {row}\n")
        return FlopCountAnalysis(model, X, table=str(path)).by_operator()

    assert total("{flops: 5}") == Counter(Sequential=5)
    assert total("{flops: 5, covers: false}") == Counter(Sequential=5, linear=96)
    assert total("zero_flop") == Counter()


def test_a_module_row_can_ask_for_an_absent_parameter(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: default\nmodules:\n  torch.nn.Linear: {flops: 1 if is_none(bias) else 2}\n")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8, bias=False))
    assert FlopCountAnalysis(model, X, table=str(path)).by_module() == Counter({"": 3, "0": 2, "1": 1})


def test_a_handle_on_one_overload_leaves_the_others():
    def model(x):
        return (x + x).sum() + x.sum(1)

    analysis = FlopCountAnalysis(model, X).set_op_handle("aten::sum.dim_IntList", lambda call: 9)
    assert analysis.by_operator() == Counter({"sum.dim_IntList": 9})


def test_the_base_class_counts_nothing_until_it_has_handles():
    analysis = JitModelAnalysis(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X)
    assert analysis.total() == 0
    assert analysis.unsupported_ops() == Counter({"aten::linear": 1})
    assert analysis.set_op_handle("aten::linear", lambda inputs, outputs: 3).total() == 3
    assert JitModelAnalysis is ModelAnalysis


def test_a_copy_keeps_class_and_settings():
    analysis = FlopCountAnalysis(nn.Linear(4, 4), X, table="fvcore").ancestor_mode("caller")
    analysis.set_op_handle("aten::linear", lambda call: 5)
    twin = analysis.copy(new_model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert type(twin) is FlopCountAnalysis and twin.total() == 10
    assert analysis.copy(new_inputs=torch.ones(7, 4)).clear_op_handles().total() == 0
    assert analysis.total() == 5


def test_wrong_names_and_modes_say_what_is_right():
    analysis = FlopCountAnalysis(Toy(), torch.ones(1, 1, 32, 32))
    with pytest.raises(KeyError, match=r"no module is named 'fc4': did you mean 'fc[123]'"):
        analysis.total("fc4")
    with pytest.raises(ValueError, match="owner, caller"):
        analysis.ancestor_mode("parent")
    with pytest.raises(ValueError, match="no_tracer_warning"):
        analysis.tracer_warnings("some")
    with pytest.raises(fvflops.formulas.TableError, match="did you mean 'default'"):
        FlopCountAnalysis(Toy(), X, table="defalt")


def test_unknown_ops_are_warned_of_in_one_line(caplog):
    @torch.library.custom_op("fvflops_test::scan", mutates_args=())
    def scan(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    scan.register_fake(torch.empty_like)

    def model(x):
        return scan(scan(x)) + 1

    with caplog.at_level(logging.WARNING):
        analysis = FlopCountAnalysis(model, X)
        analysis.total(), analysis.by_module()
    assert [record.getMessage() for record in caplog.records] == [
        "Unsupported, so not counted: fvflops_test::scan ×2 (in model); see unsupported_ops()"
    ]
    assert analysis.unsupported_ops() == Counter({"fvflops_test::scan": 2, "aten::add": 1})
    assert analysis.counts().unsupported_elements() == Counter({"fvflops_test::scan": 8})
    caplog.clear()
    FlopCountAnalysis(model, X).unsupported_ops_warnings(False).total()
    assert not caplog.records
    FlopCountAnalysis(model, X, warn=False).total()
    FlopCountAnalysis.from_trace(analysis.trace(), warn=False).total()
    assert not caplog.records
    FlopCountAnalysis.from_trace(analysis.trace()).total()
    assert len(caplog.records) == 1


def test_uncalled_modules_are_warned_of_in_one_line(caplog):
    with caplog.at_level(logging.WARNING):
        analysis = FlopCountAnalysis(
            Applied(
                lambda self, x: self.used(x),
                used=nn.Linear(4, 4),
                unused=nn.Linear(4, 4),
                holder=nn.ModuleList([nn.Identity()]),
            ),
            X,
        )
        assert analysis.uncalled_modules() == {"unused", "holder", "holder.0"}
    assert len(caplog.records) == 1 and "unused" in caplog.text and "holder" not in caplog.text


@pytest.mark.parametrize("write", [flop_count_table, flop_count_str])
def test_a_table_disables_warnings_while_it_runs_the_model_and_restores_them(write, caplog):
    analysis = FlopCountAnalysis(Applied(lambda self, x: x + 1, unused=nn.Linear(4, 4)), X)
    with caplog.at_level(logging.WARNING):
        write(analysis)
        assert not caplog.records
        analysis.copy(new_inputs=torch.ones(2, 4)).total()
        assert len(caplog.records) == 1


def test_warnings_of_the_model_can_be_silenced():
    import warnings

    def model(x):
        warnings.warn("from the model", stacklevel=1)
        return x + 1

    with pytest.warns(UserWarning, match="from the model"):
        FlopCountAnalysis(model, X).total()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FlopCountAnalysis(model, X).tracer_warnings("none").total()


def test_activations_are_outputs_of_convolutions_and_products():
    model, inputs = build_case("zoo:lenet5")
    assert ActivationCountAnalysis(model, inputs).by_operator() == Counter(
        conv=6 * 784 + 16 * 100, linear=120 + 84 + 10
    )
    q = torch.ones(1, 2, 8, 4)
    attention = ActivationCountAnalysis(F.scaled_dot_product_attention, (q, q, q))
    assert attention.total() == 2 * 8 * 8 + 2 * 8 * 4


def test_nan_empty_and_zero_size_tensors_count():
    model = nn.Linear(4, 3)
    assert FlopCountAnalysis(model, torch.full((2, 4), float("nan"))).total() == 24
    assert FlopCountAnalysis(model, torch.ones(0, 4)).total() == 0
    assert FlopCountAnalysis(nn.Conv2d(3, 4, 1), torch.ones(0, 3, 8, 8)).total() == 0


def test_models_without_parameters_or_with_thousands_of_modules():
    assert FlopCountAnalysis(nn.Identity(), X).total() == 0
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3_000)))
    flops = FlopCountAnalysis(model, torch.ones(1, 1))
    assert flops.total() == 3_000 and flops.total("2999") == 1
    assert flop_count_table(flops).count("\n") == 9_000 + 2
    assert flop_count_str(flops).count("Linear(") == 3_000


def test_every_public_name_is_there_and_says_what_it_is():
    for name in fvflops.__all__:
        assert getattr(fvflops, name).__doc__, name
    assert set(fvflops.__all__) <= set(dir(fvflops))
    with pytest.raises(AttributeError, match="flop_counts"):
        fvflops.flop_counts  # noqa: B018


def test_a_child_whose_name_has_dots_belongs_to_what_holds_it():
    """torch's add_module refuses such names, setattr does not."""
    model = nn.Sequential(nn.Linear(4, 4))
    setattr(model[0], "a.b", nn.Linear(4, 8))
    model.forward = lambda x: getattr(model[0], "a.b")(model[0](x))
    flops = FlopCountAnalysis(model, torch.ones(1, 4))
    assert flops.by_module() == {"": 48, "0": 48, "0.a.b": 32}


@pytest.mark.parametrize(
    "op",
    [
        *("aten::gelu", "aten::gelu.default", "torch.ops.aten.gelu.default", "torch.ops.aten.gelu"),
        *(torch.ops.aten.gelu.default, torch.ops.aten.gelu),
    ],
)
def test_every_name_of_an_op_is_one_for_a_handle(op, caplog):
    analysis = FlopCountAnalysis(nn.Sequential(nn.Linear(4, 4), nn.GELU()), X)
    assert analysis.set_op_handle(op, lambda call: 8 * call.out.numel).by_operator()["gelu"] == 32
    assert not caplog.records


NO_OPS = {
    "aten::gellu": "torch has no op aten::gellu: did you mean aten::gelu",
    "aten::gelu.Tensor": "torch has no op aten::gelu.Tensor: did you mean aten::gelu",
    "torch.ops.aten.gellu.default": "torch has no op aten::gellu: did you mean aten::gelu",
    "Aten::gelu": "there is no op Aten::gelu: did you mean aten::gelu",
    "gelu": "'gelu' is not an op name: write namespace::name",
    "aten.gelu": "'aten.gelu' is not an op name",
}


@pytest.mark.parametrize("name", NO_OPS)
def test_a_handle_for_no_op_is_refused(name):
    analysis = FlopCountAnalysis(nn.GELU(), X)
    for handle in (None, lambda call: 1):
        with pytest.raises(ValueError, match=re.escape(NO_OPS[name])):
            analysis.set_op_handle("aten::mm", handle, name, handle)
    assert analysis.total() == 0


UNUSED = {
    "aten::gelu_": "The handle of aten::gelu_ is not used: the model did not call this op: did you mean 'aten::gelu'?",
    "aten::add.Scalar": "The handle of aten::add.Scalar is not used: the model did not call this op",
    "mylib::scan": "The handle of mylib::scan is not used: the model did not call this op",
    "prim::PythonOp.Swish": "The handle of prim::PythonOp.Swish is not used: the model did not call this op",
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_handle_of_an_op_that_is_not_called_is_named(name, caplog):
    analysis = FlopCountAnalysis(nn.Sequential(nn.Linear(4, 4), nn.GELU()), X)
    analysis.set_op_handle("aten::gelu", lambda call: 1, name, lambda call: 2, "aten::sin", None).counts()
    (record,) = caplog.records
    assert record.getMessage().startswith(UNUSED[name])
    caplog.clear()
    analysis.set_op_handle(name, None).counts()  # which has no effect either way
    analysis.uncalled_modules_warnings(False).set_op_handle(name, lambda call: 2).counts()
    assert not caplog.records


def test_a_module_handle_of_a_class_that_is_not_called_is_named(caplog):
    class Mine(nn.Module):
        pass

    analysis = FlopCountAnalysis(nn.Sequential(nn.Linear(4, 4), nn.GELU()), X)
    analysis.set_module_handle(Mine, lambda call: 1, nn.Linear, lambda call: 2, "Gelu", lambda call: 3).counts()
    unused = [record.getMessage() for record in caplog.records]
    assert "Mine is not used: the model called no such module" in unused[0] and len(unused) == 2
    with pytest.raises(ValueError, match="is not a module class: a handle of an op or a function is for set_op_handle"):
        analysis.set_module_handle(torch.autograd.Function, lambda call: 1)


def test_an_exception_in_a_handle_names_the_op_and_the_handle():
    def count_gelu(call):
        return call.arguments["inptu"]

    analysis = FlopCountAnalysis(nn.Sequential(nn.Linear(4, 4), nn.GELU()), X).set_op_handle("aten::gelu", count_gelu)
    expected = (
        r"^the handle count_gelu of aten::gelu raised KeyError: 'inptu'; called as aten::gelu\(self=float32\[1, 4\]"
    )
    with pytest.raises(ValueError, match=expected) as caught:
        analysis.total()
    assert isinstance(caught.value.__cause__, KeyError)
    analysis = FlopCountAnalysis(nn.GELU(), X).set_module_handle(nn.GELU, lambda inputs, outputs: inputs[7])
    with pytest.raises(ValueError, match=r"^the handle <lambda> of torch\.nn\.GELU raised IndexError: list index"):
        analysis.total()
