"""Formulas against loops and the products that torch runs, and every composite row against what it decomposes into."""

import itertools
import random
import re
from types import SimpleNamespace

import numpy
import pytest
import torch
from fvcore.nn.jit_handles import einsum_flop_jit
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from fvflops import FlopCountAnalysis
from fvflops.analysis.table_examples import bind_example, overloads_of, sign_example
from fvflops.capture.recorder.tensor_specs import describe_call, describe_op
from fvflops.formulas import Call, load_table
from fvflops.formulas.language.example import Example
from fvflops.formulas.registry import FORMULAS, find_formula
from fvflops.formulas.rows import cost_of_call
from fvflops.trace import TensorSpec
from fvflops.trace.calls import packet_of
from tests.support.old_torch import OLDER
from tests.support.pricing_mode import DEFAULT, Products, meta, price, run


def is_composite(op):
    """Return whether torch can decompose an op; one that this torch lacks cannot be."""
    known = op.startswith("aten::") and bool(torch._C._jit_get_schemas_for_operator(packet_of(op)))
    return known and describe_op(overloads_of(op)[0]).composite


# Their kernels take sparse tensors only, which tests/formulas/test_sparse.py gives them.
SPARSE_ONLY = {"aten::smm", "aten::sspaddmm"}
COMPOSITE = [
    row
    for row in DEFAULT.rows.values()
    if row.kind == "counted" and is_composite(row.name) and row.name not in SPARSE_ONLY
]
# row → why its flops differ from its parts'; multiply-adds and activations never do
OTHER_FLOPS = {"aten::upsample_nearest2d": "torch takes it apart into indexing, which is free"}
# Under a dispatch mode torch takes them apart into an op that computes the vectors too.
VALUES_ONLY = {"aten::linalg_eigvals", "aten::linalg_eigvalsh", "aten::linalg_svdvals"}


@pytest.mark.parametrize("row", COMPOSITE, ids=lambda row: row.name)
def test_a_composite_row_is_the_sum_of_its_parts(row):
    if OLDER and row.name == "aten::_convolution":
        pytest.skip(f"torch {torch.__version__} has no meta kernel of {row.name}")
    example = Example.parse(row.example)
    overload = next(item for item in overloads_of(row.name) if bind_example(item._schema, example) is not None)
    products = run(overload, **bind_example(overload._schema, example))
    whole = DEFAULT.price(sign_example(row.name, row.example))
    assert products.unknown == []
    if row.name in VALUES_ONLY:
        assert products.macs > whole.macs > 0
        return
    assert products.macs == whole.macs
    assert (products.flops != whole.flops) == (row.name in OTHER_FLOPS)
    assert products.activations == (whole.activations or 0)


def test_the_composite_rows_are_there():
    names = {row.name for row in COMPOSITE}
    assert {"aten::linear", "aten::matmul", "aten::einsum", "aten::lstm", "aten::scaled_dot_product_attention"} <= names


def test_a_broadcast_matmul_counts_what_runs_and_fvcore_does_not():
    args = (meta(3, 1, 5, 4), meta(2, 4, 6))
    assert price("matmul", args=args).macs == 3 * 2 * 5 * 4 * 6 == 720
    assert price("matmul", load_table("fvcore"), args=args).macs == 360


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_of_ones_sums_to_its_products(transposed, stride, padding, dilation, groups):
    image, weight = (2, 4, 9), (4, 4 // groups, 3)
    rest = (None, [stride], [0], [dilation], transposed, [0], groups)
    # Every product is 1, so their sum is their number. What a plain convolution pads is multiplied too, here with ones;
    # what a transposed one crops was computed, so that its padding changes nothing.
    ones = torch.ones(image) if transposed else torch.ones(*image[:-1], image[-1] + 2 * padding)
    products = torch.ops.aten.convolution.default(ones, torch.ones(weight), *rest).sum()
    args = (meta(*image), meta(*weight), None, [stride], [padding], [dilation], transposed, [0], groups)
    assert price("convolution", args=args).macs == products
    assert price("convolution", load_table("fvcore"), args=args).macs == products


def test_a_convolution_without_a_batch_is_one_image():
    for image in ((4, 8, 8), (1, 4, 8, 8)):
        assert run(torch.conv2d, meta(*image), meta(6, 4, 3, 3)).macs == 6 * 6 * 6 * 4 * 9
        call = Call(
            "aten::conv2d",
            {"input": TensorSpec(image), "weight": TensorSpec((6, 4, 3, 3))},
            (TensorSpec((*image[:-3], 6, 6, 6)),),
            "aten::conv2d(Tensor input, Tensor weight) -> Tensor",
        )
        assert FORMULAS["convolution"](call).macs == 6 * 6 * 6 * 4 * 9


@pytest.mark.parametrize("module", [nn.Conv2d(4, 6, 3, padding="same"), nn.Conv2d(4, 6, 3, padding="valid")])
def test_padding_by_name_is_seen(module):
    module = module.to("meta")
    positions = 64 if module.padding == "same" else 36
    assert run(module, meta(1, 4, 8, 8)).macs == positions * 6 * 4 * 9


@pytest.mark.parametrize(
    ("left", "right", "macs"),
    [
        ((6, 4), (2, 4, 5), 6 * 4 * 5),
        ((2, 3, 4), (2, 4, 5), 2 * 3 * 4 * 5),
        ((2, 3, 8), (8, 5), 3 * 8 * 5),
        ((3, 8), (8, 5), 3 * 8 * 5),
    ],
)
def test_grouped_products_of_all_ranks(left, right, macs):
    specs = {"self": TensorSpec(left), "mat2": TensorSpec(right), "offs": None}
    call = Call("aten::_grouped_mm", specs, (TensorSpec((1,)),))
    assert cost_of_call(DEFAULT.rows["aten::_grouped_mm"], call).macs == macs


@pytest.mark.parametrize("table", ["default", "exact"])
def test_grouped_products_end_at_the_last_offset_where_it_is_known(table):
    row = load_table(table).rows["aten::_grouped_mm"]

    def macs(left, right, ends):
        offsets = TensorSpec((2,), "int32", values=ends)
        specs = {"self": TensorSpec(left), "mat2": TensorSpec(right), "offs": offsets, "bias": None}
        return cost_of_call(row, Call("aten::_grouped_mm", specs, (TensorSpec((1,)),))).macs

    assert macs((9, 4), (2, 4, 6), (3, 7)) == 7 * 4 * 6  # rows
    assert macs((2, 9, 4), (4, 6), (3, 5)) == 9 * 4 * 5  # columns
    assert macs((9, 4), (4, 6), (1, 2)) == 9 * 2 * 6  # of the contracted dimension
    assert macs((9, 4), (2, 4, 6), (3, 9)) == macs((9, 4), (2, 4, 6), None) == 9 * 4 * 6


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_rows_of_no_expert_are_not_counted(execution):
    def experts(x, weights, ends):
        return torch.nn.functional.grouped_mm(x, weights, offs=ends)

    x, weights = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(2, 16, 24, dtype=torch.bfloat16)
    ends = torch.tensor([2, 5], dtype=torch.int32)
    for table in ("default", "exact"):
        analysis = FlopCountAnalysis(experts, (x, weights, ends), table=table, execution=execution)
        assert analysis.macs() == 5 * 16 * 24
    on_meta = FlopCountAnalysis(experts, (x.to("meta"), weights.to("meta"), ends.to("meta")))
    assert on_meta.macs() == 8 * 16 * 24  # unknown offsets


def test_lu_and_cholesky_are_their_loops():
    for m, n in itertools.product(range(5), repeat=2):
        loops = sum((m - k) * (n - k) for k in range(1, min(m, n) + 1))
        assert price("linalg_lu_factor_ex", args=(meta(m, n),)).macs == loops
        if m == n:
            loops = sum(1 for j in range(n) for i in range(j, n) for _ in range(j))
            assert price("linalg_cholesky_ex", args=(meta(n, n),)).macs == loops
            assert price("_linalg_det", args=(meta(n, n),)).macs == sum((n - k) ** 2 for k in range(1, n + 1))


def test_least_squares_is_qr_reflectors_and_a_triangular_solve():
    for batch, k in (((), 1), ((2,), 5)):
        matrix, sides = torch.ones(*batch, 4, 3) + torch.eye(4, 3), torch.ones(*batch, 4, k)
        reflectors, tau = torch.geqrf(matrix)
        parts = [
            price("geqrf", args=(matrix,)),
            price("ormqr", args=(reflectors, tau, sides)),
            price("linalg_solve_triangular", args=(meta(*batch, 3, 3), meta(*batch, 3, k)), upper=True),
        ]
        assert price("linalg_lstsq", args=(matrix, sides)).macs == sum(part.macs for part in parts)
    assert price("linalg_lstsq", args=(torch.eye(4, 3).expand(2, 4, 3), torch.ones(2, 4))).macs == 2 * (27 + 18)
    assert price("linalg_lstsq", args=(torch.eye(4, 3)[None], torch.ones(2, 4, 5))).macs == 234, "each copy is factored"
    assert price("linalg_lstsq", args=(torch.eye(3, 4), torch.ones(3, 5))).macs == 27 + 5 * 18, "a wide matrix"


def test_few_reflectors_make_an_orthogonal_matrix_cheaply():
    m, n, k = 300, 200, 20
    loops = sum(2 * (m - j) * (n - j) for j in range(k))  # each reflector meets the columns right of it
    assert price("linalg_householder_product", args=(meta(m, n), meta(k))).macs == pytest.approx(loops, rel=0.01)
    assert price("linalg_householder_product", args=(meta(4, 3), meta(3))).macs == 4 * 9 - 9


def test_a_nuclear_norm_is_looked_into():
    assert DEFAULT.row("aten::nuclear_norm") is None
    assert run(torch.ops.aten.nuclear_norm.default, meta(4, 3)).macs > 0


def test_fft_is_five_n_log_n():
    assert run(torch.fft.fft2, torch.empty(3, 8, 4, dtype=torch.complex64)).flops == 5 * 96 * 5
    assert run(torch.fft.rfft, torch.empty(3, 8)).flops == 5 * 24 * 3 // 2


RECURRENT = [
    pytest.param(layer, options, id=f"{layer.__name__}-{options}")
    for layer, options in [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 2, "bias": False}),
        (nn.GRU, {}),
        (nn.GRU, {"num_layers": 3, "bidirectional": True}),
        (nn.RNN, {"nonlinearity": "tanh"}),
        (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "batch_first": True}),
    ]
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("layer", "options"), RECURRENT)
def test_a_recurrent_layer_is_the_products_of_its_cells(layer, options, packed):
    module = layer(6, 5, **options)
    batch_first = options.get("batch_first", False)
    data = torch.ones(3, 7, 6) if batch_first else torch.ones(7, 3, 6)
    if packed:
        data = pack_padded_sequence(data, torch.tensor([7, 4, 2]), batch_first=batch_first)
    with torch.backends.mkldnn.flags(enabled=False):
        whole, parts = run(module, data, apart=False), run(module, data)
    assert whole.macs == parts.macs > 0
    assert whole.activations == parts.activations
    steps = 13 if packed else 21
    assert whole.macs == steps * sum(weight.numel() for weight in module.parameters() if weight.ndim == 2)


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4),
    st.integers(1, 4),
)  # fmt: skip
def test_attention_is_its_two_products(B, groups, Hk, Q, K, D, Dv):
    query, key, value = meta(B, Hk * groups, Q, D), meta(B, Hk, K, D), meta(B, Hk, K, Dv)
    whole = price("scaled_dot_product_attention", args=(query, key, value), enable_gqa=groups > 1)
    assert whole.macs == B * Hk * groups * Q * K * (D + Dv)
    assert whole.activations == B * Hk * groups * Q * (K + Dv)
    repeated = [tensor.repeat_interleave(groups, 1) for tensor in (key, value)]
    scores = price("matmul", args=(query, repeated[0].mT))
    assert whole.macs == scores.macs + price("matmul", args=(meta(B, Hk * groups, Q, K), repeated[1])).macs


@pytest.mark.parametrize(
    ("query", "key", "pairs"),
    [
        ((5, 4), (6, 4), 30),
        ((3, 5, 4), (3, 6, 4), 90),
        ((2, 3, 5, 4), (1, 1, 6, 4), 180),
        ((2, 0, 5, 4), (2, 0, 6, 4), 0),
    ],
)
def test_attention_takes_any_batch(query, key, pairs):
    specs = {"query": TensorSpec(query), "key": TensorSpec(key), "value": TensorSpec(key)}
    assert FORMULAS["attention"](Call("attention", specs, (TensorSpec(query),))).macs == pairs * 8


@pytest.mark.parametrize(
    ("layer", "inputs", "hidden"),
    [
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, 16),
        (nn.MultiheadAttention(8, 2, batch_first=True), 3, 0),
    ],
)
def test_a_fused_layer_is_its_slow_path(layer, inputs, hidden):
    layer, data = layer.eval(), (torch.ones(3, 5, 8),) * inputs
    with torch.no_grad(), Products(apart=False) as fused:
        layer(*data)
    assert fused.unknown == []
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        slow = run(layer, *data)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert fused.macs == slow.macs == 3 * 5 * (4 * 8 * 8 + 2 * 8 * hidden) + 2 * 3 * 5 * 5 * 8
    assert fused.flops == slow.flops if hidden else fused.activations == slow.activations


def random_einsum(seed):
    """Return an equation, shapes and perhaps a path: broadcasts, diagonals, ellipses, spaces, implicit outputs."""
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    sizes = {letter: rng.choice([1, 2, 3, 4, 5, 0 if seed % 20 == 0 else 2]) for letter in "abcdeZ"}
    hidden = [rng.randint(1, 3), rng.randint(1, 3)]
    terms, shapes = [], []
    for _ in range(count):
        term = [rng.choice("abcdeZ") for _ in range(rng.randint(0, 4))]
        shape = [1 if rng.random() < 0.1 and term.count(letter) == 1 else sizes[letter] for letter in term]
        if rng.random() < 0.25:
            position, length = rng.randint(0, len(term)), rng.randint(0, 2)
            term.insert(position, "...")
            shape[position:position] = hidden[2 - length :]
        terms.append("".join(term))
        shapes.append(tuple(shape))
    equation = rng.choice([",", ", ", " , "]).join(terms)
    used = [letter for letter in sizes if any(letter in term for term in terms)]
    if rng.random() < 0.7:
        output = rng.sample(used, rng.randint(0, len(used)))
        if "..." in equation and rng.random() < 0.7:
            output.insert(rng.randint(0, len(output)), "...")
        equation += " -> " + "".join(output)
    path = None
    if rng.random() < 0.4 and count > 1:
        path = [index for left in range(count, 1, -1) for index in rng.sample(range(left), 2)]
    return equation, shapes, path


def einsum_cases(count):
    """Yield equations that torch accepts, with the signature of the call and the multiply-adds that ran."""
    found = 0
    for seed in itertools.count():
        if found == count:
            return
        equation, shapes, path = random_einsum(seed)
        tensors = [torch.empty(shape) for shape in shapes]
        operation = torch.ops.aten.einsum.default
        try:
            with torch.no_grad(), Products() as products:
                result = operation(equation, tensors, path=path)
        except RuntimeError:
            continue
        found += 1
        yield equation, shapes, describe_call(operation, (equation, tensors), {"path": path}, result), products.macs


def test_einsum_counts_the_products_of_its_path():
    worked = 0
    for equation, shapes, signature, macs in einsum_cases(400):
        assert find_formula("einsum")(Call.of(signature)).macs == macs, (equation, shapes)
        worked += macs > 0
    assert worked > 100


def jit_value(**answers):
    """Return a stand-in for a value of a traced graph, as fvcore's handle reads it."""
    value = SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})
    value.type = value.node = lambda: value
    return value


def fvcore_einsum(equation, shapes):
    """Return fvcore's count of an einsum, which fvcore parses from the text that numpy prints."""
    tensors = [jit_value(isCompleteTensor=True, sizes=list(shape)) for shape in shapes]
    return einsum_flop_jit([jit_value(toIValue=equation), jit_value(inputs=tensors)], [])


def test_fvcore_einsum_is_the_number_that_numpy_prints():
    compared = 0
    for equation, shapes, signature, _ in einsum_cases(150):
        try:
            expected = fvcore_einsum(equation, shapes)
        except ValueError:  # numpy refuses a repeated output of broadcast sizes, which torch accepts
            continue
        assert find_formula("fvcore_einsum")(Call.of(signature)).macs == expected, (equation, shapes)
        compared += 1
    assert compared >= 110


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bik->bjk", [(7, 31, 37), (7, 31, 41)]),
        ("XYZ,XWZ->XWY", [(7, 31, 37), (7, 41, 37)]),
        ("ab,bc,cd->ad", [(300, 411), (411, 7), (7, 999)]),
        ("ab,cd,ef,gh,bc,de,fg->ah", [(2, 3), (4, 5), (6, 7), (8, 9), (3, 4), (5, 6), (7, 8)]),
        ("nqhd,nkhd->nhqk", [(2, 197, 12, 64), (2, 197, 12, 64)]),
        ("i,j,k->ijk", [(50,), (60,), (70,)]),
    ],
)
def test_fvcore_einsum_of_common_equations(equation, shapes):
    tensors = tuple(TensorSpec(shape) for shape in shapes)
    call = Call("aten::einsum", {"equation": equation, "tensors": tensors}, (TensorSpec(()),))
    assert find_formula("fvcore_einsum")(call).macs == fvcore_einsum(equation, shapes)


def test_fvcore_einsum_has_four_digits():
    spec = TensorSpec((1234, 5678))
    call = Call("aten::einsum", {"equation": "ab,ab->", "tensors": (spec, spec)}, (TensorSpec(()),))
    assert 1234 * 5678 == 7_006_652
    assert find_formula("fvcore_einsum")(call).macs == 7_005_000


@pytest.mark.parametrize("equation", ["ij", "ij,jk,kl", "ijk,jk", "i1,jk", "ij,jk->ij->k"])
def test_an_error_repeats_an_invalid_equation(equation):
    pair = (TensorSpec((2, 3)), TensorSpec((3, 4)))
    with pytest.raises(ValueError, match="equation"):
        FORMULAS["einsum"](Call("aten::einsum", {"equation": equation, "tensors": pair}, (TensorSpec(()),)))


def test_the_path_of_many_operands_is_found_quickly_or_refused():
    """Every product is within numpy's limit, so that all paths are tried, 10^9 for nine operands."""

    def cost(count):
        letters = "abcdefghijk"[:count]
        equation = ",".join(f"{letter}z" for letter in letters) + f"->{letters}"
        tensors = (TensorSpec((2, 3)),) * count
        call = Call("aten::einsum", {"equation": equation, "tensors": tensors}, (TensorSpec((2,) * count),))
        return find_formula("numpy_einsum")(call).flops

    letters = "abcdef"
    equation = ",".join(f"{letter}z" for letter in letters) + f"->{letters}"
    text = numpy.einsum_path(equation, *[numpy.empty((2, 3))] * 6, optimize="optimal")[1]
    assert cost(6) == float(re.search(r"Optimized FLOP count: *(\S+)", text)[1])
    assert cost(9) > cost(8) > cost(7)
    with pytest.raises(ValueError, match="einsum of 10 operands is not computed: at most 9"):
        cost(10)
