"""Scaling: costs as polynomials in sizes, against hand counts, textbook polynomials and fresh counts."""

import json
import math
import random
import re
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fvflops
from fvflops.cli import main
from fvflops.comparison.cost_functions import Axis, CostExpression, GenerationCost, ScalingError
from fvflops.comparison.polynomial import Polynomial
from fvflops.comparison.scaling import Sample, describe_costs, read_axis
from fvflops.comparison.scaling_report import generation_report, scaling_report
from fvflops.reports.formats import FORMATS, write_document
from fvflops.reports.pictures.picture import file_type
from fvflops.zoo import build
from fvflops.zoo.gpt2 import GPT2, Attention, Block, GPT2Config
from fvflops.zoo.llama import Llama, LlamaConfig
from tests.support.random_cases import random_cases
from tests.support.reports.report_formats import check_report, run, write_as


def polynomial(variables, terms):
    return Polynomial.of(variables.split(), terms)


def known(axes, function):
    """Return the cost that is fitted to a function of sizes, as if a model had been counted."""
    return describe_costs("flops", axes, lambda sizes: Sample(function(*sizes), {"": function(*sizes)}, {}, {}))


# Polynomials.


def test_a_polynomial_is_evaluated_added_multiplied_and_written():
    cost = polynomial("S d", {(1, 2): 6, (2, 1): 2})
    assert cost(S=3, d=5) == 6 * 3 * 25 + 2 * 9 * 5
    assert str(cost) == "2·S²·d + 6·S·d²"
    assert str(cost - polynomial("d S", {(1, 2): 2})) == "6·S·d²"
    assert str(Polynomial.of("x", {(3,): Fraction(-1, 3), (0,): 1000})) == "-1/3·x³ + 1,000"
    assert (cost * cost)(S=2, d=3) == cost(S=2, d=3) ** 2
    assert (2 * cost + 1 - cost)(S=2, d=3) == cost(S=2, d=3) + 1
    assert str(cost - cost) == "0" and (cost - cost).degree() == 0
    assert cost.degree("d") == 2 and cost.degree() == 3
    with pytest.raises(TypeError, match="variables of this polynomial must be S, d; got S"):
        cost(S=3)


@given(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(-9, 9), min_size=1, max_size=5))
@random_cases(30)
def test_a_sum_over_lengths_is_the_sum(first, count, coefficients):
    law = polynomial("L", {(power,): factor for power, factor in enumerate(coefficients)})
    summed = law.sum_over("L", polynomial("P", {(1,): 1}), polynomial("N", {(1,): 1}))
    values = dict.fromkeys(summed.variables, 0) | {"P": first, "N": count}
    exact = sum(law.at((length,)) for length in range(first, first + count))
    assert summed(**{name: values[name] for name in summed.variables}) == exact
    assert law.sum_over("L", first, count).at(()) == exact


# Fits of known functions.

SIZES = (Axis("a", 1, 40), Axis("b", 16, 4096), Axis("c", 3, 300, 3))


@given(st.integers(1, 3), st.dictionaries(st.tuples(*[st.integers(0, 3)] * 3), st.integers(1, 10**9), max_size=5))
@random_cases(25)
def test_any_polynomial_is_recovered(count, terms):
    axes = SIZES[:count]
    law = Polynomial.of([axis.name for axis in axes], {key[:count]: factor for key, factor in terms.items()})
    cost = known(axes, lambda *sizes: law.at(sizes))
    assert cost.polynomial == law and cost.everywhere and cost.held_out
    assert not set(cost.held_out) & set(cost.fitted)


@pytest.mark.parametrize(
    "function",
    [
        lambda n: n * (n * 2_654_435_761 % 2**32 >> 16),
        lambda n: n * round(1000 * math.log2(n)),
        lambda n: n // 7 * n + n % 5,
        lambda n: (n % 17) ** 2,
        lambda n: 2 ** (n // 100),
    ],
    ids=["hash", "log", "remainder", "modulo", "exponential"],
)
def test_what_is_no_polynomial_is_refused(function):
    cost = known((Axis("n", 10, 1000),), function)
    assert cost.polynomial is None and str(cost) == "no polynomial in n"
    assert all(cost.counted[(size,)] == function(size) for (size,) in cost.counted)
    with pytest.raises(ScalingError, match="n=997 was not counted"):
        cost(n=997)


def test_a_floor_is_a_polynomial_for_multiples():
    cost = known((Axis("b", 1, 9), Axis("n", 10, 1000)), lambda b, n: b * (n // 14) ** 2)
    assert str(cost) == "1/196·b·n² for n a multiple of 14, from 14 to 994"
    assert cost(b=3, n=140) == 300
    with pytest.raises(ScalingError, match="n=141 was not counted, and the polynomial holds for n a multiple of 14"):
        cost(b=3, n=141)


def test_a_window_is_a_polynomial_for_larger_sizes():
    cost = known((Axis("b", 1, 9), Axis("n", 10, 1000)), lambda b, n: b * n * min(n, 100))
    assert str(cost) == "100·b·n for n from 100 to 1,000"
    assert cost(b=2, n=300) == 60_000
    with pytest.raises(ScalingError, match="n=50 was not counted, and the polynomial holds for n from 100"):
        cost(b=2, n=50)


def test_a_first_size_may_be_special():
    cost = known((Axis("n", 1, 99),), lambda n: 5 * n if n > 1 else 0)
    assert str(cost) == "5·n for n from 2 to 99" and cost(n=1) == 0


def test_a_factor_that_is_zero_at_the_first_size_is_seen():
    cost = known((Axis("a", 1, 50), Axis("b", 1, 50)), lambda a, b: (a - 1) * (b - 1) * b + a)
    assert cost(a=7, b=30) == 6 * 29 * 30 + 7 and cost.everywhere


def test_short_ranges_are_fitted_as_far_as_they_can_be_tried():
    assert known((Axis("n", 1, 3),), lambda n: 5 * n).polynomial == polynomial("n", {(1,): 5})
    assert known((Axis("n", 1, 3),), lambda n: n * n).polynomial is None  # nothing is left to try a square on
    assert known((Axis("n", 1, 2),), lambda n: 7).polynomial == polynomial("n", {(0,): 7})


# Textbook polynomials of models.


def test_linear():
    cost = fvflops.cost_of(
        lambda fan_in, fan_out: nn.Linear(fan_in, fan_out),
        lambda batch, fan_in: torch.zeros(batch, fan_in),
        vary={"batch": (1, 64), "fan_in": (4, 512), "fan_out": (4, 512)},
    )
    assert cost.polynomial == polynomial("batch fan_in fan_out", {(1, 1, 1): 1})
    parameters = fvflops.cost_of(nn.Linear, vary={"in_features": (4, 99), "out_features": (4, 99)}, metric="parameters")
    assert str(parameters) == "in_features·out_features + out_features"


def decoder(metric, table="default", block=Block):
    return fvflops.cost_of(
        lambda width: block(GPT2Config(width=width, heads=1)),
        lambda batch, seq, width: torch.zeros(batch, seq, width),
        vary={"batch": (1, 8), "seq": (1, 512), "width": (8, 256)},
        metric=metric,
        table=table,
    )


def test_attention_and_a_decoder_layer():
    attention, layer = decoder("macs", block=Attention), decoder("macs")
    assert str(attention) == "2·B·S²·d + 4·B·S·d²"
    # 24·B·S·d² + 4·B·S²·d flops, a multiply-add being two (Narayanan et al., arXiv:2104.04473, a layer's forward pass).
    assert layer.polynomial * 2 == polynomial("batch seq width", {(1, 1, 2): 24, (1, 2, 1): 4})
    assert layer.by_module()["attn"] == attention and layer.by_module()[""] == layer
    assert layer.by_module()["mlp"] != attention
    assert str(layer.by_operator()["linear"]) == "12·B·S·d²"
    exact = decoder("flops", "exact")
    assert exact.polynomial(batch=2, seq=3, width=16) == exact(batch=2, seq=3, width=16)
    assert dict(exact.polynomial.terms)[1, 1, 2] == 24
    parameters = decoder("parameters")
    assert str(parameters) == "12·d² + 13·d"  # four projections and their biases, two norms: 4d² + 8d², 9d + 4d


def test_norms_and_activations():
    images = {"batch": (1, 9), "size": (2, 64)}
    norm = nn.BatchNorm2d(6).eval()
    cost = fvflops.cost_of(norm, lambda batch, size: torch.zeros(batch, 6, size, size), vary=images)
    assert str(cost) == "12·B·R²"  # fvcore's two for each element
    vary = {"batch": (1, 9), "d": (2, 64)}
    cost = fvflops.cost_of(lambda d: nn.LayerNorm(d), lambda batch, d: torch.zeros(batch, d), vary=vary)
    assert str(cost) == "5·B·d"
    convolution, inputs = nn.Conv2d(3, 8, 3, padding=1), lambda batch, size: torch.zeros(batch, 3, size, size)
    assert str(fvflops.cost_of(convolution, inputs, vary=images, metric="activations")) == "8·B·R²"


def test_a_resnet_in_batch_and_image_size():
    model = build("resnet50", device="meta").eval()
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        del stage[1:]
    fresh = {size: fvflops.FlopCountAnalysis(model, torch.zeros(1, 3, size, size)).total() for size in (224, 225)}
    vary = {"batch": (1, 4), "size": (32, 512)}
    cost = fvflops.cost_of(model, lambda batch, size: torch.zeros(batch, 3, size, size), vary=vary)
    assert not cost.everywhere and cost.domain[1] == Axis("size", 32, 512, 32)
    squares = Fraction(fresh[224] - 2_048_000, 224**2)
    assert cost.polynomial == polynomial("batch size", {(1, 2): squares, (1, 0): 2_048_000})
    assert str(cost).endswith("·B·R² + 2,048,000·B for size a multiple of 32, from 32 to 512")
    assert cost(batch=3, size=224) == 3 * fresh[224]
    assert str(cost.by_module()["fc"]).startswith("2,048,000·B")
    with pytest.raises(ScalingError, match="size=225"):
        cost(batch=1, size=225)
    odd = fvflops.cost_of(model, lambda size: torch.zeros(1, 3, size, size), vary={"size": range(33, 514, 32)})
    assert odd.everywhere and odd.polynomial.degree() == 2 and odd(size=225) == fresh[225]


@pytest.mark.parametrize("table", ["default", "fvcore", "exact"])
def test_a_polynomial_is_a_fresh_count_elsewhere(table):
    model = GPT2(GPT2Config(vocab_size=50, positions=300, width=16, layers=2, heads=2)).eval()
    cost = fvflops.cost_of(
        model,
        lambda batch, seq: torch.zeros(batch, seq, dtype=torch.long),
        vary={"batch": (1, 20), "seq": (1, 300)},
        table=table,
    )
    chosen = random.Random(7)
    for _ in range(5):
        batch, seq = chosen.randint(1, 20), chosen.randint(1, 300)
        if (batch, seq) in cost.counted:
            continue
        fresh = fvflops.FlopCountAnalysis(model, torch.zeros(batch, seq, dtype=torch.long), table=table)
        assert cost(batch=batch, seq=seq) == fresh.total()
        modules = {name: part(batch=batch, seq=seq) for name, part in cost.by_module().items()}
        assert modules == dict(fresh.by_module())
        operators = {name: part(batch=batch, seq=seq) for name, part in cost.by_operator().items()}
        assert {name: value for name, value in operators.items() if value} == dict(fresh.by_operator())


def test_the_backward_pass_of_a_linear_layer_costs_twice():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    vary = {"batch": (1, 64)}
    forward = fvflops.cost_of(model, linear, vary=vary, metric="macs")
    both = fvflops.cost_of(model, linear, vary=vary, metric="macs", loss=torch.sum)
    # The first layer's input requires no gradient.
    assert str(forward) == "40·B" and str(both) == f"{40 * 3 - 32}·B"


def test_the_backward_pass_counts_as_one_what_the_table_counts_as_one():
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)).eval()
    inputs = lambda batch: torch.zeros(batch, 3, 5, 5)  # noqa: E731
    cost = fvflops.cost_of(model, inputs, vary={"batch": (1, 9)}, loss=torch.sum)
    # 300 MACs in the convolution, again for its weight's gradient, and 2 for each of the 100 elements of the norm.
    assert str(cost) == f"{300 + 300 + 200}·B"


def test_a_file_that_registers_ops_is_run_once(tmp_path, capsys):
    path = tmp_path / "registers.py"
    path.write_text(
        "import torch\n"
        "library = torch.library.Library('scalingtest', 'DEF')\nlibrary.define('op(Tensor x) -> Tensor')\n"
        "def build():\n    return torch.nn.Linear(4, 3)\n"
    )
    assert main(["scale", f"{path}:build", "--input", "batch,4", "--vary", "batch=1..64"]) == 0
    assert "FLOPs = 12·B" in capsys.readouterr().out


def test_depth_is_linear_and_a_late_layer_is_none():
    cost = fvflops.cost_of(
        lambda depth: nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))),
        lambda: torch.zeros(1, 4),
        vary={"depth": (2, 30)},
    )
    assert cost.polynomial == polynomial("depth", {(1,): 16})
    assert cost.by_module()["0"].polynomial == polynomial("depth", {(0,): 16})
    assert cost.by_module()["7"].polynomial is None


def test_costs_are_compared():
    def cost_of(rows, last):
        return fvflops.cost_of(nn.Linear(8, rows), linear, vary={"batch": (1, last)})

    assert cost_of(4, 64) == cost_of(4, 99) and hash(cost_of(4, 64)) == hash(cost_of(4, 99))
    assert cost_of(4, 64) != cost_of(5, 64)
    assert repr(cost_of(4, 64)) == "<flops: 32·B>"


# Bad input.


def linear(batch):
    return torch.zeros(batch, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vary": {"batch": (7, 7)}}, "batch=7..7 has one size"),
        ({"vary": {"batch": (9, 1)}}, "batch=9..1 is empty"),
        ({"vary": {"batch": range(5, 5)}}, "batch=range.5, 5. is empty"),
        ({"vary": {"batch": (0, 4)}}, "sizes and steps must be at least 1"),
        ({"vary": {"batch": 4}}, "batch must be .first, last., .* or a range; got 4"),
        ({"vary": {}}, "vary is empty: pass the range of a size"),
        ({"vary": {"batch": (1, 4), "seq": (1, 4)}}, "seq is varied, but neither the model nor the inputs are"),
        ({"vary": {"sequence": (1, 4)}}, "'batch' is an argument of the inputs, but vary has only sequence"),
    ],
    ids=["one", "reversed", "empty", "zero", "number", "none", "untaken", "unvaried"],
)
def test_a_mistake_in_what_is_varied_names_it(options, message):
    with pytest.raises(ScalingError, match=message):
        fvflops.cost_of(nn.Linear(8, 4), linear, **options)


def test_a_size_that_the_model_does_not_take_is_named():
    model = GPT2(GPT2Config(vocab_size=50, width=16, layers=1, heads=2))
    with pytest.raises(ScalingError, match=r"does not accept seq=1025: ValueError: .* context length, 1024; narrow"):
        fvflops.cost_of(model, lambda seq: torch.zeros(1, seq, dtype=torch.long), vary={"seq": (1, 1025)})
    positions = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    with pytest.raises(ScalingError, match="n=9: IndexError: an embedding of 8 rows has no row 8"):
        fvflops.cost_of(positions, lambda n: torch.arange(n), vary={"n": (1, 9)})
    assert str(fvflops.cost_of(positions, lambda n: torch.arange(n), vary={"n": (1, 8)})) == "16·n"


def test_sizes_outside_of_what_was_varied_are_not_told():
    cost = fvflops.cost_of(nn.Linear(8, 4), linear, vary={"batch": (2, 64, 2)})
    assert cost(batch=10) == 320
    for batch in (1, 3, 66):
        with pytest.raises(ScalingError, match=f"batch={batch} is outside the varied range"):
            cost(batch=batch)
    with pytest.raises(TypeError, match="the sizes of this cost must be batch; got seq"):
        cost(seq=4)


def test_an_unknown_op_is_told():
    @torch.library.custom_op("fvflops_scaling::scan", mutates_args=())
    def scan(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    scan.register_fake(lambda x: torch.empty_like(x))
    cost = fvflops.cost_of(lambda x: scan(x), linear, vary={"batch": (1, 8)})
    assert cost.unsupported == {"fvflops_scaling::scan": 1} and cost(batch=3) == 0


def test_axes_are_read():
    assert read_axis("n", range(1, 11, 3)) == Axis("n", 1, 10, 3)
    assert read_axis("n", (1, 12, 3)) == Axis("n", 1, 10, 3)
    assert 7 in Axis("n", 1, 10, 3) and 8 not in Axis("n", 1, 10, 3) and 13 not in Axis("n", 1, 10, 3)


# Generation.


def language_model(name):
    transformers = pytest.importorskip("transformers", reason="the language models are transformers'")
    layers = 1 + (name == "LlamaForCausalLM")
    sizes = {"num_hidden_layers": layers, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    tokens = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
    kind = getattr(transformers, name)
    more = {
        "GPT2LMHeadModel": {"n_positions": 32},
        "LlamaForCausalLM": {"num_key_value_heads": 2, "intermediate_size": 48},
        "MistralForCausalLM": {"num_key_value_heads": 2, "intermediate_size": 48, "sliding_window": 6},
    }[name]
    return kind, kind.config_class(**sizes, **tokens, **more)


@pytest.mark.parametrize("table", ["default", pytest.param("exact", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM"])
def test_a_generation_is_what_generate_does(name, table):
    kind, config = language_model(name)
    with torch.device("meta"):
        absent = kind(config).eval()
    cost = fvflops.generation_cost(absent, prompt=5, new=9, batch=2, table=table)
    model = kind(config).eval()
    with torch.no_grad(), fvflops.record(model, table=table) as run:
        model.generate(torch.ones(2, 5, dtype=torch.long), max_new_tokens=9, min_new_tokens=9, do_sample=False)
    # generate compares the 64 logits of 2 sequences for each of the 9 tokens, which is not of the model.
    assert cost.total == run.total() - (9 * 2 * 64 if table == "exact" else 0)
    if name == "MistralForCausalLM":  # the window bounds what the cache holds
        assert str(cost.decode).endswith("for cache from 5 to 15") and cost.decode.polynomial.degree() == 0
        assert cost.polynomial is None
    else:
        assert cost.polynomial(prompt=5, new=9) == cost.total and cost.counted_up_to == 5
        assert cost.decode.polynomial.degree() == 1 and cost.prefill.polynomial.degree() == 2


def test_the_zoos_decoders_generate_at_the_cost_of_those_of_transformers():
    sizes = {"prompt": 5, "new": 9, "batch": 2}
    kind, config = language_model("GPT2LMHeadModel")
    own = GPT2(GPT2Config(vocab_size=64, positions=32, width=32, layers=1, heads=4)).eval()
    assert fvflops.generation_cost(own, **sizes).total == fvflops.generation_cost(kind(config).eval(), **sizes).total
    kind, config = language_model("LlamaForCausalLM")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2}
    own, theirs = Llama(LlamaConfig(**shape)).eval(), kind(config).eval()
    costs = [fvflops.generation_cost(model, table="torch", **sizes) for model in (own, theirs)]
    assert costs[0].total == costs[1].total and str(costs[0].decode) == str(costs[1].decode)


def test_the_bytes_of_a_generation_are_those_of_real_execution():
    kind, config = language_model("GPT2LMHeadModel")
    model = kind(config).eval()
    sizes = {"prompt": 3, "new": 4, "metric": "bytes"}
    cost = fvflops.generation_cost(model, **sizes)
    assert cost.decode.polynomial.degree() == 1
    assert cost.total == fvflops.generation_cost(model, execution="real", **sizes).total


def test_a_generation_of_one_token_is_its_prefill():
    kind, config = language_model("GPT2LMHeadModel")
    cost = fvflops.generation_cost(kind(config).eval(), prompt=5, new=1)
    assert cost.total == cost.prefill(prompt=5) == cost.polynomial(prompt=5, new=1)


def test_a_generation_that_the_model_cannot_make_is_refused():
    kind, config = language_model("GPT2LMHeadModel")
    model = kind(config).eval()
    with pytest.raises(ScalingError, match="prompt=33: IndexError: an embedding of 32 rows"):
        fvflops.generation_cost(model, prompt=20, new=14)
    with pytest.raises(ScalingError, match="new must be an integer >= 1; got 0"):
        fvflops.generation_cost(model, prompt=20, new=0)
    with pytest.raises(ScalingError, match="MPT takes no past_key_values and use_cache"):
        fvflops.generation_cost(build("mpt_tiny", device="meta"), prompt=2, new=2)

    class WithoutUseCache(nn.Module):
        def forward(self, input_ids, past_key_values=None):
            raise AssertionError

    with pytest.raises(ScalingError, match=r"WithoutUseCache takes no use_cache, .* whose forward takes token ids"):
        fvflops.generation_cost(WithoutUseCache(), prompt=2, new=2)


# The command line, the reports and the picture.


def scale(capsys, *argv):
    return run(capsys, "scale", *argv)


def test_the_command_tells_the_polynomial_and_what_was_counted(capsys):
    code, out, err = scale(capsys, "zoo:llama_tiny", "--vary", "batch=1..4", "--vary", "seq=1..40")
    assert (code, err) == (0, "")
    blocks = out.split("\n\n")
    assert blocks[1].splitlines() == [
        # Two layers with attention at 2·64 a pair of tokens, and linears at 2·64² + 2·64·32 + 3·64·176 a token; the
        # head is 64·256. The convention leaves RMSNorm out, as fvcore does.
        "FLOPs = 256·B·S² + 108,544·B·S",
        "  B = batch from 1 to 4",
        "  S = seq from 1 to 40",
    ]
    assert re.fullmatch(r"\d+ runs: fitted to 6, exact on \d+ held out\.", blocks[2])
    assert [line.split() for line in blocks[3].splitlines()[1:]] == [
        ["module", "B·S²", "B·S"],
        ["--------", "----", "-------"],
        ["model", "256", "108,544"],
        ["layers", "256", "92,160"],
        ["lm_head", "16,384"],
    ]
    counted = [[int(cell.replace(",", "")) for cell in line.split()[:3]] for line in blocks[4].splitlines()[2:]]
    assert all(count == 256 * batch * seq**2 + 108_544 * batch * seq for batch, seq, count in counted)
    assert [1, 1] in [row[:2] for row in counted] and [4, 40] in [row[:2] for row in counted]


def test_the_command_takes_names_in_inputs_and_factories(capsys, tmp_path):
    shape = ["--input", "batch,64:float32", "--vary", "batch=1..32"]
    path = tmp_path / "models.py"
    path.write_text(
        "import torch\n"
        "def plain():\n    return torch.nn.Linear(64, 2)\n"
        "def wide(width):\n    return torch.nn.Linear(width, 2), torch.zeros(5, width)\n"
        "def wide_alone(width):\n    return torch.nn.Linear(width, 2)\n"
    )
    assert "FLOPs = 128·B\n" in scale(capsys, f"{path}:plain", *shape)[1]
    assert "FLOPs = 10·d\n" in scale(capsys, f"{path}:wide", "--vary", "width=4..64:4")[1]
    named = ["--input", "batch,width", "--vary", "width=4..64", "--vary", "batch=1..9"]
    assert "FLOPs = 2·d·B\n" in scale(capsys, f"{path}:wide_alone", *named)[1]
    assert "Parameters = 2·d + 2\n" in scale(capsys, f"{path}:wide_alone", *named, "--metric", "parameters")[1]


def test_the_json_report_holds_exact_coefficients(capsys, tmp_path):
    path = tmp_path / "net.py"
    path.write_text(
        "from torch import nn\ndef net():\n"
        "    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 32, stride=32), pool, nn.Linear(4, 5))\n"
    )
    sizes = ["--vary", "size=40..448", "--input", "1,3,size,size"]
    code, out, _ = scale(capsys, f"{path}:net", *sizes, "--format", "json")
    record = json.loads(out)
    assert code == 0 and record["format"] == "fvflops.scaling" and record["schema"] == 2
    assert record["holds_on"] == [{"name": "size", "first": 64, "last": 448, "step": 32}]
    terms = {tuple(term["exponents"].values()): Fraction(term["coefficient"]) for term in record["polynomial"]["terms"]}
    # Of each pixel 3 * 4 products, and of each of the (R / 32)^2 windows 4 elements that are pooled.
    assert terms == {(2,): 12 + Fraction(4, 32**2), (0,): 20}
    assert {row["used"] for row in record["counted"]} == {"fitted", "held out", "outside the domain"}
    assert record["modules"]["2"]["text"] == "20"


def test_the_command_tells_that_there_is_no_polynomial(capsys, tmp_path):
    path = tmp_path / "modulo.py"
    path.write_text(
        "import torch\n"
        "class Modulo(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x[:, : x.shape[1] % 17 + 1] * 2\n"
    )
    sizes = ["--vary", "n=20..400", "--input", "1,n", "--table", "exact"]
    code, out, _ = scale(capsys, f"{path}:Modulo", *sizes)
    assert code == 0 and "\nFLOPs: no polynomial in n\n" in out and "no polynomial of degree 4 or less in n" in out
    counted = [line.replace(",", "").split() for line in out.split("\n\n")[3].splitlines()[2:]]
    assert len(counted) > 8 and all(int(n) % 17 + 1 == int(count) for n, count in counted)


def test_the_command_generates():
    pytest.importorskip("transformers", reason="the language model is transformers'")
    config = '{"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 1}'
    argv = ["scale", "transformers:GPT2LMHeadModel", "--config", config, "--device", "meta"]
    argv += ["--generate", "prompt=8,new=20"]
    out, record = write_as("text", *argv), json.loads(write_as("json", *argv))
    # Twelve squares of the width a layer, norms at 5 for each element, and the head.
    token = 2 * 12 * 32**2 + 5 * 5 * 32 + 32 * 64
    assert f"one token = 128·L + {token + 128:,}\n" in out
    assert re.search(r"\nall 19 decoded tokens  ", out) and re.search(r"\ntoken 20  +26  ", out) and "\ntotal  " in out
    prefill = record["prefill"]["polynomial"]["terms"]
    first = sum(Fraction(term["coefficient"]) * 8 ** term["exponents"]["prompt"] for term in prefill)
    assert record["total"] == first + sum(128 * length + token + 128 for length in range(8, 27))
    assert record["decode"]["polynomial"]["text"] == f"128·L + {token + 128:,}"


LONG = "a_projection_" + "of_a_long_name_" * 12


@pytest.mark.parametrize("format", list(FORMATS))
def test_every_format_writes_how_a_cost_grows(format, capsys, tmp_path):
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nfrom collections import OrderedDict\ndef net():\n"
        f"    layers = [('{LONG}', torch.nn.Linear(4, 8)), ('b', torch.nn.Linear(8, 2))]\n"
        "    return torch.nn.Sequential(OrderedDict(layers))\n"
    )
    arguments = ["--input", "batch,4", "--vary", "batch=1..64", "--sort", "batch", "--top", "2", "--format", format]
    code, out, err = scale(capsys, f"{path}:net", *arguments)
    assert (code, err) == (0, "")
    written = check_report(format, out, "scaling")
    if format == "csv":
        assert [(row["batch"], row["flops"]) for row in written] == [("64", "3072"), ("54", "2592")]
    elif format == "json":
        assert written["modules"][LONG]["text"] == "32·B" and len(written["counted"]) > 2
    else:
        assert "48·B" in written.replace("$", "") and "more runs." in written and "no_such" not in written


@pytest.mark.parametrize("format", list(FORMATS))
def test_every_format_writes_a_generation(format):
    axis = Axis("prompt", 1, 64), Axis("cache", 1, 63)
    prefill, decode = Polynomial.of(("prompt",), {(2,): Fraction(1, 2), (1,): 10}), Polynomial.of(("cache",), {(1,): 4})
    cost = GenerationCost(
        metric="flops",
        batch=1,
        prompt=8,
        new=3,
        prefill=CostExpression("flops", axis[:1], prefill, axis[:1], {(8,): 112}),
        decode=CostExpression("flops", axis[1:], decode, axis[1:], {(8,): 32}, unsupported={"mylib::scan": 2}),
        polynomial=None,
        total=112 + 32 + 36,
        counted_up_to=8,
    )
    document = generation_report(cost, title="GPT: FLOPs of generating 3 tokens").ranked(sort="flops", top=2)
    written = check_report(format, write_document(document, format, width=80) + "\n" * (format != "csv"), "generation")
    if format == "csv":
        parts = [(row["part"], row["flops"]) for row in written]
        assert parts == [("prefill of 8", "112"), ("all 2 decoded tokens", "68")]
    elif format == "json":
        assert written["total"] == 180 and written["prefill"]["polynomial"]["text"] == "1/2·P² + 10·P"
    else:
        assert "mylib::scan (2 calls) in each run" in written and "180" in written and "2 more parts." in written


def test_coefficients_are_exact_and_a_module_may_have_none():
    axes = (Axis("n", 1, 9),)
    half = Polynomial.of(("n",), {(2,): Fraction(1, 2), (1,): Fraction(-1, 2)})
    part = {"half": CostExpression("flops", axes, half, axes, {(2,): 1})}
    none = {
        name: CostExpression("flops", axes, None, axes, counted)
        for name, counted in (("none", {(1,): 1, (2,): 3}), ("constant", {(1,): 4_000, (2,): 4_000}))
    }
    cost = CostExpression("flops", axes, half, axes, {(2,): 1}, modules={"": part["half"], **part, **none})
    text = write_document(scaling_report(cost, title="Net"))
    assert [line.split(None, 3) for line in text.split("\n\n")[3].splitlines()[3:]] == [
        ["model", "1/2", "-1/2"],
        ["half", "1/2", "-1/2"],
        ["none", "no", "polynomial"],
        ["constant", "4,000", "at", "all counted sizes"],
    ]


def test_without_matplotlib_a_plot_is_refused_before_the_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / "cost.svg"
    code, out, err = scale(capsys, "zoo:gpt2", "--vary", "seq=1..9", "--plot", str(picture))
    assert code == 2 and out == "" and "a plot needs matplotlib" in err and "pip install 'fvflops[plot]'" in err
    assert err.count("\n") == 1 and not picture.exists()


@pytest.mark.parametrize(
    ("kind", "model", "sizes"),
    [("svg", "zoo:llama_tiny", ["seq=1..99", "batch=1..9"]), ("png", "zoo:lenet5", ["batch=1..9"])],
)
def test_a_plot_is_drawn(kind, model, sizes, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are an extra, fvflops[plot]")
    picture = tmp_path / f"cost.{kind}"
    code, out, err = scale(capsys, model, *(f"--vary={size}" for size in sizes), "--plot", str(picture))
    assert (code, err) == (0, "") and out.startswith(model)
    start = picture.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if kind == "png" else b"<svg" in picture.read_bytes() and b"<?xml" in start
    assert file_type(str(picture)) == kind
