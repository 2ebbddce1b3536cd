"""A run leaves nothing behind: the model, inputs, caches, generators and settings are as before, bit for bit."""

import gc
import random
import threading
import weakref
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fvflops import FlopCountAnalysis, ProfileAnalysis, TrainingStepAnalysis
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore.global_state import SETTINGS, read_settings
from fvflops.capture.run import ExecutionError, record_call
from fvflops.capture.session import Session
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.trace import StopsAt
from tests.support.interruptions import describe, describe_process, differences, reachable
from tests.support.models.kept_tensors import KINDS, picture, seed, twin
from tests.support.models.parts import Applied, Parts
from tests.support.models.whole_models import build_case
from tests.support.random_cases import long_except
from tests.support.trace_comparison import add_up

LOSSES = pytest.mark.parametrize("loss", [None, add_up], ids=["forward", "backward"])
EXECUTIONS = pytest.mark.parametrize("execution", ["shapes", "auto", "real"])
TRAININGS = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def left_over(root):
    """Return the paths of the shape tensors, and of tensors with a history, that can be reached from an object."""
    return [
        path
        for path, item in reachable(root)
        if isinstance(item, torch.Tensor) and (isinstance(item, ShapeTensor) or item.grad_fn is not None)
    ]


def look_at_process():
    """Return the settings, generators and hooks that a run could leave changed."""
    hooks = {name: len(item) for name, item in vars(nn.modules.module).items() if name.startswith("_global_") and item}
    return describe_process() | {"settings": [*read_settings(SETTINGS), np.geterr()], "hooks of modules": hooks}


class Untouched:
    """A check that what is inside the block leaves things as they are; what they are is compared bit for bit."""

    def __init__(self, *things):
        self.things = things

    def look(self):
        seen = [(number, describe(thing)) for number, thing in enumerate(self.things)]
        return look_at_process() | {f"{number}{path}": item for number, paths in seen for path, item in paths.items()}

    def __enter__(self):
        gc.collect()
        self.before = self.look()

    def __exit__(self, *_):
        gc.collect()
        if left := differences(self.before, self.look()):  # not by assert, whose message pytest cuts short
            raise AssertionError(f"these differ: {', '.join(sorted(left))}")
        assert [left_over(thing) for thing in self.things] == [[] for _ in self.things]


class Touchy(nn.Module):
    """A model that changes what a run can change, and keeps what it computed wherever a model can keep a thing."""

    def __init__(self, *, raises=False, asks=False, on_meta=False):
        super().__init__()
        self.raises, self.asks, self.on_meta = raises, asks, on_meta
        self.norm = nn.BatchNorm1d(4)
        # Without a momentum it averages over all batches, and must know how many there were: on meta it cannot.
        self.average = nn.BatchNorm1d(4, momentum=0.1 if on_meta else None)
        self.fc = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.old = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.last = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("window", torch.zeros(2, 4))
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("unset", None)
        self.outside = torch.zeros(4)
        self.counter = torch.zeros(2, dtype=torch.int64)
        self.history = []
        self.sizes = [1, 2]
        self.kept = {"first": torch.ones(1)}
        self.nested = {"deep": [{"deeper": []}]}
        self.waiting = deque(maxlen=3)
        self.names = set()
        self.frozen = torch.fx.immutable_collections.immutable_list([1, 2])
        self.keyed = {}
        self.generator = torch.Generator()
        self.once = self.register_forward_pre_hook(lambda module, args: self.once.remove())

    def forward(self, x):
        x.requires_grad_()
        self.steps += 1
        self.window[0] = x.detach().mean(0)
        self.window.mul_(0.5)
        self.outside += x.detach()[0]
        self.counter += 1
        self.counter[1] += self.counter[0]
        self.replaced = self.replaced + x.detach()[0]
        self.unset = x.detach() * 2
        self.lazily = x * 2
        self.history.append(x)
        self.sizes[0] = x.shape[0]
        self.kept["last"] = x + 1
        self.nested["deep"][0]["deeper"].append(x)
        self.waiting.append(x)
        self.names.add("called")
        self.keyed[torch.zeros(3)] = 1
        torch.rand(1, generator=self.generator)
        if not self.on_meta:
            self.last.weight.data = self.last.weight.data * 2
        self.last.bias.data.mul_(3)
        self.last.extra = nn.Parameter(x.detach()[0])
        self.added = nn.Linear(4, 4)
        self.last.bias.requires_grad_(False)
        self.eval()
        self.train()
        x = self.old(self.fc(self.average(self.norm(x))))
        x = self.instance(x[None].transpose(1, 2)).transpose(1, 2)[0]
        x = F.dropout(x * random.random() * float(np.random.rand()) + torch.rand(1), 0.5, self.training)
        self.last.register_forward_hook(lambda module, args, out: None)
        if self.asks:
            x = x * x.sum().item()
        if self.raises:
            raise ZeroDivisionError("in the middle")
        return self.last(x)


@EXECUTIONS
@LOSSES
@TRAININGS
@pytest.mark.parametrize("raises", [False, True], ids=["", "raises"])
def test_a_model_is_as_before(execution, loss, training, raises):
    model, x = Touchy(raises=raises).train(training), torch.randn(5, 4)
    with Untouched(model, x):
        if raises:
            with pytest.raises(ZeroDivisionError, match="in the middle"):
                record_call(model, (x,), execution=execution, loss=loss)
        else:
            trace = record_call(model, (x,), execution=execution, loss=loss)
            assert trace.about["execution"] == ("real" if execution == "real" else "shapes")
    assert model.sizes == [1, 2]


@LOSSES
@TRAININGS
def test_a_model_is_as_before_when_it_needs_a_number(loss, training):
    model, x = Touchy(asks=True).train(training), torch.randn(5, 4)
    with Untouched(model, x):
        assert record_call(model, (x,), loss=loss).about["execution"] == "real"
    with Untouched(model, x), pytest.raises(ExecutionError):
        record_call(model, (x,), loss=loss, execution="shapes")


@LOSSES
def test_a_model_on_meta_is_as_before(loss):
    model, x = Touchy(on_meta=True).to("meta"), torch.randn(5, 4)
    with Untouched(model, x):
        record_call(model, (x,), loss=loss)


def test_the_check_sees_each_change():
    """Run the model bare: everything that the check compares must then differ."""
    model, x = Touchy(), torch.randn(5, 4, requires_grad=True)
    check = Untouched(model, x)
    with pytest.raises(AssertionError) as caught, check:
        model(x)
    paths = str(caught.value)
    changed = "steps window replaced unset outside counter running_mean num_batches_tracked _u"
    kept = "lazily history kept deeper waiting names extra added _forward_hooks"
    for name in (*changed.split(), *kept.split()):
        assert name in paths, name
    assert left_over(model)
    with pytest.raises(AssertionError, match="random"), Untouched():
        random.random()
    model = nn.Linear(4, 4)
    with pytest.raises(AssertionError, match="weight"), Untouched(model):
        model.weight.data[0, 0] += 1e-7
    with pytest.raises(AssertionError, match="grad"), Untouched(model):
        model(x).sum().backward()
    with pytest.raises(AssertionError), Untouched(model), torch.enable_grad():
        torch.autograd.set_detect_anomaly(True)
    torch.autograd.set_detect_anomaly(False)


def record_one():
    """Return a shape tensor that a program keeps of a run of its own."""
    session = Session(None, stops_at=StopsAt(), execution="shapes")
    session.start()
    tensor = torch.rand(2) * 2
    session.stop()
    assert type(tensor) is ShapeTensor
    return tensor


def test_a_tensor_that_the_caller_took_out_of_the_run_says_what_it_is():
    """What a program keeps of its own run must not pass for numbers."""
    tensor = record_one()
    uses = (lambda: tensor + 1, lambda: torch.ones(2) + tensor, tensor.tolist, tensor.numpy, tensor.sum)
    for use in uses:
        with pytest.raises(RuntimeError, match="shape"):
            use()
    assert "ShapeTensor" in repr(tensor)


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("on_meta", [False, True], ids=["weights", "meta"])
def test_gradients_are_as_before(has_gradients, on_meta):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to("meta" if on_meta else "cpu")
    if has_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 5)
    x = torch.randn(3, 4, requires_grad=True)
    x.grad = torch.ones(3, 4)
    with Untouched(model, x):
        trace = record_call(model, (x,), execution="shapes", loss=add_up)
    assert any(phase == "backward" for _, _, phase in trace.calls)


class State:
    def __init__(self):
        self.layers, self.length, self.items = [torch.zeros(1, 3, 4)], 3, [torch.ones(1)]


def attends(self, x, cache):
    x.mul_(2)
    cache["k"][:, 2:5] = self.fc(x)
    cache["v"] = torch.cat([cache["v"], self.fc(x)], 1)
    cache["new"] = x
    cache["list"].append(self.fc(x))
    cache["length"] += 3
    state = cache["state"]
    state.layers[0] = torch.cat([state.layers[0], x], 1)
    state.length += state.items.pop().numel()
    state.seen = True
    return F.scaled_dot_product_attention(x, cache["k"], cache["k"])


@LOSSES
@EXECUTIONS
def test_a_cache_of_tensors_is_as_before(loss, execution):
    x = torch.randn(1, 3, 4)
    cache = {"k": torch.randn(1, 8, 4), "v": torch.randn(1, 2, 4), "list": [], "length": 2, "state": State()}
    model = Applied(attends, fc=nn.Linear(4, 4))
    with Untouched(model, x, cache):
        record_call(model, (x, cache), execution=execution, loss=loss)
        record_call(model, (x,), {"cache": cache}, execution=execution, loss=loss)


@LOSSES
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_cache_of_transformers_is_as_before(loss, static):
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = LlamaConfig(**sizes, vocab_size=50)
    model = LlamaForCausalLM(config).eval()
    cache = StaticCache(config=config, max_cache_len=16) if static else DynamicCache(config=config)
    ids = torch.randint(50, (1, 5))
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    options = {"past_key_values": cache, "use_cache": True}
    logits = None if loss is None else lambda out: out.logits.sum()
    with Untouched(model, cache, ids):
        traces = [
            record_call(model, (ids,), options, execution=execution, loss=logits)
            for execution in ("shapes", "shapes", "real")
        ]
    assert cache.get_seq_length() == 5
    assert calls_of(traces[0]) == calls_of(traces[1])
    with torch.no_grad():
        assert model(ids, past_key_values=cache, use_cache=True).logits.isfinite().all()
    assert cache.get_seq_length() == 10


def test_views_of_one_storage_are_as_before():
    base = torch.arange(12.0).reshape(3, 4)
    views = [base[1], base[:, 2], base.t(), base.view(-1)[3:7]]

    def model(first, second):
        first.add_(1)
        second.zero_()
        return first.sum() + second.sum()

    with Untouched(base, views):
        record_call(model, (views[0], views[1]), execution="shapes")
        record_call(model, (views[2], views[3]), execution="real")


def test_integers_that_are_computed_on_the_way_are_as_before():
    """Small integer tensors are computed for real, in place too: on the caller's own storage."""
    ids = torch.arange(6).reshape(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)

    def model(ids, mask):
        ids.view(-1)[1:3].add_(10)
        mask[0] = False
        mask[1].logical_not_()
        ids.clamp_(max=3)
        assert ids.tolist() == [[0, 3, 3], [3, 3, 3]]
        assert not mask.any()
        return ids.float() * mask

    with Untouched(ids, mask):
        assert record_call(model, (ids, mask), execution="shapes").about["execution"] == "shapes"


@pytest.mark.parametrize(
    "name",
    long_except(
        ["torchvision:mobilenet_v3_small"],
        ["torchvision:mobilenet_v3_small", "timm:mobilevit_xxs", "transformers:LlamaModel"],
    ),
)
@LOSSES
@TRAININGS
def test_the_next_real_run_gives_what_it_would_have_given(name, loss, training):
    """In train mode too, where dropout draws numbers and batch norm writes statistics."""
    torch.manual_seed(0)
    model, args = build_case(name)
    model.train(training)
    args = tuple(torch.cat([arg, arg]) for arg in args)  # batch norm wants more than one value in train mode

    def run():
        torch.manual_seed(1)
        with torch.no_grad():
            return [tensor.clone() for tensor in tensors_of(model(*args))]

    before = run()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    record_call(model, args, execution="shapes", loss=loss)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    # In train mode no statistic is read in a forward pass, so that the second one gives the same.
    assert all(torch.equal(one, other) for one, other in zip(before, run(), strict=True))
    add_up(model(*args)).backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def calls_of(trace):
    return Counter(
        {
            (trace.signatures[index].op, trace.scope_of(stack), phase): number
            for (index, stack, phase), number in trace.calls.items()
        }
    )


@pytest.mark.parametrize("outer", ["shapes", "real", "auto"])
@pytest.mark.parametrize("inner", ["shapes", "real", "auto"])
@LOSSES
def test_a_recording_inside_a_recorded_model(outer, inner, loss):
    """The inner recording gives what it gives alone, where the outer run has the numbers that it needs."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    traces = []

    def forward(self, x, *, analyses):
        y = self.layer(x)
        if analyses:
            traces.append(record_call(layer, (x,), execution=inner))
            if not (outer != "real" and inner == "real"):
                traces.append(record_call(layer, (y,), execution=inner))
        return self.layer(y)

    model, x = Applied(forward, layer=layer), torch.randn(3, 4)
    alone = record_call(layer, (x,), execution="shapes")
    plain = record_call(model, (x,), {"analyses": False}, execution="shapes", loss=loss)
    with Untouched(model, x):
        trace = record_call(model, (x,), {"analyses": True}, execution=outer, loss=loss)
    assert traces and all(calls_of(item) == calls_of(alone) for item in traces)
    if inner != "real" and outer != "real":
        # Inside a shape run there is nothing to run for real, and inside another by shapes nothing runs.
        assert calls_of(trace) == calls_of(plain)
    assert calls_of(trace).keys() >= calls_of(plain).keys()


@pytest.mark.parametrize("execution", ["shapes", "real"])
@LOSSES
def test_hooks_of_the_user_run_and_their_ops_are_where_they_belong(execution, loss):
    calls = []

    class Fails(nn.Module):
        def forward(self, x):
            raise LookupError

    class Net(Parts):
        def forward(self, x):
            x = self.first(x)
            try:
                self.fails(x)
            except LookupError:
                calls.append("caught")
            return self.second(x)

    def watch(name, change=lambda *_: None):
        return lambda *args: (calls.append(name), change(*args))[1]

    model, x = Net(first=nn.Linear(4, 4), second=nn.Linear(4, 4), fails=Fails()), torch.randn(3, 4, requires_grad=True)
    model.first.register_forward_pre_hook(watch("before", lambda module, args: (args[0].sin(),)))
    keyword = watch("before, with keywords", lambda module, args, kwargs: ((args[0][:2].tan(),), kwargs))
    model.register_forward_pre_hook(keyword, with_kwargs=True)
    model.first.register_forward_hook(watch("after", lambda module, args, out: out.cos()))
    model.fails.register_forward_hook(watch("always"), always_call=True)
    backward = watch("backward", lambda module, grads, _: tuple(grad.tanh() for grad in grads))
    model.second.register_full_backward_hook(backward)
    handle = nn.modules.module.register_module_forward_hook(watch("global"))
    try:
        with Untouched(model, x):
            trace = record_call(model, (x,), execution=execution, loss=loss)
    finally:
        handle.remove()
    assert trace.about["execution"] == execution
    owners = {
        op.split("::")[1]: scope[-1] if scope else None
        for (op, scope, phase), _ in calls_of(trace).items()
        if op in ("aten::sin", "aten::cos", "aten::tan") and phase == "forward"
    }
    assert owners == {"sin": "first", "cos": "first", "tan": ""}
    once = ("before", "before, with keywords", "after", "always", "caught")
    # "global" is for each module that returned.
    assert Counter(calls) == Counter({**dict.fromkeys(once, 1), "global": 3, "backward": 1 if loss else 0})
    linears = [item for item in trace.signatures if item.packet == "aten::addmm"]
    assert {item.outputs[0].shape for item in linears} == {(2, 4)}
    if loss:
        assert any(op == "aten::tanh" and phase == "backward" for op, _, phase in calls_of(trace))


@LOSSES
def test_threads_that_record_and_one_that_trains_do_not_meet(loss):
    """Recordings take turns; a bare run of another model beside them is neither seen nor disturbed."""
    models = [nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2)) for width in (3, 5)]
    x = torch.randn(6, 4)
    bystander = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    wanted = bystander(x).detach().clone()
    done = threading.Event()

    def analyse(model):
        return calls_of(record_call(model, (x,), execution="shapes", loss=loss))

    def run():
        while not done.is_set():
            out = bystander(x)
            assert type(out) is torch.Tensor and torch.equal(out.detach(), wanted)
            out.sum().backward()

    expected = [analyse(model) for model in models]
    with Untouched(*models, x), ThreadPoolExecutor(3) as pool:
        beside = pool.submit(run)
        try:
            seen = list(pool.map(lambda model: [analyse(model) for _ in range(10)], models))
        finally:
            done.set()
        beside.result()
    assert seen == [[calls] * 10 for calls in expected]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_data_that_a_model_on_meta_assigns_is_restored(device):
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 8, device="meta")
            self.fc.bias.note = "kept"

        def forward(self, x):
            self.fc.bias.data = self.fc.bias.data.to(torch.bfloat16)
            return x @ self.fc.weight.T + self.fc.bias

    model = Casts()
    bias = model.fc.bias
    for _ in range(2):
        assert FlopCountAnalysis(model, torch.empty(2, 64, device="meta"), device=device).total() == 2 * 64 * 8
        assert model.fc.bias is bias and bias.note == "kept" and bias.requires_grad
        assert (bias.dtype, bias.device.type, type(bias)) == (torch.float32, "meta", nn.Parameter)


def test_gradients_that_the_model_makes_are_taken_back():
    def forward(self, x):
        y = self.fc(x)
        y.sum().backward()
        return y

    model, x = Applied(forward, fc=nn.Linear(2, 2)), torch.ones(1, 2)
    for gradient in (None, torch.full((2, 2), 5.0)):
        model.fc.weight.grad = gradient
        with Untouched(model, x):
            record_call(model, (x,))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_raising_fused_layer_leaves_no_function_mode(error):
    class Broken(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            raise error

    model = Broken(8, 2, batch_first=True).eval()
    with Untouched(model), pytest.raises(error):
        record_call(model, (torch.ones(1, 3, 8),))


def test_a_second_attempt_sees_the_inputs_of_the_first():
    def forward(self, items):
        y = 0
        while items:
            y = y + self.fc(items.pop())
        with torch.enable_grad():
            t = torch.ones(1, requires_grad=True)
            torch.autograd.grad(t * 2, t)
        return y

    trace = record_call(Applied(forward, fc=nn.Linear(4, 4)), ([torch.ones(1, 4), torch.ones(1, 4)],))
    assert sum(n for key, n in trace.calls.items() if trace.signatures[key[0]].op == "aten::addmm") == 2


def test_an_iterator_is_not_consumed_twice():
    def model(items):
        y = next(items) * 2
        return torch.autograd.grad(y.sum(), y)

    with pytest.raises(RuntimeError, match="does not require grad"):
        record_call(model, (iter([torch.ones(1, requires_grad=True)]),))


def test_a_bound_method_leaves_its_module_as_before():
    class Net(Parts):
        def encode(self, x):
            self.cache = x
            self.fc.weight.data, self.fc.bias.data = self.fc.weight.data[:2] * 2, self.fc.bias.data[:2]
            return self.fc(x)

    model = Net(fc=nn.Linear(4, 4))
    before = [parameter.clone() for parameter in model.parameters()]
    trace = record_call(model.encode, (torch.ones(1, 4),))
    assert all(map(torch.equal, model.parameters(), before)) and not hasattr(model, "cache")
    assert [trace.scope_of(key[1]) for key in trace.calls if trace.signatures[key[0]].op == "aten::addmm"] == [
        ("", "fc")
    ]


def test_a_training_step_under_autocast_works_after_a_recording_in_it():
    model = nn.Linear(8, 4)
    x = torch.ones(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        record_call(model, (x,))
        model(x).float().sum().backward()
    assert model.weight.grad is not None


def test_compiled_code_is_still_compiled_after_a_recording():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    block = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend=counter, fullgraph=True)
    model = nn.Sequential(block, nn.Linear(8, 2))
    x = torch.ones(2, 8)
    record_call(model, (x,))
    model(x)
    assert counter.frame_count == 1
    record_call(model, (x,))
    model(x)
    assert counter.frame_count == 1


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("before", [None, 3.0])
def test_gradients_of_what_a_function_closes_over_are_as_before(execution, before):
    inner = nn.Linear(4, 4)
    if before is not None:
        for parameter in inner.parameters():
            parameter.grad = torch.full_like(parameter, before)
    kept = [parameter.grad for parameter in inner.parameters()]
    record_call(lambda x: inner(x), (torch.ones(2, 4),), {}, loss=lambda y: y.sum(), execution=execution)
    for parameter, gradient in zip(inner.parameters(), kept, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or bool((gradient == before).all())


def test_torch_settings_that_a_forward_changes_are_as_before(monkeypatch):
    # torch's own test helpers, once imported, forbid to set flags of backends in this process.
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)

    def forward(self, x):
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.mkldnn.deterministic = True
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.opt_einsum.enabled = False
        torch.autograd.set_detect_anomaly(True)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_warn_always(True)
        torch.set_printoptions(precision=9)
        np.seterr(all="raise")
        torch.use_deterministic_algorithms(True, warn_only=True)
        out = self.fc(x)
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return out

    model, x = Applied(forward, fc=nn.Linear(4, 4)), torch.ones(2, 4)
    for execution in ("shapes", "real"):
        with Untouched(model, x):
            record_call(model, (x,), execution=execution)
    with torch.backends.opt_einsum.flags(enabled=False):  # has no effect once a program has assigned `enabled`
        assert not torch.backends.opt_einsum.enabled


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_and_mkldnn_buffers_are_as_before():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.register_buffer("coo", torch.eye(3).to_sparse())
            self.register_buffer("csr", torch.eye(3).to_sparse_csr())
            self.register_buffer("other", torch.ones(3, 3).to_mkldnn())

        def forward(self, x):
            self.coo.add_(torch.ones(3, 3).to_sparse())
            self.csr.mul_(2)
            self.other.add_(self.other)
            return self.fc(x) + self.coo.to_dense()[0] + self.other.to_dense()[0]

    model, x = Net(), torch.ones(2, 3)
    identities = [id(buffer) for buffer in model.buffers()]
    for execution in ("auto", "real"):
        record_call(model, (x,), execution=execution)
        assert [id(buffer) for buffer in model.buffers()] == identities
        assert torch.equal(model.coo.to_dense(), torch.eye(3)) and model.coo._nnz() == 3
        assert torch.equal(model.csr.to_dense(), torch.eye(3))
        assert torch.equal(model.other.to_dense(), torch.ones(3, 3))


def test_a_list_in_which_a_hook_counts_is_the_programs_own():
    calls, outputs = [], []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, out: calls.append("called"))
    record_call(model, (torch.ones(1, 4),), execution="shapes")
    assert calls == ["called"]
    model.register_forward_hook(lambda module, args, out: outputs.append(out))
    record_call(model, (torch.ones(1, 4),), execution="shapes")
    assert not outputs


def test_a_generator_that_keeps_tensors_is_named(caplog):
    """A generator cannot be turned back: the line says what refers to shape tensors."""

    def add_up():
        total = 0
        while True:
            total = (yield total) + total

    class Net(nn.Linear):
        def forward(self, x):
            return self.adding.send(super().forward(x))

    net = Net(4, 4)
    net.adding = add_up()
    next(net.adding)
    record_call(net, (torch.ones(1, 4),), execution="shapes")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fvflops"]
    assert line.startswith("shape tensors (no values) are still referenced by") and "Net.adding (the generator" in line


def test_a_tensor_in_an_object_of_a_generator_is_removed(caplog):
    def keep():
        kept = SimpleNamespace()
        while True:
            kept.last = yield

    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            self.keeping.send(y)
            return y

    net = Net(4, 4)
    net.keeping = keep()
    next(net.keeping)
    record_call(net, (torch.ones(1, 4),), execution="shapes")
    assert not [record for record in caplog.records if record.name == "fvflops"]
    assert not vars(net.keeping.gi_frame.f_locals["kept"])


@pytest.mark.parametrize("execution", ["auto", "real"])
def test_a_model_is_freed_by_reference_counting(execution):
    def forward(self, x):
        y = self.inner(x)
        return y if y.sum() != 0 else -y  # needs a number

    def analyse():
        model, x = Applied(forward, inner=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), torch.ones(2, 4)
        record_call(model, (x,), execution=execution)
        record_call(model.inner, (x,), execution=execution, loss=lambda y: y.sum())
        return [weakref.ref(model), weakref.ref(model.inner[0].weight), weakref.ref(x)]

    analyse()  # the first import of what torch loads late leaves frames of its own
    gc.collect()
    gc.disable()
    try:
        assert [reference() for reference in analyse()] == [None, None, None]
    finally:
        gc.enable()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def count(model, **options):
    assert FlopCountAnalysis(model, X, **options).total() >= 48


def count_step(model, **options):
    assert TrainingStepAnalysis(model, X, loss=lambda y: y.sum(), **options).total() >= 3 * 48 - 48


def fail(model, how=count, **options):
    with pytest.raises(LookupError, match="in the middle"):
        how(model, kwargs={"fails": True}, **options)


WAYS = {
    "count": count,
    "step": count_step,
    "real": lambda model: count(model, execution="real"),
    "error": fail,
    "error in a step": lambda model: fail(model, count_step),
    "error in a real run": lambda model: fail(model, execution="real"),
}
LIVES = [(kind, way) for kind in KINDS for way in WAYS]


def life_of(kind, way):
    """Return what a twin is and gives, step by step, after it was counted in a way, or in none."""
    with twin(kind) as (module, model):
        seed(2)
        if way is not None:
            way(model)
        states = [picture(module, model)]
        for _ in range(2):
            out = model(X)
            out.sum().backward()
            states.append([type(out).__name__, out.tolist(), *picture(module, model)])
        return states


uncounted = cache(lambda kind: life_of(kind, None))


# By default a kind is counted by shapes and for real, and each other way has some of the kinds.
@pytest.mark.parametrize(
    ("kind", "way"),
    long_except([life for place, life in enumerate(LIVES) if place % 6 in (0, 2) or place % 5 == 0], LIVES),
    ids=lambda item: getattr(item, "name", item),
)
def test_a_counted_model_is_as_its_twin(kind, way):
    expected, counted = uncounted(kind), life_of(kind, WAYS[way])
    for before, after in zip(expected, counted, strict=True):
        assert before == after


@pytest.mark.parametrize(
    "analyse",
    [
        partial(FlopCountAnalysis, execution="shapes"),
        partial(FlopCountAnalysis, execution="real"),
        partial(ProfileAnalysis, repeat=1),
    ],
    ids=["shapes", "real", "profile"],
)
def test_a_backward_pass_that_waits_accepts_the_tensors_that_a_count_wrote_to(analyse):
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x, state):
            y = x * self.weight * self.mean * state
            with torch.no_grad():
                self.mean.lerp_(y.mean(0), 0.5)
                state.add_(1)
                self.weight.mul_(2)
            return y

    model, x, state = Moving(), torch.ones(2, 4), torch.ones(4)
    waiting = (x * model.weight * model.mean * state).sum()
    analyse(model, (x, state)).total()
    waiting.backward()
    assert model.weight.grad.tolist() == [2.0] * 4
