"""A training step's count beside 6 N + 12 L H Q T flops a token (PaLM, appendix B), term by term.

Forward and backward of GPT-2 and Llama, by shapes, with the fused attention of torch's CPU and without. Flops are two
for each multiply-add of the table `default`; a causal mask saves nothing, as in the formula.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fvflops import FlopCountAnalysis, FormulaTable, Trace, load_table, record_call
from fvflops.zoo import build
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from fvflops.zoo.llama import CONFIGS


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
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.batch * self.T


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model's parameters by what they do in a step, each in numbers of elements.

    `products` are the weights of the linears, the head's among them; each module counts what it uses, so that a tied
    weight counts twice, and `tied` is what that is too much. `norms` are all that no embedding or linear has.
    """

    embeddings: Mapping[str, int]
    products: int
    head: int
    biases: int
    norms: int
    tied: int

    @property
    def total(self) -> int:
        """N: every parameter once."""
        return sum(self.embeddings.values()) + self.products + self.biases + self.norms - self.tied

    @property
    def non_embedding(self) -> int:
        """The N of Kaplan et al. (arXiv:2001.08361): neither the embeddings nor the head."""
        return self.products - self.head + self.biases + self.norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The count of a step: flops of the products by phase, and of all other arithmetic.

    `terms` begins with the two of the formula; its sum is the count if nothing was forgotten. `skipping` is the count
    without the pairs that the mask takes.
    """

    case: Case
    attention: str
    weights: Weights
    terms: Mapping[str, int]
    phases: Mapping[str, int]
    others: int
    skipping: int

    @property
    def count(self) -> int:
        """The flops of the products in both phases."""
        return sum(self.phases.values())

    @property
    def unexplained(self) -> int:
        """What of the count no term gives."""
        return self.count - sum(self.terms.values())


def list_cases() -> dict[str, Case]:
    """Return the cases: GPT-2 in its four published sizes, and the zoo's Llamas, at the length they were trained at."""
    gpt2 = {"": GPT2Config()}
    gpt2["_medium"] = GPT2Config(width=1024, layers=24, heads=16)
    gpt2["_large"] = GPT2Config(width=1280, layers=36, heads=20)
    gpt2["_xl"] = GPT2Config(width=1600, layers=48, heads=25)
    cases = [
        Case(name=f"gpt2{size}", build=partial(GPT2, c), L=c.layers, H=c.heads, Q=c.width // c.heads, T=c.positions)
        for size, c in gpt2.items()
    ]
    lengths = {"llama2_7b": 4096, "llama3_8b": 8192, "llama3_70b": 8192, "llama3_405b": 8192}
    for name, length in lengths.items():
        c = CONFIGS[name]
        cases.append(Case(name=name, build=partial(build, name), L=c.layers, H=c.heads, Q=c.head_size, T=length))
    return {case.name: case for case in cases}


def sort_weights(model: nn.Module) -> Weights:
    """Return a model's parameters by what they do."""
    embeddings: dict[str, int] = {}
    sums: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            embeddings[name] = module.weight.numel()
        elif isinstance(module, nn.Linear):
            sums["products"] += module.weight.numel()
            sums["head"] += module.weight.numel() if name == "lm_head" else 0
            sums["biases"] += 0 if module.bias is None else module.bias.numel()
        else:
            sums["norms"] += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    used = sum(embeddings.values()) + sums["products"] + sums["biases"] + sums["norms"]
    return Weights(
        embeddings=embeddings,
        products=sums["products"],
        head=sums["head"],
        biases=sums["biases"],
        norms=sums["norms"],
        tied=used - sum(parameter.numel() for parameter in model.parameters()),
    )


def list_terms(case: Case, weights: Weights, attention: str) -> dict[str, int]:
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
        "causal mask: counted whole, as in the formula": 0,
        "loss: no products": 0,
    }


def record_step(case: Case, attention: str) -> tuple[Trace, Weights]:
    """Record a step by shapes: next-token prediction without dropout, which the fused attention of the CPU lacks."""
    with torch.device("meta"):
        model = case.build().eval()
    tokens = torch.zeros(case.batch, case.T, dtype=torch.int64)

    def cross_entropy(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    with nullcontext() if attention == "fused" else sdpa_kernel(SDPBackend.MATH):
        trace = record_call(
            model, (tokens,), loss=cross_entropy, execution="shapes", stops_at=load_table("default").stops_at
        )
    return trace, sort_weights(model)


def measure(case: Case, attention: str = "fused") -> Step:
    """Record a step of a case and count it; raises ValueError if a table does not know an op."""
    trace, weights = record_step(case, attention)
    counted, exact = analyse(trace, load_table("default")), analyse(trace, load_table("exact"))
    phases: Counter[str] = Counter()
    for entry in counted.counts().entries:
        phases[entry.phase] += 2 * entry.macs
    return Step(
        case=case,
        attention=attention,
        weights=weights,
        terms=list_terms(case, weights, attention),
        phases=dict(phases),
        others=exact.total() - 2 * exact.macs(),
        skipping=2 * analyse(trace, load_table_that_skips_masked()).macs(),
    )


def analyse(trace: Trace, table: FormulaTable) -> FlopCountAnalysis:
    """Return the analysis of a trace; raises ValueError if the table does not know an op of it."""
    analysis = FlopCountAnalysis.from_trace(trace, table=table).uncalled_modules_warnings(False)
    unknown = sorted({entry.op for entry in analysis.counts().entries if entry.status.value == "unsupported"})
    if unknown:
        raise ValueError(f"{table.name} has no row for {', '.join(unknown)}: the count would be too low")
    return analysis


@cache
def load_table_that_skips_masked() -> FormulaTable:
    """Return `default`, but with the masked pairs of attention left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "skips_masked.yaml"
        path.write_text("extends: default\nconstants: {attention_skips_masked: 1}\n")
        return load_table(str(path))


@dataclass(frozen=True, slots=True)
class Run:
    """A training run as its paper gives it: the case of a step, all its tokens, N as the paper names it, and flops."""

    case: str
    tokens: int
    parameters: int
    flops: int


# Each token is taken to stand in a sequence of 8,192, as in the main stage: the paper begins at 4,096 and ends at
# 131,072 tokens a sequence, and lets no token attend to another document, of which nothing is known here.
HERD = Run("llama3_405b", tokens=15_600 * 10**9, parameters=405 * 10**9, flops=38 * 10**24)


def scale(flops: int, step: Step, run: Run) -> int:
    """Return a step's flops for all tokens of a run; raises ValueError if these are not whole steps."""
    steps, rest = divmod(run.tokens, step.case.tokens)
    if rest:
        raise ValueError(f"{run.tokens} tokens are not whole steps of {step.case.tokens}")
    return flops * steps
