"""Relations that every count obeys: batches add up, an axis scales by its power, backward is two forwards."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from fvflops import FlopCountAnalysis, load_table
from fvflops.capture.run import record_call

TABLES = ["default", "exact"]
META = torch.device("meta")


def tensor(*shape):
    return torch.empty(shape, device=META)


@dataclass(frozen=True)
class Layer:
    """A function of tensors: `sizes` names its axes, `make` the tensors for given sizes, the first with the batch `b`.

    `powers` says with which power of an axis the multiply-adds grow, where that is not 1.
    """

    function: Callable[..., torch.Tensor]
    make: Callable[..., tuple[torch.Tensor, ...]]
    sizes: dict[str, int]
    powers: dict[str, int] = field(default_factory=dict)


LAYERS = {
    "linear": Layer(
        F.linear, lambda b, t, i, o: (tensor(b, t, i), tensor(o, i), tensor(o)), {"b": 4, "t": 3, "i": 5, "o": 7}
    ),
    "matmul": Layer(
        torch.matmul, lambda b, m, k, n: (tensor(b, 2, m, k), tensor(k, n)), {"b": 4, "m": 3, "k": 5, "n": 7}
    ),
    "bmm": Layer(torch.bmm, lambda b, n: (tensor(b, n, n), tensor(b, n, n)), {"b": 4, "n": 6}, {"n": 3}),
    "einsum": Layer(
        lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y),
        lambda b, h, q, k, d: (tensor(b, h, q, d), tensor(b, h, k, d)),
        {"b": 4, "h": 2, "q": 3, "k": 5, "d": 6},
    ),
    "conv1d": Layer(
        lambda x, w: F.conv1d(x, w, padding=1),
        lambda b, c, o, t: (tensor(b, c, t), tensor(o, c, 3)),
        {"b": 4, "c": 3, "o": 5, "t": 8},
    ),
    "conv2d": Layer(
        lambda x, w: F.conv2d(x, w, padding=1, groups=2),
        lambda b, c, o, s: (tensor(b, 2 * c, s, s), tensor(2 * o, c, 3, 3)),
        {"b": 4, "c": 3, "o": 5, "s": 6},
        {"s": 2},
    ),
    "conv3d": Layer(
        lambda x, w: F.conv3d(x, w, padding=1),
        lambda b, c, s: (tensor(b, c, s, s, s), tensor(c, c, 3, 3, 3)),
        {"b": 2, "c": 3, "s": 4},
        {"c": 2, "s": 3},
    ),
    "conv_transpose2d": Layer(
        lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2),
        lambda b, c, o, s: (tensor(b, 2 * c, s, s), tensor(2 * c, o, 3, 3)),
        {"b": 4, "c": 3, "o": 5, "s": 6},
        {"s": 2},
    ),
    "attention": Layer(
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda b, h, t, d: (tensor(b, h, t, d),),
        {"b": 4, "h": 2, "t": 8, "d": 16},
        {"t": 2},
    ),
}
# Their backward computes the scores again: five products where two were forward.
RECOMPUTES = {"attention"}


def parts(layer, sizes, table):
    counts = FlopCountAnalysis(layer.function, layer.make(**sizes), table=table).counts()
    return counts.total(), sum(entry.macs for entry in counts.entries)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_costs_what_its_parts_cost(name, table):
    layer = LAYERS[name]
    whole, _ = parts(layer, layer.sizes, table)
    one, three = (parts(layer, {**layer.sizes, "b": size}, table)[0] for size in (1, layer.sizes["b"] - 1))
    assert whole == one + three > 0


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("name", "axis"), [(name, axis) for name in LAYERS for axis in LAYERS[name].sizes])
def test_an_axis_scales_by_its_power(name, axis, table):
    layer = LAYERS[name]
    _, macs = parts(layer, layer.sizes, table)
    _, doubled = parts(layer, {**layer.sizes, axis: 2 * layer.sizes[axis]}, table)
    assert doubled == 2 ** layer.powers.get(axis, 1) * macs > 0


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_backward_pass_is_two_forward_passes(name, table):
    layer = LAYERS[name]
    _, forward = parts(layer, layer.sizes, table)
    inputs = tuple(torch.randn(item.shape, requires_grad=True) for item in layer.make(**layer.sizes))
    loaded = load_table(table)
    trace = record_call(layer.function, inputs, {}, loss=lambda result: result.sum(), stops_at=loaded.stops_at)
    entries = FlopCountAnalysis.from_trace(trace, table=loaded).counts().entries
    macs = {phase: sum(entry.macs for entry in entries if entry.phase == phase) for phase in ("forward", "backward")}
    assert macs["forward"] == forward
    assert macs["backward"] * 2 == forward * (5 if name in RECOMPUTES else 4)
