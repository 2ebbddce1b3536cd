"""Compare predicted memory with users' published figures.

Run it in tools/, with the checkout on PYTHONPATH: python -m training_runs.field_memory [ROW ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from tabulate import tabulate
from torch import nn
from torch.nn import functional as F

from fvflops.cli.planning.step_options import find_optimizer
from fvflops.devices.devices import find_device
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.memory_savings import compute_loss_in_chunks
from fvflops.plan.plans import plan_rank
from fvflops.plan.step_time.step_time_report import judge
from fvflops.zoo.llama import CONFIGS, Llama, LlamaConfig
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "field_memory" / "field_memory.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published run; field_memory.yaml describes the fields."""

    source: str
    run: str
    build: str
    tokens: Sequence[int]
    adapters: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    quantity: str = "allocated"
    other: str = ""
    labels: int | None = None
    added: int = 0
    gb: float | None = None
    fits: bool | None = None
    device: str = ""
    assumes: str = ""


@cache
def read_cases() -> tuple[Case, ...]:
    return tuple(Case(**entry) for entry in yaml.safe_load(FILE.read_text()))


class Compared(NamedTuple):
    """A run with its prediction in GB."""

    case: Case
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / (self.case.gb or 1.0) - 1

    @property
    def fits(self) -> bool:
        found = judge(int(1e9 * self.predicted), find_device(self.case.device), self.case.options.get("mesh", {}))
        return bool(found.fits)


# --- models -----------------------------------------------------------------------------------------------------------


def causal(kind: str, **config: Any) -> nn.Module:
    """Return a language model of transformers in bfloat16, without weights."""
    import transformers

    settings = getattr(transformers, f"{kind}Config")(use_cache=False, **config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)


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


_LLAMA3: dict[str, Any] = {"vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8}
_LLAMA2_13B = LlamaConfig(
    vocab_size=32_000, hidden_size=5120, intermediate_size=13_824, layers=40, heads=40, kv_heads=40
)


def qwen() -> nn.Module:
    """Return Qwen-7B; query, key and value are one Linear in its own code: as many parameters as these ranks."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11_008, "num_key_value_heads": 32}
    ranks = {"k_proj": 32, "v_proj": 32}
    modules = "q_proj k_proj v_proj o_proj gate_proj up_proj"
    model = causal("Qwen2", vocab_size=151_936, **sizes)
    # peft 0.5 kept adapters in float32.
    return Autocast(lora(model, 64, modules, upcast=True, lora_dropout=0.05, rank_pattern=ranks))


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


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "mistral": partial(causal, "Mistral", vocab_size=32_000, intermediate_size=14_336, num_key_value_heads=8),
    "llama2_7b": partial(causal, "Llama", vocab_size=32_000, intermediate_size=11_008),
    "roberta": partial(classifier, "Roberta"),
    "bert": partial(classifier, "Bert"),
    "automodel_llama": automodel_llama,
    "torchtune_llama": torchtune_llama,
    "qwen": qwen,
    "llama3_8b": partial(zoo_llama, CONFIGS["llama3_8b"]),
    "llama3_8b in chunks": partial(zoo_llama, CONFIGS["llama3_8b"], chunks=8),
    "llama2_13b": partial(zoo_llama, _LLAMA2_13B),
}
ADAPTERS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "": lambda model: model,
    "mistral": lambda model: lora(model, 16, "q_proj k_proj v_proj o_proj", upcast=True),
    "litgpt": lambda model: lora(model, 8, "q_proj v_proj", lora_dropout=0.05),
    "roberta": lambda model: lora(model, 8, "query value", modules_to_save=["classifier"], lora_dropout=0.1),
}


# --- predictions ------------------------------------------------------------------------------------------------------


def predict(case: Case, model: nn.Module) -> float:
    """Return the bytes of a step of a model."""
    tokens = torch.ones(tuple(case.tokens), dtype=torch.int64)
    labels = tokens if case.labels is None else torch.ones(len(tokens), dtype=torch.int64)
    inputs = {"tokens" if isinstance(model, WithLoss) else "input_ids": tokens, "labels": labels}
    if case.labels == 0:  # the model has its loss in place of its logits
        del inputs["labels"]
    options: dict[str, Any] = {"mesh": {"dp": 1}, **case.options}
    options["optimizer"] = find_optimizer(options.get("optimizer", "AdamW"))
    plan = plan_rank(model.train(), (), inputs, device="cuda", loss=_loss_of, **options)
    timeline, added = plan.memory(), case.added * 2**20
    if case.quantity == "allocated" and case.fits is None:
        return timeline.peak + added
    return reserved_memory(timeline, expandable_segments=case.quantity != "reserved").peak + added


def _loss_of(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result
    return result.logits if result.loss is None else result.loss


def compare(case: Case) -> Compared:
    predicted = predict(case, ADAPTERS[case.adapters](MODELS[case.build]()))
    if case.other:
        predicted -= predict(case, MODELS[case.other]())
    return Compared(case, predicted / 1e9)


def write_table(found: Sequence[Compared]) -> str:
    """Return the rows with their errors, and how many are within 5 %."""
    cells = []
    for item in found:
        if item.case.fits is None:
            shown = f"{item.predicted:.2f}", f"{item.case.gb:.2f}", f"{item.error:+.1%}"
        else:
            said, known = ("fits" if fits else "does not fit" for fits in (item.fits, item.case.fits))
            shown = f"{item.predicted:.2f}: {said}", known, ""
        cells.append((item.case.source, item.case.run, item.case.quantity, *shown, item.case.assumes))
    heads = ["source", "run", "memory", "predicted, GB", "published", "error", "assumes"]
    errors = [abs(item.error) for item in found if item.case.fits is None]
    verdicts = [item.fits == item.case.fits for item in found if item.case.fits is not None]
    within = sum(error <= 0.05 for error in errors)
    right = f"{sum(verdicts)} of {len(verdicts)} verdicts are right"
    return f"{tabulate(cells, heads)}\n\n{within} of {len(errors)} rows are within 5 %; {right}."


def main() -> None:
    define_torchvision_schemas()
    wanted = set(map(int, sys.argv[1:]))
    found = []
    for number, case in enumerate(read_cases(), start=1):
        if not wanted or number in wanted:
            start = time.monotonic()
            found.append(compare(case))
            print(f"{number}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(write_table(found))


if __name__ == "__main__":
    main()
