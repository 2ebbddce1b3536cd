"""A training step's products against 6 N + 12 L H Q T flops a token, term by term, and Llama-3-405B's

The formula is appendix B of PaLM (arXiv:2204.02311): N parameters, L layers of H heads of size Q, sequences of T.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fvflops import FlopCountAnalysis, load_table, record_call
from fvflops.zoo import build
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from fvflops.zoo.llama import CONFIGS, Llama, LlamaConfig
from tests.support.random_cases import long_except


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with what the formula asks for: L layers of H heads of size Q, on `batch` sequences of T tokens."""

    name: str
    build: Callable[[], nn.Module]
    L: int
    H: int
    Q: int
    T: int
    batch: int = 1

    @property
    def tokens(self):
        return self.batch * self.T


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Numbers of parameters by what they do in a step: `products` are weights of linears, a tied one counted twice."""

    embeddings: Mapping[str, int]
    products: int
    biases: int
    norms: int
    tied: int

    @property
    def total(self):
        return sum(self.embeddings.values()) + self.products + self.biases + self.norms - self.tied


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Flops of a step: of products by phase and of `others`; `skipping` is without the pairs that the mask takes."""

    case: Case
    weights: Weights
    terms: Mapping[str, int]
    phases: Mapping[str, int]
    others: int
    skipping: int

    @property
    def count(self):
        return sum(self.phases.values())

    @property
    def unexplained(self):
        return self.count - sum(self.terms.values())


def gpt2_case(config, *, name="gpt2", **sizes):
    shape = {"L": config.layers, "H": config.heads, "Q": config.width // config.heads, "T": config.positions}
    return Case(name=name, build=partial(GPT2, config), **{**shape, **sizes})


def llama_case(config, *, name="llama", **sizes):
    shape = {"L": config.layers, "H": config.heads, "Q": config.head_size, "T": 16}
    return Case(name=name, build=partial(Llama, config), **{**shape, **sizes})


def list_cases():
    """Return the cases: GPT-2 in its four published sizes, and the zoo's Llamas, at the length they were trained at."""
    gpt2 = {"gpt2": GPT2Config()}
    gpt2["gpt2_medium"] = GPT2Config(width=1024, layers=24, heads=16)
    gpt2["gpt2_large"] = GPT2Config(width=1280, layers=36, heads=20)
    gpt2["gpt2_xl"] = GPT2Config(width=1600, layers=48, heads=25)
    cases = {name: gpt2_case(config, name=name) for name, config in gpt2.items()}
    lengths = {"llama2_7b": 4096, "llama3_8b": 8192, "llama3_70b": 8192, "llama3_405b": 8192}
    return cases | {name: llama_case(CONFIGS[name], name=name, T=length) for name, length in lengths.items()}


def sort_weights(model):
    embeddings = {}
    sums = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            embeddings[name] = module.weight.numel()
        elif isinstance(module, nn.Linear):
            sums["products"] += module.weight.numel()
            sums["biases"] += 0 if module.bias is None else module.bias.numel()
        else:
            sums["norms"] += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    used = sum(embeddings.values()) + sums["products"] + sums["biases"] + sums["norms"]
    return Weights(
        embeddings=embeddings,
        products=sums["products"],
        biases=sums["biases"],
        norms=sums["norms"],
        tied=used - sum(parameter.numel() for parameter in model.parameters()),
    )


def list_terms(case, weights, attention):
    """Return the formula's two terms, then each that the count has more or less, in flops of a step."""
    product = 2 * case.L * case.H * case.Q * case.T * case.tokens
    return {
        "6 N tokens": 6 * weights.total * case.tokens,
        "12 L H Q T tokens": 6 * product,
        **{
            f"{name}: in N, looked up and not multiplied": -6 * size * case.tokens
            for name, size in weights.embeddings.items()
        },
        "lm_head: multiplies, tied and so not in N again": 6 * weights.tied * case.tokens,
        "norms: in N, no products": -6 * weights.norms * case.tokens,
        "biases: in N, no products": -6 * weights.biases * case.tokens,
        "attention's backward makes its scores again (5 products, not 4)": product if attention == "fused" else 0,
    }


def record_step(case, attention):
    """Record a step by shapes: next-token prediction without dropout, which the fused attention of the CPU lacks."""
    with torch.device("meta"):
        model = case.build().eval()
    tokens = torch.zeros(case.batch, case.T, dtype=torch.int64)

    def cross_entropy(logits):
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    with nullcontext() if attention == "fused" else sdpa_kernel(SDPBackend.MATH):
        trace = record_call(
            model, (tokens,), loss=cross_entropy, execution="shapes", stops_at=load_table("default").stops_at
        )
    return trace, sort_weights(model)


def measure_case(case, attention="fused"):
    trace, weights = record_step(case, attention)
    counted, exact = analyse(trace, load_table("default")), analyse(trace, load_table("exact"))
    phases = Counter()
    for entry in counted.counts().entries:
        phases[entry.phase] += 2 * entry.macs
    return Step(
        case=case,
        weights=weights,
        terms=list_terms(case, weights, attention),
        phases=dict(phases),
        others=exact.total() - 2 * exact.macs(),
        skipping=2 * analyse(trace, load_table_that_skips_masked()).macs(),
    )


def analyse(trace, table):
    analysis = FlopCountAnalysis.from_trace(trace, table=table).uncalled_modules_warnings(False)
    assert all(entry.status.value != "unsupported" for entry in analysis.counts().entries), "the count would be too low"
    return analysis


@cache
def load_table_that_skips_masked():
    with TemporaryDirectory() as folder:
        path = Path(folder) / "skips_masked.yaml"
        path.write_text("extends: default\nconstants: {attention_skips_masked: 1}\n")
        return load_table(str(path))


CASES = list_cases()
ATTENTIONS = ("fused", "unfused")
TINY_GPT2 = GPT2Config(vocab_size=100, positions=16, width=48, layers=2, heads=4)
TIED_LLAMA = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2, tie_embeddings=True
)

# Parameters of the released checkpoints. The sizes of GPT-2 are from table 2 of Radford et al. 2019.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}


# Each kind of model, and the one whose paper says what its training took; the others are larger or smaller.
USUAL = ("gpt2", "llama2_7b", "llama3_405b")


@cache
def measure(name, attention):
    return measure_case(CASES[name], attention)


def count_by_op(case, attention="fused"):
    """Return the multiply-adds of a step by phase, op and the module that owns them."""
    trace, _ = record_step(case, attention)
    found = Counter()
    for entry in FlopCountAnalysis.from_trace(trace).uncalled_modules_warnings(False).counts().entries:
        if entry.macs:
            found[entry.phase, entry.label, entry.scope[-1]] += entry.macs
    return found


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_parameters_of_its_checkpoint(name):
    with torch.device("meta"):
        assert sort_weights(CASES[name].build()).total == PARAMETERS[name]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", long_except(USUAL, PARAMETERS))
def test_a_step_is_the_formula_and_named_terms(name, attention):
    assert not measure(name, attention).unexplained


def test_the_forward_pass_of_gpt2_is_as_published():
    """By nanoGPT's transformer_sizing notebook; the backward pass is twice that."""
    assert measure("gpt2", "unfused").phases == {"forward": 291_648_307_200, "backward": 2 * 291_648_307_200}


@pytest.mark.parametrize("name", long_except(USUAL, PARAMETERS))
def test_with_the_weights_that_multiply_for_n_and_unfused_attention_nothing_is_left(name):
    step = measure(name, "unfused")
    assert step.count == 6 * step.weights.products * step.case.tokens + step.terms["12 L H Q T tokens"]
    assert step.phases["backward"] == 2 * step.phases["forward"]
    assert step.phases.keys() == {"forward", "backward"}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(
    "case",
    [gpt2_case(TINY_GPT2, batch=3, T=11), llama_case(TIED_LLAMA, batch=2, T=13)],
    ids=["GPT-2 on fewer tokens than positions", "Llama with a tied head"],
)
def test_the_terms_hold_for_batches_short_sequences_and_ties(case, attention):
    step = measure_case(case, attention)
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
    assert found["sum"] == found["cross entropy"] == measure_case(gpt2_case(TINY_GPT2)).count // 2


@pytest.mark.parametrize("name", long_except(USUAL, PARAMETERS))
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
    expected = measure_case(gpt2_case(TINY_GPT2), "unfused").count
    assert 2 * FlopCountAnalysis.from_trace(trace).macs() == expected
    assert expected < measure_case(gpt2_case(TINY_GPT2)).count


def test_a_real_run_counts_the_same():
    model, tokens = build("llama_tiny"), torch.zeros(2, 16, dtype=torch.int64)
    trace = record_call(model, (tokens,), loss=torch.sum, stops_at=load_table("default").stops_at, execution="real")
    step = measure_case(llama_case(CONFIGS["llama_tiny"], batch=2))
    assert 2 * FlopCountAnalysis.from_trace(trace).macs() == step.count
    assert not step.unexplained


def test_llama_3_405b_against_its_paper():
    """The paper's 3.8e25 flops (arXiv:2407.21783, section 1) are 6 N tokens, rounded; the count has 9 % more."""
    tokens, N, paper = 15_600_000_000_000, 405_853_388_800, 38 * 10**24
    assert f"{6 * N * tokens:.1e}" == f"{6 * 405 * 10**9 * tokens:.1e}" == f"{paper:.1e}" == "3.8e+25"
    assert round(6 * N * tokens / paper, 4) == 0.9997

    terms = {
        "6 N": 6 * N,
        "12 L H Q T": 12 * 126 * 128 * 128 * 8192,
        "embedding is looked up": -6 * 128_256 * 16_384,
        "norms multiply nothing": -6 * (2 * 126 + 1) * 16_384,
        "scores made again": 2 * 126 * 128 * 128 * 8192,
    }
    fused, unfused = (measure("llama3_405b", attention) for attention in ATTENTIONS)
    # Each token is taken to stand in a sequence of 8,192, as in the main stage.
    steps = Fraction(tokens, fused.case.tokens)
    counted = fused.count * steps
    assert counted == sum(terms.values()) * tokens
    ratios = [fused.count, unfused.count, fused.skipping, fused.others]
    assert [round(float(flops * steps / paper), 4) for flops in ratios] == [1.0917, 1.0778, 1.0431, 0.0015]


def test_a_count_that_its_terms_do_not_give_has_a_rest():
    case = dataclasses.replace(gpt2_case(TINY_GPT2), L=3)
    assert measure_case(case, "unfused").unexplained == -12 * 48 * 16 * 16
