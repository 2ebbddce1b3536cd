"""Optimizer steps: shape execution equals real execution, counts per parameter group, and changes nothing."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fvflops import TrainingStepAnalysis, flop_count_str, flop_count_table, record
from fvflops.capture.run import ExecutionError
from fvflops.capture.shapes import survivors
from tests.support.random_cases import long_except
from tests.support.recording_checks import EXECUTIONS, OUTSIDE, X, check_sums, macs_by_phase, make_net, ops_by_place
from tests.support.recording_checks import nothing_stays_installed as nothing_stays_installed

OPTIONS = {
    "SGD": {},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "SGD maximize": {"momentum": 0.5, "maximize": True},
    "Adam": {},
    "Adam amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {},
    "Adagrad": {},
    "Adadelta": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "ASGD": {},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
OPTIMIZERS = {
    **{
        f"{name} {kind}": partial(getattr(torch.optim, name.partition(" ")[0]), **options, foreach=kind == "foreach")
        for name, options in OPTIONS.items()
        for kind in ("foreach", "for-loop")
    },
    **{f"{name} fused": partial(getattr(torch.optim, name), fused=True) for name in FUSED},
    **(
        {"Muon": lambda parameters: torch.optim.Muon([item for item in parameters if item.ndim == 2])}
        if hasattr(torch.optim, "Muon")
        else {}
    ),
    "Adafactor": torch.optim.Adafactor,
}
# Adafactor reads the value of a parameter's norm, which does not affect the cost.
ASSUMED = {"Adafactor": {"aten::_local_scalar_dense": 1.0}}


def make_small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))  # one parameter of one element


def train(model, optimizer):
    optimizer.zero_grad()
    model(X).pow(2).sum().backward()
    optimizer.step()


def contents(model, optimizer):
    state = [optimizer.state_dict(), optimizer.param_groups, torch.get_rng_state()]
    tensors = [item for parameter in model.parameters() for item in (parameter, parameter.grad)]
    return [item.clone() if isinstance(item, torch.Tensor) else item for item in tree_leaves([tensors, state])]


def is_same(before, after):
    return len(before) == len(after) and all(
        torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        for left, right in zip(before, after, strict=True)
    )


LISTS = [name for name in OPTIMIZERS if "for-loop" not in name or name.startswith("Adam")]  # others loop alike


@pytest.mark.parametrize("name", long_except(LISTS, OPTIMIZERS))
def test_optimizer_step_in_shape_execution_equals_the_real_one_and_changes_nothing(name):
    assume = ASSUMED.get(name)
    for steps_before in (0, 2):
        counted = {}
        for execution in EXECUTIONS:
            model = make_small()
            optimizer = OPTIMIZERS[name](model.parameters())
            for _ in range(steps_before):
                train(model, optimizer)
            before, parameters = contents(model, optimizer), [*model.parameters()]
            options = {"assume": assume} if execution == "shapes" else {}
            with record(model, execution=execution, table="exact", **options) as run:
                train(model, optimizer)
            counted[execution] = ops_by_place(run), run.by_module_and_phase(), run.by_parameter_group()
            check_sums(run)
            assert not run.unsupported_ops()
            if execution == "shapes":
                assert is_same(before, contents(model, optimizer))
                assert all(left is right for left, right in zip(parameters, model.parameters(), strict=True))
                train(model, optimizer)
        assert counted["real"] == counted["shapes"]
    # Weights on the meta device, with an optimizer or a function that creates it.
    model = make_small().to("meta")
    optimizer = OPTIMIZERS[name](model.parameters())
    before = contents(model, optimizer) if not optimizer.state else None
    arguments = {"loss": lambda y: y.pow(2).sum(), "table": "exact", "assume": assume}
    steps = [
        TrainingStepAnalysis(model, X, optimizer=value, **arguments)
        for value in (OPTIMIZERS[name], optimizer, [optimizer])
    ]
    model = make_small()
    with record(model, table="exact") as run:
        train(model, OPTIMIZERS[name](model.parameters()))
    assert all(step.by_phase() == run.by_phase() for step in steps)
    assert all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])
    assert before is None or not optimizer.state


def test_steps_in_exact_equal_hand_counts():
    # `sizes` are the elements of each parameter. SGD: p += -lr * g, after b = m * b + g with momentum, and also
    # g += m * b with Nesterov. Adam: m by lerp (3), v * b2, v += (1 - b2) * g * g (3), a square root, a division,
    # + eps, p -= lr * m / that (3), and one increment of the step counter per parameter.
    sizes = (12, 3, 3, 1)
    cases = [
        (partial(torch.optim.SGD, lr=0.1), lambda n: 2 * n),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), lambda n: (2 + 2) * n),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), lambda n: (2 + 2 + 2) * n),
        (partial(torch.optim.SGD, lr=0.1, weight_decay=0.1), lambda n: (2 + 2) * n),
        (torch.optim.Adam, lambda n: 13 * n + 1),
    ]
    for make_optimizer, flops in cases:
        for foreach in (False, True):
            model = make_small()
            optimizer = make_optimizer([{"params": [item]} for item in model.parameters()], foreach=foreach)
            train(model, optimizer)
            with record(model, table="exact") as run:
                train(model, optimizer)
            groups = [sum(labels.values()) for labels in run.by_parameter_group().values()]
            assert groups == list(map(flops, sizes)), (make_optimizer, foreach)
            assert sum(run.by_phase()["optimizer"].values()) == sum(groups)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_two_optimizers_with_named_groups_and_a_parameter_outside_the_model(execution):
    generator, critic, outside_parameter = nn.Linear(4, 4), nn.Linear(4, 1), nn.Parameter(torch.ones(3))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    first = torch.optim.SGD([{"params": [generator.weight], "group_name": "weights"}, {"params": [generator.bias]}])
    second = torch.optim.SGD([*critic.parameters(), outside_parameter])
    with record(model, execution=execution, table="exact") as run:
        (critic(generator(X)).sum() + outside_parameter.sum()).backward()
        first.step()
        second.step()
    assert {name: sum(labels.values()) for name, labels in run.by_parameter_group().items()} == {
        "SGD weights": 2 * 16,
        "SGD 1": 2 * 4,
        "SGD 2, 0": 2 * (4 + 1 + 3),
    }
    assert run.by_module_and_phase()[OUTSIDE] == {"optimizer": 2 * 3}
    fourth = torch.optim.SGD([*critic.parameters(), outside_parameter], foreach=True)
    with record(model, execution=execution, table="exact") as run:
        critic(X).sum().backward()
        outside_parameter.grad = torch.ones(3)
        fourth.step()
    assert run.by_phase()["optimizer"].total() == 2 * (4 + 1 + 3)
    assert OUTSIDE not in run.by_module()  # a kernel on parameters inside and outside the model is the model's
    third = torch.optim.Adam([outside_parameter])
    with record(model, execution=execution, table="exact") as run:
        outside_parameter.sum().backward()
        third.step()
    assert run.by_module_and_phase()[OUTSIDE] == {"optimizer": 13 * 3 + 1}
    assert run.total(OUTSIDE) == 40
    check_sums(run)
    assert OUTSIDE in flop_count_table(run)
    assert OUTSIDE in flop_count_str(run)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_closure_is_not_part_of_the_step_and_updates_belong_to_their_group(execution):
    model = make_net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "group_name": "head"}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def closure():
        optimizer.zero_grad()
        loss = model(X).sum()
        loss.backward()
        return loss

    with record(model, execution=execution, table="exact") as run:
        optimizer.step(closure)
    assert macs_by_phase(run) == {"forward": 72, "backward": 96}
    steps = [entry for entry in run.counts().entries if entry.phase == "optimizer"]
    calls = Counter()
    for entry in steps:
        calls[entry.group, entry.op] += entry.calls
    assert {group for group, _ in calls} == {"SGD 0", "SGD head"}
    assert calls["SGD 0", "aten::clone"] == calls["SGD head", "aten::clone"] == 2  # the initial momentum buffers


def test_lbfgs_is_recorded_in_real_execution_only():
    model = make_net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn=None)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(X).pow(2).sum()
        loss.backward()
        return loss

    with record(model, table="exact") as run:
        optimizer.step(closure)
    assert macs_by_phase(run) | {"optimizer": 0} == {
        "forward": 72 * len(calls),
        "backward": 96 * len(calls),
        "optimizer": 0,
    }
    assert run.by_parameter_group().keys() == {"LBFGS 0"}
    with pytest.raises(ValueError, match=r"LBFGS\.step needs a closure.*fvflops\.record"):
        TrainingStepAnalysis(model, X, loss=torch.sum, optimizer=torch.optim.LBFGS).total()
    with pytest.raises(TypeError, match="returned None"):
        TrainingStepAnalysis(model, X, loss=torch.sum, optimizer=lambda parameters: None).total()
    with pytest.raises(ExecutionError, match=r"_local_scalar_dense.*assume="):
        TrainingStepAnalysis(model, X, loss=torch.sum, optimizer=torch.optim.Adafactor).total()


def test_sparse_step():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SparseAdam([model[0].weight])
    with record(model, table="exact") as run:
        model(torch.tensor([1, 2, 1])).sum().backward()
        optimizer.step()
    assert run.by_parameter_group().keys() == {"SparseAdam 0"}
    check_sums(run)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_steps_inside_the_backward_pass(execution):
    model = make_net()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in optimizers]
    with record(model, execution=execution, table="exact") as run:
        model(X).sum().backward()
    for hook in hooks:
        hook.remove()
    assert run.by_phase()["optimizer"].total() == 2 * (16 + 4 + 8 + 2)
    assert len(run.by_parameter_group()) == 4
    assert macs_by_phase(run) == {"forward": 72, "backward": 96}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_ends_without_a_search_through_all_objects(device, monkeypatch):
    searches = []
    monkeypatch.setattr(survivors, "_survivors", lambda run: searches.append(run) or [])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    TrainingStepAnalysis(model, torch.ones(2, 4), loss=torch.sum, device=device).total()
    assert not searches
