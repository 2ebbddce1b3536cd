"""Ops of libraries that are not installed: each library's schema, a small module that calls it, and a count by tally.

The hand is a program of the oracle's kind, which does what the kernel does with numbers that tell a tally of their
multiply-adds: the attention of tests/oracle/test_attention.py, and a scan and a convolution that are checked here.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, load_table
from fvflops.formulas import TableError
from fvflops.trace import Status
from tests.support.models.whole_models import Function
from tests.support.oracle.attention import attention, attention_backward
from tests.support.oracle.number import Tally, linear, matmul, plus_product, values
from tests.support.random_cases import long_except
from tests.support.schemas.library_schemas import SCHEMAS, define_library_schemas

DEFAULT = load_table("default")


def attend(tally, *sequences):
    """Do the attention of one sequence, [Q, H, D] on [K, Hk, D] and [K, Hk, Dv]; heads may share their keys."""
    attention(tally, *(tally.numbers(x.transpose(0, 1)[None]) for x in sequences))


def attend_backward(tally, *sequences):
    """Go back through the attention of one sequence with keys and values of a size, the scores computed again."""
    query, key, value = (tally.numbers(x.transpose(0, 1)[None]) for x in sequences)
    attention_backward(tally, query, query, key, value, query, query[..., 0])


def macs_of(step, *sequences):
    """Return the multiply-adds of a step on sequences, each the shapes of query, key and value."""
    tally = Tally()
    for shapes in sequences:
        step(tally, *(rand(*shape) for shape in shapes))
    return tally.macs


def scan(tally, u, steps, A, B, C):
    """Return the selective scan of u and steps [D, L] by A [D, N], B and C [N, L]."""
    states, out = tally.zeros(*A.shape), []
    for x, delta, b, c in zip(u.T, steps.T, B.T, C.T, strict=True):
        states = plus_product(delta[:, None] * b * x[:, None], np.exp(delta[:, None] * A), states)
        out.append(tally.dot(states, c))
    return np.stack(out, 1)


def convolve(tally, x, weight):
    """Return the causal depthwise convolution of x [D, L] by a weight [D, W]."""
    width = weight.shape[1]
    padded = np.concatenate([tally.zeros(len(x), width - 1), x], 1)
    return tally.dot(np.stack([padded[:, step : step + width] for step in range(x.shape[1])], 1), weight[:, None])


def rand(*shape):
    return torch.rand(shape, dtype=torch.float64)


def test_the_hand_scans():
    u, steps, A, B, C = rand(3, 4), rand(3, 4), -rand(3, 2), rand(2, 4), rand(2, 4)
    # The same recurrence, unrolled: what step s puts in decays until it is read at step t.
    sums = steps.cumsum(1)
    lag = (sums[:, :, None] - sums[:, None, :])[..., None] * A[:, None, None, :]
    reach = torch.exp(lag) * torch.ones(4, 4, dtype=u.dtype).tril()[None, :, :, None]
    other = torch.einsum("dtsn,ds,ns,nt,ds->dt", reach, steps, B, C, u)
    tally = Tally()
    mine = scan(tally, *map(tally.numbers, (u, steps, A, B, C)))
    torch.testing.assert_close(torch.tensor(values(mine), dtype=u.dtype), other)
    assert tally.macs == 2 * 3 * 4 * 2


def test_the_hand_convolves():
    x, weight = rand(3, 5), rand(3, 2)
    other = nn.functional.conv1d(nn.functional.pad(x, (1, 0)), weight[:, None], groups=3)
    tally = Tally()
    mine = convolve(tally, *map(tally.numbers, (x, weight)))
    torch.testing.assert_close(torch.tensor(values(mine), dtype=x.dtype), other)
    assert tally.macs == 3 * 5 * 2


# Which of an op's arguments its first result is like; of its other results nothing is asked.
FORWARD = {
    "flash_attn::_flash_attn_forward": "q",
    "flash_attn_3::fwd": "q",
    "xformer::memory_efficient_attention_forward": "q",
    "xformers::efficient_attention_forward_cutlass": "query",
    "xformers::efficient_attention_forward_ck": "query",
    "xformers::efficient_attention_forward_decoder_ck": "query",
    "xformers_flash::flash_fwd": "query",
    "xformers_flash3::flash_fwd": "query",
}
PACKED = {
    "flash_attn::_flash_attn_varlen_forward": "q",
    "flash_attn_3::fwd": "q",
    "xformers::efficient_attention_forward_cutlass": "query",
    "xformers_flash::flash_fwd": "query",
    "xformers_flash3::flash_fwd": "query",
}
BACKWARD = {
    "flash_attn::_flash_attn_backward": "q",
    "flash_attn_3::bwd": "q",
    "xformers::efficient_attention_backward_cutlass": "query",
    "xformers::efficient_attention_backward_ck": "query",
}
PACKED_BACKWARD = {
    "flash_attn::_flash_attn_varlen_backward": "q",
    "flash_attn_3::bwd": "q",
    "xformers_flash::flash_bwd": "query",
    "xformers_flash3::flash_bwd": "query",
}
SPLIT = {"xformers::efficient_attention_forward_decoder_splitk_ck": "query"}
ATTENTION = {**FORWARD, **PACKED, **BACKWARD, **PACKED_BACKWARD, **SPLIT}


def overload_of(op):
    namespace, _, name = op.partition("::")
    return getattr(getattr(torch.ops, namespace), name).default


class Kernel(nn.Module):
    """Calls one op with tensors by the names of its arguments; what it must have beside them is filled in."""

    def __init__(self, op, names, **numbers):
        super().__init__()
        self.op, self.names, self.numbers = overload_of(op), names, numbers

    def forward(self, *tensors):
        given = {**dict(zip(self.names, tensors, strict=True)), **self.numbers}
        blank = {"Tensor": tensors[0], "float": 1.0, "bool": False, "int": 0, "str": "group"}
        for argument in self.op._schema.arguments:
            if not argument.has_default_value():
                given.setdefault(argument.name, blank.get(str(argument.type)))
        return self.op(**given)


def run_by_shapes(op, like, *args, **kwargs):
    names = [argument.name for argument in op._schema.arguments]
    first = torch.empty_like({**dict(zip(names, args, strict=False)), **kwargs}[like])
    rest = [first.new_empty(()) if "Tensor" in str(item.type) else 0 for item in op._schema.returns[1:]]
    return (first, *rest) if rest else first


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    """Kernels for the meta device, which lets an op's results be known by their shapes."""
    define_library_schemas()
    libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in SCHEMAS}
    for op, like in ATTENTION.items():
        namespace, _, name = op.partition("::")
        libraries[namespace].impl(name, partial(run_by_shapes, overload_of(op), like), "Meta")
    yield
    libraries.clear()


def total_of(module, *tensors):
    """Return the total of a module whose every op is known to the table."""
    analysis = FlopCountAnalysis(module, tensors)
    assert not analysis.unsupported_ops()
    return analysis.total()


def named(like):
    return ("q", "k", "v") if like == "q" else ("query", "key", "value")


@pytest.mark.parametrize("op", FORWARD)
def test_attention(op):
    """Four heads of queries share two of keys, whose width is not the values'."""
    shapes = (3, 4, 6), (5, 2, 6), (5, 2, 7)
    tensors = [rand(2, *shape) for shape in shapes]
    assert total_of(Kernel(op, named(FORWARD[op])), *tensors) == macs_of(attend, shapes, shapes)


def starts_of(known, *starts):
    """Return where sequences start, as numbers that are known or on the meta device."""
    return [torch.tensor(numbers, dtype=torch.int32, device="cpu" if known else "meta") for numbers in starts]


# Of two sequences of 3 and 2 queries on 4 and 5 keys what each counts as: itself, or the longest of them.
COUNTED = {True: ((3, 4), (2, 5)), False: ((3, 5), (3, 5))}


@pytest.mark.parametrize("known", COUNTED)
@pytest.mark.parametrize("op", PACKED)
def test_packed_attention(op, known):
    macs = macs_of(attend, *(((queries, 2, 6), (keys, 2, 6), (keys, 2, 6)) for queries, keys in COUNTED[known]))
    rows = (1,) if "cutlass" in op else ()
    tensors = (rand(*rows, 5, 2, 6), rand(*rows, 9, 2, 6), rand(*rows, 9, 2, 6))
    starts = starts_of(known, [0, 3, 5], [0, 4, 9])
    names = (*named(PACKED[op]), "cu_seqlens_q", "cu_seqlens_k")
    assert total_of(Kernel(op, names, max_seqlen_q=3, max_seqlen_k=5), *tensors, *starts) == macs


@pytest.mark.parametrize("op", BACKWARD)
def test_the_backward_of_attention(op):
    shapes = (3, 4, 6), (5, 4, 6), (5, 4, 6)
    tensors = [rand(2, *shape) for shape in shapes]
    assert total_of(Kernel(op, named(BACKWARD[op])), *tensors) == macs_of(attend_backward, shapes, shapes)


@pytest.mark.parametrize("known", COUNTED)
@pytest.mark.parametrize("op", PACKED_BACKWARD)
def test_the_backward_of_packed_attention(op, known):
    sequences = [((queries, 2, 6), (keys, 2, 6), (keys, 2, 6)) for queries, keys in COUNTED[known]]
    macs = macs_of(attend_backward, *sequences)
    starts = starts_of(known, [0, 3, 5], [0, 4, 9])
    module = Kernel(op, (*named(PACKED_BACKWARD[op]), "cu_seqlens_q", "cu_seqlens_k"), max_seqlen_q=3, max_seqlen_k=5)
    assert total_of(module, rand(5, 2, 6), rand(9, 2, 6), rand(9, 2, 6), *starts) == macs


@pytest.mark.parametrize("known", [True, False])
def test_attention_that_is_not_told_its_longest_run_of_keys(known):
    """xFormers' CK kernel: in self-attention it is the queries'."""
    macs = macs_of(attend, *([(length, 2, 6)] * 3 for length in ((3, 2) if known else (3, 3))))
    (starts,) = starts_of(known, [0, 3, 5])
    names = ("query", "key", "value", "seqstart_q", "seqstart_k")
    module = Kernel("xformers::efficient_attention_forward_ck", names, max_seqlen_q=3)
    assert total_of(module, *[rand(1, 5, 2, 6)] * 3, starts, starts) == macs


def test_attention_on_keys_in_pages():
    """Two sequences of three pages each, of five keys a page; the cache has more pages."""
    macs = macs_of(attend, *[((3, 4, 6), (15, 2, 6), (15, 2, 6))] * 2)
    pages = torch.zeros(2, 3, dtype=torch.int32)
    module = Kernel("flash_attn_3::fwd", ("q", "k", "v", "page_table"))
    assert total_of(module, rand(2, 3, 4, 6), rand(9, 5, 2, 6), rand(9, 5, 2, 6), pages) == macs


def test_attention_on_the_keys_of_a_cache_that_are_in_use():
    """Of a cache of 15 keys for each of two sequences 4 and 9 are in use, in pages or not."""
    macs = macs_of(attend, *(((3, 4, 6), (keys, 2, 6), (keys, 2, 6)) for keys in (4, 9)))
    used = torch.tensor([4, 9], dtype=torch.int32)
    module = Kernel("flash_attn_3::fwd", ("q", "k", "v", "seqused_k"))
    assert total_of(module, rand(2, 3, 4, 6), rand(2, 15, 2, 6), rand(2, 15, 2, 6), used) == macs
    module = Kernel("flash_attn_3::fwd", ("q", "k", "v", "page_table", "seqused_k"))
    pages = torch.zeros(2, 3, dtype=torch.int32)
    assert total_of(module, rand(2, 3, 4, 6), rand(9, 5, 2, 6), rand(9, 5, 2, 6), pages, used) == macs


def test_attention_with_a_second_query_for_the_values():
    """Multi-head latent attention: the scores are of two products."""
    tally = Tally()
    attend(tally, rand(3, 4, 6), rand(5, 1, 6), rand(5, 1, 7))
    matmul(tally, tally.numbers(rand(3 * 4, 7)), tally.numbers(rand(7, 5)))
    module = Kernel("flash_attn_3::fwd", ("q", "k", "v", "q_v"))
    assert total_of(module, rand(1, 3, 4, 6), rand(1, 5, 1, 6), rand(1, 5, 1, 7), rand(1, 3, 4, 7)) == tally.macs


def test_attention_on_groups_of_heads():
    """xFormers' decoder: [B, Q, G, H, D]."""
    macs = macs_of(attend, *[((1, 6, 4), (5, 6, 4), (5, 6, 4))] * 2)
    module = Kernel("xformers::efficient_attention_forward_decoder_splitk_ck", ("query", "key", "value"))
    assert total_of(module, rand(2, 1, 2, 3, 4), rand(2, 5, 2, 3, 4), rand(2, 5, 2, 3, 4)) == macs


def test_an_attention_without_heads():
    macs = macs_of(attend, *[((3, 1, 6), (5, 1, 6), (5, 1, 6))] * 2)
    module = Kernel("xformer::memory_efficient_attention_forward", ("q", "k", "v"))
    assert total_of(module, rand(2, 3, 6), rand(2, 5, 6), rand(2, 5, 6)) == macs


def test_every_attention_of_a_library_has_a_row_and_a_source():
    for op in ATTENTION:
        row = DEFAULT.row(op)
        assert row is not None and row.source and "attention" in str(row.use), op


def like_kernel(result):
    """Return what a kernel behind Python's back leaves to see: a result, and no op that made it."""
    return torch.empty_like(result)


class SelectiveScanFn(torch.autograd.Function):
    """Of mamba_ssm: u, delta [B, D, L], A [D, N], B, C [B, N, L], then perhaps D, z and the bias of delta."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
        return like_kernel(u)


class MambaInnerFn(torch.autograd.Function):
    """Of mamba_ssm: the middle of a Mamba block."""

    @staticmethod
    def forward(
        ctx, xz, conv_weight, conv_bias, x_weight, delta_weight, out_weight, out_bias, A, B=None, C=None, D=None
    ):
        return xz.new_empty(xz.shape[0], xz.shape[2], out_weight.shape[0])


class MambaChunkScanCombinedFn(torch.autograd.Function):
    """Of mamba_ssm: x [B, L, H, P], dt [B, L, H], A [H], B and C [B, L, G, N]."""

    @staticmethod
    def forward(ctx, x, dt, A, B, C, chunk_size, D=None, z=None):
        return like_kernel(x)


class MambaSplitConv1dScanCombinedFn(torch.autograd.Function):
    """Of mamba_ssm: the middle of a Mamba-2 block."""

    @staticmethod
    def forward(
        ctx,
        zxbcdt,
        conv_weight,
        conv_bias,
        dt_bias,
        A,
        D,
        chunk_size,
        initial_states=None,
        seq_idx=None,
        limit=None,
        final=False,
        activation="silu",
        norm_weight=None,
        eps=1e-6,
        out_weight=None,
        out_bias=None,
        width=0,
    ):
        return zxbcdt.new_empty(*zxbcdt.shape[:2], width if out_weight is None else out_weight.shape[0])


class CausalConv1dFn(torch.autograd.Function):
    """Of causal_conv1d: x [B, D, L], weight [D, W]."""

    @staticmethod
    def forward(ctx, x, weight, bias=None, activation=None):
        out = torch.empty_like(x)
        torch.ops.DaoAILab._causal_conv1d_fwd_cpp(x, weight, bias, None, None, out, None, activation == "silu")
        return out


def apply(function, *rest):
    """Return a module that applies a function to its inputs, and to what it was made with."""
    return Function(lambda *tensors: function(*tensors, *rest))


@pytest.mark.parametrize("rest", [(), (rand(3),), (rand(3), rand(2, 3, 4), rand(3), True)])
def test_a_selective_scan(rest):
    """The skip connection, the gate and the bias of the steps are elementwise."""
    u, steps, A, B, C = rand(2, 3, 4), rand(2, 3, 4), rand(3, 5), rand(2, 5, 4), rand(2, 5, 4)
    tally = Tally()
    for batch in range(2):
        scan(tally, *map(tally.numbers, (u[batch], steps[batch], A, B[batch], C[batch])))
    assert total_of(apply(SelectiveScanFn.apply, *rest), u, steps, A, B, C) == tally.macs


@pytest.mark.parametrize("biases", [True, False])
def test_the_middle_of_a_mamba_block(biases):
    D, L, N, R, W, E = 4, 3, 5, 2, 3, 6
    xz, weight, A = rand(2, 2 * D, L), rand(D, 1, W), rand(D, N)
    into_parts, into_steps, outward = rand(R + 2 * N, D), rand(D, R), rand(E, D)
    tally = Tally()
    for batch in range(2):
        x = convolve(tally, tally.numbers(xz[batch, :D]), tally.numbers(weight[:, 0]))
        steps, B, C = np.split(linear(tally, x.T, tally.numbers(into_parts)), [R, R + N], 1)
        y = scan(tally, x, linear(tally, steps, tally.numbers(into_steps)).T, tally.numbers(A), B.T, C.T)
        linear(tally, y.T, tally.numbers(outward))
    conv_bias, out_bias = (rand(D), rand(E)) if biases else (None, None)
    module = apply(MambaInnerFn.apply, weight, conv_bias, into_parts, into_steps, outward, out_bias, A, None, None)
    assert total_of(module, xz) == tally.macs


def scan_heads(tally, x, dt, A, B, C):
    """Return Mamba-2's scan of one sequence as Mamba's: a head's channels have its steps, its decay and its group."""
    L, H, P = x.shape
    heads = []
    for h in range(H):
        b, c = (part[:, h * B.shape[1] // H].T for part in (B, C))
        heads.append(scan(tally, x[:, h].T, np.broadcast_to(dt[:, h], (P, L)), np.full((P, len(b)), A[h]), b, c).T)
    return np.stack(heads, 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_scan_in_chunks(groups):
    x, dt, A, B, C = rand(2, 5, 4, 3), rand(2, 5, 4), rand(4), rand(2, 5, groups, 6), rand(2, 5, groups, 6)
    tally = Tally()
    for batch in range(2):
        scan_heads(tally, *map(tally.numbers, (x[batch], dt[batch], A, B[batch], C[batch])))
    assert total_of(apply(MambaChunkScanCombinedFn.apply, 2), x, dt, A, B, C) == tally.macs


@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("projects", [True, False])
def test_the_middle_of_a_mamba_2_block(beside, bias, groups, projects):
    """With two groups an initial state tells how many states there are."""
    H, P, N, W, L, E = 2, 3, 4, 3, 5, 7
    D, channels = H * P, H * P + 2 * groups * N
    zxbcdt, weight = rand(2, L, 2 * beside + 2 * D + 2 * groups * N + H), rand(channels, W)
    outward = rand(E, beside + D) if projects else None
    tally = Tally()
    for batch in range(2):
        _, _, convolved, dt = map(tally.numbers, zxbcdt[batch].split([2 * beside, D, channels, H], 1))
        x, *rest = np.split(convolve(tally, convolved.T, tally.numbers(weight)).T, [D, D + groups * N], 1)
        B, C = (part.reshape(L, groups, N) for part in rest)
        y = scan_heads(tally, x.reshape(L, H, P), dt, tally.numbers(rand(H)), B, C)
        if outward is not None:
            linear(tally, np.concatenate([tally.zeros(L, beside), y.reshape(L, D)], 1), tally.numbers(outward))
    states = rand(2, H, P, N) if groups > 1 else None
    numbers = torch.zeros(2, L, dtype=torch.int32)
    given = (weight, rand(channels) if bias else None, *(rand(H) for _ in range(3)), 2, states, numbers)
    given += None, False, "silu"
    rest = (rand(D), 1e-6, outward, rand(E) if projects else None, beside + D)
    module = apply(MambaSplitConv1dScanCombinedFn.apply, *given, *rest)
    assert total_of(module, zxbcdt) == tally.macs


def test_a_causal_convolution():
    """By its function, and by the op inside it."""
    x, weight = rand(2, 3, 5), rand(3, 4)
    tally = Tally()
    for batch in range(2):
        convolve(tally, *map(tally.numbers, (x[batch], weight)))
    library = torch.library.Library("DaoAILab", "IMPL")
    library.impl("_causal_conv1d_fwd_cpp", lambda *args: None, "Meta")
    library.impl("_causal_conv1d_fwd_cpp", lambda *args: None, "CPU")
    assert total_of(apply(CausalConv1dFn.apply, None, "silu"), x, weight) == tally.macs
    op = torch.ops.DaoAILab._causal_conv1d_fwd_cpp.default
    within = apply(lambda *args: op(*args), None, None, None, torch.empty_like(x), None, True)
    assert total_of(within, x, weight) == tally.macs


class Scale(torch.autograd.Function):
    """A user's function with a product inside, whose tensors belong to no library."""

    @staticmethod
    def forward(ctx, x, weight):
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad, None


FUNCTIONS = (
    *("SelectiveScanFn", "MambaInnerFn", "MambaChunkScanCombinedFn", "MambaSplitConv1dScanCombinedFn"),
    "CausalConv1dFn",
    *(f"NeighborhoodAttention{rank}D{part}AutogradFunction" for rank in (1, 2, 3) for part in ("QK", "AV")),
    *("MSDeformAttnFunction", "MultiScaleDeformableAttnFunction", "SparseConvFunction", "SparseInverseConvFunction"),
    *("ChunkGLAFunction", "ChunkSimpleGLAFunction", "ChunkDeltaRuleFunction", "ChunkGatedDeltaRuleFunction"),
    "ChunkKDAFunction",
)


def test_each_shipped_row_of_a_function_is_tried_with_another_class():
    names = {name.removeprefix("prim::PythonOp.") for name in load_table("default").rows if "PythonOp" in name}
    assert names == {*FUNCTIONS}


@pytest.mark.parametrize("table", ["default", "exact"])
@pytest.mark.parametrize("rows", long_except(["", "2 4"], ["", "4", "2 4", "2 8 6"]))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_class_of_a_librarys_name_is_looked_into(name, rows, table):
    """The shipped row does not fit, so that the ops inside count: the product, and nothing is unknown."""
    function = type(name, (Scale,), {})
    x, weight = rand(*map(int, rows.split()), 5), rand(5, 6)
    for execution in ("shapes", "real"):
        analysis = FlopCountAnalysis(apply(function.apply), (x, weight), table=table, execution=execution)
        multiply_add = load_table(table).multiply_add
        assert analysis.total() == multiply_add * x.numel() * 6
        assert not analysis.counts().ledger()[Status.UNSUPPORTED]


def test_a_users_row_that_does_not_fit_is_an_error(tmp_path):
    """The same expression in a table of the user's names the mistake."""
    path = tmp_path / "mine.yaml"
    path.write_text('extends: default\nops:\n  prim::PythonOp.SelectiveScanFn: {macs: "size(input_2, -1)"}\n')
    function = type("SelectiveScanFn", (Scale,), {})
    analysis = FlopCountAnalysis(apply(function.apply), (rand(4, 5), rand(5, 6)), table=str(path))
    with pytest.raises(TableError, match=r"mine\.yaml:3: prim::PythonOp.SelectiveScanFn: unknown name input_2"):
        analysis.total()


def test_an_op_of_another_library_of_that_name_is_unknown(tmp_path):
    """A shipped row that does not fit leaves the op unknown, and the rest counted; a user's row is an error."""
    library = torch.library.Library("xformer", "FRAGMENT")
    library.define("memory_efficient_attention_forward.mine(Tensor data) -> Tensor")
    for key in ("CPU", "Meta"):
        library.impl("memory_efficient_attention_forward.mine", lambda data: data.clone(), key)
    model = nn.Sequential(nn.Linear(5, 6), apply(torch.ops.xformer.memory_efficient_attention_forward.mine))
    analysis = FlopCountAnalysis(model, rand(4, 5).float())
    assert analysis.total() == 4 * 5 * 6
    assert analysis.unsupported_ops() == {"xformer::memory_efficient_attention_forward": 1}
    path = tmp_path / "mine.yaml"
    row = "xformer::memory_efficient_attention_forward: {use: attention_bshd}"
    path.write_text(f"extends: default\nops:\n  {row}\n")
    with pytest.raises(TableError, match=r"mine\.yaml:3"):
        FlopCountAnalysis(model, rand(4, 5).float(), table=str(path)).total()
