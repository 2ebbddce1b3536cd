"""Compare predicted memory with users' published figures.

Run it in tools/, with the checkout on PYTHONPATH: python -m training_runs.field_memory [ROW ...]
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import nn
from torch.nn import functional as F

from fvflops.devices.devices import find_device
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.memory_savings import compute_loss_in_chunks
from fvflops.plan.plans import plan_rank
from fvflops.plan.step_time.step_time_report import judge
from fvflops.zoo.llama import CONFIGS, Llama, LlamaConfig
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "field_memory" / "field_memory.csv"
UNITS = {"GB": 1e9, "GiB": 2**30}
# transformers 4 had the cosines and sines of 32,768 positions in each of Mistral's 32 layers, in bfloat16.
_MISTRAL_TABLES = 32 * 2 * 32_768 * 128 * 2

Row = Mapping[str, str]
Model = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published run: its model, the shape of its token ids, options of `plan_rank`, and the compared quantity.

    `quantity` is "allocated" or "reserved", "saved" by `other`, or "fits" a device. `added` are bytes that the run had
    besides, `assumes` settings that its source lacks. `labels` are None for each token, 0 where there are none, else of
    so many classes.
    """

    model: Model
    tokens: tuple[int, int]
    quantity: str = "allocated"
    options: Mapping[str, Any] = field(default_factory=dict)
    other: Model | None = None
    device: str = ""
    labels: int | None = None
    added: int = 0
    assumes: str = ""


class Compared(NamedTuple):
    """A row with its prediction, in bytes, or whether it is said to fit."""

    row: Row
    case: Case
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


# --- models -----------------------------------------------------------------------------------------------------------


def causal(kind: str, *, dtype: torch.dtype = torch.bfloat16, **config: Any) -> nn.Module:
    """Return a language model of transformers without weights."""
    import transformers

    settings = getattr(transformers, f"{kind}Config")(use_cache=False, **config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype)


def classifier(kind: str) -> nn.Module:
    """Return a large encoder of transformers with a classifier, in float32, without fused attention as in 2021."""
    import transformers

    settings = getattr(transformers, f"{kind}Config")(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    with torch.device("meta"):
        return transformers.AutoModelForSequenceClassification.from_config(settings, attn_implementation="eager")


def lora(model: nn.Module, rank: int, modules: str, *, upcast: bool = False, **options: Any) -> nn.Module:
    """Return a model with adapters in its own dtype, or with `upcast` in float32, as newer releases of peft do."""
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=16, target_modules=modules.split(), **options)
    whole: Any = model
    wrapped: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=upcast)
    if hasattr(model, "get_input_embeddings"):  # as for checkpoints whose inputs need no gradient
        whole.get_input_embeddings().register_forward_hook(lambda _, args, output: output.requires_grad_(True))
    return wrapped


_LLAMA3: dict[str, Any] = {"vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8}
_QWEN: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_key_value_heads": 32,
}


def mistral() -> nn.Module:
    return causal("Mistral", vocab_size=32_000, intermediate_size=14_336, num_key_value_heads=8)


def mistral_lora() -> nn.Module:
    return lora(mistral(), 16, "q_proj k_proj v_proj o_proj", upcast=True)


def qwen() -> nn.Module:
    # peft 0.5 kept adapters in float32. Qwen's query, key and value are one Linear: as many parameters as these ranks.
    ranks = {"k_proj": 32, "v_proj": 32}
    modules = "q_proj k_proj v_proj o_proj gate_proj up_proj"
    return Autocast(lora(causal("Qwen2", **_QWEN), 64, modules, upcast=True, lora_dropout=0.05, rank_pattern=ranks))


class Autocast(nn.Module):
    """A model that computes in bfloat16, as in transformers' Trainer with `bf16`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(**inputs)


class AutomodelLinear(nn.Module):
    """A Linear with an adapter whose result is dropped out, as NeMo Automodel's are (_peft/lora.py)."""

    def __init__(self, linear: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": linear.weight.device, "dtype": linear.weight.dtype}
        self.linear, self.dropout = linear.requires_grad_(False), nn.Dropout(dropout)
        self.down = nn.Linear(linear.in_features, rank, **options)
        self.up = nn.Linear(rank, linear.out_features, **options)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(inputs) + self.dropout(self.up(self.down(inputs)))
        return result


class WithLoss(nn.Module):
    """A model of the zoo that returns its cross entropy in float32, of some chunks of its logits."""

    def __init__(self, model: nn.Module, chunks: int = 1) -> None:
        super().__init__()
        self.model, self._chunks = model, chunks

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, labels = self.model(tokens).flatten(0, 1), labels.flatten()
        pairs = zip(logits.chunk(self._chunks), labels.chunk(self._chunks), strict=True)
        losses = [F.cross_entropy(chunk.float(), label, reduction="sum") for chunk, label in pairs]
        return torch.stack(losses).sum() / len(labels)


def zoo_llama(config: LlamaConfig, chunks: int = 1) -> nn.Module:
    """Return a Llama of the zoo with its loss, without weights."""
    with torch.device("meta"):
        return WithLoss(Llama(config), chunks)


def automodel_llama() -> nn.Module:
    """Return the model of Automodel's llama3_1_8b_peft_benchmark.yaml: all Linears, lm_head too, have adapters."""
    model = causal("Llama", hidden_size=4096, **_LLAMA3).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, AutomodelLinear(module, 16, 0.1))
    return model


def torchtune_llama() -> nn.Module:
    model = causal("Llama", hidden_size=4096, **_LLAMA3)
    compute_loss_in_chunks(model)
    return lora(model, 8, "q_proj v_proj o_proj gate_proj up_proj down_proj")


# --- rows -------------------------------------------------------------------------------------------------------------

_CHECKPOINTS = {"checkpoint": "full"}
_CONTEXT = 512 * 2**20  # of CUDA, where nvidia-smi measured
_FSDP = {"mesh": {"fsdp": 8}, "precision": "bf16-mixed", "checkpoint": "selective"}
_LLAMA2_13B = LlamaConfig(
    vocab_size=32_000, hidden_size=5120, intermediate_size=13_824, layers=40, heads=40, kv_heads=40
)
_LOOP = partial(torch.optim.AdamW, foreach=False)  # transformers' AdamW updates one parameter after the other
_BERT: dict[str, Any] = {"model": partial(classifier, "Bert"), "quantity": "reserved", "labels": 2}
# Up to 1.10 torch kept the input of each softmax too (derivatives.yaml): 16 heads of 512 x 512 in each of 24 layers.
_SOFTMAX = 16 * 512 * 512 * 4
# Up to 1.13 zero_grad() kept the gradients, which live through the next forward pass, as between micro-batches.
_ZEROED = {"microbatches": 2}
_ROBERTA: dict[str, Any] = {
    "tokens": (64, 96),
    "quantity": "reserved",
    "labels": 2,
    "added": _CONTEXT,
    "assumes": "nvidia-smi, float32",
}
# Qwen's own code of 2023 registered the causal mask of 8,192 positions in each of 32 layers (modeling_qwen.py).
_QWEN_OPTIONS: dict[str, Any] = {
    "model": qwen,
    "options": {**_CHECKPOINTS, "microbatches": 2},  # of 8, which need no more memory
    "added": 32 * 8192**2,
    "assumes": "a causal mask in each layer",
}
_TITAN = partial(zoo_llama, CONFIGS["llama3_8b"])

CASES: tuple[Case, ...] = (
    Case(model=mistral, tokens=(4, 4096), options=_CHECKPOINTS, added=_MISTRAL_TABLES),
    Case(model=mistral, tokens=(8, 4096), options=_CHECKPOINTS, added=_MISTRAL_TABLES),
    Case(model=mistral_lora, tokens=(4, 4096), options=_CHECKPOINTS, added=_MISTRAL_TABLES),
    Case(model=mistral_lora, tokens=(8, 4096), options=_CHECKPOINTS, added=_MISTRAL_TABLES),
    Case(
        model=mistral_lora,
        tokens=(8, 4096),
        options=_CHECKPOINTS,
        added=_MISTRAL_TABLES + _CONTEXT,
        quantity="reserved",
        assumes="512 MiB of context",
    ),
    *(
        Case(
            model=lambda: lora(
                causal("Llama", vocab_size=32_000, intermediate_size=11_008), 8, "q_proj v_proj", lora_dropout=0.05
            ),
            tokens=(batch, 1304),
            assumes="transformers' Llama",
        )
        for batch in (1, 2)
    ),
    Case(model=partial(classifier, "Roberta"), **_ROBERTA),
    Case(
        model=lambda: lora(classifier("Roberta"), 8, "query value", modules_to_save=["classifier"], lora_dropout=0.1),
        **_ROBERTA,
    ),
    Case(model=automodel_llama, tokens=(2, 4096), quantity="fits", device="H100", assumes="its peft_benchmark.yaml"),
    Case(
        model=_TITAN,
        tokens=(1, 8192),
        options=_FSDP,
        quantity="saved",
        other=partial(_TITAN, chunks=8),
        assumes="8 ranks, 8 chunks",
    ),
    *(Case(tokens=(1, length), **_QWEN_OPTIONS) for length in (256, 2048, 8192)),
    Case(tokens=(4, 512), options={"optimizer": _LOOP, **_ZEROED}, added=4 * 24 * _SOFTMAX, **_BERT),
    Case(tokens=(1, 512), options={"optimizer": _LOOP, "microbatches": 4}, added=24 * _SOFTMAX, **_BERT),
    Case(tokens=(1, 512), options={"optimizer": _LOOP, "microbatches": 4, **_CHECKPOINTS}, added=_SOFTMAX, **_BERT),
    Case(
        tokens=(4, 512),
        added=4 * 24 * _SOFTMAX,
        **_BERT,
        options={**_ZEROED, "optimizer": torch.optim.Adafactor, "assume": {"aten::_local_scalar_dense": 1.0}},
    ),
    Case(
        model=torchtune_llama,
        labels=0,
        tokens=(2, 2048),
        options=_CHECKPOINTS,
        assumes="batch 2, 2048 tokens, checkpoints",
    ),
    Case(
        model=partial(zoo_llama, _LLAMA2_13B),
        tokens=(2, 4096),
        quantity="fits",
        device="A100 80GB",
        options={"mesh": {"fsdp": 64}, "precision": "bf16-mixed"},
        assumes="4096 tokens",
    ),
)


def read_rows() -> list[Row]:
    with FILE.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def predict(case: Case, model: nn.Module) -> float:
    tokens = torch.ones(case.tokens, dtype=torch.int64)
    labels = tokens if case.labels is None else torch.ones(case.tokens[0], dtype=torch.int64)
    names = ("tokens", "labels") if isinstance(model, WithLoss) else ("input_ids", "labels")
    options: dict[str, Any] = {"mesh": {"dp": 1}, "optimizer": torch.optim.AdamW, **case.options}
    inputs = dict(zip(names, (tokens, labels), strict=True))
    if case.labels == 0:  # the model has its loss in place of its logits
        del inputs["labels"]
    plan = plan_rank(model.train(), (), inputs, device="cuda", loss=_loss_of, **options)
    timeline = plan.memory()
    if case.quantity == "allocated":
        return timeline.peak + case.added
    return reserved_memory(timeline, expandable_segments=case.quantity != "reserved").peak + case.added


def _loss_of(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result
    return result.logits if result.loss is None else result.loss


def compare(row: Row, case: Case) -> Compared:
    predicted = predict(case, case.model())
    if case.quantity == "fits":
        return Compared(row, case, predicted, float(row["unit"] == "fits"))
    if case.other is not None:
        predicted -= predict(case, case.other())
    return Compared(row, case, predicted, float(row["measured"]) * UNITS[row["unit"].partition(" ")[0]])


def write_table(found: Iterator[Compared]) -> str:
    """Return the rows with their errors, and how many are within 5 %."""
    cells, errors, verdicts = [], [], []
    for item in found:
        if item.case.quantity == "fits":
            needed = f"{item.predicted / 1e9:.2f}"
            verdict = judge(int(item.predicted), find_device(item.case.device), item.case.options.get("mesh", {}))
            shown = (
                f"{needed}: {'fits' if verdict.fits else 'does not fit'}",
                "fits" if item.published else "does not",
                "",
            )
            verdicts.append(verdict.fits == bool(item.published))
        else:
            shown = f"{item.predicted / 1e9:.2f}", f"{item.published / 1e9:.2f}", f"{item.error:+.1%}"
            errors.append(abs(item.error))
        name = f"{item.row['model']}, {item.row['what']}, {item.row['settings']}"
        cells.append((item.row["source"], name, item.case.quantity, *shown, item.case.assumes))
    heads = ["source", "run", "memory", "predicted, GB", "published", "error", "assumes"]
    within = sum(error <= 0.05 for error in errors)
    right = f"{sum(verdicts)} of {len(verdicts)} verdicts are right"
    return f"{tabulate(cells, heads)}\n\n{within} of {len(errors)} rows are within 5 %; {right}."


def main() -> None:
    define_torchvision_schemas()
    wanted = set(map(int, sys.argv[1:])) or set(range(1, len(CASES) + 1))
    found = []
    for number, (row, case) in enumerate(zip(read_rows(), CASES, strict=True), start=1):
        if number in wanted:
            start = time.monotonic()
            found.append(compare(row, case))
            print(f"{number}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(write_table(iter(found)))


if __name__ == "__main__":
    main()
