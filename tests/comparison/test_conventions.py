"""The comparison of conventions: every difference is explained, to the last FLOP."""

import json
import re

import pytest
import torch
from torch import nn

from fvflops import compare
from fvflops.cli import main
from fvflops.comparison.convention_differences import Difference, comparison_report, explain_differences
from fvflops.formulas import shipped_tables
from fvflops.reports.formats import write_document
from fvflops.trace import Counts, Entry, ModuleTree, Status
from tests.support.models.whole_models import build_case
from tests.support.reports.report_formats import output_of


def entry(label, macs=0, flops=0, *, scope=("",), unit=1, calls=1, status=Status.COUNTED, op=None):
    return Entry(scope, "forward", op or f"aten::{label}", label, status, calls, unit * macs + flops, macs, flops)


def counts(*entries):
    return Counts("flops", ModuleTree({}), entries)


def test_the_same_work_under_two_names_is_no_difference():
    first = counts(entry("linear", 10), entry("softmax", flops=3))
    second = counts(entry("addmm", 10, unit=2), entry("softmax", flops=3))
    assert explain_differences(first, second, units=(1, 2)) == (Difference("unit", 10),)


def test_ops_that_only_one_convention_counts():
    first = counts(entry("linear", 10), entry("sdpa", 7, calls=2))
    second = counts(entry("linear", 10), entry("sdpa", status=Status.IGNORED), entry("gelu", flops=4, calls=3))
    assert explain_differences(first, second, units=(1, 1)) == (
        Difference("only_first", -7, "sdpa", "", 2),
        Difference("only_second", 4, "", "gelu", 3),
    )
    unknown = counts(entry("linear", 10), entry("sdpa", status=Status.UNSUPPORTED))
    assert explain_differences(first, unknown, units=(1, 1)) == (Difference("unsupported", -7, "sdpa", "", 2),)


def test_ops_are_matched_module_by_module():
    first = counts(entry("linear", 10, scope=("", "a")), entry("linear", 10, scope=("", "b")))
    second = counts(entry("addmm", 10, scope=("", "a")), entry("mm", 9, scope=("", "b")))
    assert explain_differences(first, second, units=(1, 1)) == (Difference("different_count", -1, "linear", "mm", 1),)


def test_a_module_with_a_formula_is_compared_with_the_ops_inside_it():
    first = counts(entry("linear", 10, scope=("", "mha", "mha.out")), entry("sdpa", 5, scope=("", "mha")))
    second = counts(entry("MultiheadAttention", 15, scope=("", "mha"), op="torch.nn.MultiheadAttention"))
    assert explain_differences(first, second, units=(1, 1)) == ()
    less = counts(entry("MultiheadAttention", 12, scope=("", "mha"), op="torch.nn.MultiheadAttention"))
    reasons = explain_differences(first, less, units=(1, 1))
    assert {(reason.kind, reason.first, reason.second, reason.value) for reason in reasons} == {
        ("only_first", "linear", "", -10),
        ("only_first", "sdpa", "", -5),
        ("only_second", "", "MultiheadAttention", 12),
    }


@pytest.mark.parametrize("name", ["toy", "zoo:llama_tiny", "torchvision:mobilenet_v3_small", "transformers:BertModel"])
def test_the_reasons_add_up_for_every_pair_of_conventions(name):
    model, inputs = build_case(name)
    comparison = compare(model, inputs)
    assert set(comparison.totals) == set(shipped_tables())
    for first, first_total in comparison.totals.items():
        for second, second_total in comparison.totals.items():
            reasons = comparison.between(first, second)
            assert sum(reason.value for reason in reasons) == second_total.total - first_total.total, (first, second)
            assert all(reason.value for reason in reasons)


def test_fvcore_lacks_the_attention_of_a_transformer():
    model, inputs = build_case("zoo:vit_b_16")
    comparison = compare(model, inputs, tables=["default", "fvcore"])
    (reason,) = comparison.between("default", "fvcore")
    # 12 layers, 197 tokens, width 768, two products
    assert reason == Difference("only_first", -12 * 2 * 197 * 197 * 768, "scaled_dot_product_attention", "", 12)


def test_the_report_explains_the_differences(capsys):
    text = output_of(capsys, "compare", "zoo:vit_b_16", "--tables", "fvcore,torch", "--device", "meta")
    assert text.startswith("zoo:vit_b_16 on float32[1, 3, 224, 224]: 17.6G FLOPs by default, 16.9G to 33.7G")
    assert "A MAC (multiply-add) is" in text and "Why the others do not report 17.6G, as default does\n" in text
    assert re.search(r"\nfvcore +-715M  ignores scaled_dot_product_attention \(12 calls\)\n", text)
    assert re.search(r"\ntorch +\+17.6G  a MAC is 2 FLOPs, not 1\n", text)
    assert re.search(r"\ntorch +33.7G +2  16.8G +0\n", text)
    assert "\ntorch: torch.utils.flop_counter.FlopCounterMode of torch 2.13.\n" in text


def test_the_report_compares_with_another_reference():
    comparison = compare(nn.Linear(3, 2), torch.ones(4, 3), tables=["default", "fvcore"])
    text = write_document(comparison_report(comparison, against="fvcore"))
    assert text.split("\n\n")[-2].endswith("default              0  no difference")
    with pytest.raises(KeyError, match="no convention 'fvcor' was compared: did you mean 'fvcore'"):
        comparison_report(comparison, against="fvcor")


def test_a_convention_without_macs_is_noted_and_two_labels_of_an_op_are_short(capsys):
    text = output_of(capsys, "compare", "zoo:resnet50", "--tables", "torch_flops,thop", "--device", "meta")
    assert "\ntorch_flops: multiply-adds are among the other FLOPs.\n" in text
    assert "  counts BatchNorm2d, not batch_norm (53 calls)\n" in text and "…" not in text
    assert main(["compare", "zoo:resnet50", "--tables", "thop", "--device", "meta"]) == 0
    assert "multiply-adds are among" not in capsys.readouterr().out


def test_smaller_differences_are_summed():
    comparison = compare(nn.Linear(3, 2), torch.ones(4, 3), tables=["default"])
    reasons = tuple(Difference("only_second", 9 - index, "", f"op{index}", 1) for index in range(4))
    total = comparison.totals["default"]
    comparison = type(comparison)("x", {"a": total, "b": total}, {("a", "b"): reasons})
    rows = write_document(comparison_report(comparison, shown=2)).split("\n\n")[-2].split("\n")[-3:]
    assert [row.split(None, 2)[1:] for row in rows] == [
        ["+9", "also counts op0 (1 call)"],
        ["+8", "also counts op1 (1 call)"],
        ["+13", "2 smaller differences"],
    ]


def test_the_convention_of_a_file_is_compared_with_all_shipped_ones(capsys, tmp_path):
    table = tmp_path / "mine.yaml"
    table.write_text('multiply_add: 1\nops:\n  aten::addmm: {flops: numel(out), example: "2, 2 3, 3 2 = 4"}\n')
    assert main(["compare", "zoo:lenet5", "--table", str(table), "--format", "json"]) == 0
    compared = list(json.loads(capsys.readouterr().out)["conventions"])
    assert compared == [str(table), *shipped_tables()]


def test_json_has_every_pair(capsys):
    assert main(["compare", "zoo:lenet5", "--table", "fvcore", "--tables", "torch", "--format", "json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert list(written["conventions"]) == ["fvcore", "torch"]
    assert {(pair["from"], pair["to"]) for pair in written["differences"]} == {("fvcore", "torch"), ("torch", "fvcore")}


def test_a_duplicate_convention_raises():
    with pytest.raises(ValueError, match="duplicate tables: fvcore"):
        compare(nn.Linear(3, 2), torch.ones(4, 3), tables=["fvcore", "fvcore"])


def test_an_op_that_no_convention_counts_is_named():
    with torch.library._scoped_library("compared", "DEF") as library:
        library.define("scan(Tensor x) -> Tensor")
        library.impl("scan", lambda x: x.clone(), "CompositeExplicitAutograd")
        text = str(compare(lambda x: torch.ops.compared.scan(x @ x), torch.ones(2, 2), tables=["default", "exact"]))
    assert "Unsupported, so counted by none: compared::scan." in text
