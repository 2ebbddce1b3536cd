"""The pairs that a mask leaves, counted on request by every attention that says its mask: against masks written out."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import flop_registry

from fvflops import FlopCountAnalysis, load_table, model_flops, record_call
from fvflops.capture.decomposed_attention import count_mask, count_pairs
from fvflops.capture.recorder.tensor_specs import describe_tensor
from fvflops.counting import TableCostModel, count
from fvflops.counting.uncounted_work import find_unknown_masks
from fvflops.formulas.functions.attention import SKIPS, band_size
from fvflops.trace import Signature, Status, TensorSpec, Trace
from fvflops.trace.spec import decode_value, encode_value
from tests.support.old_torch import needs
from tests.support.table_folder import TableFolder

B, H, D, Dv = 2, 3, 8, 5
ACTUAL = f"extends: default\nconstants: {{{SKIPS}: 1}}\n"

cases = settings(max_examples=60)  # the rest is the profile's
lengths = st.integers(1, 9)
widths = st.none() | st.integers(0, 10)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return the default table, and one that extends it and counts what masks leave."""
    folder = TableFolder(tmp_path_factory.mktemp("tables"))
    return folder("extends: default\n", "dense.yaml"), folder(ACTUAL, "actual.yaml")


def band(queries, keys, left=None, right=None, *, lower=False):
    """Return which key each query sees, of a band that is anchored at the first pair or at the last."""
    shift = keys - queries if lower else 0
    return torch.tensor(
        [
            [
                (left is None or key >= query + shift - left) and (right is None or key <= query + shift + right)
                for key in range(keys)
            ]
            for query in range(queries)
        ]
    )


@cases
@given(lengths, lengths, widths, widths, st.booleans())
def test_a_band_counts_as_its_mask(queries, keys, left, right, lower):
    shift = keys - queries if lower else 0
    assert band_size(queries, keys, left, right, shift) == int(band(queries, keys, left, right, lower=lower).sum())


def test_a_long_band_takes_no_time():
    n = 10**9
    assert band_size(n, n, right=0) == n * (n + 1) // 2
    assert band_size(n, n, left=0, right=0) == n


def test_torch_means_what_is_counted():
    """Against the pairs that torch's own kernel for the CPU weighs, and those in its masks of the two corners."""
    from torch.nn.attention.bias import CausalVariant, causal_lower_right, causal_upper_left

    for queries, keys in ((5, 5), (3, 6), (6, 3)):
        query, key, value = torch.randn(1, 1, queries, D), torch.randn(1, 1, keys, D), torch.eye(keys)[None, None]
        weights = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert int((weights > 0).sum()) == band_size(queries, keys, right=0)
        if queries <= keys:  # torch warns of rows that see nothing
            lower = causal_lower_right(queries, keys)._materialize()
            assert int(lower.sum()) == band_size(queries, keys, right=0, shift=keys - queries)
        assert int(causal_upper_left(queries, keys)._materialize().sum()) == band_size(queries, keys, right=0)
    assert (CausalVariant.UPPER_LEFT, CausalVariant.LOWER_RIGHT) == (1, 2)  # as custom_mask_type has them


# Of each op: how its tensors lie, and whether its causal mask is anchored at the lower right.
FIRST, THIRD = "heads first", "heads third"
OPS = {
    "aten::scaled_dot_product_attention": (FIRST, False),
    "aten::_scaled_dot_product_attention_math": (FIRST, False),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (FIRST, False),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (FIRST, False),
    "aten::_scaled_dot_product_flash_attention": (FIRST, True),
    "aten::_scaled_dot_product_flash_attention_backward": (FIRST, True),
    "aten::_scaled_dot_product_efficient_attention": (FIRST, False),
    "aten::_scaled_dot_product_efficient_attention_backward": (FIRST, False),
    "aten::_scaled_dot_product_cudnn_attention": (FIRST, False),
    "aten::_scaled_dot_product_cudnn_attention_backward": (FIRST, False),
    "aten::_scaled_dot_product_fused_attention_overrideable": (FIRST, False),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": (FIRST, False),
    "aten::_cudnn_attention_forward": (FIRST, False),
    "aten::_cudnn_attention_backward": (FIRST, False),
    "aten::_flash_attention_forward": (THIRD, True),
    "aten::_flash_attention_forward_no_dropout_inplace": (THIRD, True),
    "aten::_flash_attention_backward": (THIRD, True),
    "flash_attn::_flash_attn_forward": (THIRD, True),
    "flash_attn::_flash_attn_backward": (THIRD, True),
    "flash_attn_3::fwd": (THIRD, True),
    "xformers_flash::flash_fwd": (THIRD, True),
}


def call_of(op, layout, queries, keys, **more):
    """Return the signature of a call, by the names that its arguments have."""
    sizes = ((queries, D), (keys, D), (keys, Dv))
    shapes = [(B, H, *size) if layout == FIRST else (B, size[0], H, size[1]) for size in sizes]
    letters = op.startswith("flash_attn")
    names = ("q", "k", "v") if letters else ("query", "key", "value")
    arguments = {**dict(zip(names, map(TensorSpec, shapes), strict=True)), **more}
    out = TensorSpec((*shapes[0][:-1], Dv))
    return Signature(op, tuple(arguments), tuple(arguments.values()), (out,), op)


def check_pairs(tables, signature, mask):
    """Compare what both tables count for a call with a mask that is written out: two products, or five in backward."""
    width = 3 * D + 2 * Dv if "backward" in signature.op or "bwd" in signature.op else D + Dv
    dense, actual = (table.price(signature) for table in tables)
    assert dense.macs == B * H * mask.numel() * width
    assert actual.macs == B * H * int(mask.sum()) * width <= dense.macs
    assert (actual.status, actual.label) == (dense.status, dense.label)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 7), (7, 4), (1, 5)])
def test_a_causal_mask_counts_on_request(tables, op, queries, keys):
    layout, lower = OPS[op]
    name = "causal" if op.startswith("flash_attn::") else "is_causal"
    causal = call_of(op, layout, queries, keys, **{name: True})
    check_pairs(tables, causal, band(queries, keys, right=0, lower=lower))
    check_pairs(tables, call_of(op, layout, queries, keys, **{name: False}), band(queries, keys))


@cases
@given(lengths, lengths, st.sampled_from([0, 1, 2]), st.none() | st.integers(0, 12), st.booleans())
def test_the_mask_types_of_xformers_count_on_request(tables, queries, keys, kind, size, backward):
    op = f"aten::_efficient_attention_{'backward' if backward else 'forward'}"
    signature = call_of(op, THIRD, queries, keys, custom_mask_type=kind, window_size=size)
    left = size - 1 if size else None  # the window's keys, the query's own included
    mask = band(queries, keys, left, 0 if kind else None, lower=kind == 2)
    check_pairs(tables, signature, mask)


WINDOWS = {
    "aten::_flash_attention_forward": ("is_causal", "window_size_left", "window_size_right"),
    "aten::_flash_attention_backward": ("is_causal", "window_size_left", "window_size_right"),
    "flash_attn::_flash_attn_forward": ("causal", "window_size_left", "window_size_right"),
    "xformers_flash::flash_fwd": ("is_causal", "window_left", "window_right"),
    "torch_attn::_varlen_attn": ("is_causal", "window_size", ""),
}


@cases
@given(st.sampled_from(sorted(WINDOWS)), lengths, lengths, st.integers(-1, 10), st.integers(-1, 10), st.booleans())
def test_a_sliding_window_counts_on_request(tables, op, queries, keys, left, right, causal):
    flag, first, second = WINDOWS[op]
    sides = {first: left, second: right} if second else {first: (left, right)}
    signature = call_of(op, THIRD, queries, keys, **{flag: causal}, **sides)
    limits = [None if side < 0 else side for side in (left, right)]
    if causal:
        limits[1] = 0
    check_pairs(tables, signature, band(queries, keys, *limits, lower=True))


def test_packed_sequences_count_as_the_longest(tables):
    shapes = {"query": (11, H, D), "key": (9, H, D), "value": (9, H, Dv)}
    arguments = {name: TensorSpec(shape) for name, shape in shapes.items()}
    arguments |= {"cum_seq_q": TensorSpec((B + 1,), "int32"), "cum_seq_k": TensorSpec((B + 1,), "int32")}
    arguments |= {"max_q": 6, "max_k": 5, "is_causal": True}
    out = (TensorSpec((11, H, Dv)),)
    signature = Signature("aten::_flash_attention_forward", tuple(arguments), tuple(arguments.values()), out)
    check_pairs(tables, signature, band(6, 5, right=0, lower=True))


def attend(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def tensors_of_sizes(queries=6, keys=5):
    return torch.randn(B, H, queries, D), torch.randn(B, H, keys, D), torch.randn(B, H, keys, Dv)


def hide(mask, lowest):
    """Return a mask of numbers that hides what a mask of true and false does."""
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


SIZES = [(6, 5), (1, 1, 6, 5), (B, 1, 6, 5), (B, H, 6, 5), (1, 5), (B, 1, 1, 5), (H, 6, 1)]


@pytest.mark.parametrize("lowest", [None, float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_mask_leaves_what_is_true_in_it(tables, size, lowest, execution):
    mask = torch.rand(size, generator=torch.Generator().manual_seed(len(size))) < 0.6
    pairs = int(mask.expand(B, H, 6, 5).sum())
    inputs = (*tensors_of_sizes(), mask if lowest is None else hide(mask, lowest))
    dense, actual = (FlopCountAnalysis(attend, inputs, table=table, execution=execution) for table in tables)
    assert dense.total() == B * H * 30 * (D + Dv)
    assert actual.total() == pairs * (D + Dv) < dense.total()
    assert actual.trace().about["execution"] == execution


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_masks_that_differ_in_their_numbers_alone_are_told_apart(tables, execution):
    """Two calls with tensors that look alike, and one whose mask is changed between them in place."""
    masks = [torch.tensor([[True, False, True, False, True]]), torch.tensor([[True, True, True, True, False]])]

    def model(query, key, value, one, other):
        attend(query, key, value, one)
        attend(query, key, value, other)
        changed = one.clone()
        attend(query, key, value, changed)
        changed[:, 1] = True
        return attend(query, key, value, changed)

    analysis = FlopCountAnalysis(model, (*tensors_of_sizes(), *masks), table=tables[1], execution=execution)
    assert analysis.total() == B * H * 6 * (3 + 4 + 3 + 4) * (D + Dv)


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_mask_that_the_model_makes(tables, execution):
    """Of lengths, as models of text do: a row of a batch sees as many keys as there are."""

    def model(query, key, value, lengths):
        keep = torch.arange(key.shape[-2])[None, None, None] < lengths[:, None, None, None]
        return attend(query, key, value, keep.expand(-1, H, query.shape[-2], -1))

    inputs = (*tensors_of_sizes(), torch.tensor([2, 5]))
    analysis = FlopCountAnalysis(model, inputs, table=tables[1], execution=execution)
    assert analysis.total() == H * 6 * (2 + 5) * (D + Dv)


def test_a_mask_whose_numbers_nobody_knows_leaves_all_pairs_in_a_run(tables):
    """It is made of activations, which a run by shapes does not compute."""

    def model(query, key, value):
        return attend(query, key, value, query[..., :1] > 0)

    analysis = FlopCountAnalysis(model, tensors_of_sizes(), table=tables[1], execution="shapes")
    assert analysis.total() == B * H * 30 * (D + Dv)


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("mask", ["causal", "window", None])
@pytest.mark.parametrize("value_dim", [8, 6])
def test_training_counts_what_a_mask_leaves_where_torch_decomposes_attention(tables, execution, mask, value_dim):
    """With another size of value heads torch has no fused kernel on a CPU: two products forward, four backward."""
    queries, keys = 12, 10
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)[None]
    masks = {"causal": columns <= rows, "window": (columns <= rows) & (columns > rows - 4), None: columns >= 0}
    pairs = int(masks[mask].expand(queries, keys).sum())

    def model(query, key, value):
        kwargs = {"is_causal": True} if mask == "causal" else {} if mask is None else {"attn_mask": masks[mask]}
        return F.scaled_dot_product_attention(query * 1, key * 1, value * 1, **kwargs)

    sizes = (queries, 8), (keys, 8), (keys, value_dim)
    inputs = tuple(torch.randn(2, 3, *size, requires_grad=True) for size in sizes)
    trace = record_call(model, inputs, loss=torch.sum, execution=execution)
    for table, counted in zip(tables, (queries * keys, pairs), strict=True):
        entries = count(trace, TableCostModel(table, "flops"), "flops").entries
        macs = sum(entry.macs - entry.recomputed for entry in entries)
        assert macs == 3 * 2 * 3 * counted * (8 + value_dim)
        assert not find_unknown_masks(trace, table)
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize("value_dim", [8, 6])
def test_unknown_masks_are_named(tables, value_dim):
    def model(query, value):
        return F.scaled_dot_product_attention(query, query, value, attn_mask=query[0, 0, :, :1] > 0)

    inputs = torch.randn(1, 2, 16, 8, requires_grad=True), torch.randn(1, 2, 16, value_dim, requires_grad=True)
    analysis = FlopCountAnalysis(model, inputs, table=tables[1])
    assert "Mask unknown, counted as dense: aten::scaled_dot_product_attention ×1 (in model)." in " ".join(
        str(analysis).split()
    )
    trace = record_call(model, inputs, loss=torch.sum)
    step = SimpleNamespace(trace=lambda: trace)
    with pytest.warns(UserWarning, match="mask unknown, counted as dense"):
        assert model_flops(step, attention="causal") == model_flops(step)
    assert not find_unknown_masks(trace, tables[0])


def test_attention_that_is_called_by_an_imported_name_is_named(tables):
    """Its products cannot be told from others."""
    attend_ = F.scaled_dot_product_attention
    inputs = tuple(torch.randn(1, 2, 16, size, requires_grad=True) for size in (8, 6))
    trace = record_call(lambda query, value: attend_(query, query, value, is_causal=True), inputs, loss=torch.sum)
    assert list(find_unknown_masks(trace, tables[1])) == ["aten::_safe_softmax"]
    trace = record_call(lambda q, v: F.scaled_dot_product_attention(q, q, v), inputs, loss=torch.sum)
    assert not find_unknown_masks(trace, tables[1])


def test_the_numbers_of_a_call_are_saved_with_a_trace():
    mask = torch.rand(6, 5) < 0.6
    trace = FlopCountAnalysis(attend, (*tensors_of_sizes(), mask)).trace()
    loaded = Trace.from_json(trace.to_json())
    assert loaded.signatures == trace.signatures
    (values,) = (spec.values for spec in loaded.signatures[-1].inputs if isinstance(spec, TensorSpec) and spec.values)
    assert values == (int(mask.sum()),)


@cases
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_packed_sequences_count_one_by_one(tables, sequences, causal, backward):
    queries, keys = zip(*sequences, strict=True)
    starts_q, starts_k = (tuple(accumulate(lengths, initial=0)) for lengths in (queries, keys))
    specs = {
        "query": TensorSpec((sum(queries), H, D)),
        "key": TensorSpec((sum(keys), H, D)),
        "value": TensorSpec((sum(keys), H, Dv)),
        "cum_seq_q": TensorSpec((len(starts_q),), "int32", values=starts_q),
        "cum_seq_k": TensorSpec((len(starts_k),), "int32", values=starts_k),
    }
    arguments = {**specs, "max_q": max(queries), "max_k": max(keys), "is_causal": causal}
    op = f"aten::_flash_attention_{'backward' if backward else 'forward'}"
    out = (TensorSpec((sum(queries), H, Dv)),)
    signature = Signature(op, tuple(arguments), tuple(arguments.values()), out, op)
    masks = [band(q, k, right=0 if causal else None, lower=True) for q, k in sequences]
    width = 3 * D + 2 * Dv if backward else D + Dv
    if len(sequences) == 1 and starts_q[-1] == 0:
        return  # of nothing
    dense, actual = (table.price(signature).macs for table in tables)
    assert dense == H * sum(q * k for q, k in sequences) * width
    assert actual == H * sum(int(mask.sum()) for mask in masks) * width
    # torch's own formula, on tensors that hold these numbers
    formula = flop_registry[getattr(torch.ops.aten, op.removeprefix("aten::"))]
    given_ = [torch.empty(specs[name].shape, device="meta") for name in ("query", "key", "value")]
    starts = [torch.tensor(numbers, dtype=torch.int32) for numbers in (starts_q, starts_k)]
    if not backward:
        assert load_table("torch").price(signature).macs * 2 == formula(
            *given_, *starts, max(queries), max(keys), 0.0, causal, False, out_val=None
        )
    else:
        # torch wants the gradient in the query's shape
        same = [given_[0], given_[0], given_[1], given_[1], given_[0], given_[0]]
        equal = {**arguments, "value": specs["key"]}
        signature = Signature(op, tuple(equal), tuple(equal.values()), out, op)
        assert load_table("torch").price(signature).macs * 2 == formula(
            *same, *starts, max(queries), max(keys), 0.0, causal, None, None, out_val=None
        )


def test_packed_sequences_by_torchs_own_function(tables):
    """`torch.nn.attention.varlen`, by shapes and as on a GPU that this machine need not have."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    starts = torch.tensor([0, 3, 5, 11], dtype=torch.int32)
    query = torch.randn(11, H, D, dtype=torch.bfloat16)

    def model(query, starts):
        return varlen.varlen_attn(query, query, query, starts, starts, 6, 6)

    analysis = FlopCountAnalysis(model, (query, starts), table=tables[0], execution="shapes", device="cuda")
    assert analysis.total() == H * (9 + 4 + 36) * 2 * D
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]


PARTS = (3, 5, 2)


def nest(layout, *inner):
    return torch.nested.nested_tensor([torch.randn(length, *inner) for length in PARTS], layout=layout)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("execution", ["auto", "real"])
def test_parts_of_nested_tensors_count_without_padding(layout, execution):
    rows = sum(PARTS)
    linear = FlopCountAnalysis(nn.Linear(8, 6), nest(layout, 8), execution=execution)
    assert linear.total() == rows * 8 * 6
    exact = FlopCountAnalysis(torch.nn.functional.gelu, nest(layout, 8), execution=execution, table="exact")
    assert exact.total() == FlopCountAnalysis(F.gelu, torch.randn(rows, 8), table="exact").total()
    exact = FlopCountAnalysis(nn.Linear(8, 6), nest(layout, 8), execution=execution, table="exact")
    assert exact.total() == 2 * rows * 8 * 6 + rows * 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("execution", ["auto", "real"])
def test_the_attention_of_nested_tensors_counts_without_padding(execution):
    """Two heads of four, each part with itself: as a linear layer, by rows alone."""

    def attend_nested(x):
        query = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(query, query, query)

    analysis = FlopCountAnalysis(attend_nested, nest(torch.jagged, 8), execution=execution)
    assert analysis.total() == 2 * sum(length**2 for length in PARTS) * 2 * 4
    product = FlopCountAnalysis(lambda x: torch.bmm(x, x.transpose(1, 2)), nest(torch.strided, 8), execution=execution)
    assert product.total() == sum(length**2 for length in PARTS) * 8


def test_the_spec_of_a_nested_tensor():
    spec = describe_tensor(nest(torch.strided, 8))
    assert (spec.shape, spec.layout, spec.numel, spec.nbytes) == ((3, 5, 8), "nested", 80, 320)
    assert [part.shape for part in spec.parts()] == [(1, 3, 8), (1, 5, 8), (1, 2, 8)]
    assert decode_value(encode_value(spec)) == spec


flex = pytest.importorskip("torch.nn.attention.flex_attention")
# Of 5 x 4 blocks: a triangle, a window and nothing in particular.
MASKS = {
    "causal": lambda batch, head, query, key: query >= key,
    "window": lambda batch, head, query, key: (query - key).abs() <= 5,
    "by head": lambda batch, head, query, key: (query >= key) | (head == 1),
    "all": lambda batch, head, query, key: query >= 0,
}


def sum_blocks(blocks, queries, keys, sizes):
    """Return the pairs in the blocks of a mask [batch, heads, rows, columns] of ones and zeros, one by one."""
    return sum(
        min(sizes[0], queries - row * sizes[0]) * min(sizes[1], keys - column * sizes[1])
        for _, _, row, column in blocks.nonzero().tolist()
    )


@needs("flex_attention")
@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("inside", [False, True])
def test_flex_attention_counts_the_blocks_it_computes(tables, name, execution, inside):
    queries, keys, sizes = 70, 50, (16, 16)

    def make():
        return flex.create_block_mask(MASKS[name], None, 2, queries, keys, device="cpu", BLOCK_SIZE=sizes)

    mask = make()
    pairs = 3 * sum_blocks(mask.to_dense(), queries, keys, sizes)
    query, key = torch.randn(3, 2, queries, D), torch.randn(3, 2, keys, D)

    def model(query, key):
        return flex.flex_attention(query, key, key, block_mask=make() if inside else mask)

    dense, actual = (FlopCountAnalysis(model, (query, key), table=table, execution=execution) for table in tables)
    assert dense.by_operator()["flex_attention"] == 3 * 2 * queries * keys * 2 * D
    assert actual.by_operator()["flex_attention"] == pairs * 2 * D <= dense.by_operator()["flex_attention"]
    assert (pairs == 3 * 2 * queries * keys) == (name == "all")


@needs("flex_attention")
def test_flex_attention_without_a_mask_is_dense(tables):
    query = torch.randn(1, 2, 70, D)
    for table in tables:
        analysis = FlopCountAnalysis(lambda query: flex.flex_attention(query, query, query), query, table=table)
        assert analysis.total() == 2 * 70 * 70 * 2 * D


@needs("flex_attention")
def test_the_backward_of_flex_attention_counts_the_same_blocks(tables):
    mask = flex.create_block_mask(MASKS["causal"], None, None, 70, 70, device="cpu", BLOCK_SIZE=16)
    pairs = 3 * 2 * sum_blocks(mask.to_dense(), 70, 70, (16, 16))
    query = torch.randn(3, 2, 70, D)
    statistics = torch.randn(3, 2, 70)

    def model(query):
        rest = (query, statistics, query, statistics, torch.add, torch.add, mask.as_tuple(), 1.0, {})
        return torch.ops.higher_order.flex_attention_backward(query, query, query, *rest)

    for table, expected in zip(tables, (3 * 2 * 70 * 70, pairs), strict=True):
        analysis = FlopCountAnalysis(model, query, table=table, execution="shapes")
        assert analysis.by_operator()["flex_attention"] == expected * 5 * D


@cases
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 4), st.integers(0, 4), st.integers(0, 2**25 - 1))
def test_the_blocks_of_a_mask_are_summed(rows, columns, cut, narrow, bits):
    sizes, queries, keys = (5, 6), 5 * rows - cut, 6 * columns - narrow
    blocks = torch.tensor([[bits >> (row * 5 + column) & 1 for column in range(columns)] for row in range(rows)])
    indices = torch.argsort(blocks, dim=-1, descending=True, stable=True)
    expected = sum_blocks(blocks[None, None], queries, keys, sizes)
    assert count_pairs(blocks.sum(-1), indices.int(), (queries, keys), sizes) == expected


def test_a_mask_whose_numbers_are_not_there_stays_as_it_is():
    mask = flex.create_block_mask(MASKS["causal"], None, None, 70, 70, device="cpu", BLOCK_SIZE=16).as_tuple()
    args = (torch.randn(1, 1, 70, D),) * 3 + (None, mask)
    assert count_mask(args, 4, lambda tensors: False)[4] is mask
    counted = count_mask(args, 4, lambda tensors: True)
    assert counted[4][:-1] == mask[:-1] and counted[4][-1].value == sum_blocks(
        flex.create_block_mask(MASKS["causal"], None, None, 70, 70, device="cpu", BLOCK_SIZE=16).to_dense(),
        70,
        70,
        (16, 16),
    )
    assert count_mask(counted, 4, lambda tensors: True)[4] is counted[4]
