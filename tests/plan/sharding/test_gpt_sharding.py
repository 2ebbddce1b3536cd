"""Megatron GPT and MPT divided among ranks: against one process, two processes, and hand counts."""

import pytest
import torch

from fvflops import plan_rank
from fvflops.capture.shorten import shorten
from fvflops.plan import rank_model
from fvflops.plan.communication import Volume
from fvflops.plan.sharding.sharding_styles import ShardingError
from fvflops.trace import tensors_in
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.zoo import ZOO, build
from fvflops.zoo.mpt import MPT
from tests.support.processes.gpt_worker import CASES, LABELS, RANKS, SIZES, TOKENS, describe_work
from tests.support.processes.start import run_ranks

# A model of each class of the zoo that plans divide, the smallest.
SHARDED = {entry.model_class: name for name, entry in ZOO.items() if hasattr(entry.model_class, "zoo_parallelism")}
LAYERS, HIDDEN, VOCABULARY = 2, 64, 256
STATE = 4 * TOKENS.numel() * HIDDEN  # bytes of a hidden state
LOSSES = 4 * TOKENS.numel()


@pytest.fixture(scope="module")
def runs():
    return run_ranks("gpt_worker", RANKS)


def plan(name, mesh, **options):
    return plan_rank(build(name, device="meta", **SIZES[name]), (TOKENS, LABELS), mesh=mesh, **options)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_compute_the_loss_and_gradients_of_one(runs, case):
    first, second = (run[case] for run in runs)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)
    assert max(*first["distance"].values(), *second["distance"].values()) < 1e-5


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("case", CASES)
def test_the_plan_equals_each_process(runs, case, rank):
    name, sequence = CASES[case]
    work = describe_work(plan(name, {"tp": RANKS}, rank=rank, sequence_parallel=sequence).trace)
    assert work == {key: runs[rank][case][key] for key in work}


@pytest.mark.parametrize("name", SIZES)
def test_the_ranks_share_all_products(name):
    whole = plan(name, {"dp": 1}).flops().macs()
    for sequence in (False, True):
        assert whole == plan(name, {"tp": 4}, sequence_parallel=sequence).flops().macs() * 4


@pytest.mark.parametrize("name", SHARDED.values())
def test_attention_heads_are_as_wide_as_in_the_whole_model(name):
    def sizes(mesh):
        inputs = [torch.zeros(1, 12, dtype=torch.int64) for _ in ZOO[name].inputs]
        trace = plan_rank(build(name, device="meta", layers=1), tuple(inputs), mesh=mesh).trace
        products = (item for item in trace.signatures if "bmm" in item.op or "scaled_dot_product" in item.op)
        return {tensor.shape[-1:] for item in products for tensor in tensors_in(item.inputs)}

    assert sizes({"tp": 2}) == sizes({"dp": 1}) != set()


@pytest.mark.parametrize("name", SIZES)
def test_logits_stay_divided_by_the_vocabulary(name):
    # All-reduced: the embedding, after attention and MLP of each layer, the gradients before both and before the head;
    # and of each token the largest logit, the sum of exponentials, and the label's logit.
    work = describe_work(plan(name, {"tp": 4}).trace)
    assert work["payloads"] == {"all_reduce": [4 * LAYERS + 2 + 3, (4 * LAYERS + 2) * STATE + 3 * LOSSES]}


def test_every_bias_and_norm_of_megatron_gpt_works_on_a_part_of_the_sequence():
    work = describe_work(plan("megatron_gpt_tiny", {"tp": 4}, sequence_parallel=True).trace)
    # Hidden states are gathered before each attention and MLP and before the head, and scattered behind; so are their
    # gradients. The backward pass gathers hidden states again, so that only parts are kept. The embedding is reduced to
    # all ranks, which keep their parts, and gathers its gradient.
    assert work["payloads"] == {
        "all_gather": [6 * LAYERS + 3, (6 * LAYERS + 3) * STATE],
        "reduce_scatter": [4 * LAYERS + 1, (4 * LAYERS + 1) * STATE],
        "all_reduce": [1 + 3, STATE + 3 * LOSSES],
    }


def test_a_vocabulary_need_not_divide_evenly():
    model = build("megatron_gpt_tiny", device="meta", vocab_size=250)
    plans = [plan_rank(model, (TOKENS, LABELS), mesh={"tp": 4}, rank=rank) for rank in (0, 3)]
    assert plans[0].parameters - plans[1].parameters == (63 - 61) * HIDDEN


@pytest.mark.parametrize("name", SIZES)
def test_heads_that_do_not_divide_are_refused(name):
    with pytest.raises(ValueError, match=r"tp=3 must divide the number of heads .* is 4"):
        plan(name, {"tp": 3})


TWICE = ("tokens", "tokens")  # what goes in and out of a layer


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        ({"tp": 2}, {"tensor": {"blocks.*.attn.Wqk": "colwise"}}, "matches .*: did you mean 'blocks.*.attn.Wqkv'"),
        ({"pp": 2, "tp": 2}, {"tensor": {"block.*.attn": "colwise"}}, "no module matches 'block.*.attn': did you mean"),
        ({"tp": 2}, {"divided": ("blocks.*.attn.head",)}, "attn has no attribute 'head': did you mean 'heads'"),
        ({"pp": 2}, {"stages": (("embed",), "blocks", ("head",), *TWICE)}, "'embed': did you mean 'embedding'"),
        ({"pp": 2}, {"stages": (("embedding",), "blocks", (), *TWICE)}, "keep the parameter head.norm_f.weight"),
    ],
)
def test_a_name_that_the_model_lacks_is_refused(monkeypatch, mesh, changes, message):
    monkeypatch.setattr(MPT, "zoo_parallelism", MPT.zoo_parallelism._replace(**changes))
    with pytest.raises(ShardingError, match=message):
        plan("mpt_tiny", mesh)


def test_an_error_of_a_divided_model_names_its_styles(monkeypatch):
    styles = {pattern: style for pattern, style in MPT.zoo_parallelism.tensor.items() if pattern != "head.lm_head"}
    monkeypatch.setattr(MPT, "zoo_parallelism", MPT.zoo_parallelism._replace(tensor=styles))
    with pytest.raises(RuntimeError, match=r"\(tp=2: if it runs without tp, a sharding style is missing or wrong\)"):
        plan("mpt_tiny", {"tp": 2})


def test_a_model_without_layers_is_divided():
    model = build("mpt_tiny", device="meta", layers=0)
    assert (
        plan_rank(model, (TOKENS, LABELS), mesh={"tp": 2}).flops().macs() * 2
        == TOKENS.numel() * VOCABULARY * HIDDEN * 3
    )


def test_fsdp_gathers_divided_layers():
    for name in SIZES:
        divided = plan(name, {"fsdp": 2, "tp": 2}, sequence_parallel=True, optimizer=torch.optim.AdamW)
        assert divided.parameters * 2 == plan(name, {"tp": 2}).parameters


@pytest.mark.parametrize("name", SIZES)
def test_the_first_and_the_last_stage_reduce_the_gradient_of_their_embeddings(name):
    mesh = {"pp": 2, "dp": 3, "tp": 2}
    first, last = (plan(name, mesh, rank=rank, microbatches=2) for rank in (1, 7))
    whole = plan(name, {"tp": 2})
    embedding = VOCABULARY * HIDDEN // 2
    assert first.parameters + last.parameters == whole.parameters + embedding
    for stage in (first, last):
        assert sum("the first and the last stage share" in line for line in stage.derived) == 1
        (volume,) = [
            volume
            for key, volume in stage.communication().by_collective_and_group().items()
            if (key.collective, key.axis) == ("all_reduce", "pp")
        ]
        assert volume == Volume(calls=1, payload=4 * embedding, wire=4 * embedding)
    group = next(
        spec
        for call in first.trace.signatures
        for spec in map(ProcessGroupSpec.of, call.inputs)
        if spec and spec.axis == "pp" and spec.name.startswith("first")
    )
    assert (group.first, group.step, group.size) == (1, 6, 2)
    assert first.flops().macs() + last.flops().macs() == 2 * whole.flops().macs()


@pytest.mark.parametrize(("name", "shape"), [("megatron_gpt_tiny", (16, 2, HIDDEN)), ("mpt_tiny", (2, 16, HIDDEN))])
def test_layers_are_compared_with_the_hidden_state_of_the_whole_sequence(monkeypatch, name, shape):
    shapes = []

    def watch(model, args, kwargs, **options):
        shapes.append(tuple(kwargs["tokens"].shape))
        return shorten(model, args, kwargs, **options)

    monkeypatch.setattr(rank_model, "shorten", watch)
    model = build(name, device="meta", layers=10)
    mesh = {"pp": 2, "tp": 2}
    short = plan_rank(model, (TOKENS, LABELS), mesh=mesh, rank=2, sequence_parallel=True, table="exact")
    assert shapes == [shape]
    monkeypatch.setattr(rank_model, "shorten", lambda *_, **options: None)
    full = plan_rank(model, (TOKENS, LABELS), mesh=mesh, rank=2, sequence_parallel=True, table="exact")
    assert short.flops().by_phase() == full.flops().by_phase()
    assert short.communication().by_collective() == full.communication().by_collective()


def kept_activations(layers, mesh, sequence):
    """Return the bytes that the forward pass of a float16 model keeps for the backward pass."""
    sizes = {"positions": 256, "hidden_size": 128, "layers": layers}
    model = build("megatron_gpt_tiny", device="meta", **sizes).half()
    tokens = torch.ones(4, 256, dtype=torch.int64)  # each rank's scores are for Megatron's fused softmax
    timeline = plan_rank(model, (tokens, tokens), mesh=mesh, sequence_parallel=sequence, device="cuda").memory()
    events = timeline.trace.events
    backward = next(index for index, event in enumerate(events) if (event.kind, event.phase) == ("op", "backward"))
    return sum(
        block.nbytes
        for block in timeline.blocks
        if block.kind == "activation" and block.begin < backward and (block.end is None or backward < block.end)
    )


@pytest.mark.parametrize(("ranks", "sequence"), [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_a_layer_of_megatron_gpt_keeps_the_activations_of_its_paper(ranks, sequence):
    # Table 2 of Korthikanti et al. (arXiv:2205.05198), which omits the means and deviations of the norms (float32).
    s, b, h, a = 256, 4, 128, 4
    norms = 2 * 2 * 4 * s * b // (ranks if sequence else 1)
    paper = s * b * h * (34 + 5 * a * s / h) / ranks
    if not sequence:
        paper = s * b * h * (10 + 24 / ranks + 5 * a * s / (h * ranks))
    layer = kept_activations(2, {"tp": ranks}, sequence) - kept_activations(1, {"tp": ranks}, sequence)
    assert layer == paper + norms
