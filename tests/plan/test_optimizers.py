"""Optimizers by name: bitsandbytes' own state, byte for byte, and Muon with AdamW."""

import re
import warnings

import pytest
import torch
from torch import nn

from fvflops import TrainingStepAnalysis, predict_memory
from fvflops.cli import main
from fvflops.cli.planning.step_options import find_optimizer
from fvflops.plan.added_optimizers import BLOCKWISE_NAMES, Muon, find_blockwise
from fvflops.trace import Status


def step(optimizer, device=None, table="default"):
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 4)).to("meta")
    x = torch.empty(4, 512, device="meta")
    return TrainingStepAnalysis(model, (x,), loss=torch.sum, optimizer=optimizer, device=device, table=table)


@pytest.fixture(autouse=True)
def _paged_on_a_cpu():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Paged optimizers are not supported")
        yield


def state_bytes(optimizer):
    tensors = [item for state in optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor)]
    return sum({item.data_ptr(): item.nbytes for item in tensors}.values())


@pytest.mark.parametrize("name", BLOCKWISE_NAMES)
def test_updates_and_state_are_those_of_bitsandbytes(name):
    theirs = getattr(pytest.importorskip("bitsandbytes").optim, name)
    weights = [torch.randn(96, 128), torch.randn(128)]
    pairs = [(nn.Parameter(weight.clone()), nn.Parameter(weight.clone())) for weight in weights]
    ours = find_optimizer(name.lower())([mine for mine, _ in pairs], weight_decay=0.01)
    reference = theirs([other for _, other in pairs], lr=1e-3, weight_decay=0.01)
    for _ in range(3):
        for mine, other in pairs:
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        ours.step()
        reference.step()
    for mine, other in pairs:
        assert torch.equal(mine, other)
    assert state_bytes(ours) == state_bytes(reference)


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "PagedAdamW", "PagedAdamW8bit"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_memory_of_the_state(name, device):
    """The large matrix has 8 bits, in paged memory on a GPU; the small tensors have float32."""
    states, bits = (1 if "Lion" in name else 2), (8 if "8bit" in name else 32)
    matrix = states * 512 * 512 * bits // 8
    scales = states * 4 * (512 * 512 // 256 + 256) * (bits == 8)
    small = states * 4 * (512 + 2 * 512 + 4 * 512 + 4)
    is_paged = "Paged" in name and device == "cuda"
    timeline = predict_memory(step(find_blockwise(name), device))
    states_at_peak = sum(block.nbytes for block in timeline.blocks if block.kind == "optimizer state")
    rounding = 0 if device == "cpu" else 512 * 20  # the allocator's
    expected = matrix * (not is_paged) + scales + small
    assert expected <= states_at_peak <= expected + rounding


def test_the_arithmetic_of_a_step():
    """Adam has 14 FLOPs an element, and of 8 bits 12 more, two searches among 255, and one a block and state."""
    analysis = step(find_blockwise("AdamW8bit"), table="exact")
    matrix, small = 512 * 512, 512 + 2 * 512 + 4 * 512 + 4
    assert sum(analysis.by_phase()["optimizer"].values()) == (26 + 2 * 8) * matrix + 2 * matrix // 256 + 14 * small
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]


def test_muon_is_for_hidden_matrices():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 50))
    optimizer = Muon(model.parameters(), by_adamw={(50, 8)})
    by_class = {type(inner).__name__: inner.param_groups[0]["params"] for inner in optimizer.inner}
    assert [tuple(item.shape) for item in by_class["Muon"]] == [(8, 8)]
    assert len(by_class["AdamW"]) == 6
    model(torch.arange(5)).sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_names_of_transformers():
    """Every name of an 8-bit or paged Adam, AdamW or Lion in TrainingArguments is one."""
    from transformers.training_args import OptimizerNames  # imports much of transformers

    pattern = re.compile(r"(paged_)?(adamw|lion)(_bnb)?(_8bit|_32bit)?")
    names = [item.value for item in OptimizerNames if pattern.fullmatch(item.value) and item.value != "adamw"]
    assert len(names) >= 6
    for name in names:
        found = find_optimizer(name)
        assert found.bits == (8 if "8bit" in name else 32) and found.is_paged == ("paged" in name), name
    for name in ("adamw", "adam", "lion", "sgd8bit", "adamw4bit"):
        assert find_blockwise(name) is None


@pytest.mark.parametrize(
    ("name", "device", "note"),
    [
        ("muon", "cuda", "optimizer: Muon and AdamW"),
        ("paged_adamw_8bit", "cuda", "1.05 MB of the optimizer's state are in paged memory"),
        ("paged_adamw_8bit", "cpu", "on the CPU the optimizer's state is in the peak"),
    ],
)
def test_memory_by_name(name, device, note, capsys, tmp_path):
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nnet = torch.nn.Sequential(torch.nn.Linear(1024, 512), torch.nn.Linear(512, 4))\n"
        "def make():\n    return net, (torch.randn(2, 1024),)\n"
    )
    assert main(["memory", f"{path}:make", "--optimizer", name, "--device", device, "--no-savings"]) == 0
    assert note in " ".join(capsys.readouterr().out.split())


def test_an_unknown_optimizer_is_refused_before_the_model_is_built(capsys):
    assert main(["memory", "zoo:no_such_model", "--optimizer", "adamw8bi"]) == 2
    assert "did you mean 'adamw8bit'?" in capsys.readouterr().err
