"""After a run, also one that raised, nothing differs: each thing that could is looked at by itself."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from fvflops.capture.restore.global_settings import SETTINGS, read_settings
from fvflops.capture.run import record_call


class Touchy(nn.Module):
    """A model that changes whatever a forward run can change, and may raise in the middle of it."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises = raises
        self.norm = nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.fc = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(2, 2))
        self.register_buffer("swapped", torch.zeros(1))
        self.history: list[int] = []
        self.cache: dict[str, torch.Tensor] = {"kept": torch.ones(1)}
        self.calls = 0
        self.outside = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.lazily = x.clone()
        self.cache["new"] = x
        self.steps.view(-1)[1:3].add_(1)
        self.outside += 1
        self.swapped = self.swapped + 1
        self.last.weight.data = self.last.weight.data * 2
        self.last.bias.requires_grad_(False)
        self.last.bias.data.mul_(3)
        self.eval()
        self.train()
        x = self.fc(self.norm(x))
        x = self.instance(x[None].transpose(1, 2)).transpose(1, 2)[0]
        x = x + random.random() + np.random.rand() + torch.rand(1)
        x = torch.nn.functional.dropout(x, 0.5)
        if self.raises:
            raise ZeroDivisionError("in the middle")
        return self.last(x)


def state_of(model: nn.Module) -> dict[str, object]:
    """Return everything about a model that a person could see, by value."""
    tensors = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return {
        "tensors": {name: tensor.tolist() for name, tensor in tensors.items()},
        "identities": {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())},
        "requires_grad": {name: tensor.requires_grad for name, tensor in model.named_parameters()},
        "grads": {name: tensor.grad for name, tensor in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [
                len(value) for key, value in vars(module).items() if key.endswith(("_hooks", "_with_kwargs", "_called"))
            ]
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "calls": getattr(model, "calls", None),
        "history": list(getattr(model, "history", [])),
        "cache": sorted(getattr(model, "cache", {})),
        "outside": model.outside.tolist() if hasattr(model, "outside") else None,
    }


def settings() -> dict[str, object]:
    """Return the settings of torch that a run could leave changed."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "excluded": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        "function apply": "apply" in vars(torch.autograd.function._SingleLevelFunction),
        "global hooks": len(torch.nn.modules.module._global_forward_hooks),
    }


def generators() -> list[object]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("raises", [False, True])
def test_nothing_differs(raises, training):
    model = Touchy(raises).train(training)
    x = torch.ones(5, 4)
    before = state_of(model), settings(), generators()
    if raises:
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            record_call(model, (x,))
    else:
        record_call(model, (x,))
    after = state_of(model), settings(), generators()
    for part_before, part_after in zip(before, after, strict=True):
        assert part_before == part_after
    assert torch.equal(x, torch.ones(5, 4))


def test_the_comparison_sees_each_change():
    """Run the model bare: every part that the test above compares, settings apart, must then differ."""
    model = Touchy(False)
    before, before_random = state_of(model), generators()
    model(torch.ones(5, 4))
    after = state_of(model)
    differing = {key for key in before if before[key] != after[key]}
    assert differing >= {"tensors", "identities", "requires_grad", "attributes", "calls", "history", "cache", "outside"}
    assert generators() != before_random


def test_inputs_that_are_written_to_are_restored_through_every_view():
    base = torch.arange(6.0)
    view = base[2:4]
    record_call(lambda tensor: tensor.mul_(10), (view,))
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


def test_gradients_that_the_model_makes_are_taken_back():
    class Backward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            y = self.fc(x)
            y.sum().backward()
            return y

    model = Backward()
    record_call(model, (torch.ones(1, 2),))
    assert model.fc.weight.grad is None
    model.fc.weight.grad = torch.full((2, 2), 5.0)
    record_call(model, (torch.ones(1, 2),))
    assert model.fc.weight.grad.tolist() == [[5, 5], [5, 5]]


def test_a_raising_fused_layer_leaves_no_function_mode():
    class Broken(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            raise ZeroDivisionError

    model = Broken(8, 2, batch_first=True).eval()
    before = settings()
    with pytest.raises(ZeroDivisionError):
        record_call(model, (torch.ones(1, 3, 8),))
    assert settings() == before


def test_inputs_and_what_they_hold_are_as_before():
    class Cache:
        def __init__(self) -> None:
            self.layers = [torch.zeros(1, 3)]
            self.length = 3

    class Net(nn.Module):
        def forward(self, x, queue, cache):
            x.requires_grad_()
            queue["last"] = queue["items"].pop()
            cache.layers[0] = torch.cat([cache.layers[0], x], 1)
            cache.length += 1
            cache.seen = True
            return x * 2

    x, cache, queue = torch.ones(1, 1), Cache(), {"items": [torch.ones(1)]}
    record_call(Net(), (x, queue, cache))
    assert not x.requires_grad and x.grad is None
    assert list(queue) == ["items"] and len(queue["items"]) == 1
    assert cache.layers[0].shape == (1, 3) and vars(cache).keys() == {"layers", "length"} and cache.length == 3


def test_a_second_attempt_sees_the_inputs_of_the_first():
    class Pops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, items):
            y = 0
            while items:
                y = y + self.fc(items.pop())
            with torch.enable_grad():
                t = torch.ones(1, requires_grad=True)
                torch.autograd.grad(t * 2, t)
            return y

    trace = record_call(Pops(), ([torch.ones(1, 4), torch.ones(1, 4)],))
    assert sum(trace.signatures[key[0]].op == "aten::addmm" for key in trace.calls) >= 1
    assert sum(n for key, n in trace.calls.items() if trace.signatures[key[0]].op == "aten::addmm") == 2


def test_an_iterator_is_not_consumed_twice():
    def model(items):
        y = next(items) * 2
        return torch.autograd.grad(y.sum(), y)

    with pytest.raises(RuntimeError, match="does not require grad"):
        record_call(model, (iter([torch.ones(1, requires_grad=True)]),))


def test_hooks_containers_shapes_and_generators_of_the_model_are_as_before():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.nested = {"deep": [[1]]}
            self.frozen = torch.fx.immutable_collections.immutable_list([1, 2])
            self.keyed: dict = {}
            self.generator = torch.Generator()
            self.once = self.register_forward_pre_hook(lambda module, args: self.once.remove())

        def forward(self, x):
            self.nested["deep"][0].append(2)
            self.keyed[torch.zeros(3)] = 1
            torch.rand(1, generator=self.generator)
            self.fc.register_forward_hook(lambda module, args, out: None)
            self.fc.weight.data = self.fc.weight.data[:2]
            self.fc.bias.data = self.fc.bias.data[:2]
            torch.set_default_dtype(torch.float64)
            return self.fc(x)

    model = Net()
    state = model.generator.get_state()
    record_call(model, (torch.ones(1, 4),))
    assert model.nested == {"deep": [[1]]} and not model.keyed
    assert torch.equal(model.generator.get_state(), state)
    assert len(model._forward_pre_hooks) == 1 and not model.fc._forward_hooks
    assert model.fc.weight.shape == (4, 4) and model.fc.bias.shape == (4,)
    assert torch.get_default_dtype() is torch.float32


def test_a_bound_method_leaves_its_module_as_before():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def encode(self, x):
            self.cache = x
            self.fc.weight.data = self.fc.weight.data * 2
            return self.fc(x)

    model = Net()
    before = model.fc.weight.clone()
    trace = record_call(model.encode, (torch.ones(1, 4),))
    assert torch.equal(model.fc.weight, before) and not hasattr(model, "cache")
    assert [trace.scope_of(key[1]) for key in trace.calls if trace.signatures[key[0]].op == "aten::addmm"] == [
        ("", "fc")
    ]


def test_an_interrupt_leaves_no_function_mode():
    class Interrupted(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            raise KeyboardInterrupt

    before = settings()
    with pytest.raises(KeyboardInterrupt):
        record_call(Interrupted(8, 2, batch_first=True).eval(), (torch.ones(1, 3, 8),))
    assert settings() == before


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

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

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

    def look() -> list[object]:
        found = read_settings(SETTINGS)
        return [*found, np.geterr(), torch.get_default_device(), settings()]

    model, x = Net(), torch.ones(2, 4)
    before = look()
    for execution in ("shapes", "real"):
        record_call(model, (x,), execution=execution)
        assert look() == before
    with torch.backends.opt_einsum.flags(enabled=False):  # has no effect once a program has assigned `enabled`
        assert not torch.backends.opt_einsum.enabled


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_and_mkldnn_buffers_are_as_before():
    class Net(nn.Module):
        def __init__(self) -> None:
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
        total = None
        while True:
            y = yield total
            total = y if total is None else total + y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.adding = add_up()
            next(self.adding)

        def forward(self, x):
            return self.adding.send(self.fc(x))

    record_call(Net(), (torch.ones(1, 4),), execution="shapes")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fvflops"]
    assert line.startswith("shape tensors (no values) are still referenced by") and "Net.adding (the generator" in line


def test_a_tensor_in_an_object_of_a_generator_is_removed(caplog):
    class Kept:
        pass

    def keep():
        kept = Kept()
        while True:
            kept.last = yield kept

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.keeping = keep()
            self.kept = next(self.keeping)

        def forward(self, x):
            y = self.fc(x)
            self.keeping.send(y)
            return y

    net = Net()
    del net.kept
    record_call(net, (torch.ones(1, 4),), execution="shapes")
    assert not [record for record in caplog.records if record.name == "fvflops"]
    assert not vars(net.keeping.gi_frame.f_locals["kept"])


@pytest.mark.parametrize("execution", ["auto", "real"])
def test_a_model_is_freed_by_reference_counting(execution):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x):
            y = self.inner(x)
            return y if y.sum() != 0 else -y  # needs a number

    def analyse() -> list[weakref.ref]:
        model, x = Net(), torch.ones(2, 4)
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
