"""Twins of runs in which calls of leaf modules are replayed, and in which each call runs."""

import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fvflops import FlopCountAnalysis, record_call
from fvflops.capture.instrument import modules as instrumented
from fvflops.capture.instrument.leaf_calls import LeafCalls
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.sources.meta import build_on_meta
from fvflops.trace import StopsAt
from fvflops.zoo import ZOO
from tests.support.random_cases import long_except


@pytest.fixture
def replays(monkeypatch):
    names = []
    replay = LeafCalls.replay

    def listed(self, leaf, *args):
        result = replay(self, leaf, *args)
        if result is not None:
            names.append(leaf.kind.name)
        return result

    monkeypatch.setattr(LeafCalls, "replay", listed)
    return names


def trace_of(model, *args, table="default", ordered=True, **options):
    trace = FlopCountAnalysis(model, args, table=table, warn=False, **options).trace()
    return (trace if ordered else trace.aggregate()).to_json()


def trace_of_run(model, *args, **options):
    """Return the trace of a run in which each call runs, with cached outcomes of ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instrumented, "find_leaf_calls", lambda *_: None)
        trace_of(model, *args, **options)
        return trace_of(model, *args, **options)


class Every(nn.Module):
    """A module of each class, each called twice, the second time in place of another with the same shapes."""

    def __init__(self):
        super().__init__()
        self.images = nn.ModuleList(
            [
                *(
                    nn.Conv2d(4, 4, 3, padding=1, bias=bias, groups=groups)
                    for bias in (True, False)
                    for groups in (1, 2)
                ),
                *(nn.Conv2d(4, 4, 3, padding="same", padding_mode=mode) for mode in ("zeros", "reflect")),
                *(nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False)),
                *(nn.GroupNorm(2, 4), nn.LayerNorm(8), nn.LayerNorm(8, bias=False), nn.Dropout(0.2), nn.Identity()),
                *(nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()),
                *(nn.SiLU(inplace=True), nn.LeakyReLU(), nn.Hardswish(), nn.Hardsigmoid(), nn.Linear(8, 8)),
                *(nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.AdaptiveAvgPool2d(8), nn.Linear(8, 8, bias=False)),
            ]
        )
        self.sequence = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(256, 2))
        self.volume = nn.Sequential(nn.Conv3d(4, 4, 1), nn.BatchNorm3d(4))

    def forward(self, x):
        for _ in range(2):
            for module in self.images:
                x = module(x)
        self.volume(x[:, :, None])
        return self.sequence(x.flatten(2))


MODELS = {
    "every": (Every, torch.zeros(2, 4, 8, 8)),
    "resnet50": (ZOO["resnet50"].build, torch.zeros(1, 3, 64, 64)),
    "vit_b_16": (ZOO["vit_b_16"].build, torch.zeros(1, 3, 224, 224)),
    "gpt2": (ZOO["gpt2"].build, torch.zeros(1, 16, dtype=torch.int64)),
    "llama_tiny": (ZOO["llama_tiny"].build, torch.zeros(1, 16, dtype=torch.int64)),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("table", ["default", "fvcore", "exact"])
@pytest.mark.parametrize("name", long_except(["every", "llama_tiny"], MODELS))
def test_replayed_runs_are_those_in_which_each_call_runs(name, table, training, replays):
    build, value = MODELS[name]
    model = build_on_meta(build).train(training)
    expected = trace_of_run(model, value, table=table)
    assert not replays
    assert trace_of(model, value, table=table) == expected
    before = len(replays)
    assert trace_of(model, value, table=table) == expected
    assert len(replays) > before
    assert trace_of(build_on_meta(build).train(training), value, table=table) == expected


def test_every_class_is_replayed(replays):
    model = Every().eval()
    trace_of(model, torch.zeros(2, 4, 8, 8))
    replays.clear()
    trace_of(model, torch.zeros(2, 4, 8, 8))
    # Reflection is an op of its own; a convolution with padding="same" is decomposed into more than one.
    assert set(replays) >= {
        *("conv1d", "conv2d", "conv3d", "linear", "batch_norm", "group_norm", "layer_norm", "relu", "hardtanh"),
        *("gelu", "silu", "leaky_relu", "hardswish", "hardsigmoid", "avg_pool2d", "adaptive_avg_pool2d"),
    }


@pytest.mark.parametrize("stops_at", [frozenset(), frozenset({"aten::linear"}), frozenset({"aten::layer_norm"})])
def test_calls_are_learnt_for_each_set_of_composite_ops(stops_at, replays):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    value = torch.zeros(2, 4)
    traces = [record_call(model, (value,), stops_at=StopsAt(stops_at), execution="shapes").to_json() for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instrumented, "find_leaf_calls", lambda *_: None)
        expected = record_call(model, (value,), stops_at=StopsAt(stops_at), execution="shapes").to_json()
    assert traces == [expected] * 3


class Double(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.relu or func is torch.relu:
            return torch.sigmoid(torch.sigmoid(args[0]))
        return func(*args, **(kwargs or {}))


class Replace(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.relu.default:
            return torch.ops.aten.sigmoid.default(*args)
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """A model whose forward may do something to its modules before it calls them."""

    def __init__(self, change):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.act = nn.ReLU()
        self.norm = nn.BatchNorm2d(4)
        self.other = nn.Conv2d(3, 4, 5)
        self.change = change
        self.called = []

    def forward(self, x):
        return self.act(self.norm(self.conv(x))) if self.change is None else self.change(self, x)


def run(net, x):
    return net.act(net.norm(net.conv(x)))


def set_stride(net, x):
    net.conv.stride = (2, 2)
    return run(net, x)


def replace_weight(net, x):
    net.conv.weight = net.other.weight
    return run(net, x)


def swap_parameters(net, x):
    parameters = {"weight": net.other.weight, "bias": net.other.bias}
    return net.act(torch.func.functional_call(net.conv, parameters, (x,)))


def drop_bias(net, x):
    net.conv.bias = None
    return run(net, x)


def add_hook(net, x):
    handle = net.act.register_forward_hook(lambda module, args, result: result.sigmoid())
    try:
        return run(net, x)
    finally:
        handle.remove()


def add_pre_hook(net, x):
    with net.act.register_forward_pre_hook(lambda module, args: (args[0].tanh(),)):
        return run(net, x)


def add_global_hook(net, x):
    with nn.modules.module.register_module_forward_hook(lambda module, args, result: result.sigmoid()):
        return net.act(x)


def override_forward(net, x):
    net.act.forward = torch.sigmoid
    return run(net, x)


def change_class(net, x):
    net.act.__class__ = nn.Sigmoid
    try:
        return net.act(x)
    finally:
        net.act.__class__ = nn.ReLU


def patch_function(net, x):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "relu", lambda x, inplace=False: x.sigmoid().tanh())
        return run(net, x)


def use_autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return run(net, x)


def use_function_mode(net, x):
    with Double():
        return run(net, x)


def use_dispatch_mode(net, x):
    with Replace():
        return run(net, x)


def use_vmap(net, x):
    return torch.func.vmap(lambda image: run(net, image[None]))(x)


def use_functionalize(net, x):
    return torch.func.functionalize(lambda image: run(net, image))(x)


def use_tracer(net, x):
    graph = make_fx(partial(run, net))(x)
    net.called.append(str(len([node for node in graph.graph.nodes if node.op == "call_function"])))
    return graph(x)


def use_thread(net, x):
    results = []
    thread = threading.Thread(target=lambda: results.append(run(net, x)))
    thread.start()
    thread.join()
    return run(net, x) + results[0]


def train(net, x):
    net.norm.train(not net.norm.training)
    return run(net, x)


def disable_mkldnn(net, x):
    with torch.backends.mkldnn.flags(enabled=False):
        return run(net, x)


CHANGES = [
    *(set_stride, replace_weight, swap_parameters, drop_bias, add_hook, add_pre_hook, add_global_hook),
    *(override_forward, change_class, patch_function, use_autocast, use_function_mode, use_dispatch_mode, use_vmap),
    *(use_functionalize, use_tracer, use_thread, train, disable_mkldnn),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("first", [True, False])
def test_changed_calls_run(change, first, replays):
    """`first`: the changed model is counted first, so that its calls could be learnt; else calls of the unchanged."""
    image = torch.zeros(2, 3, 16, 16)
    ordered = change is not use_autocast  # its cache is freed in the order of addresses
    clear_cache()
    expected = trace_of_run(Net(change).eval(), image, ordered=ordered)
    plain = trace_of_run(Net(None).eval(), image)
    clear_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed, unchanged = Net(change).eval(), Net(None).eval()
        for _ in range(2):
            if first:
                assert trace_of(changed, image, ordered=ordered) == expected
            assert trace_of(unchanged, image) == plain
            assert trace_of(changed, image, ordered=ordered) == expected
    assert replays  # of the unchanged model


@pytest.mark.parametrize("patched", ["forward", "function"])
def test_functions_replaced_before_the_run_are_called(patched, monkeypatch, replays):
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4)).eval()
    for _ in range(3):
        before = trace_of(model, torch.zeros(2, 4))
    if patched == "forward":
        monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x.sigmoid())
    else:
        monkeypatch.setattr(F, "relu", lambda x, inplace=False: x.sigmoid())
    replays.clear()
    assert trace_of(model, torch.zeros(2, 4)) == trace_of_run(model, torch.zeros(2, 4)) != before
    assert set(replays) == {"linear"}


def test_calls_with_lines_have_them(replays):
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4)).eval()
    for _ in range(3):
        lines = FlopCountAnalysis(model, torch.zeros(2, 4), warn=False, lines=True)
        assert len(lines.trace().events or ()) > 2
    assert not replays


def test_a_call_that_raises_raises_each_time():
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4)).eval()
    for _ in range(3):
        FlopCountAnalysis(model, torch.zeros(2, 4), warn=False).total()
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
            FlopCountAnalysis(model, torch.zeros(2, 5), warn=False).total()


def test_calls_on_real_tensors_and_other_devices_are_twins(replays):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2))
    value = torch.zeros(2, 3, 4, 4)
    for device in ("cpu", "cuda", "cpu"):
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype).eval()
            expected = trace_of_run(model, value.to(dtype), device=device)
            for _ in range(3):
                assert trace_of(model, value.to(dtype), device=device) == expected
    assert replays
