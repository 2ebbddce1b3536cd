"""Rows of models: equal to counting each alone, with fallbacks and errors of one line."""

import dataclasses
import random
from functools import partial

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, predict_memory
from fvflops.counting.metrics import MetricCounts
from fvflops.formulas import load_table
from fvflops.sources import SourceOptions, load_model
from fvflops.sweep import COLUMNS, CountSettings, ModelCount, count_many, count_model
from tests.support.models.parts import Applied
from tests.support.models.unseen_work import KINDS, Net
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas


def needs_values(self, x):
    """A model whose control flow needs a value: it has none on the meta device."""
    return self.fc(x) if self.fc.weight.sum().item() < 1e9 else x


def test_columns_are_the_fields_of_a_row():
    assert sorted(column.key for column in COLUMNS) == sorted(field.name for field in dataclasses.fields(ModelCount))
    texts = {field.name for field in dataclasses.fields(ModelCount) if field.type == "str"}
    assert {column.key for column in COLUMNS if column.is_text} == texts


@pytest.mark.parametrize("name", ["zoo:lenet5", "zoo:resnet50", "zoo:llama_tiny"])
@pytest.mark.parametrize("table", ["default", "exact"])
def test_a_row_equals_counting_the_built_model(name, table):
    row = count_model(name, settings=CountSettings(table))
    loaded = load_model(name)
    flops = FlopCountAnalysis(loaded.model.eval(), loaded.inputs, table=load_table(table), warn=False)
    counts = MetricCounts(flops.trace(), load_table(table), flops.counts())
    expected = {metric: counts[metric].total() for metric in ("parameters", "flops", "macs", "activations", "bytes")}
    assert {metric: getattr(row, metric) for metric in expected} == expected
    assert row.peak_memory == predict_memory(flops).peak
    assert row.inputs == flops.trace().about["inputs"]
    assert (row.execution, row.device, row.dtype, row.table, row.error) == ("shapes", "meta", "float32", table, "")


def test_a_model_that_needs_values_is_built_with_weights():
    (row,) = count_many([lambda: (Applied(needs_values, fc=nn.Linear(8, 4)), torch.ones(2, 8))])
    assert (row.flops, row.device, row.execution, row.error) == (64, "cpu", "real", "")


def test_weights_beyond_the_limit_are_not_built():
    options, settings = SourceOptions(), CountSettings(memory=100)
    row = count_model("tests.sweep.test_count_model:make_needs_values", options, settings)
    assert row.error.startswith("meta: Linear") or row.error.startswith("meta: ")
    assert row.error.endswith(" | with weights: its weights take 144 B, more than the limit of 100 B")
    assert (row.flops, row.device, row.failure) == (None, "meta", "out of memory")


def test_a_default_configuration_that_does_not_fit_is_counted_smaller():
    define_torchvision_schemas()
    settings = CountSettings(execution="real", memory=200_000_000, peak_memory=False)
    row = count_model("transformers:GPT2Model", settings=settings)
    assert (row.error, row.execution, row.built) == ("", "real", "n_layer=2")
    smaller = count_model("transformers:GPT2Model", SourceOptions(config='{"n_layer": 2}'))
    assert (row.parameters, row.flops, row.options) == (smaller.parameters, smaller.flops, '{"execution": "real"}')


def make_needs_values():
    return Applied(needs_values, fc=nn.Linear(8, 4)), torch.ones(2, 8)


def test_a_wrong_input_is_an_error_that_names_the_module():
    row = count_model("zoo:lenet5", SourceOptions(inputs=("1,3,28,28",)))
    assert "Conv2d 'features.0' expects 1 input channel, got float32[1, 3, 28, 28]" in row.error
    assert (row.flops, row.failure, row.options) == (None, "error", '{"inputs": ["1,3,28,28"]}')


def test_a_factory_is_called_for_each_row_and_its_errors_do_not_stop_the_others():
    widths = [(f"w{width}", partial(nn.Linear, 4, width)) for width in (0, 3)]
    rows = list(count_many([*widths, ("no module", dict), ("raises", lambda: 1 // 0)], options=inputs("1,4")))
    assert [row.model for row in rows] == ["w0", "w3", "no module", "raises"]
    assert [row.flops for row in rows] == [0, 12, None, None]
    assert rows[2].error == "no module returned dict: return a torch.nn.Module, or (module, inputs)"
    assert rows[3].error.startswith("ZeroDivisionError: integer division or modulo by zero (test_count_model.py:")


def test_a_module_without_inputs_says_how_to_pass_them():
    (row,) = count_many([partial(nn.Linear, 4, 3)])
    assert (row.model, row.error.partition(":")[0]) == ("model 1", "the model has no inputs")


def test_an_unknown_table_raises_before_a_model_is_built():
    with pytest.raises(Exception, match="defualt"):
        count_many([pytest.fail], table="defualt")


def test_unseen_work_is_listed_with_its_place():
    (row,) = count_many([("scan", lambda: (Net(KINDS["from_numpy"].compute), torch.ones(4, 8)))], execution="real")
    assert row.unsupported.startswith("unseen::from_numpy ×1 in 'scan' at tests/support/models/unseen_work.py:")


def test_random_states_are_restored():
    random.seed(7)
    torch.manual_seed(7)
    expected = random.random(), torch.rand(1).item()
    random.seed(7)
    torch.manual_seed(7)
    count_model("zoo:lenet5", SourceOptions(device="cpu"))
    assert (random.random(), torch.rand(1).item()) == expected


def inputs(*texts):
    return SourceOptions(inputs=texts)


def test_options_apply_to_functions_as_to_names():
    def build(width=8):
        return nn.Linear(width, 4), torch.ones(1, width)

    options = SourceOptions(args=("width=16",), batch=3, dtype="bf16")
    (row,) = count_many([build], options=options)
    assert (row.flops, row.inputs, row.dtype, row.error) == (3 * 16 * 4, "bfloat16[3, 16]", "bfloat16", "")
    (row,) = count_many([build], options=SourceOptions(config="{}"))
    assert row.error.startswith("--config applies to transformers:CLASS")


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ("zoo:lenet5", SourceOptions(), r"models='zoo:lenet5' is one name: pass a list of names, \['zoo:lenet5'\]"),
        (["zoo:lenet5"], SourceOptions(device="cdua"), "'cdua' is not a device of torch"),
    ],
)
def test_wrong_arguments_are_refused_before_counting(models, options, message):
    with pytest.raises(ValueError, match=message):
        count_many(models, options=options)
