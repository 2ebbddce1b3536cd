"""The predicted memory beside the formulas of two papers: of activations, and of the states that ZeRO divides."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from fvflops import TrainingStepAnalysis, plan_rank, predict_memory
from tests.support.models.mixed_precision_adam import MixedPrecisionAdam
from tests.support.models.transformer_layer import make_layers

# "Reducing Activation Recomputation in Large Transformer Models", equations 1, 2, 4 and 6; the paper's letters.

S, B, H, A = 64, 2, 64, 4
# What torch keeps besides: of each of the two norms the mean and the inverse deviation of each row, which the paper
# calls small and leaves out. In bfloat16 on the CPU, in float32 on CUDA.
STATISTICS = {"cpu": 2 * 2 * 2 * S * B, "cuda": 2 * 2 * 4 * S * B}


def kept_by_one_layer(predict):
    """Return the bytes that the backward pass finds of a layer: of two layers less one's."""
    kept = []
    for layers in (1, 2):
        timeline = predict(layers)
        events = timeline.trace.events
        first = next(at for at, event in enumerate(events) if (event.kind, event.phase) == ("op", "backward"))
        kept.append(timeline.at(first).by_kind["activation"])
    return kept[1] - kept[0]


def predict_layers(layers, *, device, **options):
    with torch.device("meta"):
        model, x = make_layers(layers, H, A, **options), torch.zeros(S, B, H, dtype=torch.bfloat16)
    step = TrainingStepAnalysis(model, x, loss=torch.sum, device=device)
    return predict_memory(step, granularity=1)


def predict_shard(layers, *, ranks, sequence, selective):
    def shard(model, mesh):
        with torch.device("meta"):
            return make_layers(
                layers, H, A, ranks=ranks, group=mesh.get_group(), sequence=sequence, selective=selective
            )

    with torch.device("meta"):
        x = torch.zeros(S // ranks if sequence else S, B, H, dtype=torch.bfloat16)
        model = make_layers(layers, H, A)
    return plan_rank(model, (x,), mesh={"tp": ranks}, shard_by=shard).memory()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_layer_keeps_what_the_paper_says(device):
    whole = kept_by_one_layer(lambda layers: predict_layers(layers, device=device))
    selective = kept_by_one_layer(lambda layers: predict_layers(layers, device=device, selective=True))
    assert whole == S * B * H * 34 + 5 * A * S * S * B + STATISTICS[device]
    assert selective == S * B * H * 34 + STATISTICS[device]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallelism_divides_what_the_paper_says(ranks):
    def kept(**options):
        return kept_by_one_layer(lambda layers: predict_shard(layers, ranks=ranks, **options))

    attention = 5 * A * S * S * B // ranks
    tensor = S * B * H * 10 + S * B * H * 24 // ranks
    both = S * B * H * 34 // ranks
    statistics = STATISTICS["cpu"]
    assert kept(sequence=False, selective=False) == tensor + attention + statistics
    assert kept(sequence=False, selective=True) == tensor + statistics
    assert kept(sequence=True, selective=False) == both + attention + statistics // ranks
    assert kept(sequence=True, selective=True) == both + statistics // ranks


# "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5 and figure 1: 16 bytes a parameter
# with Adam in mixed precision, 2 each for parameter and gradient, K = 12 for the optimizer's state.

WIDTH, LAYERS = 64, 4
PARAMETERS = WIDTH * WIDTH * LAYERS
X = torch.zeros(8, WIDTH, dtype=torch.bfloat16)


def make_model():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).bfloat16()


def states(timeline, *kinds):
    """Return the bytes of these kinds at the end of the step."""
    held = timeline.at(len(timeline.trace.events) - 1).by_kind
    return sum(held[kind] for kind in ("gradient", "optimizer state", *kinds))


def plan(ranks, optimizer=MixedPrecisionAdam, axis="fsdp", model=None, x=X, **options):
    model = make_model() if model is None else model
    return plan_rank(model, (x,), mesh={axis: ranks}, optimizer=optimizer, **options).memory()


def test_mixed_precision_takes_16_bytes_a_parameter():
    step = TrainingStepAnalysis(make_model(), X, loss=torch.sum, optimizer=MixedPrecisionAdam)
    kinds = predict_memory(step).at_peak().by_kind
    assert {kind: kinds[kind] for kind in ("parameter", "gradient", "optimizer state")} == {
        "parameter": 2 * PARAMETERS,
        "gradient": 2 * PARAMETERS,
        "optimizer state": 12 * PARAMETERS,
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_stage_1_divides_the_optimizer_state(ranks):
    def optimizer(parameters):
        return ZeroRedundancyOptimizer(parameters, optimizer_class=MixedPrecisionAdam, lr=1e-3)

    timeline = plan(ranks, optimizer, "dp")
    assert states(timeline, "parameter") == 4 * PARAMETERS + 12 * PARAMETERS // ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_stage_2_divides_the_gradients_too(ranks):
    def keep_gathered(model, mesh):
        model.to_empty(device="cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        model.set_reshard_after_backward(False)

    timeline = plan(ranks, axis="tp", shard_by=keep_gathered)
    # The parameters in use are FSDP2's gathered copy.
    assert states(timeline, "communication") == 2 * PARAMETERS + 14 * PARAMETERS // ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_stage_3_divides_all(ranks):
    assert states(plan(ranks), "parameter") == 16 * PARAMETERS // ranks
    # As FSDP2 is usually run: parameters, gradients and state are in float32. AdamW's counts of steps come on top.
    timeline = plan(ranks, torch.optim.AdamW, model=make_model().float(), x=X.float())
    assert states(timeline, "parameter") == 16 * PARAMETERS // ranks + 4 * LAYERS
