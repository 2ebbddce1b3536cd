"""Expert parallelism: the experts of a mixture (MoE layer) are divided among ranks, which exchange tokens.

As in torchtitan and transformers, `ep` adds no ranks: the experts have a mesh of their own over the ranks of the dense
layers' mesh.

    dense layers   (pp, dp, fsdp, cp, tp)
    experts        (pp, dp, efsdp, ep, etp)    fsdp * cp * tp = efsdp * ep * etp

Without fsdp, the axis `edp` has the replicas of each expert among the ranks of dp, cp and tp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fvflops.plan.parallel_axes import AXES, count_shares, dense_axes
from fvflops.plan.sharding.routing import RoutedTokens, Routing, check_routing, dispatching, slicing_tokens
from fvflops.plan.sharding.sharding_styles import (
    EXPERT_DIMENSIONS,
    ShardingError,
    check_width,
    distribute_parameters,
    join_choices,
    list_divisors,
    name_class,
    parallelism_of,
)
from fvflops.plan.sharding.tensor_parallel import Sharding, expand_plan, find_styles, matching_modules
from fvflops.torch_internals import disable_dispatch_modes

# transformers' style of a module whose tokens are sent to the ranks of their experts.
_DISPATCHED = "ep_dispatch_experts"


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """The experts of a rank's model: their modules, and name → number of experts before they were divided.

    `mesh` is the DeviceMesh that divides them, None without ep; its axes are dp, efsdp or edp, ep and etp.
    `data_ranks` is the number of ranks with different tokens.
    """

    modules: tuple[nn.Module, ...]
    numbers: Mapping[str, int]
    mesh: Any
    data_ranks: int

    @property
    def divided_parameters(self) -> set[int]:
        """The ids of the experts' parameters if each rank of ep has different experts, else none."""
        modules = () if self.mesh is None else self.modules
        return {id(parameter) for module in modules for parameter in module.parameters()}

    @property
    def replicas(self) -> int:
        """The number of ranks with the same experts, without fsdp."""
        return self.mesh["edp"].size() if self.mesh is not None and "edp" in self.mesh.mesh_dim_names else 1


def check_expert_axes(mesh: Mapping[str, int]) -> None:
    """Raise ShardingError where ep and etp do not divide the ranks of fsdp (or dp), cp and tp as in torchtitan.

    >>> check_expert_axes({"fsdp": 4, "tp": 2, "ep": 3})
    Traceback (most recent call last):
    fvflops.plan.sharding.sharding_styles.ShardingError: ep=3 must divide ...use ep=1, 2, 4 or 8
    """
    experts, etp, tp = (mesh.get(axis, 1) for axis in ("ep", "etp", "tp"))
    data, cp = _data_axis(mesh), count_shares(mesh, "tokens") // count_shares(mesh, "samples")
    if etp not in (1, tp):
        raise ShardingError(f"etp={etp} must be 1 or the size of tp ({tp}), as in torchtitan")
    # With etp=1 the ranks of tp divide the tokens, so that all of them belong to one group of experts.
    shared = math.prod((cp, tp // etp))
    ranks = mesh.get(data, 1) * shared
    fitting = [size for size in range(1, ranks + 1) if ranks % size == 0 and (size == 1 or size % shared == 0)]
    if experts not in fitting:
        axes = " x ".join(axis for axis in (data, "cp", "" if etp > 1 else "tp") if axis and mesh.get(axis, 1) > 1)
        condition = f" and be a multiple of cp and tp ({shared})" if shared > 1 else ""
        raise ShardingError(
            f"ep={experts} must divide the {ranks} rank{'s' * (ranks > 1)} of {axes or 'fsdp'}{condition}: "
            f"use ep={join_choices(fitting)}"
        )


def _data_axis(mesh: Mapping[str, int]) -> str:
    return "fsdp" if mesh.get("fsdp", 1) > 1 else "dp"


def make_expert_mesh(mesh: Mapping[str, int], rank: int) -> Any:
    """Return a pipeline stage's experts' DeviceMesh: dp (with fsdp), efsdp (edp without fsdp), ep and etp."""
    dense = dense_axes(mesh)
    data = _data_axis(mesh)
    # Models or stages, then replicas, then the ranks that share experts: by samples, by tokens, tp.
    place = {axis: AXES[axis].tokens * (3 - AXES[axis].samples) + 4 * (axis == "tp") for axis in dense}
    place["dp"] = 2 if data == "dp" else 1
    order = sorted(dense, key=lambda axis: place[axis])
    ranks = torch.arange(math.prod(dense.values())).view(*dense.values()).permute(*map(list(dense).index, order))
    stages, replicas = (math.prod(dense[axis] for axis in order if place[axis] == number) for number in (0, 1))
    ep, etp = mesh.get("ep", 1), mesh.get("etp", 1)
    views = ranks.reshape(stages, replicas, -1, ep, etp)
    (stage,) = (view for view in views if bool((view == rank).any()))
    axes = ("dp", f"e{data}", "ep", "etp")
    # With a named backend torch makes a process group for each axis, also where all ranks are along it.
    backends = ((dist.get_backend(), None),) * len(axes)
    return dist.device_mesh.DeviceMesh("cpu", stage, mesh_dim_names=axes, backend_override=backends)


def without_experts(model: nn.Module, sharding: Sharding, mesh: Mapping[str, int]) -> Sharding:
    """Return a model's tensor-parallel sharding without the modules that expert parallelism shards."""
    if mesh.get("ep", 1) == 1:
        return sharding
    mixture = _pattern_of(model)
    patterns = [f"{mixture}.experts"] if mixture else list(getattr(model, "_ep_plan", None) or {})
    within = tuple(f"{pattern}." for pattern in patterns)
    styles = {name: style for name, style in sharding.styles.items() if not f"{name}.".startswith(within)}
    return replace(sharding, styles=styles)


def divide(model: nn.Module, device_mesh: Any, mesh: Mapping[str, int], *, rank: int) -> DividedExperts | None:
    """Divide a model's experts, in place, over ep and etp; return None for a model without known mixtures.

    A zoo mixture is divided as torchtitan does it, a model of transformers by its `_ep_plan` and transformers' own
    code. Without ep in the mesh nothing is divided. With it, a model without known mixtures, and a number of experts
    that ep does not divide, raise ShardingError.
    """
    ep = mesh.get("ep", 1)
    found = _find_experts(model)
    if found is None:
        if ep > 1:
            raise ShardingError(f"no mixtures of experts are known in {name_class(model)}: plan it without ep")
        return None
    library, experts = found
    numbers = {
        name: next(len(parameter) for parameter in module.parameters(recurse=False) if parameter.ndim == 3)
        for name, module in experts.items()
    }
    data_ranks = count_shares(mesh, "tokens")
    if ep == 1:
        return DividedExperts(tuple(experts.values()), numbers, None, data_ranks)
    for name, number in numbers.items():
        if number % ep:
            raise ShardingError(f"ep={ep} must divide the {number} experts of {name}: use ep={list_divisors(number)}")
    expert_mesh = make_expert_mesh(mesh, rank)
    (_divide_transformers if library == "transformers" else _divide_zoo)(model, device_mesh, expert_mesh, mesh)
    return DividedExperts(tuple(experts.values()), numbers, expert_mesh, data_ranks)


def _find_experts(model: nn.Module) -> tuple[str, dict[str, nn.Module]] | None:
    """Return the library of a model's mixtures, and name → module of their experts; None for a model without."""
    if _pattern_of(model):
        return "zoo", {name: mixture.experts for name, mixture in _mixtures(model).items()}
    plan = getattr(model, "_ep_plan", None) or {}
    if _DISPATCHED not in plan.values() or _DISPATCHED not in find_styles("expert"):
        return None
    styles = expand_plan(model, plan)
    return "transformers", {path: model.get_submodule(path) for path in styles if styles[path] == _DISPATCHED}


def has_partial_router_gradients(model: nn.Module) -> bool:
    """Return whether each rank of tp has a part of the gradients of a model's routers."""
    return bool(_pattern_of(model))


def loops_over_experts(model: nn.Module) -> bool:
    """Return whether mixtures of transformers run each expert by itself, with the tokens that its router selects."""
    found = _find_experts(model)
    modules = () if found is None else found[1].values()
    return any(getattr(getattr(item, "config", None), "_experts_implementation", "") == "eager" for item in modules)


def _mixtures(model: nn.Module) -> dict[str, Any]:
    """Return name of its experts → mixture, for the mixtures of a zoo model."""
    found = matching_modules(model, _pattern_of(model)).items()
    return {f"{path}.experts": module for path, module in found if not isinstance(module, nn.Identity)}


def _pattern_of(model: nn.Module) -> str:
    known = parallelism_of(model)
    return "" if known is None else known.mixtures


def _divide_transformers(model: Any, device_mesh: Any, expert_mesh: Any, mesh: Mapping[str, int]) -> None:
    if mesh.get("etp", 1) > 1:
        raise ShardingError("transformers does not divide the weights of an expert: plan it without etp")
    # The axis etp has one rank here: without tp no other rank has the same tokens.
    batch_mesh = device_mesh["tp"] if mesh.get("tp", 1) > 1 else expert_mesh["etp"]
    plan, code = expand_plan(model, model.ep_plan), import_module("transformers.distributed.expert_parallel")
    code.apply_expert_parallelism(model, expert_mesh["ep"], batch_mesh, plan, ep_implementation="all_to_all")


def _divide_zoo(model: nn.Module, device_mesh: Any, expert_mesh: Any, mesh: Mapping[str, int]) -> None:
    from torch.distributed.tensor import Shard

    etp, tp = mesh.get("etp", 1), mesh.get("tp", 1)
    for mixture in _mixtures(model).values():
        experts = mixture.experts
        if etp > 1:
            check_width(experts, "etp", etp)
            both = expert_mesh["ep", "etp"]
            distribute_parameters(experts, both, lambda name: [Shard(0), Shard(EXPERT_DIMENSIONS[name])])
        else:
            distribute_parameters(experts, expert_mesh["ep"], lambda name: [Shard(0)])
        if tp > etp:
            mixture.order.forward = slicing_tokens(mixture.order.forward, device_mesh["tp"])
        mixture.experts.forward = dispatching(mixture.experts, expert_mesh.get_group("ep"))


def shard_experts_fully(experts: DividedExperts, **options: Any) -> None:
    """Apply `fully_shard` to a rank's experts over the ranks of efsdp, in place; `options` are passed on to it.

    As in torchtitan, the experts' second dimension is sharded where efsdp has more ranks than a rank has experts. Their
    gradients are divided by the number of ranks with different tokens, as the dense layers' are.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    if experts.mesh is None:
        return
    replicas, sharded, _, _ = experts.mesh.shape
    mesh = experts.mesh["dp", "efsdp"] if replicas > 1 else experts.mesh["efsdp"]
    for name, module in zip(experts.numbers, experts.modules, strict=True):
        each = experts.numbers[name] // experts.mesh["ep"].size()
        placement = (lambda parameter: Shard(1)) if sharded > each else None
        widths = [parameter.to_local().shape[1] for parameter in module.parameters()]  # type: ignore[attr-defined]
        if placement is not None and any(width % sharded for width in widths):
            raise ShardingError(
                f"ep leaves {sharded} ranks of fsdp for each {each} experts of {name}, and FSDP2 cannot divide their "
                f"widths {' and '.join(map(str, sorted(set(widths))))} by {sharded}: use another ep or fsdp"
            )
        wrapped: Any = fully_shard(module, mesh=mesh, shard_placement_fn=placement, **options)
        wrapped.set_gradient_divide_factor(float(experts.data_ranks))
        if sharded > 1:
            # Only NCCL can scale in the reduction.
            wrapped.set_force_sum_reduction_for_comms(True)


# --- routing ---------------------------------------------------------------------------------------------------------


def fix_routing(model: nn.Module, experts: DividedExperts, mesh: Mapping[str, int], routing: Routing) -> None:
    """Route to each expert of a model, in place, the number of tokens that `routing` gives; None is balanced."""
    found = _find_experts(model)
    assert found is not None
    library, modules = found
    check_routing(routing, list(modules))
    sliced = experts.mesh is not None and mesh.get("etp", 1) == 1
    for name, number in experts.numbers.items():
        tokens = RoutedTokens(
            name,
            routing,
            experts=number,
            ranks=mesh.get("ep", 1),
            rank=0 if experts.mesh is None else experts.mesh["ep"].get_local_rank(),
            slices=mesh.get("tp", 1) if sliced else 1,
        )
        if library == "transformers":
            modules[name].forward = _route_transformers(modules[name].forward, tokens)
        else:
            mixture = _mixtures(model)[name]
            mixture.router.forward = _route(mixture.router.forward, tokens)
            mixture.experts.received = tokens.received


def describe_routing(routing: Routing) -> str:
    """Return a plan's assumption on the tokens of each expert."""
    balanced = "balanced routing: all experts get equally many tokens"
    return balanced if routing is None else "routing by the given numbers of tokens of each expert"


def _route_transformers(forward: Callable[..., Any], tokens: RoutedTokens) -> Callable[..., Any]:
    """Return transformers' forward that takes from `tokens` each token's experts and each expert's number of tokens."""
    code: Any = import_module("transformers.distributed.expert_parallel")

    def routed(hidden_states: torch.Tensor, top_k_index: torch.Tensor, *args: Any) -> Any:
        top_k, exchange = top_k_index.shape[-1], code.all_to_all_single
        tokens.batch = top_k_index.numel() // top_k, top_k

        def exchange_counts(output: torch.Tensor, input: torch.Tensor, **options: Any) -> None:
            with disable_dispatch_modes():
                unused = torch.empty_like(output)
            exchange(unused, input, **options)
            with disable_dispatch_modes():
                output.copy_(tokens.received())

        code.all_to_all_single = exchange_counts
        try:
            return forward(hidden_states, tokens.chosen().view(top_k_index.shape), *args)
        finally:
            code.all_to_all_single = exchange

    return routed


def _route(forward: Callable[..., Any], tokens: RoutedTokens) -> Callable[..., Any]:

    def routed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = forward(x)
        tokens.batch = len(chosen), chosen.shape[-1]
        return weights, tokens.chosen()

    return routed
