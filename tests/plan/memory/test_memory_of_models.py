"""The predicted peak memory of whole models' steps beside what the CPU's allocator records, run by hand.

Of each model the first and the second training step of a program, and of some a forward pass without gradients. Both
figures are bytes over what is there before: parameters, buffers and inputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.measured_memory import Autocast, compare_forward, compare_steps
from tests.support.models.mixed_precision_adam import MixedPrecisionAdam
from tests.support.processes.rank_memory import compare_ranks

pytestmark = pytest.mark.long

ADAMW = torch.optim.AdamW
FUSED, FOREACH = partial(ADAMW, fused=True), partial(ADAMW, foreach=True)
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


class Case(NamedTuple):
    """A model with its inputs, its loss (None: the result's own), optimizer, and classes of checkpointed modules."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: Any
    checkpointed: tuple[type[nn.Module], ...] = ()
    forward: bool = True


class Recurrent(nn.Module):
    """A language model of recurrent layers, as in torch's word_language_model example."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.layers = layers(256, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 5000)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens))[0])


def classify(logits):
    logits = logits.flatten(0, -2)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def recurrent(layers):
    return Case(Recurrent(layers), (torch.randint(0, 5000, (8, 64)),), {}, classify, SGD)


def images(name, optimizer):
    library, _, model = name.partition(":")
    build = pytest.importorskip(library).create_model if library == "timm" else _torchvision
    return Case(build(model), (torch.randn(4, 3, 224, 224),), {}, classify, optimizer)


def _torchvision(name):
    return pytest.importorskip("torchvision").models.get_model(name, weights=None)


def tokens(kind, head, shape, labels=None, **config):
    """Return a model of transformers with its own loss of its labels, by default its tokens."""
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**config))
    ids = torch.randint(0, model.config.vocab_size, shape)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False} if labels is None else {"input_ids": ids}
    return Case(model, (), {"labels": labels, **inputs}, None, ADAMW)


resnet = partial(images, "torchvision:resnet50", SGD)
vit = partial(images, "timm:vit_small_patch16_224", ADAMW)
gpt2 = partial(tokens, "GPT2", "LMHeadModel", (2, 128))
bert = partial(
    tokens, "Bert", "ForSequenceClassification", (4, 128), torch.zeros(4, dtype=torch.long), num_hidden_layers=6
)
llama = partial(
    tokens,
    "Llama",
    "ForCausalLM",
    (4, 128),
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=8000,
)


def variant(make, *, autocast=False, blocks="", **changes):
    """Return another way to train: under autocast, with checkpointed blocks of a class, or other fields of its case."""
    case = make()._replace(forward=False, **changes)
    classes = {type(module) for module in case.model.modules() if type(module).__name__ == blocks}
    assert bool(classes) == bool(blocks)
    return case._replace(model=Autocast(case.model) if autocast else case.model, checkpointed=tuple(classes))


def halved_llama():
    case = variant(llama, optimizer=MixedPrecisionAdam)
    return case._replace(model=case.model.bfloat16())


CASES = {
    "ResNet-50": resnet,
    "MobileNetV3-L": partial(images, "torchvision:mobilenet_v3_large", SGD),
    "ViT-S/16": vit,
    "GPT-2": gpt2,
    "BERT": bert,
    "Llama": llama,
    "GRU": partial(recurrent, nn.GRU),
    "GPT-2, autocast, fused": partial(variant, gpt2, autocast=True, optimizer=FUSED),
    "BERT, foreach": partial(variant, bert, optimizer=FOREACH),
    "ViT-S/16, checkpoints, foreach": partial(variant, vit, blocks="Block", optimizer=FOREACH),
    "Llama, autocast, checkpoints, fused": partial(
        variant, llama, autocast=True, blocks="LlamaDecoderLayer", optimizer=FUSED
    ),
    "Llama, bfloat16, 32-bit copies": halved_llama,
    "Llama, 8-bit AdamW": lambda: variant(llama, optimizer=pytest.importorskip("torchao.optim").AdamW8bit),
    "LSTM": partial(recurrent, nn.LSTM),
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_steps_take_what_is_measured(name):
    torch.manual_seed(0)
    model, args, kwargs, loss, optimizer, checkpointed, forward = CASES[name]()
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its optimizers, whose temporaries are then others
        pairs = [compare_forward(model.eval(), args, kwargs)] if forward else []
        model.train()
        pairs += compare_steps(model, args, kwargs, loss=loss, optimizer=optimizer, checkpointed=checkpointed)
    # oneDNN's LSTM takes memory that only it knows.
    least = 0.5 if name == "LSTM" else 0.999
    assert all(least < predicted / measured < 1.001 for predicted, measured in pairs), pairs


@pytest.mark.parametrize("processes", [2, 4])
def test_the_predicted_step_of_each_process_takes_what_is_measured(processes):
    meshes = [{"fsdp": processes}, {"tp": processes}, *([{"fsdp": 2, "tp": 2}] if processes == 4 else [])]
    cases = [(mesh, "AdamW") for mesh in meshes] + [({"fsdp": processes}, name) for name in ("fused", "foreach")]
    for case, ranks in zip([*cases, "mixed precision"], compare_ranks(processes, cases), strict=True):
        for steps in ranks:
            assert all(0.998 < predicted / measured < 1.002 for predicted, measured in steps), (case, steps)
