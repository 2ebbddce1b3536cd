"""The bytes that ops read and write, against counts by hand, for each kind of op that the rule has to know."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fvflops import ByteCountAnalysis, FlopCountAnalysis, StopsAt, Trace, TrainingStepAnalysis, load_table, record_call
from fvflops.counting import count
from fvflops.counting.traffic.byte_costs import TrafficCostModel, split_by_aliasing
from fvflops.counting.traffic.traffic import StorageInfo, Traffic, op_traffic
from fvflops.counting.traffic.traffic_rules import bytes_of
from fvflops.trace import Signature, Status, Symbol, TensorSpec, TraceError
from fvflops.zoo import build

STOPS = load_table("exact").stops_at
FLOAT, LONG = 4, 8
X = torch.ones(8, 4)
N = X.numel() * FLOAT  # 128 bytes
IDS, AT = torch.tensor([1, 5, 2]), torch.zeros(8, 2, dtype=torch.long)
ROWS, Y = torch.ones(3, 4), torch.ones(8, 4)


def moved(function, *args, execution="shapes", stops_at=STOPS):
    """Return what all calls of a function's ops read and write, and the ops of which that is not known."""
    trace = record_call(function, args, stops_at=stops_at, execution=execution)
    parts = []
    for part in ("read", "written"):
        sorted_trace, pricer = split_by_aliasing(trace, part)
        counts = count(sorted_trace, pricer, "bytes")
        parts.append(counts.total())
    assert not counts.ledger()[Status.UNSUPPORTED]
    return tuple(parts)


# What runs, on what, and the bytes that are read and written; the hand counts stand beside.
CASES = {
    "linear": (F.linear, (torch.ones(2, 3), torch.ones(5, 3), torch.ones(5)), (6 + 15 + 5, 10)),
    "matmul of one operand with itself": (lambda x: x @ x.t(), (X,), (32, 64)),
    "conv2d": (F.conv2d, (torch.ones(2, 3, 8, 8), torch.ones(5, 3, 3, 3)), (2 * 3 * 64 + 135, 2 * 5 * 36)),
    "batch norm": (
        F.batch_norm,
        (torch.ones(2, 3, 4), torch.zeros(3), torch.ones(3), torch.ones(3), torch.ones(3)),
        (24 + 12, 24),
    ),
    "add": (torch.add, (X, torch.ones(8, 4)), (64, 32)),
    "add to itself": (lambda x: x + x, (X,), (32, 32)),
    "add a row to each": (torch.add, (X, torch.ones(4)), (36, 32)),
    "relu in place": (torch.relu_, (torch.ones(8, 4),), (32, 32)),
    "overwrite by copy_": (lambda x, y: x.copy_(y), (torch.ones(8, 4), X), (32, 32)),
    "overwrite by fill_": (lambda x: x.fill_(1), (torch.ones(8, 4),), (0, 32)),
    "overwrite by zero_": (lambda x: x.zero_(), (torch.ones(8, 4),), (0, 32)),
    "out=": (lambda x, out: torch.mul(x, 2, out=out), (X, torch.ones(8, 4)), (32, 32)),
    "views": (lambda x: x.view(4, 8).t().unsqueeze(0)[:, 1:].expand(3, 7, 4).split(2, 1), (X,), (0, 0)),
    "a reshape that is a view": (lambda x: x.reshape(2, 16), (X,), (0, 0)),
    "a reshape that copies": (lambda x: x.t().reshape(-1), (X,), (32, 32)),
    "contiguous": (lambda x: x.contiguous().t().contiguous(), (X,), (32, 32)),
    "to its own dtype": (lambda x: x.to(torch.float32), (X,), (0, 0)),
    "empty": (lambda x: (torch.empty(99), torch.empty_like(x), x.new_empty(7)), (X,), (0, 0)),
    "factories": (lambda x: (torch.zeros(99), torch.ones_like(x), x.new_full((7,), 1.0)), (X,), (0, 99 + 32 + 7)),
    "expanded": (lambda x: x.expand(100, 4) * 2, (torch.ones(1, 4),), (4, 400)),
    "dropout in evaluation": (lambda x: F.dropout(x, 0.5, False), (X,), (0, 0)),
    "mean of rows": (lambda x: x.mean(1), (X,), (32, 8)),
    "cat": (lambda x, y: torch.cat([x, y]), (X, X), (64, 64)),
    "attention, fused": (
        F.scaled_dot_product_attention,
        (torch.ones(2, 3, 6, 8), torch.ones(2, 3, 5, 8), torch.ones(2, 3, 5, 8)),
        (288 + 2 * 240, 288),
    ),
}


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("case", list(CASES))
def test_bytes_by_hand(case, execution):
    function, args, (read, written) = CASES[case]
    args = tuple(argument.clone() for argument in args)  # some are written to
    assert moved(function, *args, execution=execution) == (read * FLOAT, written * FLOAT)


# The indices are read too, as int64.
LOOKUPS = {
    "embedding": (F.embedding, (IDS, torch.ones(50, 4)), (3 * LONG + 12 * FLOAT, 12 * FLOAT)),
    "index": (lambda x, ids: x[ids], (X, IDS), (3 * LONG + 12 * FLOAT, 12 * FLOAT)),
    "index_select": (lambda x, ids: x.index_select(0, ids), (X, IDS), (3 * LONG + 12 * FLOAT, 12 * FLOAT)),
    "gather": (lambda x, at: x.gather(1, at), (X, AT), (16 * (LONG + FLOAT), 64)),
    "index_put_": (lambda x, ids, y: x.index_put_((ids,), y), (X, IDS, ROWS), (3 * LONG + 12 * FLOAT, 12 * FLOAT)),
    "index_put_ that adds": (
        lambda x, ids, y: x.index_put_((ids,), y, accumulate=True),
        (X, IDS, ROWS),
        (3 * LONG + 24 * FLOAT, 12 * FLOAT),
    ),
    "index_put_ of two indices": (
        lambda x, i, j: x.index_put_((i, j), torch.tensor(2.0)),
        (X, IDS.view(3, 1), torch.tensor([0, 3])),
        (5 * LONG + FLOAT, 6 * FLOAT),
    ),
    "scatter_": (lambda x, at, y: x.scatter_(1, at, y), (X, AT, Y), (16 * (LONG + FLOAT), 16 * FLOAT)),
    "scatter_add_": (lambda x, at, y: x.scatter_add_(1, at, y), (X, AT, Y), (16 * (LONG + 2 * FLOAT), 16 * FLOAT)),
    "a cache takes in new keys": (
        lambda cache, at, keys: cache.index_copy_(1, at, keys),
        (torch.ones(2, 1000, 8), torch.tensor([17]), torch.ones(2, 1, 8)),
        (LONG + 16 * FLOAT, 16 * FLOAT),
    ),
    "a slice of a cache": (
        lambda cache, keys: cache[:, 17:18].copy_(keys),
        (torch.ones(2, 1000, 8), torch.ones(2, 1, 8)),
        (16 * FLOAT, 16 * FLOAT),
    ),
    "loss of a few tokens": (
        F.nll_loss,
        (torch.ones(3, 50), IDS),
        (3 * LONG + 3 * FLOAT, 2 * FLOAT),  # the loss and the weight of all
    ),
}


@pytest.mark.parametrize("case", list(LOOKUPS))
def test_only_what_is_looked_up_is_moved(case):
    function, args, hand = LOOKUPS[case]
    assert moved(function, *args) == hand


def test_a_bag_reads_a_row_for_each_index():
    trace = record_call(F.embedding_bag, (IDS.view(1, 3), torch.ones(50, 4)))
    (bag,) = [call for call in trace.signatures if "embedding_bag" in call.op]
    traffic = op_traffic(bag)
    assert traffic is not None
    # Three rows, three indices, and where each bag begins.
    assert traffic.read == 12 * FLOAT + 3 * LONG + LONG
    assert traffic.written >= 4 * FLOAT


def test_attention_that_is_looked_into_moves_the_scores():
    q = torch.ones(1, 2, 64, 8)
    fused = sum(moved(F.scaled_dot_product_attention, q, q.clone(), q.clone()))
    math = StopsAt(frozenset({"aten::softmax", "aten::matmul"}))
    apart = sum(moved(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, q, q.clone(), q.clone(), stops_at=math))
    scores, sizes = 2 * 64 * 64 * FLOAT, 1024 * FLOAT
    assert fused == 4 * sizes
    # q, k and scores; scores twice; scores, v and output.
    assert apart == 4 * sizes + 4 * scores


def test_the_fused_kernel_of_training_keeps_a_number_for_each_query():
    q, k, v = (torch.ones(1, 2, 64, 8, requires_grad=True) for _ in range(3))
    trace = record_call(F.scaled_dot_product_attention, (q, k, v), loss=lambda out: out.sum())
    (kernel,) = [call for call in trace.signatures if call.op.endswith("_for_cpu")]
    sizes, lse = 1024 * FLOAT, 2 * 64 * FLOAT
    assert op_traffic(kernel) == Traffic(3 * sizes, sizes + lse)
    (kernel,) = [call for call in trace.signatures if call.op.endswith("_for_cpu_backward")]
    assert op_traffic(kernel) == Traffic(5 * sizes + lse, 3 * sizes)


def test_a_pooling_backward_does_not_read_its_input():
    x = torch.ones(1, 2, 8, 8, requires_grad=True)
    trace = record_call(lambda x: F.max_pool2d(x, 2), (x,), loss=lambda out: out.sum())
    (kernel,) = [call for call in trace.signatures if call.packet.endswith("_backward")]
    # The gradients of 32 outputs and the indices of their maxima; the gradient of the input.
    assert op_traffic(kernel) == Traffic(32 * (FLOAT + LONG), 128 * FLOAT)


@pytest.mark.parametrize(
    ("spec", "hand"),
    [
        (TensorSpec((100, 100), layout="sparse_coo", nnz=7), 7 * (FLOAT + 2 * LONG)),
        (TensorSpec((100, 50), layout="sparse_csr", nnz=7), 7 * (FLOAT + LONG) + 101 * LONG),
        (TensorSpec((100, 50), layout="sparse_csc", nnz=7), 7 * (FLOAT + LONG) + 51 * LONG),
        (TensorSpec((3, 2), "complex128"), 96),
    ],
    ids=["coo", "csr", "csc", "complex"],
)
def test_the_bytes_of_a_tensor(spec, hand):
    assert bytes_of(spec) == hand


def test_a_sparse_product_reads_what_is_stored():
    dense = torch.zeros(50, 50)
    dense[3, 4] = dense[7, 7] = 1.0
    stored = 2 * (FLOAT + LONG) + 51 * LONG
    read, written = moved(torch.mm, dense.to_sparse_csr(), torch.ones(50, 3), execution="real")
    assert (read, written) == (stored + 150 * FLOAT, 150 * FLOAT)


# Reads and writes of each parameter, in float32 numbers: of p, its gradient g, and the averages m and v.
#   one by one and in lists: p decays (2), m moves to g (3), v decays (2) and takes in g*g (3), the root of v (2), its
#   scale (2) and eps (2), p moves by m/root (4); in the first step zeros for m and v are written besides
#   fused: p, g, m, v read; p, m, v written
@pytest.mark.parametrize(
    ("options", "passes"),
    [({"foreach": False}, 20), ({"foreach": True}, 20), ({"fused": True}, 7)],
    ids=["one by one", "in lists", "fused"],
)
def test_an_adamw_step_by_hand(options, passes):
    parameters = 1000 * 1000
    step = TrainingStepAnalysis(
        nn.Linear(1000, 1000, bias=False).train(),
        torch.ones(1, 1000),
        loss=lambda y: y.sum(),
        optimizer=lambda given: torch.optim.AdamW(given, **options),
    )
    counts = ByteCountAnalysis.from_trace(step.trace()).by_phase()["optimizer"]
    assert sum(counts.values()) / parameters / FLOAT == pytest.approx(passes + 2, rel=1e-4)


def test_a_batch_twice_as_large_moves_the_activations_twice_and_the_weights_once():
    model = build("resnet50").eval()
    once, twice = (ByteCountAnalysis(model, torch.ones(batch, 3, 224, 224)).total() for batch in (1, 2))
    weights = sum(tensor.numel() for name, tensor in model.state_dict().items() if "num_batches" not in name) * FLOAT
    assert 2 * once - twice == weights


def test_half_the_dtype_moves_half_the_bytes():
    model = build("gpt2", layers=1).eval()
    ids = torch.ones(1, 64, dtype=torch.int64)
    single = ByteCountAnalysis(model, ids).total()
    half = ByteCountAnalysis(model.bfloat16(), ids).total()
    # Token and position ids are int64 in either.
    assert 0 <= 2 * half - single < 64 * LONG * 10


def test_read_and_written_are_what_is_moved():
    model = build("lenet5")
    x = torch.ones(2, 1, 28, 28)
    parts = [ByteCountAnalysis(model, x, part=part).by_module() for part in ("moved", "read", "written")]
    assert parts[0] == parts[1] + parts[2] and parts[0][""] > 0
    with pytest.raises(ValueError, match="part must be one of moved, read, written; got 'sent'"):
        ByteCountAnalysis(model, x, part="sent")


@pytest.mark.parametrize("name", ["resnet50", "gpt2"])
def test_a_run_by_shapes_moves_what_a_real_one_does(name):
    model = build(name, layers=1).eval() if name == "gpt2" else build(name).eval()
    x = torch.ones(1, 16, dtype=torch.int64) if name == "gpt2" else torch.ones(1, 3, 64, 64)
    shapes, real = (ByteCountAnalysis(model, x, execution=execution).by_operator() for execution in ("shapes", "real"))
    assert shapes == real and shapes


def test_without_events_what_may_have_copied_is_unknown():
    def model(x):
        return x.t().reshape(-1) + 1

    flops = FlopCountAnalysis(model, X)
    known = ByteCountAnalysis.from_trace(Trace.from_json(flops.trace().to_json()))
    assert known.by_operator() == {"reshape": 2 * N, "add": 2 * N} and not known.unsupported_ops()
    aggregated = ByteCountAnalysis.from_trace(flops.trace().aggregate()).unsupported_ops_warnings(False)
    assert aggregated.by_operator() == {"add": 2 * N}
    assert aggregated.unsupported_ops() == {"aten::reshape": 1}


def test_two_calls_of_one_signature_may_differ():
    square = torch.ones(4, 4)
    trace = record_call(lambda x: (x.reshape(16), x.t().reshape(16)), (square,), stops_at=STOPS)
    assert [call.op for call in trace.signatures].count("aten::reshape") == 1
    sorted_trace, pricer = split_by_aliasing(trace)
    counts = count(sorted_trace, pricer, "bytes")
    assert counts.by_label() == {"reshape": 2 * 64}
    assert counts.ledger()[Status.ZERO_FLOP]["aten::reshape"] == 1


def test_a_weight_in_an_object_and_an_op_that_nobody_saw_are_unknown():
    packed = Signature(
        "quantized::linear",
        ("X", "W_prepack", "Y_scale_i", "Y_zero_point_i"),
        (TensorSpec((2, 3), "quint8"), Symbol("object", "ScriptObject"), 1.0, 0),
        (TensorSpec((2, 5), "quint8"),),
        "quantized::linear(Tensor X, __torch__.torch.classes.quantized.LinearPackedParamsBase W_prepack, "
        "float Y_scale_i, int Y_zero_point_i) -> Tensor Y",
    )
    unseen = Signature("mylib::scan", (), (), (), "mylib::scan(...)")
    strange = Signature("aten::relu", ("self",), (TensorSpec((2,), "float3"),), (TensorSpec((2,), "float3"),))
    assert [op_traffic(call) for call in (packed, unseen, strange)] == [None] * 3
    assert TrafficCostModel().op_cost(unseen)[0].status is Status.UNSUPPORTED


def test_storages_bound_what_is_read_only_from_above():
    call = Signature("aten::mul", ("self", "other"), (TensorSpec((10,)), TensorSpec((10,))), (TensorSpec((10,)),))
    assert op_traffic(call) == Traffic(80, 40)
    assert op_traffic(call, StorageInfo(True, 44)) == Traffic(44, 40)
    assert op_traffic(call, StorageInfo(True, 4000)) == Traffic(80, 40)


def test_a_handle_says_what_an_op_moves():
    analysis = ByteCountAnalysis(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.ones(4, 3))
    assert analysis.by_operator() == {"linear": (12 + 8 + 8) * FLOAT, "relu": 16 * FLOAT}
    analysis.set_op_handle("aten::linear", lambda call: 7)
    assert analysis.by_operator() == {"linear": 7, "relu": 16 * FLOAT}
    decomposed = ByteCountAnalysis.from_trace(record_call(nn.Linear(3, 2), (torch.ones(4, 3),)))
    assert decomposed.total() > 0
    with pytest.raises(TraceError, match="has decomposed aten::linear"):
        decomposed.set_op_handle("aten::linear", lambda call: 7).total()


def test_the_table_says_at_which_ops_bytes_are_counted_whole(tmp_path):
    table = tmp_path / "decomposed.yaml"
    table.write_text("extends: exact\nops:\n  aten::linear: decompose\n")
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    assert ByteCountAnalysis(model, x).by_operator() == {"linear": 28 * FLOAT}
    assert ByteCountAnalysis(model, x, table=str(table)).by_operator() == {"addmm": 28 * FLOAT}
