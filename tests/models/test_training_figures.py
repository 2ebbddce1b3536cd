"""A training step's products against 6 N + 12 L H Q T flops a token, term by term, and Llama-3-405B's training.

The formula is appendix B of PaLM (arXiv:2204.02311): N parameters, L layers of H heads of size Q, sequences of T.
"""

import dataclasses
from collections import Counter
from fractions import Fraction
from functools import cache, partial

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, load_table, record_call
from fvflops.zoo import build
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from fvflops.zoo.llama import CONFIGS, Llama, LlamaConfig
from tests.support import training_figures as training

CASES = training.list_cases()
ATTENTIONS = ("fused", "unfused")
TINY_GPT2 = GPT2Config(vocab_size=100, positions=16, width=48, layers=2, heads=4)
TIED_LLAMA = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2, tie_embeddings=True
)

# Layers, width, vocabulary and positions, as published in table 2 of Radford et al. 2019; the parameters that this
# makes are those of the released checkpoints.
GPT2_SIZES = {
    "gpt2": (12, 768, 50_257, 1024, 124_439_808),
    "gpt2_medium": (24, 1024, 50_257, 1024, 354_823_168),
    "gpt2_large": (36, 1280, 50_257, 1024, 774_030_080),
    "gpt2_xl": (48, 1600, 50_257, 1024, 1_557_611_200),
}
# Layers, width, MLP's width, width of keys and values, vocabulary, length, and the released checkpoints' parameters.
LLAMA_SIZES = {
    "llama2_7b": (32, 4096, 11_008, 4096, 32_000, 4096, 6_738_415_616),
    "llama3_8b": (32, 4096, 14_336, 1024, 128_256, 8192, 8_030_261_248),
    "llama3_70b": (80, 8192, 28_672, 1024, 128_256, 8192, 70_553_706_496),
    "llama3_405b": (126, 16_384, 53_248, 1024, 128_256, 8192, 405_853_388_800),
}
# The count over the formula, with N all parameters.
RATIOS = {
    "gpt2": (1.0156, 0.9937),
    "gpt2_medium": (1.0173, 0.9966),
    "gpt2_large": (1.0159, 0.9978),
    "gpt2_xl": (1.0137, 0.9985),
    "llama2_7b": (1.0061, 0.9832),
    "llama3_8b": (0.9835, 0.9484),
    "llama3_70b": (1.0091, 0.9871),
    "llama3_405b": (1.0080, 0.9952),
}


@cache
def measure(name, attention="fused"):
    return training.measure(CASES[name], attention)


def gpt2_case(config, *, batch=1, length=None):
    return training.Case(
        name="gpt2",
        build=partial(GPT2, config),
        L=config.layers,
        H=config.heads,
        Q=config.width // config.heads,
        T=length or config.positions,
        batch=batch,
    )


def llama_case(config, *, batch=1, length=16):
    return training.Case(
        name="llama",
        build=partial(Llama, config),
        L=config.layers,
        H=config.heads,
        Q=config.head_size,
        T=length,
        batch=batch,
    )


def count_by_op(case, attention="fused"):
    """Return the multiply-adds of a step by phase, op and the module that owns them."""
    trace, _ = training.record_step(case, attention)
    found = Counter()
    for entry in FlopCountAnalysis.from_trace(trace).uncalled_modules_warnings(False).counts().entries:
        if entry.macs:
            found[entry.phase, entry.label, entry.scope[-1]] += entry.macs
    return found


def test_the_cases_have_the_published_sizes():
    assert list(CASES) == [*GPT2_SIZES, *LLAMA_SIZES] == list(RATIOS)
    assert {*LLAMA_SIZES} == {*CONFIGS} - {"llama_tiny"}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", GPT2_SIZES)
def test_gpt2_is_the_formula_and_named_terms(name, attention):
    layers, width, vocabulary, T, parameters = GPT2_SIZES[name]
    token_embedding, position_embedding = vocabulary * width, T * width
    linears = layers * 12 * width**2  # a layer's: 3 + 1 for attention, 4 + 4 for the MLP
    biases = layers * 9 * width  # 3 + 1 and 4 + 1
    norms = (2 * layers + 1) * 2 * width  # weight and bias each
    # N has the head's weight once: as the token embedding's.
    N = token_embedding + position_embedding + linears + biases + norms
    assert parameters == N
    product = 2 * layers * width * T  # of one product of attention, in a token's flops: H * Q is the width
    formula = 6 * N + 6 * product
    extra = {
        "embedding is looked up": -6 * (token_embedding + position_embedding),
        "tied head multiplies": 6 * token_embedding,
        "norms multiply nothing": -6 * norms,
        "biases multiply nothing": -6 * biases,
        "scores made again": product if attention == "fused" else 0,
    }
    check(name, attention, formula, extra, T)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", LLAMA_SIZES)
def test_llama_is_the_formula_and_named_terms(name, attention):
    layers, width, mlp_width, kv_width, vocabulary, T, parameters = LLAMA_SIZES[name]
    embedding = head = vocabulary * width
    linears = layers * (2 * width**2 + 2 * width * kv_width + 3 * width * mlp_width)
    norms = (2 * layers + 1) * width
    N = embedding + linears + norms + head
    assert parameters == N
    # Grouped queries share keys and values: their projections are smaller, the products of attention are not.
    product = 2 * layers * width * T
    extra = {
        "embedding is looked up": -6 * embedding,
        "norms multiply nothing": -6 * norms,
        "scores made again": product if attention == "fused" else 0,
    }
    check(name, attention, 6 * N + 6 * product, extra, T)


def check(name, attention, formula, extra, T):
    """Hold a step against a token's formula and extra terms, by hand and as they are listed."""
    step = measure(name, attention)
    assert step.count == (formula + sum(extra.values())) * T
    assert sum(list(step.terms.values())[:2]) == formula * T
    assert not step.unexplained
    assert round(Fraction(step.count, formula * T), 4) == Fraction(str(RATIOS[name][ATTENTIONS.index(attention)]))


def test_the_smallest_and_the_largest_by_their_digits():
    """The terms of GPT-2 in their order, and the totals."""
    assert list(measure("gpt2").terms.values()) == [
        764_558_180_352,
        115_964_116_992,
        -237_142_278_144,
        -4_831_838_208,
        237_142_278_144,
        -235_929_600,
        -509_607_936,
        19_327_352_832,
        0,
        0,
    ]
    assert measure("gpt2").count == 894_272_274_432
    # The forward pass as nanoGPT's transformer_sizing notebook publishes it, and for the backward pass twice that.
    assert measure("gpt2", "unfused").phases == {"forward": 291_648_307_200, "backward": 2 * 291_648_307_200}
    assert measure("llama3_405b").count == 21_784_555_161_649_152
    assert measure("llama3_405b", "unfused").count == 6 * (8192 * 403_747_897_344 + 126 * 2 * 8192**2 * 16_384)


@pytest.mark.parametrize("name", RATIOS)
def test_with_the_weights_that_multiply_for_n_and_unfused_attention_nothing_is_left(name):
    step = measure(name, "unfused")
    assert step.count == 6 * step.weights.products * step.case.tokens + step.terms["12 L H Q T tokens"]
    assert step.phases["backward"] == 2 * step.phases["forward"]
    assert step.phases.keys() == {"forward", "backward"}


@pytest.mark.parametrize("name", RATIOS)
def test_which_n_is_no_detail(name):
    """Kaplan's N leaves out the head, which multiplies: of the smallest GPT-2 that is more than a quarter."""
    step = measure(name, "unfused")
    head = step.weights.products - (step.weights.non_embedding - step.weights.biases - step.weights.norms)
    if name in GPT2_SIZES:
        _, width, vocabulary, *_ = GPT2_SIZES[name]
    else:
        _, width, _, _, vocabulary, *_ = LLAMA_SIZES[name]
    assert head == vocabulary * width
    kaplan = 6 * step.weights.non_embedding * step.case.tokens + step.terms["12 L H Q T tokens"]
    assert step.count - kaplan == 6 * (head - step.weights.norms - step.weights.biases) * step.case.tokens
    if name == "gpt2":
        assert step.count / kaplan > 1.25


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(
    "case",
    [gpt2_case(TINY_GPT2, batch=3, length=11), llama_case(TIED_LLAMA, batch=2, length=13)],
    ids=["GPT-2 on fewer tokens than positions", "Llama with a tied head"],
)
def test_the_terms_hold_for_batches_short_sequences_and_ties(case, attention):
    step = training.measure(case, attention)
    assert step.unexplained == 0
    assert step.weights.total == sum(parameter.numel() for parameter in case.build().parameters())
    assert step.weights.tied == 100 * (48 if case.name == "gpt2" else 64)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_each_product_stands_in_the_module_and_phase_of_its_term(attention):
    """In a GPT-2 of two layers, 48 wide, on 16 tokens: what the terms name, found in the trace and nothing else."""
    linears = {"attn.c_attn": 3 * 48**2, "attn.c_proj": 48**2, "mlp.c_fc": 4 * 48**2, "mlp.c_proj": 4 * 48**2}
    product = 16 * 16 * 48
    expected = Counter()
    for layer in ("h.0", "h.1"):
        for name, weights in linears.items():
            expected["forward", "addmm", f"{layer}.{name}"] = 16 * weights
            expected["backward", "mm", f"{layer}.{name}"] = 2 * 16 * weights
        label = "scaled_dot_product_attention" if attention == "fused" else "bmm"
        expected["forward", label, f"{layer}.attn"] = 2 * product
        expected["backward", label, f"{layer}.attn"] = (5 if attention == "fused" else 4) * product
    expected["forward", "mm", "lm_head"] = 16 * 100 * 48
    expected["backward", "mm", "lm_head"] = 2 * 16 * 100 * 48
    assert count_by_op(gpt2_case(TINY_GPT2), attention) == expected


def test_the_loss_has_no_products_and_the_embedding_none_in_its_backward():
    model, tokens = GPT2(TINY_GPT2).eval(), torch.zeros(1, 16, dtype=torch.int64)
    stops = load_table("default").stops_at
    found = {}
    for name, loss in {
        "sum": torch.sum,
        "cross entropy": lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
    }.items():
        trace = record_call(model, (tokens,), loss=loss, stops_at=stops)
        analysis = FlopCountAnalysis.from_trace(trace).uncalled_modules_warnings(False)
        found[name] = analysis.macs()
        assert analysis.macs("wte") == analysis.macs("wpe") == 0
        assert "aten::embedding_dense_backward" in {signature.op for signature in trace.signatures}
    assert found["sum"] == found["cross entropy"] == training.measure(gpt2_case(TINY_GPT2)).count // 2


@pytest.mark.parametrize("name", RATIOS)
def test_a_causal_mask_is_counted_whole_and_half_of_it_is_a_term_on_request(name):
    """Of T * T pairs T * (T + 1) / 2 are left in each product: seven if attention is fused, six if torch decomposes it.

    On request both are the same convention: they differ by the scores that the fused backward makes again.
    """
    for attention, products in (("fused", 7), ("unfused", 6)):
        step = measure(name, attention)
        case = step.case
        masked = 2 * case.L * case.H * case.Q * (case.T * (case.T - 1) // 2)
        assert step.count - step.skipping == products * masked


def test_dropout_takes_the_fused_attention_from_the_cpu():
    """GPT-2 as it is trained, with dropout: the CPU's kernel has none, so that its attention is not fused."""
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    trace = record_call(
        GPT2(TINY_GPT2).train(), (tokens,), loss=torch.sum, stops_at=load_table("default").stops_at, execution="shapes"
    )
    expected = training.measure(gpt2_case(TINY_GPT2), "unfused").count
    assert 2 * FlopCountAnalysis.from_trace(trace).macs() == expected
    assert expected < training.measure(gpt2_case(TINY_GPT2)).count


def test_a_real_run_counts_the_same():
    model, tokens = build("llama_tiny"), torch.zeros(2, 16, dtype=torch.int64)
    trace = record_call(model, (tokens,), loss=torch.sum, stops_at=load_table("default").stops_at, execution="real")
    step = training.measure(llama_case(CONFIGS["llama_tiny"], batch=2))
    assert 2 * FlopCountAnalysis.from_trace(trace).macs() == step.count
    assert not step.unexplained


def test_llama_3_405b_against_its_paper():
    """The paper's 3.8e25 flops (arXiv:2407.21783, section 1) are 6 N tokens, rounded; the count has 9 % more."""
    tokens, N, paper = 15_600_000_000_000, 405_853_388_800, 38 * 10**24
    assert dataclasses.astuple(training.HERD) == ("llama3_405b", tokens, 405 * 10**9, paper)
    assert f"{6 * N * tokens:.1e}" == f"{6 * 405 * 10**9 * tokens:.1e}" == f"{paper:.1e}" == "3.8e+25"
    assert round(6 * N * tokens / paper, 4) == 0.9997

    terms = {
        "6 N": 6 * N,
        "12 L H Q T": 12 * 126 * 128 * 128 * 8192,
        "embedding is looked up": -6 * 128_256 * 16_384,
        "norms multiply nothing": -6 * (2 * 126 + 1) * 16_384,
        "scores made again": 2 * 126 * 128 * 128 * 8192,
    }
    fused, unfused = measure("llama3_405b"), measure("llama3_405b", "unfused")
    counted = training.scale(fused.count, fused, training.HERD)
    assert counted == sum(terms.values()) * tokens
    assert {name: round(flops * tokens / paper, 4) for name, flops in terms.items()} == {
        "6 N": 0.9997,
        "12 L H Q T": 0.0833,
        "embedding is looked up": -0.0052,
        "norms multiply nothing": -0.0,
        "scores made again": 0.0139,
    }
    ratios = [fused.count, unfused.count, fused.skipping, fused.others]
    assert [round(training.scale(flops, fused, training.HERD) / paper, 4) for flops in ratios] == [
        1.0917,
        1.0778,
        1.0431,
        0.0015,
    ]


def test_a_run_is_whole_steps():
    step = dataclasses.replace(measure("gpt2"), case=dataclasses.replace(CASES["gpt2"], T=999))
    with pytest.raises(ValueError, match="15600000000000 tokens are not whole steps of 999"):
        training.scale(1, step, training.HERD)


def test_a_count_that_its_terms_do_not_give_has_a_rest():
    case = dataclasses.replace(gpt2_case(TINY_GPT2), L=3)
    assert training.measure(case, "unfused").unexplained == -12 * 48 * 16 * 16


def test_an_op_without_a_row_is_an_error():
    library = torch.library.Library("training_figures", "DEF")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", torch.clone, "CPU")

    class Wonders(nn.Module):
        def forward(self, x):
            return torch.ops.training_figures.mystery(x)

    trace = record_call(Wonders(), (torch.ones(2, 2),))
    with pytest.raises(ValueError, match="default has no row for training_figures::mystery"):
        training.analyse(trace, load_table("default"))
