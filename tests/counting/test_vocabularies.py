"""A composite op costs the same as called and as autograd decomposes it, in each convention, but for a literal list."""

import pytest
import torch

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record, record_call
from fvflops.analysis.table_examples import bind_example, overloads_of
from fvflops.capture.recorder.tensor_specs import describe_op
from fvflops.counting import TableCostModel, count
from fvflops.formulas import load_table
from fvflops.formulas.language.example import Example
from fvflops.trace.calls import packet_of
from fvflops.zoo import build
from tests.support.old_torch import VERSION

# Conventions of forward passes only, in which the ops that autograd shows are ignored: calflops, deepspeed, ptflops,
# thop, torch_flops, torch_profiler, torchinfo.
CONVENTIONS = ("default", "exact", "fvcore", "torch")
# In addition to the examples of the rows: arguments for which torch chooses another decomposition.
OTHER_CASES = {
    "aten::adaptive_avg_pool2d": ("1 4 6 6, output_size=[1, 1]",),
    "aten::matmul": ("3 4, 4", "4, 4 5", "2 3 4, 4 5", "2 3 4, 2 4 5"),
    "aten::linear": ("4, 5 4, 5", "2 3 4, 5 4"),
    "aten::scaled_dot_product_attention": ("2 4 6 8, 2 4 6 8, 2 4 6 4",),
}
_VECTORS = "with autograd torch computes the vectors too"
_MEAN = "torch's mean, which fvcore's convention does not count"
_CPU_FALLBACK = (
    {}
    if VERSION >= (2, 12)
    else {"aten::_grid_sampler_2d_cpu_fallback_backward": "torch 2.11 and older: a composite op of loops, without ops"}
)
# Convention → row → why its FLOPs differ under autograd.
DIFFERENT = {
    "default": {
        "aten::adaptive_avg_pool2d": _MEAN,
        "aten::linalg_eigvals": _VECTORS,
        "aten::linalg_eigvalsh": _VECTORS,
        "aten::linalg_svdvals": _VECTORS,
    },
    "exact": {
        "aten::_scaled_dot_product_attention_math": "the softmax also replaces rows that are masked completely",
        "aten::affine_grid_generator_backward": "the base grid is computed by the op itself",
        **_CPU_FALLBACK,
        "aten::isfinite": "called it is one comparison; torch decomposes it into abs and two comparisons",
        "aten::linalg_eigvals": _VECTORS,
        "aten::linalg_eigvalsh": _VECTORS,
        "aten::linalg_svdvals": _VECTORS,
        "aten::scaled_dot_product_attention": "torch decomposes it as _scaled_dot_product_attention_math",
    },
    "fvcore": {
        "aten::adaptive_avg_pool2d": _MEAN,
        "aten::matmul": "fvcore counts a broadcast product by the first shapes, and bmm as executed",
    },
    "torch": {},
}


def examples_of(row):
    """Return calls of a composite row's op: the overload and its arguments; [] if the op has no kernel here."""
    calls = []
    for text in (row.example, *OTHER_CASES.get(row.name, ())):
        example = Example.parse(text if " = " in text else f"{text} = 0")
        overload = next((op for op in overloads_of(row.name) if bind_example(op._schema, example) is not None), None)
        if overload is not None and not any(argument.is_out for argument in overload._schema.arguments):
            calls.append((overload, bind_example(overload._schema, example)))
    return calls


def with_numbers(value, *, trained):
    """Return an argument with a tensor of numbers for one without."""
    if isinstance(value, (list, tuple)):
        return type(value)(with_numbers(item, trained=trained) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if not value.dtype.is_floating_point:
        return torch.ones(value.shape, dtype=value.dtype)
    return torch.rand(value.shape, dtype=value.dtype).requires_grad_(trained)


def flops_of(trace, table):
    return count(trace, TableCostModel(table, "flops"), "flops").total()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_composite_row_has_the_total_of_its_decomposition(convention):
    table = load_table(convention)
    different, compared = set(), 0
    for row in table.rows.values():
        known = row.name.startswith("aten::") and torch._C._jit_get_schemas_for_operator(packet_of(row.name))
        if (
            row.kind != "counted"
            or not row.example
            or not known
            or not describe_op(overloads_of(row.name)[0]).composite
        ):
            continue
        for overload, arguments in examples_of(row):
            values, trained = (
                {name: with_numbers(value, trained=trained) for name, value in arguments.items()}
                for trained in (False, True)
            )
            try:
                with record(table=table) as run:
                    overload(**trained)
            except (NotImplementedError, RuntimeError):
                continue  # without a derivative, or with sparse arguments only
            trace = record_call(overload, (), values, execution="real", stops_at=table.stops_at)
            compared += 1
            if flops_of(run.trace(), table) != flops_of(trace, table):
                different.add(row.name)
    assert different == set(DIFFERENT[convention])
    assert compared >= {"default": 25, "exact": 80, "fvcore": 8, "torch": 1}[convention]


def test_a_training_step_has_the_forward_pass_of_the_model():
    """But for the mean over the last features, 2048 x 7 x 7 of ResNet-50."""
    model, images = build("resnet50", device="meta").eval(), torch.zeros(1, 3, 224, 224, device="meta")
    step = TrainingStepAnalysis(model, images, loss=torch.sum)
    forward = sum(entry.value for entry in step.counts().entries if entry.phase == "forward")
    assert FlopCountAnalysis(model, images).total() - forward == 2048 * 7 * 7
