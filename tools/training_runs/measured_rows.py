"""Rows of published training runs of 2022 to 2026, whose layouts are words such as "tp8 pp12 dp4 mb8 heads64"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fvflops.zoo import megatron_gpt, mpt
from training_runs.measured_llama import MeasuredLlamaConfig
from training_runs.run_record import Config, Row, TrainingRun, divide_batch, make_mesh

Numbers = Mapping[str, int]
Fields = dict[str, Any]
# Sizes that the source's row does not give. Llamas: layers, hidden size, heads, heads of keys, width of the MLP, words.
_LLAMAS = {
    "llama2-7b": (32, 4096, 32, 32, 11_008, 32_000),
    "llama2-13b": (40, 5120, 40, 40, 13_824, 32_000),
    "llama2-70b": (80, 8192, 64, 8, 28_672, 32_000),
    "llama3-8b": (32, 4096, 32, 8, 14_336, 128_256),
    "llama3.1-8b": (32, 4096, 32, 8, 14_336, 128_256),
    "llama3.1-70b": (80, 8192, 64, 8, 28_672, 128_256),
    "llama3.1-405b": (126, 16_384, 128, 8, 53_248, 128_256),
    "internlm-7b": (32, 4096, 32, 32, 11_008, 103_168),
    # Squared ReLU without gates; arXiv:2402.16819 and arXiv:2406.11704.
    "nemotron4-15b": (32, 6144, 48, 8, 24_576, 256_000),
    "nemotron4-340b": (96, 18_432, 96, 8, 73_728, 256_000),
    "nemotron-340b": (96, 18_432, 96, 8, 73_728, 256_000),
}
# Layers, hidden size, heads: table 1 of arXiv:2205.05198.
_GPTS = {
    "gpt 22B": (48, 6144, 64),
    "gpt 175B": (96, 12_288, 96),
    "gpt 530B": (105, 20_480, 128),
    "gpt 1T": (128, 25_600, 160),
}
# Sequences of a step, and stages of a rank: ibid., table 3.
_GPT_STEPS = {"gpt 22B": (4, 1), "gpt 175B": (64, 3), "gpt 530B": (280, 3), "gpt 1T": (512, 1)}
_A100: dict[str, Any] = {"device": "A100 SXM 80GB", "node_gbps": 200.0}
_H100: dict[str, Any] = {"device": "H100 SXM", "node_gbps": 400.0}


def read_measured(dataset: str, line: int, row: Row) -> TrainingRun | None:
    """Return a run, None of one that did not fit or whose batch must be another than its source's."""
    source = row["source"].removesuffix(" performance").removesuffix(" README").replace(" performance.md", "")
    read = next(read for start, read in _SOURCES.items() if source.startswith(start))
    if row["status"] != "ok":
        return None
    numbers = {name: int(number) for name, number in re.findall(r"([a-z]+)=?(\d+)", row["layout"])}
    fields = read(row, numbers)
    if fields is None:
        return None
    run = TrainingRun(
        dataset=dataset,
        source=source,
        line=line,
        name=row["model"],
        quantity={"s/it": "step seconds", "step s": "step seconds", "tok/s/GPU": "tokens/s/GPU"}[row["metric"]],
        value=float(row["value"]),
        memory=float(row["memory_gb"]) * 1e9 if row["memory_gb"] else None,
        **{"precision": "bf16", "gathered_in": "bfloat16", "reduced_in": "float32", **fields},
    )
    if run.step_seconds is None or abs(run.step_seconds / float(row["step_seconds"]) - 1) > 1e-3:
        raise ValueError(f"a step of {run.tokens:,} tokens takes {run.step_seconds} s, not {row['step_seconds']}")
    return run


def _checkpointing(layout: str) -> str:
    return next((name for name in ("every 2", "selective", "full") if name in layout), "none")


def _llama(name: str) -> MeasuredLlamaConfig:
    layers, hidden, heads, kv_heads, intermediate, words = _LLAMAS[name]
    return MeasuredLlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        gated=not name.startswith("nemotron"),
    )


def _replicated(row: Row, numbers: Numbers, sequence: int) -> Fields:
    """Return the fields of a run of dp, whose ranks divide the optimizer, and maybe pp, cp and tp."""
    sizes = {axis: numbers.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
    if "gbs" in numbers:
        sizes["dp"] = int(row["gpus"]) // (sizes["pp"] * sizes["tp"])
        local_batch = divide_batch(numbers["gbs"], sizes["dp"])
    else:
        local_batch = numbers["mb"] * numbers.get("ga", numbers.get("x", 1))
    return {
        "sequence": sequence,
        "local_batch": local_batch,
        "micro_batch": numbers["mb"],
        "mesh": make_mesh(int(row["gpus"]), **sizes),
        "virtual_stages": numbers.get("vp", 1),
        "sharded_optimizer": True,
    }


def _sharded(row: Row, numbers: Numbers, sequence: int) -> Fields:
    """Return the fields of a run under FSDP of one microbatch."""
    return {
        "sequence": sequence,
        "local_batch": numbers["b"],
        "micro_batch": numbers["b"],
        "mesh": make_mesh(int(row["gpus"]), dp=numbers.get("dp", 1), fsdp=numbers["fsdp"]),
        "sharding": "FULL_SHARD",
        "checkpointing": _checkpointing(row["layout"]),
    }


def _bigscience(row: Row, numbers: Numbers) -> Fields | None:
    """Return a trial of BLOOM's: 2,048 sequences of 2,048 tokens; bf16, full checkpointing, ZeRO-1, 250,880 words.

    Trials of the same layout differ by up to 29 %. Two whose products would reach 62 % of an A100's peak and more, the
    recomputed ones counted, must have had fewer sequences.
    """
    layers, hidden = map(int, row["model"].removeprefix("gpt ").split("x"))
    if float(row["value"]) < _FASTEST:
        return None
    # The nearest number of sequences that is divisible by the layout.
    shares = numbers["dp"] * numbers["mb"]
    numbers = {**numbers, "gbs": round(2048 / shares) * shares}
    return {
        **_A100,
        **_replicated(row, numbers, 2048),
        "config": megatron_gpt.MegatronGPTConfig(
            vocab_size=250_880, hidden_size=hidden, layers=layers, heads=numbers["heads"]
        ),
        "checkpointing": "full",
        "reduced_in": "bfloat16",
    }


def _korthikanti(row: Row, numbers: Numbers) -> Fields:
    """Return a run of table 5: fp16, one replica; interleaved stages where the paper has them."""
    layers, hidden, heads = _GPTS[row["model"]]
    sequences, virtual = _GPT_STEPS[row["model"]]
    recomputes_all = "full" in row["layout"]
    return {
        **_A100,
        **_replicated(row, {**numbers, "gbs": sequences}, 2048),
        "config": megatron_gpt.MegatronGPTConfig(layers=layers, hidden_size=hidden, heads=heads),
        "precision": "fp16",
        "gathered_in": "float16",
        "reduced_in": "float16",
        "virtual_stages": virtual,
        "checkpointing": "full" if recomputes_all else "attention",
        "sequence_parallel": not recomputes_all,
        "sharded_optimizer": False,
    }


def _fsdp(row: Row, numbers: Numbers) -> Fields:
    """Return a run of torchtitan or fms-fsdp, of which the latter reduces in bf16; both on A100s, by their rates."""
    reduced = {"reduced_in": "bfloat16"} if row["source"].startswith("IBM") else {}
    return {**_A100, **_sharded(row, numbers, numbers.get("seq", 4096)), "config": _llama(row["model"]), **reduced}


def _internevo(row: Row, numbers: Numbers) -> Fields:
    """Return a run on A800s, taken for A100s: ZeRO-1, or hybrid FSDP inside nodes with full checkpointing."""
    if "hsdp" in row["layout"]:
        sizes = {"fsdp": 8, "dp": numbers["dp"] // 8, "b": numbers["mb"]}
        fields = _sharded(row, sizes, 2048)
    else:
        fields = _replicated(row, numbers, 2048)
    return {**_A100, **fields, "config": _llama(row["model"]), "reduced_in": "bfloat16", "recomputes_all": True}


def _nvidia(row: Row, numbers: Numbers) -> Fields:
    """Return a run of NeMo: Transformer Engine's kernels are taken for compiled ones.

    Sequences of 2,048 tokens of GPT-3 5B (24 layers, hidden size 4,096), 8,192 with cp, 4,096 of the others.
    """
    is_gpt = row["model"].startswith("gpt3")
    config: Config = mpt.MPTConfig(vocab_size=51_200, hidden_size=4096, layers=24, heads=32)
    return {
        **_H100,
        **_replicated(row, numbers, 2048 if is_gpt else 8192 if "cp" in numbers else 4096),
        "config": config if is_gpt else _llama(row["model"]),
        "precision": "fp8" if "FP8" in row["source"] else "bf16",
        "sequence_parallel": numbers.get("tp", 1) > 1,
        "compiled": True,
    }


# Seconds of the fastest of BigScience's trials that is comparable.
_FASTEST = 90.0
# Start of a source's name → the function that returns the fields of a run from its row and the numbers of its layout.
_SOURCES: Mapping[str, Callable[[Row, Numbers], Fields | None]] = {
    "BigScience": _bigscience,
    "torchtitan": _fsdp,
    "IBM": _fsdp,
    "Korthikanti": _korthikanti,
    "NVIDIA": _nvidia,
    "InternEvo": _internevo,
}
