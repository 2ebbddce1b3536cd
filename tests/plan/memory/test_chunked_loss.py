"""Cross entropy in chunks of tokens: its numbers, its memory and its FLOPs."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fvflops.cli import main
from fvflops.plan.memory.memory_savings import ChunkedLoss, compute_loss_in_chunks, size_of_chunk
from fvflops.zoo import build
from tests.support.measured_memory import compare_steps, measure_steps

TOKENS, WIDTH, VOCABULARY = 128, 32, 512
TINY = ("memory", "zoo:llama_tiny", "--no-savings", "--format", "json")


def hidden_states():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def test_loss_and_gradients_are_those_of_cross_entropy():
    hidden, weight, labels = hidden_states()
    assert size_of_chunk(TOKENS, WIDTH, VOCABULARY) < TOKENS
    expected = F.cross_entropy(hidden @ weight.t(), labels)
    gradients = torch.autograd.grad(2 * expected, (hidden, weight))
    found = ChunkedLoss.apply(hidden, weight, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(2 * found, (hidden, weight)), gradients)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="this torch has no chunked cross entropy")
def test_chunks_and_memory_are_those_of_torch():
    options = nn.LinearCrossEntropyOptions(chunking_method="aspect_ratio", acc_policy="compact")
    for sizes in ((8192, 4096, 128256), (4096, 5120, 32000), (1024, 768, 50257), (TOKENS, WIDTH, VOCABULARY)):
        assert size_of_chunk(*sizes) == options._compute_batch_chunk_size(*sizes)
    hidden, weight, labels = hidden_states()

    def torchs():
        F.linear_cross_entropy(hidden, weight, labels, options=options).backward()

    def ours():
        ChunkedLoss.apply(hidden, weight, labels).backward()

    (theirs,), (peak,) = measure_steps(torchs), measure_steps(ours)
    hidden.grad = weight.grad = None
    # Both have a gradient of each; torch has a few buffers of the chunk's logits, liger and this one.
    logits = 4 * VOCABULARY * size_of_chunk(TOKENS, WIDTH, VOCABULARY)
    assert peak <= theirs <= peak + 3 * logits and peak <= 4 * (hidden.numel() + weight.numel()) + 3 * logits


def test_predicted_memory_is_measured():
    model = build("llama_tiny").train()
    compute_loss_in_chunks(model)
    tokens = torch.randint(0, 100, (4, 60))
    for predicted, measured in compare_steps(model, (tokens,), loss=lambda loss: loss, optimizer=torch.optim.AdamW):
        assert predicted == pytest.approx(measured, rel=0.03)


LOSS = """
from torch.nn import functional as F

def cross_entropy(logits):
    return F.cross_entropy(logits.flatten(0, 1), logits.new_zeros(logits.shape[:2], dtype=int).flatten())
"""


def test_the_command_saves_the_logits_and_their_gradients(capsys, tmp_path):
    (tmp_path / "loss.py").write_text(LOSS)

    def predict(*options):
        assert main([*TINY, *options]) == 0
        data = json.loads(capsys.readouterr().out)
        phases = {row["phase"]: row["bytes"] for row in data["tables"]["phases"]["rows"]}
        return phases["backward"], data["settings"]

    options = ("--seq", "1024", "--optimizer", "none")
    whole, _ = predict(*options, "--loss", f"{tmp_path / 'loss.py'}:cross_entropy")
    chunked, settings = predict(*options, "--loss", "chunked")
    vocabulary = build("llama_tiny", device="meta").lm_head.out_features
    assert whole - chunked > 0.8 * 2 * 1024 * vocabulary * 4  # the logits and their logarithms, or gradients
    assert settings["loss"] == "cross entropy in chunks of tokens"
    for mesh in ("fsdp=2", "dp=2", "pp=2"):
        assert predict("--mesh", mesh, "--loss", "chunked")[0] > 0


def test_mistakes(capsys):
    assert main([*TINY, "--mesh", "tp=2", "--loss", "chunked"]) == 2
    assert "--loss chunked is not supported with tp" in capsys.readouterr().err
    assert main(["memory", "zoo:resnet50", "--loss", "chunked"]) == 2
    assert "no output projection without a bias is known of ResNet" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "hinted"), [("zoo:llama_tiny", True), ("zoo:lenet5", False)])
def test_a_language_models_savings_name_the_chunked_loss(capsys, model, hinted):
    assert main(["memory", model]) == 0
    assert ("Not tried: --loss chunked." in capsys.readouterr().out) is hinted
    assert main(["memory", model, "--loss", "torch:sum"]) == 0
    assert "chunked" not in capsys.readouterr().out
