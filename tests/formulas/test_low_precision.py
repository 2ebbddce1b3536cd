"""Weights of few bits: bitsandbytes and torchao, where they are installed, and what stands for them where not."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, load_table, parameter_count, parameter_summary
from fvflops.capture.model.model_index import read_modules
from fvflops.counting.count_trace import find_dtype
from fvflops.formulas import Call
from fvflops.formulas.rows import cost_of_call
from fvflops.trace import ModuleTree, Signature, Status, Symbol, TensorSpec
from tests.support.models.parts import Applied
from tests.support.schemas.library_schemas import define_library_schemas

EXECUTIONS = ("shapes", "real")


def linear(rows, *sizes):
    """Return the multiply-adds of linear layers one after the other on some rows."""
    return sum(rows * inner * outer for inner, outer in pairwise(sizes))


@pytest.fixture(scope="module")
def bnb():
    """Return bitsandbytes, with which come kernels for the CPU."""
    return pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("nested", [True, False])
def test_layers_of_four_bits(bnb, kind, rows, execution, nested):
    """Two layers of 128 x 64 and 64 x 32, each of one product; the second computes in bfloat16."""
    options = {"quant_type": kind, "compress_statistics": nested}
    first = bnb.nn.Linear4bit(128, 64, compute_dtype=torch.float32, **options)
    second = bnb.nn.Linear4bit(64, 32, bias=False, compute_dtype=torch.bfloat16, **options)
    model = nn.Sequential(first, nn.ReLU(), second).to("cpu")
    assert first.weight.numel() == 128 * 64 // 2
    analysis = FlopCountAnalysis(model, torch.rand(rows, 128), execution=execution)
    assert analysis.total() == linear(rows, 128, 64, 32)
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]
    assert analysis.by_dtype() == {"float32": rows * 128 * 64, "bfloat16": rows * 64 * 32}
    assert analysis.trace().about["execution"] == execution
    assert parameter_count(model)[""] == 128 * 64 + 64 + 64 * 32
    summary = parameter_summary(analysis)[""]
    assert (summary.active, summary.unused) == (128 * 64 + 64 + 64 * 32, 0)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_layers_of_eight_bits(bnb, execution):
    model = nn.Sequential(
        bnb.nn.Linear8bitLt(128, 64, has_fp16_weights=False), bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
    ).to("cpu")
    analysis = FlopCountAnalysis(model, torch.rand(5, 128), execution=execution)
    assert analysis.total() == linear(5, 128, 64, 32)
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]
    assert parameter_count(model)[""] == 128 * 64 + 64 + 64 * 32 + 32


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_the_kernels_of_eight_bits(bnb, threshold, execution):
    """What Linear8bitLt calls where there are kernels for it: on the CPU their plain versions run."""
    weight = torch.randint(-128, 128, (16, 64), dtype=torch.int8)
    x = torch.rand(4, 64, dtype=torch.float16)
    x[2, 7] = x[3, 9] = 40.0  # outliers, in two columns
    ops = torch.ops.bitsandbytes

    def run(x):
        rows, scale, outliers = ops.int8_vectorwise_quant(x, threshold)
        stats = torch.ones(16)
        if outliers is None:
            return ops.int8_scaled_mm(rows, weight, scale, stats, None, torch.float16)
        return ops.int8_mixed_scaled_mm(x, rows, weight, scale, stats, outliers, None)[0]

    # By shapes nobody knows how many columns have outliers.
    analysis = FlopCountAnalysis(run, x, execution="real" if threshold else execution)
    assert analysis.total() == 4 * 16 * (64 + (2 if threshold else 0))
    assert analysis.by_dtype() == {"int8": analysis.total()}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_quantising_is_known(bnb, kind, execution):
    """In `exact`: of 256 numbers in blocks of 64 nine flops each, four in a search among 15, one a block; back one."""
    from bitsandbytes import functional

    def run(x):
        packed, state = functional.quantize_4bit(x, blocksize=64, quant_type=kind)
        return functional.dequantize_4bit(packed, state)

    analysis = FlopCountAnalysis(run, torch.rand(4, 64), table="exact", execution=execution)
    by_operator = analysis.by_operator()
    assert (by_operator["quantize_4bit"], by_operator["dequantize_4bit"]) == (9 * 256 + 4, 256)
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]
    assert FlopCountAnalysis(run, torch.rand(4, 64)).total() == 0


class State:
    """What bitsandbytes says of a weight that it has packed."""

    quant_type, shape = "nf4", torch.Size([64, 128])


class Packed(nn.Parameter):
    """A stand-in for bitsandbytes' Params4bit."""

    quant_state = State()


def test_packed_parameters_count_as_their_elements():
    model = nn.Linear(128, 64)
    model.weight = Packed(torch.zeros(64 * 128 // 2, 1, dtype=torch.uint8), requires_grad=False)
    assert parameter_count(model) == {"": 8256, "weight": 8192, "bias": 64}
    assert parameter_summary(model)[""].trainable == 64
    tree = read_modules(model)
    spec = next(iter(tree.parameters())).spec
    assert (spec.shape, spec.dtype, spec.nbytes) == ((64, 128), "nf4", 4096)
    assert ModuleTree.decode(tree.encode()) == tree


def test_a_state_that_does_not_fit_is_not_believed():
    """Of 100 bytes no more than 200 numbers: what calls itself a state may be another's."""
    model = nn.Module()
    model.weight = Packed(torch.zeros(100, 1, dtype=torch.uint8), requires_grad=False)
    assert parameter_count(model)[""] == 100


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such type")
def test_numbers_of_four_bits_that_share_an_element():
    """torch's float4_e2m1fn_x2, as a parameter and in a product."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(6, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), requires_grad=False)
    assert parameter_count(model)[""] == 6 * 16
    for dtype, packed in (("float4_e2m1fn_x2", 2), ("float8_e4m3fn", 1)):
        names = ("self", "mat2", "scale_a", "scale_b", "bias")
        specs = (TensorSpec((16, 8), dtype), TensorSpec((8, 32), dtype), TensorSpec(()), TensorSpec(()), None)
        schema = "aten::_scaled_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? bias) -> Tensor"
        signature = Signature("aten::_scaled_mm", names, specs, (TensorSpec((16, 32)),), schema)
        for table in ("default", "exact"):
            assert load_table(table).price(signature).macs == packed * 16 * 8 * 32


@pytest.mark.parametrize(
    ("op", "names", "inputs", "dtype"),
    [
        ("bitsandbytes::int8_scaled_mm", ("A", "row_stats"), (("int8"), ("float32")), "int8"),
        ("quantized::linear_dynamic", ("X",), ("float32",), "int8"),
        ("quantized::linear_dynamic_fp16", ("X",), ("float32",), "float32"),
        ("onednn::qlinear_pointwise", ("qx", "x_scale"), ("uint8", "float32"), "uint8"),
        ("onednn::qlinear_pointwise.tensor", ("qx", "x_scale"), ("uint8", "float32"), "uint8"),
        ("aten::_int_mm", ("self", "mat2"), ("int8", "int8"), "int8"),
        ("aten::mm", ("self", "mat2"), ("bfloat16", "bfloat16"), "bfloat16"),
        ("mylib::scan", ("index", "u"), ("int64", "float32"), "float32"),
    ],
)
def test_the_dtype_that_a_kernel_computes_in(op, names, inputs, dtype):
    specs = tuple(TensorSpec((2, 3), item) for item in inputs)
    assert find_dtype(op, names, specs, ()) == dtype


def test_a_recurrent_layer_of_float16_weights_computes_in_float32():
    inputs = (TensorSpec((2, 3)), Symbol("dtype", "float16"))
    assert find_dtype("aten::quantized_lstm.input", ("input", "dtype"), inputs, ()) == "float32"
    assert find_dtype("aten::quantized_lstm.input", ("input", "dtype"), inputs[:1], ()) == "int8"


AO = {
    "Int8WeightOnlyConfig": "bfloat16",
    "Int8DynamicActivationInt8WeightConfig": "int8",
    "Float8WeightOnlyConfig": "bfloat16",
    "IntxWeightOnlyConfig": "bfloat16",
}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("config", AO)
def test_weights_of_torchao(config, execution):
    quantization = pytest.importorskip("torchao.quantization")
    if not hasattr(quantization, config):
        pytest.skip(f"this torchao has no {config}")
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16().eval()
    quantization.quantize_(model, getattr(quantization, config)())
    assert type(model[0].weight) is not nn.Parameter
    analysis = FlopCountAnalysis(model, torch.rand(5, 128, dtype=torch.bfloat16), execution=execution)
    assert analysis.total() == linear(5, 128, 64, 32)
    assert analysis.by_dtype() == {AO[config]: analysis.total()}
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]
    assert parameter_count(model)[""] == 128 * 64 + 64 + 64 * 32 + 32


def reset(spike, h, at):
    return h - spike * 0.7 if at is None else spike * at + (1 - spike) * h


def fire(h):
    return (h >= 0.7).to(h.dtype)


def charge_if(x, v, at):
    return reset(fire(h := v + x), h, at)


def charge_lif(x, v, at):
    return reset(fire(h := v + (x - (v - 0.3)) / 2.5), h, at)


def charge_qif(x, v, at):
    return reset(fire(h := v + (x + 0.6 * (v - 0.3) * (v - 0.4)) / 2.5), h, at)


def charge_eif(x, v, at):
    return reset(fire(h := v + (x + 0.3 - v + 0.4 * torch.exp((v - 0.2) / 0.4)) / 2.5), h, at)


def charge_izhikevich(x, v, w, at):
    h = v + (x + 0.6 * (v - 0.3) * (v - 0.4) - w) / 2.5
    spike = fire(h)
    return reset(spike, h, at), w + (0.2 * (h - 0.3) - w) / 3.5 + 0.9 * spike


def charge_ilif(x, v):
    h = 0.6 * v + x
    return h - (h / 0.7).clamp(0, 4).round() * 0.7


def charge_stbif(x, q, fired):
    q = q + x / 0.7
    fired = fired.round()
    up, down = ((q >= 1) & (fired < 4)).float(), ((q < 0) & (fired > -4)).float()
    spike = up - down
    return spike * 0.7, q - up + down, fired + spike


def charge_activation_aware(x, v, at):
    h = v + x
    return reset(fire(h + 0.1), h, at)


NEURONS = {
    "sj_if": (charge_if, 2),
    "sj_lif": (charge_lif, 2),
    "sj_qif": (charge_qif, 2),
    "sj_eif": (charge_eif, 2),
    "sj_izhikevich": (charge_izhikevich, 3),
    "sj_activation_aware_if": (charge_activation_aware, 2),
    "sj_ilif": (charge_ilif, 2),
    "sj_stbif": (charge_stbif, 3),
}
WITHOUT_RESET = ("sj_ilif", "sj_stbif")


@pytest.mark.parametrize(
    ("name", "at"), [(name, at) for name in NEURONS for at in (None, 0.3) if at is None or name not in WITHOUT_RESET]
)
def test_a_spiking_neuron_costs_what_its_arithmetic_does(name, at):
    """In `exact`; in `default` it is arithmetic that is left out, as any other elementwise one."""
    charge, states = NEURONS[name]
    tensors = tuple(torch.rand(2, 8) for _ in range(states))
    step = charge if name in WITHOUT_RESET else lambda *given: charge(*given, at)
    written = FlopCountAnalysis(step, tensors, table="exact").total()
    spec = TensorSpec((3, 2, 8))
    call = Call(f"{name}::forward", {"x": spec, "reset": at}, (spec,), constants=load_table("exact").constants)
    row = load_table("exact").row(f"{name}::forward")
    assert cost_of_call(row, call).flops == 3 * written
    assert load_table("default").row(f"{name}::forward").kind == "ignored"
    if name in BACK:
        assert load_table("default").row(f"{name}::backward").kind == "ignored"


def over(number, z):
    """Return a quotient in one division: torch runs `number / z` as a reciprocal and a product."""
    return torch.div(torch.tensor(number), z)


SURROGATES = [
    lambda z: (1 - (s := torch.sigmoid(4.5 * z))) * s * 4.5,
    lambda z: over(2.5, 1 + (y := z * 6.5) * y),
    lambda z: (4.5 - 20.5 * z.abs()).clamp_min(0),
    lambda z: 2.5 * torch.exp(-4.5 * z.abs()),
    lambda z: over(1.0, 9.5 * (y := 0.25 + z.abs()) * y),
    lambda z: over(4.5, (y := 1 + z.abs()) * y),
    lambda z: 2.5 * torch.exp(-(y := 4.5 * z) * y),
]


def go_back(h, gs, gv, carry, surrogate, at, *, detached):
    """Return the gradients of the charge of one step and of the surrogate."""
    sg = surrogate(h - 0.7)
    if at is None:
        through = None if detached else 1 - 0.7 * sg
    else:
        through = 1 - fire(h)
        if not detached:
            through = through + (at - h) * sg
    incoming = carry + gv
    # To multiply by 1, where a soft reset is detached, is one multiplication in the kernel.
    return gs * sg + (incoming * 1.5 if through is None else incoming * through), sg


def back_if(h, gs, gv, carry, **how):
    return go_back(h, gs, gv, carry, **how)[0]


def back_lif(h, gs, gv, carry, **how):
    gh, _ = go_back(h, gs, gv, carry, **how)
    return gh / 2.5, gh - gh / 2.5


def back_qif(h, gs, gv, carry, before, **how):
    gh, _ = go_back(h, gs, gv, carry, **how)
    return gh / 2.5, gh * (1 + 0.6 * (2 * before - 0.3 - 0.4) / 2.5)


def back_eif(h, gs, gv, carry, before, **how):
    gh, _ = go_back(h, gs, gv, carry, **how)
    return gh / 2.5, gh * (1 + (torch.exp((before - 0.2) / 0.4) - 1) / 2.5)


def back_izhikevich(h, gs, gv, carry, before, gw, carried, **how):
    gh, sg = go_back(h, gs, gv, carry, **how)
    incoming = carried + gw
    gh = gh + incoming * (0.9 * sg + 0.3)
    passed = gh * (1 + 0.6 * (2 * before - 0.3 - 0.4) / 2.5)
    return gh / 2.5, passed, incoming * 0.8 - gh / 2.5


BACK = {"sj_if": (back_if, 4), "sj_lif": (back_lif, 4), "sj_qif": (back_qif, 5), "sj_eif": (back_eif, 5)}
BACK["sj_izhikevich"] = (back_izhikevich, 7)


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("at", [None, 0.3])
@pytest.mark.parametrize("name", BACK)
def test_the_backward_of_a_spiking_neuron_costs_what_its_arithmetic_does(name, at, detached):
    back, number = BACK[name]
    tensors = tuple(torch.rand(2, 8) for _ in range(number))
    spec = TensorSpec((3, 2, 8))
    row, constants = load_table("exact").row(f"{name}::backward"), load_table("exact").constants
    for surrogate_id, surrogate in enumerate(SURROGATES):
        how = {"surrogate": surrogate, "at": at, "detached": detached}
        written = FlopCountAnalysis(partial(back, **how), tensors, table="exact").total()
        arguments = {"gs": spec, "reset": at, "detach_reset": detached, "surrogate_id": surrogate_id}
        call = Call(f"{name}::backward", {**arguments, "decay_input": True}, (spec,), constants=constants)
        assert cost_of_call(row, call).flops == 3 * written


@pytest.mark.parametrize("detached", [True, False])
def test_the_backward_of_a_neuron_of_many_levels_costs_what_its_arithmetic_does(detached):
    def back(h, gs, gv, carry):
        scaled = h / 0.7
        sg = ((scaled >= 0) & (scaled <= 4)).float() / 0.7
        incoming = carry + gv
        return (gs * sg + incoming * (1.5 if detached else 1 - 0.7 * sg)) * 0.6

    written = FlopCountAnalysis(back, tuple(torch.rand(2, 8) for _ in range(4)), table="exact").total()
    spec, table = TensorSpec((3, 2, 8)), load_table("exact")
    call = Call("sj_ilif::backward", {"gs": spec, "detach_reset": detached}, (spec,), constants=table.constants)
    assert cost_of_call(table.row("sj_ilif::backward"), call).flops == 3 * written


@pytest.mark.parametrize("at", [None, 0.3])
def test_the_backward_of_a_neuron_with_a_learned_decay_charges_its_steps_anew(at):
    """It costs more than a plain leaky neuron's by the membrane before each step but the first, and the decay's sum."""
    gs, v, w = TensorSpec((3, 2, 8)), TensorSpec((2, 8)), TensorSpec(())
    table = load_table("exact")
    given = {"gs": gs, "reset": at, "detach_reset": True, "surrogate_id": 1, "decay_input": True}
    plain, learned = (
        cost_of_call(
            table.row(f"{name}::backward"),
            Call(f"{name}::backward", {**given, **more}, (gs,), constants=table.constants),
        ).flops
        for name, more in (("sj_lif", {}), ("sj_plif", {"v": v, "w": w}))
    )
    before = FlopCountAnalysis(lambda h: reset(fire(h), h, at), torch.rand(2, 2, 8), table="exact").total()
    # gh * q twice, and a difference, for 3; x - (previous - reset), times gh, and a sum; sigmoid and its slope.
    assert learned - plain == 3 * 16 * 4 + before + 16 + (8 + 3) + 3


def test_a_neuron_runs_in_a_model():
    """The op of a layer of neurons is no longer unknown, by shapes and for real."""
    define_library_schemas()
    library = torch.library.Library("sj_if", "IMPL")
    for key in ("CPU", "Meta"):
        library.impl("forward", lambda x, v, *rest: (x.clone(), x.clone(), x.clone()), key)

    def net(self, x):
        x = self.linear(x)
        return torch.ops.sj_if.forward(x, x[0], 1.0, 0.0, False, 4.0, True, 0)[0]

    for execution in EXECUTIONS:
        analysis = FlopCountAnalysis(Applied(net, linear=nn.Linear(8, 6)), torch.rand(4, 2, 8), execution=execution)
        assert analysis.total() == 4 * 2 * 8 * 6
        assert not analysis.counts().ledger()[Status.UNSUPPORTED]
        exact = FlopCountAnalysis(
            Applied(net, linear=nn.Linear(8, 6)), torch.rand(4, 2, 8), table="exact", execution=execution
        )
        assert exact.by_operator()["forward"] == 4 * 2 * 6 * 6
