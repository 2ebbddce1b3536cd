"""Training, recorded: recompute is what was rerun, and each backward op belongs to the module that it is of."""

import inspect
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from fvflops import Trace, TrainingStepAnalysis, flop_count_str, flop_count_table, record
from fvflops.analysis.fvcore_text import summarise
from fvflops.reports.terminal.op_coverage import op_coverage_notes
from fvflops.zoo.gpt2 import Block, GPT2Config
from tests.support.models.parts import Applied, Parts
from tests.support.old_torch import REPEATS_DETACH, checkpoint_to_the_end
from tests.support.oracle.backward_owners import Witness
from tests.support.recording_checks import (
    BEFORE,
    EXECUTIONS,
    X,
    check_sums,
    macs_by_owner,
    macs_by_phase,
    make_net,
    ops_by_place,
)
from tests.support.recording_checks import nothing_stays_installed as nothing_stays_installed

BATCH, TOKENS, WIDTH = 2, 8, 16
CONFIG = GPT2Config(vocab_size=10, positions=TOKENS, width=WIDTH, layers=1, heads=2, dropout=0.0)
# Multiply-adds of a block's forward: each linear layer's rows × inputs × outputs, and the two products of attention.
ROWS = BATCH * TOKENS
FORWARD = {
    "attn.c_attn": ROWS * WIDTH * 3 * WIDTH,
    "attn": 2 * BATCH * TOKENS * TOKENS * WIDTH,
    "attn.c_proj": ROWS * WIDTH * WIDTH,
    "mlp.c_fc": ROWS * WIDTH * 4 * WIDTH,
    "mlp.c_proj": ROWS * 4 * WIDTH * WIDTH,
}
# A layer's backward is two products like its forward's. Attention's kernel makes five where its forward makes two.
BACKWARD = {name: macs * 5 // 2 if name == "attn" else macs * 2 for name, macs in FORWARD.items()}
EARLY_STOP = {name: 1 for name in FORWARD if name != "mlp.c_proj"}


class Reruns(TorchDispatchMode):
    """Notes the ops that run inside a function when it is called in a backward pass: what a checkpoint runs again."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()
        self._inside = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._inside and not (REPEATS_DETACH and func.name() == "aten::detach"):
            self.ops[func.name()] += 1
        return func(*args, **(kwargs or {}))

    def of(self, function):
        def run(*args):
            again = torch._C._current_autograd_node() is not None
            self._inside += again
            try:
                return function(*args)
            finally:
                self._inside -= again

        return run


def save_products(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


SAVE_PRODUCTS = partial(create_selective_checkpoint_contexts, save_products)


def in_two_halves(block, again):
    def run(x):
        x = x + checkpoint(again(lambda y: block.attn(block.ln_1(y))), x, use_reentrant=False)
        return x + checkpoint(again(lambda y: block.mlp(block.ln_2(y))), x, use_reentrant=False)

    return run


# How a block is run, given `again`, which marks a function that is checkpointed; and how often each part is run again.
# Without reentrancy torch stops as soon as the last tensor that it wants is there: the input of the last layer, so that
# this layer is not run again. Nested in halves, the attention is run again to get the second half's input, and then for
# itself, each time up to the last layer in it if nothing after that is wanted.
CHECKPOINTS = {
    "none": (lambda again, block, x: block(x), {}),
    "reentrant": (lambda again, block, x: checkpoint(again(block), x, use_reentrant=True), dict.fromkeys(FORWARD, 1)),
    "not reentrant": (lambda again, block, x: checkpoint(again(block), x, use_reentrant=False), EARLY_STOP),
    "without early stop": (lambda again, block, x: checkpoint_to_the_end(again(block), x), dict.fromkeys(FORWARD, 1)),
    "selective": (
        lambda again, block, x: checkpoint(again(block), x, use_reentrant=False, context_fn=SAVE_PRODUCTS),
        {"attn": 1},
    ),
    "nested": (
        lambda again, block, x: checkpoint(again(in_two_halves(block, again)), x, use_reentrant=False),
        {"attn.c_attn": 2, "attn": 2, "attn.c_proj": 1, "mlp.c_fc": 1},
    ),
    "nested reentrant": (
        lambda again, block, x: checkpoint(
            again(lambda y: checkpoint(again(block), y, use_reentrant=True)), x, use_reentrant=True
        ),
        dict.fromkeys(FORWARD, 2),
    ),
}


class Checkpointed(nn.Module):
    """A transformer block of GPT-2, run in one of the ways."""

    def __init__(self, way, reruns):
        super().__init__()
        self.block = Block(CONFIG)
        self._run = CHECKPOINTS[way][0]
        self._again = reruns.of

    def forward(self, x):
        return self._run(self._again, self.block, x)


def recompute_ops(run):
    trace = run.trace()
    ops = Counter()
    for (signature, _, phase), calls in trace.calls.items():
        if phase == "recompute" and not (REPEATS_DETACH and trace.signatures[signature].op == "aten::detach"):
            ops[trace.signatures[signature].op] += calls
    return ops


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_recompute_of_a_transformer_block_is_exactly_what_was_rerun(way):
    reruns, ops = Reruns(), {}
    model = Checkpointed(way, reruns)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    times = CHECKPOINTS[way][1]
    expected = {
        f"block.{name}": {"forward": macs, "backward": BACKWARD[name]}
        | ({"recompute": times[name] * macs} if name in times else {})
        for name, macs in FORWARD.items()
    }
    for execution in EXECUTIONS:
        with reruns if execution == "real" else nullcontext(), record(model, execution=execution) as run:
            model(x).sum().backward()
        assert macs_by_owner(run) == expected
        check_sums(run)
        ops[execution] = recompute_ops(run)
    # What a policy has saved does not come down to the logger. Reentrancy detaches the inputs before the function runs.
    detached = 0 if REPEATS_DETACH else {"reentrant": 1, "nested reentrant": 2}.get(way, 0)
    assert ops["real"] == reruns.ops + Counter({"aten::detach": detached})
    for counted in ops.values():
        del counted["aten::detach"]
    assert ops["shapes"] == ops["real"]


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_torchs_counter_lacks_the_attention_of_a_checkpointed_block_and_does_not_tell_recompute_from_forward(way):
    model = Checkpointed(way, Reruns())
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    with record(model) as run:
        model(x).sum().backward()
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    attention = macs_by_owner(run)["block.attn"]
    # Its one error here: it knows no attention on the CPU. It counts two flops for a multiply-add.
    assert counter.get_total_flops() == 2 * (run.macs() - sum(attention.values()))
    assert set(counter.get_flop_counts()["Global"]) == {torch.ops.aten.addmm, torch.ops.aten.mm}
    assert run.macs(phase="recompute") == sum(times * FORWARD[name] for name, times in CHECKPOINTS[way][1].items())


class Residuals(nn.Module):
    """Reentrant checkpoints one inside the other, each with a way around it: gradients meet at their nodes."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 4)
        self.depth = depth

    def forward(self, x):
        return self.go_down(x, self.depth)

    def go_down(self, x, depth):
        if depth == 0:
            return self.last(x)
        below = checkpoint(self.go_down, x, depth - 1, use_reentrant=True)
        return below + self.layers[depth % 3](x)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_what_runs_in_autograds_own_threads_has_its_owner(execution):
    depth, macs = 66, 3 * 4 * 4
    model, x = Residuals(depth), X.clone().requires_grad_()
    with record(model, execution=execution, table="exact") as run, Witness(model) as witness:
        loss = model(x).sum()
        witness.give(loss, "")
        loss.backward()
    trace = run.trace()
    assert {event.thread for event in trace.events} > {0}  # torch goes to another thread at 60 passes inside another
    assert BEFORE not in trace.modules.by_name
    assert witness.disagreements(trace) == []
    # Made by no module when they ran again; there the gradients meet.
    assert witness.unreached(trace) == {("", "CheckpointFunctionBackward")}
    check_sums(run)
    # The layer at a depth runs again as often as there are checkpoints around it; `last` is in all of them.
    again = Counter({f"layers.{index}": 0 for index in range(3)})
    for at in range(1, depth + 1):
        again[f"layers.{at % 3}"] += (depth - at) * macs
    assert {name: owned["recompute"] for name, owned in macs_by_owner(run).items()} == again | {"last": depth * macs}
    assert macs_by_phase(run)["backward"] == (depth + 1) * 2 * macs
    # Per depth: the sum on the way down runs again; the one of gradients, 12 elements, is part of the backward pass.
    sums = Counter()
    for entry in run.counts().entries:
        if entry.op == "aten::add" and entry.scope and entry.scope[-1] == "":
            sums[entry.phase] += entry.value
    assert sums == {"forward": depth * 12, "recompute": sum(range(depth)) * 12, "backward": depth * 12}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_made_before_the_recording_is_recompute_too(reentrant):
    model = make_net()
    x = X.clone().requires_grad_()
    y = checkpoint(lambda value: (model[0](value) @ torch.eye(4)).relu() @ torch.ones(4, 1), x, use_reentrant=reentrant)
    with record(model) as run:
        y.sum().backward()
    # The last product is not wanted again without reentrancy.
    own = {"recompute": 48 + 12 * reentrant}
    assert run.macs("0", phase="recompute") == 48
    if reentrant:  # the graph in it is made when it runs again
        expected = {"0": {"recompute": 48, "backward": 96}, BEFORE: own | {"backward": 48 + 12}}
    else:
        expected = {"0": {"recompute": 48}, BEFORE: own | {"backward": 96 + 48 + 12}}
    assert macs_by_owner(run) == expected


def test_a_module_that_an_early_stop_ends_is_no_call_of_a_table_with_rows_for_modules():
    model = make_net()
    x = X.clone().requires_grad_()
    with record(model, table="thop") as run:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert macs_by_phase(run) == {"forward": 48 + 24, "recompute": 48}
    exits = [event for event in run.trace().events if event.kind == "exit" and event.phase == "recompute"]
    assert [event.raised for event in exits] == [False, False, True, True]
    with record(model) as run:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    run.set_module_handle(nn.Linear, lambda call: 1000)
    assert {name: dict(phases) for name, phases in run.by_module_and_phase().items() if name} == {
        "0": {"forward": 1000, "recompute": 1000, "backward": 96},
        "1": {},
        "2": {"forward": 1000, "backward": 48},
    }


def test_a_graph_that_is_kept_is_rerun_for_each_backward_pass():
    model, reruns = make_net(), Reruns()
    with reruns, record(model) as run:
        loss = checkpoint(reruns.of(model), X.clone().requires_grad_(), use_reentrant=False).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert recompute_ops(run) == reruns.ops
    assert macs_by_owner(run) == {
        "0": {"forward": 48, "recompute": 2 * 48, "backward": 2 * 96},
        "2": {"forward": 24, "backward": 2 * 48},
    }


def test_what_a_library_calls_a_checkpoint_is_told_by_its_name():
    class CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):
            ctx.function = function
            ctx.save_for_backward(x)
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.function(x)
            torch.autograd.backward(y, gradient)
            return None, x.grad

    def forward(self, x):
        return CheckpointFunction.apply(lambda y: self.layer(y) @ torch.eye(4), x)

    model = nn.Sequential(Applied(forward, layer=nn.Linear(4, 4)))
    with record(model) as run:
        model(X.clone().requires_grad_()).sum().backward()
    assert macs_by_owner(run) == {
        "0": {"forward": 48, "recompute": 48, "backward": 48},
        "0.layer": {"forward": 48, "recompute": 48, "backward": 96},
    }


class Views(nn.Module):
    """Writes in place through views, islands without autograd, and views of views."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = self.layer(x).clone()
        y[:, 1:3].mul_(self.scale[1:3])
        y[:, 0].add_(1)
        with torch.no_grad():
            island = (y * 2).cumsum(0).sin()
            torch.arange(4).cumsum(0)
        y = y + island
        y.view(-1)[::2].relu_()
        left, right = y.chunk(2, -1)
        return torch.cat([left, right * 2], -1).transpose(0, 1).contiguous().t()


class Adversary(nn.Module):
    """Shared and tied modules, fused recurrent kernels, attention, a grouped convolution, and writes through views."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Views(), Views()
        self.shared = self.one.layer
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.two.layer.weight
        self.lstm, self.gru = nn.LSTM(4, 4), nn.GRU(4, 4)
        self.batch_norm, self.layer_norm = nn.BatchNorm1d(4), nn.LayerNorm(4)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x):
        h = self.shared(self.one(self.two(self.one(x))))
        h = h + self.lstm(h[:, None])[0][:, 0] + self.gru(h[:, None])[0][:, 0]
        h = self.tied(self.batch_norm(h)) * self.embedding(torch.arange(len(h)) % 5)
        h = self.convolution(h.t()[None])[0].t()
        h = self.layer_norm(h + self.attention(h, h, h)[0])
        h = functional.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])[0, 0].clone()
        h[1:3] *= 2
        return h


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_every_backward_op_of_an_adversarial_net_has_the_owner_that_its_graph_has(execution):
    model, x = Adversary(), torch.randn(6, 4, requires_grad=True)
    with record(model, execution=execution, table="exact") as run, Witness(model) as witness:
        loss = model(x).pow(2).sum()
        witness.give(loss, "")
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, [x])
    trace = run.trace()
    assert not trace.modules.pseudo_modules()
    assert witness.disagreements(trace) == []
    assert not witness.unreached(trace)
    check_sums(run)
    assert not run.unsupported_ops()


def twice_differentiable(self, x):
    """What has a derivative of its derivative, in shared modules and through views."""
    h = self.norm(self.one(self.act(self.two(self.one(x)))))
    h = self.convolution(h.t()[None])[0].t()
    return h * h.sigmoid()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_backward_pass_of_a_backward_pass_belongs_to_whose_backward_it_is(execution):
    parts = {"one": Views(), "two": Views(), "norm": nn.LayerNorm(4), "act": nn.GELU()}
    model = Applied(twice_differentiable, **parts, convolution=nn.Conv1d(4, 4, 3, padding=1))
    x = torch.randn(6, 4, requires_grad=True)
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        record(model, execution=execution, table="exact") as run,
        Witness(model) as witness,
    ):
        loss = model(x).pow(2).sum()
        witness.give(loss, "")
        gradients = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        penalty = sum(gradient.pow(2).sum() for gradient in gradients)
        witness.give(penalty, "")
        (third,) = torch.autograd.grad(penalty, [x], create_graph=True)
        loss = loss + third.pow(2).sum()
        witness.give(loss, "")
        loss.backward()
    assert witness.disagreements(run.trace()) == []
    assert {owner for owner, _ in witness.unreached(run.trace())} == {"one", "two"}  # which write through views
    assert not run.trace().modules.pseudo_modules()
    check_sums(run)


def test_the_witness_sees_a_wrong_owner():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with record(model) as run, Witness(model) as witness:
        model(X).sum().backward()
    trace = run.trace()
    assert witness.disagreements(trace) == []
    other = {"0": "1", "1": "0"}
    regions = tuple(region._replace(name=other.get(region.name, region.name)) for region in trace.regions)
    assert ("aten::mm", "1", "0") in witness.disagreements(replace(trace, regions=regions))


def test_a_gradient_penalty_by_hand():
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 1, bias=False))
    x = torch.randn(3, 4, requires_grad=True)
    for execution in EXECUTIONS:
        with record(model, execution=execution) as run:
            (gradient,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
            gradient.pow(2).sum().backward()
        # Backward to x: one product a layer. Of `g @ W` then the gradients of g, where it has one, and of W: what
        # comes into the last layer from the loss has none. The forward itself leads to no parameter's gradient.
        assert macs_by_owner(run) == {
            "0": {"forward": 60, "backward": 60 + 2 * 60},
            "1": {"forward": 15, "backward": 15 + 15},
        }


def test_the_node_of_a_last_write_through_a_view_has_its_owner():
    model = nn.Linear(4, 4)
    with record(model, table="exact") as run:
        y = model(X)
        gradient = torch.ones_like(y)
        y[0].mul_(2)
        y.backward(gradient)
    assert not run.trace().modules.pseudo_modules()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_graph_made_before_the_recording_is_told_and_not_lost(execution):
    model = make_net()
    y = model(X)
    with record(model, execution=execution) as run:
        y.sum().backward(retain_graph=True)
        model(X).sum().backward()
    expected = {"0": {"forward": 48, "backward": 48}, "2": {"forward": 24, "backward": 48}, BEFORE: {"backward": 96}}
    assert macs_by_owner(run) == expected
    assert run.total(BEFORE) == run.by_module()[BEFORE] == 96
    assert run.total() == 96 + 168
    assert BEFORE in flop_count_table(run)
    assert f"({BEFORE}): (#params: 0, #flops: 96, #forward: 0, #backward: 96)" in flop_count_str(run)
    assert Trace.from_json(run.trace().to_json()) == run.trace()
    # A parameter's gradient is added to the one that is there in the module that it is of.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with record(model, execution=execution, table="exact") as run:
        y.sum().backward()
    assert run.by_module_and_phase()["0"] == {"backward": 16 + 4}


class Reversible(torch.autograd.Function):
    """Keeps nothing but its input, and calls its module again in its backward, as reversible nets do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(x), gradient)
        return x.grad + gradient.mean(), None


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_function_whose_backward_calls_a_module(execution):
    model = Applied(
        lambda self, x: self.out(Reversible.apply(x, self.inner) @ torch.eye(2)), inner=make_net(), out=nn.Linear(2, 2)
    )
    with record(model, execution=execution) as run, Witness(model) as witness:
        model(X.clone().requires_grad_()).sum().backward()
    assert witness.disagreements(run.trace()) == []
    # The function's name says nothing of a checkpoint: what its backward runs is backward.
    assert macs_by_owner(run) == {
        "": {"forward": 12, "backward": 12},
        "inner.0": {"forward": 48, "backward": 48 + 96},
        "inner.2": {"forward": 24, "backward": 24 + 48},
        "out": {"forward": 12, "backward": 24},
    }
    assert ("function", "Reversible") in {(region.kind, region.name) for region in run.trace().regions}
    run.set_op_handle("prim::PythonOp.Reversible", lambda call: 5)
    assert "unused_rows" not in summarise(run).about
    run.set_op_handle("prim::PythonOp.ReversibleBackward", lambda call: 5)
    assert "Without effect: prim::PythonOp.ReversibleBackward. A" in " ".join(op_coverage_notes(summarise(run)))
    assert run.by_module()["inner"] == 3 * 72  # covered where the function is called, counted in its backward


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_hooks_run_for_the_node_that_they_hang_on(execution):
    model = nn.Sequential(make_net(), nn.Linear(2, 2))
    seen = []

    def hook(gradient):
        seen.append(gradient)
        return gradient @ torch.eye(2) + model[1](gradient).detach()

    with record(model, execution=execution) as run, Witness(model) as witness:
        h = model[0](X.clone().requires_grad_())
        h.register_hook(hook)
        handle = model[0][0].weight.register_hook(lambda gradient: gradient @ torch.eye(4))
        full = model[1].register_full_backward_hook(lambda module, inner, outer: None)
        model[1](h).sum().backward()
        handle.remove()
        full.remove()
    assert len(seen) == 1
    assert witness.disagreements(run.trace()) == []
    # The hook on the weight runs when the gradient has been made, before it is added to the parameter's.
    assert macs_by_owner(run) == {
        "0.0": {"forward": 48, "backward": 96 + 64},
        "0.2": {"forward": 24, "backward": 48 + 12},
        "1": {"forward": 12, "backward": 24 + 12},
    }


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_gradients_inside_a_checkpoint_belong_to_the_modules_that_they_are_of(execution):
    reruns = Reruns()

    class Penalised(Parts):
        def forward(self, x):
            return checkpoint(reruns.of(self.inner), x, use_reentrant=False)

        def inner(self, x):
            (gradient,) = torch.autograd.grad(self.layer(x).pow(2).sum(), x)
            return gradient * x

    model = nn.Sequential(Penalised(layer=nn.Linear(4, 4, bias=False)))
    with reruns, record(model, execution=execution) as run:
        model(X.clone().requires_grad_()).sum().backward()
    # Both passes recompute unsaved tensors: up to the layer's result the first, all, the pass inside too, the second.
    assert macs_by_owner(run) == {"0.layer": {"forward": 48, "backward": 48, "recompute": 48 + 96}}
    if execution == "real":
        assert recompute_ops(run) == reruns.ops


FUNCTIONAL = {
    "grad": (lambda model, loss, parameters: torch.func.grad(loss)(parameters, X), {"forward": 72, "backward": 96}),
    "vjp": (
        lambda model, loss, parameters: torch.func.vjp(model, X)[1](torch.ones(3, 2)),
        {"forward": 72, "backward": 72},
    ),
    "jacrev": (lambda model, loss, parameters: torch.func.jacrev(model)(X), {"forward": 72, "backward": 6 * 72}),
    # The weights' tangents, zeros, are multiplied too.
    "jvp": (lambda model, loss, parameters: torch.func.jvp(model, (X,), (X,)), {"forward": 3 * 72}),
    "a gradient for each example": (
        lambda model, loss, parameters: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, X),
        {"forward": 72, "backward": 96},
    ),
    "jacobian": (
        lambda model, loss, parameters: torch.autograd.functional.jacobian(model, X),
        {"forward": 72, "backward": 6 * 72},
    ),
}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_derivatives(name, execution):
    model = make_net()
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).pow(2).sum()

    run_it, expected = FUNCTIONAL[name]
    with record(model, execution=execution) as run:
        run_it(model, loss, parameters)
    assert macs_by_phase(run) == expected
    assert set(macs_by_owner(run)) == {"0", "2"}


def test_a_training_step_by_shapes_is_the_real_one():
    torch.manual_seed(0)
    model = nn.Sequential(Checkpointed("none", Reruns()), nn.Linear(WIDTH, 1))
    x = torch.randn(BATCH, TOKENS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"checkpoint": [Block], "micro_batches": 2, "table": "exact"}
    step = TrainingStepAnalysis(model, x, loss=torch.sum, optimizer=optimizer, **options)
    counted = ops_by_place(step)
    assert not optimizer.state
    with record(model, table="exact") as run:
        for _ in range(2):
            model[1](checkpoint(model[0], x, use_reentrant=False)).sum().backward()
        optimizer.step()
    real = ops_by_place(run)
    # The first is checkpointed a level further down; torch 2.10 and older make an empty tensor for each checkpoint.
    moved = ("aten::detach", "aten::empty")
    assert {key: calls for key, calls in counted.items() if key[2] not in moved} == {
        key: calls for key, calls in real.items() if key[2] not in moved
    }
    assert step.by_module_and_phase() == run.by_module_and_phase()
    signature = inspect.signature(TrainingStepAnalysis)
    assert all(item.kind is item.KEYWORD_ONLY for item in list(signature.parameters.values())[2:])


class Masked(nn.Linear):
    """A block that makes a tensor on the device of its input, as masks are made."""

    def forward(self, x):
        return super().forward(x) * torch.ones(4, device=x.device)


def test_recomputation_on_a_missing_device():
    """A block that is called again in the backward pass may make tensors on the emulated device, too."""
    model, options = nn.Sequential(Masked(4, 4), Masked(4, 4)), {"checkpoint": [Masked], "device": "cuda"}
    trace = TrainingStepAnalysis(model, torch.ones(2, 4), loss=torch.sum, **options).trace()
    ops = [event for event in trace.events if event.kind == "op"]
    made = Counter(event.phase for event in ops if trace.signatures[event.item].packet == "aten::ones")
    assert made == {"forward": 2, "recompute": 2}
