"""The attention of transformers' models counts the pairs that their masks leave, as sums over the rows of the masks."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fvflops import record, record_call
from fvflops.counting import TableCostModel, count
from fvflops.counting.uncounted_work import find_unknown_masks
from fvflops.devices.utilisation import with_attention
from fvflops.formulas import load_table
from fvflops.sources.meta import build_on_meta

transformers = pytest.importorskip("transformers")

TABLE = with_attention(load_table("default"), "causal")
WINDOW, CHUNK, HEADS, DIM = 512, 384, 2, 8
DOCUMENTS = (0.25, 0.4, 0.35)

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": DIM,
    "max_position_embeddings": 65536,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
MIXTURE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def pairs_of(kind, n):
    """Return the unmasked pairs of a mask of n x n positions, summed over its rows."""
    rows = range(n)
    if kind == "causal":
        return sum(i + 1 for i in rows)
    if kind == "window":
        return sum(min(i + 1, WINDOW) for i in rows)
    if kind == "both sides":  # a window of 2 * (WINDOW // 2) + 1
        half = WINDOW // 2
        return sum(min(i, half) + 1 + min(n - 1 - i, half) for i in rows)
    if kind == "all":
        return n * n
    if kind == "chunked":
        return sum(i % CHUNK + 1 for i in rows)
    if kind == "documents":
        return sum(length * (length + 1) // 2 for length in document_lengths(n))
    prefix = n // 4  # of which each position sees all
    return sum(max(i + 1, prefix) for i in rows)


def document_lengths(n):
    first, second, _ = (int(share * n) for share in DOCUMENTS)
    return [first, second, n - first - second]


@dataclass
class Architecture:
    """A model of transformers, the mask of each of its layers, and the sizes of its heads."""

    name: str
    kinds: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    documents: bool = False
    dims: tuple[int, int] = (DIM, DIM)

    def build(self, *, with_weights=False):
        config = getattr(transformers, f"{self.name}Config")(**{**TINY, **self.settings})
        config._attn_implementation = "sdpa"
        model = getattr(transformers, f"{self.name}Model")
        return model(config) if with_weights else build_on_meta(lambda: model(config))

    def arguments(self, n):
        ids = torch.ones(1, n, dtype=torch.long)
        if self.documents:
            positions = torch.cat([torch.arange(length) for length in document_lengths(n)])
            return {"input_ids": ids, "position_ids": positions[None]}
        return {"input_ids": ids}

    def macs(self, n):
        return sum(pairs_of(kind, n) for kind in self.kinds) * HEADS * sum(self.dims)


ARCHITECTURES = [
    Architecture("Llama", ("causal", "causal")),
    Architecture("Llama", ("documents",) * 2, documents=True),
    Architecture("Mistral", ("window",) * 2, {"sliding_window": WINDOW}),
    Architecture("Mixtral", ("window",) * 2, {"sliding_window": WINDOW, **MIXTURE}),
    Architecture("Starcoder2", ("window",) * 2, {"sliding_window": WINDOW}),
    Architecture("Phi3", ("window",) * 2, {"sliding_window": WINDOW}),
    Architecture("Qwen2", ("window", "causal"), SLIDING | {"use_sliding_window": True}),
    Architecture("Qwen3", ("window", "causal"), SLIDING | {"use_sliding_window": True}),
    Architecture("Gemma3Text", ("window", "causal"), SLIDING),
    Architecture("Cohere2", ("window", "causal"), SLIDING),
    Architecture("Olmo3", ("window", "causal"), SLIDING),
    Architecture("Exaone4", ("window", "causal"), SLIDING),
    Architecture(
        "Llama4Text",
        ("chunked", "causal"),
        {
            "attention_chunk_size": CHUNK,
            "layer_types": ["chunked_attention", "full_attention"],
            "intermediate_size_mlp": 16,
            **MIXTURE,
        },
    ),
    Architecture(
        "ModernBert",
        ("all", "both sides"),
        {"local_attention": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    Architecture("DeepseekV2", ("causal",) * 2, MLA, dims=(12, 6)),
    Architecture("DeepseekV3", ("causal",) * 2, {**MLA, "head_dim": 4}, dims=(12, 6)),
    Architecture("MiniCPM3", ("causal",) * 2, MLA, dims=(12, 6)),
    Architecture("Lfm2", ("causal",), {"layer_types": ["conv", "full_attention"], "block_ff_dim": 16}),
    Architecture("Qwen3Next", ("causal",), {"layer_types": ["linear_attention", "full_attention"], **MIXTURE}),
    Architecture("GPT2", ("causal",) * 2, {"n_layer": 2, "n_head": 2, "n_embd": 16}),
    Architecture("Bert", ("all",) * 2, {"attention_probs_dropout_prob": 0.0}),
    Architecture("OPT", ("causal",) * 2, {"ffn_dim": 16, "word_embed_proj_dim": 16}),
]


def attention_macs(trace, phases=("forward",)):
    """Return the multiply-adds of attention: of fused ones without recomputation, of others the marked products."""
    counts = count(trace, TableCostModel(TABLE, "flops"), "flops")
    fused = sum(
        entry.macs - entry.recomputed for entry in counts.entries if "attention" in entry.op and entry.phase in phases
    )
    decomposed = 0
    for (index, _, phase), calls in trace.calls.items():
        signature = trace.signatures[index]
        specs = [spec for spec in (*signature.inputs, *signature.outputs) if getattr(spec, "values", None)]
        if signature.op in ("aten::bmm", "aten::mm") and specs and phase in phases:
            decomposed += calls * TABLE.price(signature).macs
    return fused + decomposed


def loss(output):
    return output.last_hidden_state.sum()


architectures = pytest.mark.parametrize(
    "architecture", ARCHITECTURES, ids=lambda item: item.name + item.documents * " documents"
)


@architectures
@pytest.mark.parametrize("n", [2048, *(pytest.param(n, marks=pytest.mark.long) for n in (8192, 32768))])
def test_attention_counts_unmasked_pairs(architecture, n):
    model = architecture.build()
    arguments, expected = architecture.arguments(n), architecture.macs(n)
    options = {"kwargs": arguments, "execution": "shapes", "stops_at": TABLE.stops_at}
    trace = record_call(model, (), **options)
    assert attention_macs(trace) == expected
    trace = record_call(model, (), loss=loss, **options)
    assert not find_unknown_masks(trace, TABLE)
    assert attention_macs(trace) == expected
    assert attention_macs(trace, ("backward",)) == 2 * expected


@pytest.mark.parametrize("n", [2048, pytest.param(32768, marks=pytest.mark.long)])
def test_a_prefix_that_all_positions_see(n):
    model = ARCHITECTURES[0].build()

    def forward(ids):
        embeddings = model.embed_tokens(ids)
        mask = transformers.masking_utils.create_causal_mask(
            config=model.config,
            inputs_embeds=embeddings,
            attention_mask=None,
            past_key_values=None,
            or_mask_function=lambda batch, head, query, key: key < n // 4,
        )
        return model(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state

    trace = record_call(forward, (torch.ones(1, n, dtype=torch.long),), execution="shapes", stops_at=TABLE.stops_at)
    assert attention_macs(trace) == 2 * pairs_of("prefix", n) * HEADS * 2 * DIM


@architectures
@pytest.mark.long
@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_recorded_training_steps_count_the_same_pairs(architecture, execution):
    n = 1100  # more than 2^20 pairs
    model = architecture.build(with_weights=execution == "real")
    with record(model, table=TABLE, execution=execution) as run:
        loss(model(**architecture.arguments(n))).backward()
    trace = run.trace()
    assert trace.info.execution == execution
    assert attention_macs(trace) == architecture.macs(n)
    assert attention_macs(trace, ("backward",)) == 2 * architecture.macs(n)
