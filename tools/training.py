#!/usr/bin/env python3
"""Sets a training step's count beside 6 N + 12 L H Q T flops a token (PaLM, appendix B): tools/training.py [MODEL ...].

Forward and backward of GPT-2 and Llama, by shapes, with the fused attention of torch's CPU and without. Flops are two
for each multiply-add of the table `default`; a causal mask saves nothing, as in the formula. What the count has more
or less than the formula is listed term by term, and the exit status is 1 if the terms do not give the count to the
last digit. Last stands the training of Llama-3-405B as its paper gives it (arXiv:2407.21783, sections 1 and 3).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tabulate import tabulate  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from fvflops import FlopCountAnalysis, FormulaTable, Trace, load_table, record_call  # noqa: E402
from fvflops.units import format_thousands  # noqa: E402
from fvflops.zoo import build  # noqa: E402
from fvflops.zoo.gpt2 import GPT2, GPT2Config  # noqa: E402
from fvflops.zoo.llama import CONFIGS  # noqa: E402


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


HEADERS = (
    *("model", "attention", "tokens", "N", "6 N", "12 L H Q T", "sum"),
    *("forward", "backward", "count", "others", "ratio", "Kaplan's N", "products' N"),
)


def show_table(steps: list[Step]) -> None:
    """Print a row for each step, in flops a token and in ratios."""
    rows = []
    for step in steps:
        tokens, formula = step.case.tokens, list(step.terms.values())[:2]
        figures = [*formula, sum(formula), step.phases["forward"], step.phases["backward"], step.count, step.others]
        ratios = [
            step.count / (6 * N * tokens + formula[1])
            for N in (step.weights.total, step.weights.non_embedding, step.weights.products)
        ]
        rows.append(
            [step.case.name, step.attention, format_thousands(tokens), format_thousands(step.weights.total)]
            + [f"{figure / tokens:.5g}" for figure in figures]
            + [f"{ratio:.4f}" for ratio in ratios]
        )
    print("Flops a token: the formula with N all parameters; the count; others is what is no product (softmax, norms,")
    print(
        "loss ...), by `exact`, and is not in the count. The ratio is count / sum; then with Kaplan's N (no embeddings"
    )
    print("and no head), and with the N of the products alone (what multiplies, once for each linear).")
    print(tabulate(rows, HEADERS, disable_numparse=True, colalign=("left", "left", *["right"] * 12)))


def show_terms(fused: Step, unfused: Step) -> None:
    """Print what the counts are made of, in flops of a step and as ratios to the formula."""
    case = fused.case
    formula = sum(list(fused.terms.values())[:2])
    rows: list[tuple[str, int, int]] = [(name, flops, unfused.terms[name]) for name, flops in fused.terms.items()]
    if fused.unexplained or unfused.unexplained:
        rows.append(("UNEXPLAINED", fused.unexplained, unfused.unexplained))
    rows.append(("= forward and backward, counted", fused.count, unfused.count))
    rows.append(("  and if masked pairs are left out", fused.skipping, unfused.skipping))
    rows.append(("  not in it: what is no product, by `exact`", fused.others, unfused.others))
    sizes = f"L={case.L} H={case.H} Q={case.Q} T={format_thousands(case.T)}"
    print(f"\n{case.name}, {case.batch} x {format_thousands(case.T)} tokens, {sizes}")
    print(f"  {'flops of a step, and their ratio to the formula':64}{'fused attention':>36}{'unfused attention':>36}")
    for name, *both in rows:
        print(f"  {name:64}" + "".join(f"{format_thousands(n):>27} {n / formula:8.4f}" for n in both))


def show_run(fused: Step, unfused: Step, run: Run) -> None:
    """Print a run's published flops beside the formula's and the counts, each term with its ratio to the paper's."""
    named, held = 6 * run.parameters * run.tokens, 6 * fused.weights.total * run.tokens
    rows: list[tuple[str, list[int]]] = [
        ("the paper's", [run.flops]),
        (f"6 N tokens, N = {run.parameters // 10**9}e9 as it is named", [named]),
        (f"6 N tokens, N = {format_thousands(fused.weights.total)}", [held]),
        ("the paper's less that: it is rounded to two digits", [run.flops - held]),
    ]
    steps = (fused, unfused)
    rows.append(("counted, with fused and with unfused attention", [scale(step.count, step, run) for step in steps]))
    for name, flops in fused.terms.items():
        rows.append((f"  {name}", [scale(flops, fused, run), scale(unfused.terms[name], unfused, run)]))
    left, others = [step.skipping for step in steps], [step.others for step in steps]
    rows.append(("if masked pairs are left out", [scale(n, fused, run) for n in left]))
    rows.append(("not in it: what is no product, by `exact`", [scale(n, fused, run) for n in others]))
    tokens = f"{run.tokens / 10**12:g}T tokens in sequences of {format_thousands(fused.case.T)}"
    print(f"\n{run.case} on {tokens}: flops, and their ratio to the paper's")
    for name, figures in rows:
        print(f"  {name:66}" + "".join(f"{n:12.3e} {n / run.flops:8.4f}" for n in figures))


def main(arguments: list[str] | None = None) -> int:
    """Print the table, the terms and the run; return 1 if a count is not what its terms give."""
    cases = list_cases()
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] + ".")
    parser.add_argument("model", nargs="*", metavar="MODEL", help=f"not all, but these: {', '.join(cases)}")
    names = parser.parse_args(arguments).model or list(cases)
    if unknown := [name for name in names if name not in cases]:
        parser.error(f"no model {', '.join(unknown)}: take some of {', '.join(cases)}")
    pairs = [(measure(cases[name], "fused"), measure(cases[name], "unfused")) for name in names]
    steps = [step for pair in pairs for step in pair]
    show_table(steps)
    for pair in pairs:
        show_terms(*pair)
    for pair in pairs:
        if pair[0].case.name == HERD.case:
            show_run(*pair, HERD)
    return 1 if any(step.unexplained for step in steps) else 0


if __name__ == "__main__":
    sys.exit(main())
