"""Recording: what is seen, under which scope, in which vocabulary."""

from collections import Counter, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fvflops.capture.run import record_call
from fvflops.trace import StopsAt, Trace, TraceError
from tests.support.models.parts import Applied

LINEAR = StopsAt(frozenset({"aten::linear", "aten::scaled_dot_product_attention"}))


def seen(trace):
    return [
        (trace.scope_of(event.stack)[-1], trace.signatures[event.item].packet)
        for event in trace.events
        if event.kind == "op"
    ]


def owners(trace, op):
    return Counter(owner for owner, name in seen(trace) if name == op)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(self.first, nn.ReLU())

    def forward(self, x):
        return self.second(self.first(x))


def recursive(self, x, depth=2):
    x = self.fc(x)
    return self(x, depth - 1) if depth else x


class Catches(nn.Module):
    class Raises(nn.Module):
        def forward(self, x):
            torch.relu(x)
            raise LookupError("inside")

    def __init__(self):
        super().__init__()
        self.bad = self.Raises()
        self.deep = nn.Sequential(nn.Sequential(self.bad))
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        try:
            self.deep(x)
        except LookupError:
            x = torch.tanh(x)
        return self.fc(x)


def test_composite_ops_are_recorded_as_called_where_they_are_stops_and_inside_elsewhere():
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    whole = record_call(model, (x,), stops_at=LINEAR)
    inside = record_call(model, (x,))
    assert seen(whole) == [("", "aten::linear")]
    assert ("", "aten::addmm") in seen(inside)
    assert inside.decomposed == {"aten::linear"}
    assert not whole.decomposed


def test_arguments_are_normalised_to_the_schema():
    trace = record_call(nn.Conv2d(3, 4, 3, stride=2), (torch.ones(1, 3, 8, 8),))
    signature = next(item for item in trace.signatures if item.packet == "aten::convolution")
    arguments = dict(zip(signature.names, signature.inputs, strict=True))
    assert arguments["stride"] == (2, 2) and arguments["groups"] == 1 and arguments["transposed"] is False
    assert arguments["weight"].shape == (4, 3, 3, 3)
    whole = record_call(nn.Conv2d(3, 4, 3), (torch.ones(1, 3, 8, 8),), stops_at=StopsAt(frozenset({"aten::conv2d"})))
    assert [len(item.inputs) for item in whole.signatures] == [7]


def test_a_shared_module_has_its_first_name():
    assert owners(record_call(Shared(), (torch.ones(1, 4),), stops_at=LINEAR), "aten::linear") == {"first": 2}


def test_recursive_calls_stack_up_and_unwind():
    trace = record_call(Applied(recursive, fc=nn.Linear(4, 4)), (torch.ones(1, 4),), stops_at=LINEAR)
    scopes = [trace.scope_of(event.stack) for event in trace.events if event.kind == "op"]
    assert scopes == [("", "fc"), ("", "", "fc"), ("", "", "", "fc")]


def test_a_direct_forward_belongs_to_the_caller():
    assert owners(
        record_call(
            Applied(lambda self, x: self.fc.forward(x) + self.gate(x), fc=nn.Linear(4, 4), gate=nn.Linear(4, 4)),
            (torch.ones(1, 4),),
            stops_at=LINEAR,
        ),
        "aten::linear",
    ) == {"": 1, "gate": 1}


def test_scopes_unwind_when_a_module_raises_and_the_model_catches():
    trace = record_call(Catches(), (torch.ones(1, 4),), stops_at=LINEAR)
    assert seen(trace) == [("bad", "aten::relu"), ("", "aten::tanh"), ("fc", "aten::linear")]
    raised = {trace.regions[trace.region_signatures[e.item].region].name for e in trace.events if e.raised}
    assert raised == {"bad", "deep.0", "deep"}


def test_enter_and_exit_events_nest():
    trace = record_call(Shared(), (torch.ones(1, 4),))
    depth, deepest = 0, 0
    for event in trace.events:
        depth += {"enter": 1, "exit": -1}.get(event.kind, 0)
        deepest = max(deepest, depth)
        assert depth >= 0
    assert (depth, deepest) == (0, 3)


def test_storages_are_named_freed_and_shared_by_views():
    def forward(self, x):
        y = self.fc(x).view(-1)
        z = y.exp()
        del y
        return z.sum()

    trace = record_call(Applied(forward, fc=nn.Linear(4, 4)), (torch.ones(2, 4),), stops_at=LINEAR)
    origins = {storage.name or storage.origin for storage in trace.storages}
    assert {"fc.weight", "fc.bias", "input", "op"} <= origins
    ops = {trace.signatures[event.item].packet: event for event in trace.events if event.kind == "op"}
    assert ops["aten::view"].writes == ops["aten::linear"].writes
    order = [(event.kind, event.item) for event in trace.events]
    freed = order.index(("free", ops["aten::linear"].writes[0]))
    assert order.index(("op", ops["aten::exp"].item)) < freed < order.index(("op", ops["aten::sum"].item))


def test_data_parallel_is_looked_through():
    trace = record_call(nn.DataParallel(nn.Sequential(nn.Linear(4, 4))), (torch.ones(1, 4),), stops_at=LINEAR)
    assert owners(trace, "aten::linear") == {"module.0": 1}
    assert trace.scope_of(1) == ("",)


def test_distributed_data_parallel_is_looked_through(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)))
        trace = record_call(model, (torch.ones(1, 4),), stops_at=LINEAR)
    finally:
        torch.distributed.destroy_process_group()
    assert seen(trace) == [("module.0", "aten::linear")]


def test_compiled_models_have_the_names_of_the_model():
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for model in (torch.compile(inner, backend="eager"), nn.Sequential(torch.compile(inner, backend="eager"))):
        trace = record_call(model, (torch.ones(1, 4),), stops_at=LINEAR)
        assert not any("_orig_mod" in name for name in trace.modules.by_name)
        prefix = "0." if "0.1" in trace.modules.by_name else ""
        assert seen(trace) == [(prefix + "0", "aten::linear"), (prefix + "1", "aten::relu")]


def test_ops_that_a_script_runs_out_of_sight_are_named():
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    script = torch.jit.optimize_for_inference(torch.jit.script(convolution))
    ops = owners(record_call(nn.Sequential(script), (torch.ones(1, 3, 8, 8),)), "prim::mkldnn_convolution")
    assert ops == {"0": 1}


def test_a_plain_function_can_be_recorded():
    trace = record_call(lambda x: torch.relu(x) + 1, (torch.ones(3),))
    assert seen(trace) == [("", "aten::relu"), ("", "aten::add")]


@pytest.mark.parametrize("mask", [False, True])
def test_fused_attention_is_seen_as_its_slow_path_whatever_the_grad_mode(mask):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    kwargs = {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])} if mask else {}
    x = torch.ones(2, 5, 16)
    with_grad = record_call(model, (x,), kwargs, stops_at=LINEAR)
    with torch.no_grad():
        without = record_call(model, (x,), kwargs, stops_at=LINEAR)
    assert seen(with_grad) == seen(without)
    assert owners(without, "aten::linear")["layers.1.self_attn"] == 2
    assert owners(without, "aten::linear")["layers.1.linear2"] == 1
    assert not any("fwd" in op or "native_multi" in op for _, op in seen(without))
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_model_that_uses_autograd_runs_in_the_core_vocabulary():
    def forward(self, x):
        with torch.enable_grad():
            x = x.requires_grad_()
            return torch.autograd.grad(self.fc(x).sum(), x)[0]

    x = torch.ones(2, 3)
    trace = record_call(Applied(forward, fc=nn.Linear(3, 1)), (x,), stops_at=LINEAR)
    assert trace.about["vocabulary"] == "core"
    assert ("fc", "aten::addmm") in seen(trace)
    assert "backward" in {event.phase for event in trace.events}


def test_both_vocabularies_can_stand_in_one_trace():
    def forward(self, x):
        with torch.inference_mode():
            self.fc(x)
        y = self.fc(x)
        torch.autograd.grad(y.sum(), y)
        return y

    ops = {
        op for _, op in seen(record_call(Applied(forward, fc=nn.Linear(3, 3)), (torch.ones(2, 3),), stops_at=LINEAR))
    }
    assert {"aten::linear", "aten::addmm"} <= ops


def test_autograd_functions_are_regions_also_through_an_apply_held_since_import():
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    held = Swish.apply
    trace = record_call(lambda x: held(x) + Swish.apply(x), (torch.ones(3),))
    functions = [e for e in trace.events if e.kind == "enter" and trace.regions[e.item] == ("function", "Swish")]
    assert len(functions) == 2
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def test_custom_and_functional_ops_are_seen():
    @torch.library.custom_op("fvflops_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def model(x):
        return twice(x).sum() + torch.func.vmap(torch.sin)(x).sum() + torch.func.jacrev(torch.cos)(x).sum()

    ops = {op for _, op in seen(record_call(model, (torch.ones(3),)))}
    assert {"fvflops_test::twice", "aten::sin", "aten::cos"} <= ops


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4), (1, 4)])
def test_empty_tensors_are_recorded(shape):
    trace = record_call(nn.Linear(4, 2), (torch.full(shape, float("nan")),), stops_at=LINEAR)
    assert trace.signatures[0].outputs[0].shape == (*shape[:-1], 2)


def test_a_model_without_parameters_and_one_with_ten_thousand_modules():
    assert seen(record_call(nn.Identity(), (torch.ones(1),))) == []
    many = nn.Sequential(*(nn.ReLU() for _ in range(10_000)))
    assert len(seen(record_call(many, (torch.ones(1),)))) == 10_000


def test_inputs_of_every_kind_reach_the_model():
    Pair = namedtuple("Pair", "a b")

    @dataclass
    class Output:
        value: torch.Tensor

    one = torch.ones(2)
    trace = record_call(
        Applied(lambda self, pair, *, scale, nested: Output(pair.a + pair.b * scale + nested["x"][0])),
        (Pair(one, one),),
        {"scale": 2, "nested": {"x": [one]}},
    )
    region = trace.region_signatures[-1]
    assert len(region.inputs) == 3 and len(region.outputs) == 1


def test_a_model_on_meta_runs_on_meta():
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    trace = record_call(model, (torch.ones(1, 4),), stops_at=LINEAR, execution="real")
    assert trace.signatures[0].outputs[0].device == "meta"


def test_a_tensor_on_the_wrong_device_is_named():
    class Mixes(nn.Linear):
        def forward(self, x, y):
            return super().forward(x) + y[torch.zeros(1, dtype=torch.int64)].cpu()

    with pytest.raises((RuntimeError, NotImplementedError), match="argument 1 is on meta; the model is on cpu"):
        record_call(Mixes(4, 2), (torch.ones(1, 4), torch.ones(1, 2, device="meta")), execution="real")


def test_a_lazy_module_says_what_to_do():
    with pytest.raises(ValueError, match="run the model once"):
        record_call(nn.LazyLinear(3), (torch.ones(1, 2),))


def test_the_trace_survives_json_and_aggregation():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    trace = record_call(model, (torch.ones(2, 5, 16),))
    assert Trace.from_json(trace.to_json()) == trace
    aggregated = trace.aggregate()
    assert Trace.from_json(aggregated.to_json()) == aggregated
    assert aggregated.calls == trace.calls and aggregated.events is None


def test_merged_traces_add_up():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    small, large = (record_call(model, (torch.ones(rows, 4),), stops_at=LINEAR) for rows in (1, 2))
    merged = Trace.merge([small, large, small])
    shapes = {merged.signatures[key[0]].outputs[0].shape: count for key, count in merged.calls.items()
              if merged.signatures[key[0]].packet == "aten::linear"}  # fmt: skip
    assert shapes == {(1, 4): 2, (2, 4): 1}
    assert sum(merged.calls.values()) == 6
    other = record_call(nn.Linear(4, 4), (torch.ones(1, 4),), stops_at=LINEAR)
    with pytest.raises(TraceError, match="different models cannot be merged: trace 2 has other modules than trace 0"):
        Trace.merge([small, large, other])
    with pytest.raises(TraceError, match="trace 1 was recorded with another stops_at than trace 0"):
        Trace.merge([small, record_call(model, (torch.ones(1, 4),))])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "incomplete trace: invalid JSON"),
        (lambda text: "ops: []", "not a trace: invalid JSON"),
        (lambda text: text.replace('"schema":1', '"schema":99'), "update fvflops"),
        (lambda text: "{}", "not a trace of fvflops"),
        (lambda text: "[1]", "not a trace of fvflops"),
        (lambda text: text.replace('"stacks":', '"stakcs":'), "damaged"),
        (lambda text: text.replace('"length":', '"colour":[],"length":').partition(',"checksum"')[0] + "}", "colour"),
    ],
)
def test_a_damaged_trace_is_refused(damage, message):
    text = record_call(nn.Linear(4, 4), (torch.ones(1, 4),)).to_json()
    with pytest.raises(TraceError, match=message):
        Trace.from_json(damage(text))


def test_dropout_and_softmax_are_recorded_in_training_too():
    trace = record_call(nn.Sequential(nn.Dropout(), nn.Softmax(-1)).train(), (torch.ones(2, 2),))
    assert {("0", "aten::native_dropout"), ("1", "aten::_softmax")} <= set(seen(trace))
