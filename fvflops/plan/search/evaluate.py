"""Plan, time and measure one layout of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fvflops.devices.devices import Device
from fvflops.plan.pipeline_stages import Inputs, PipelineStages, find_stages
from fvflops.plan.plan_options import PlanError, PlanOptions
from fvflops.plan.rank_plan import StepPlan, plan_ranks
from fvflops.plan.search.candidates import Candidate
from fvflops.plan.search.found_layouts import LayoutResult
from fvflops.plan.search.layout_bounds import MicrobatchCost, Sharding, measure_microbatch
from fvflops.plan.sharding.tensor_parallel import ShardingError, find_sharding
from fvflops.plan.step_time.efficiency import Efficiency, KernelTimer
from fvflops.plan.step_time.estimate import estimate_step
from fvflops.plan.step_time.network import Network
from fvflops.plan.step_time.step_program import read_step
from fvflops.plan.step_time.step_tables import read_memories
from fvflops.plan.step_time.step_time_report import judge
from fvflops.units import format_bytes


def resize_inputs(inputs: Any, *, batch: int, ranks: int = 1) -> Any:
    """Return nested inputs with `batch` samples, of a rank of `ranks` among which the sequence is divided.

    The first dimension of every tensor that has one is the batch, the second of token ids the sequence. Tensors that
    differ in their first dimension, and a sequence that `ranks` does not divide, raise PlanError.

    >>> tokens = torch.ones(2, 16, dtype=torch.int64)
    >>> resize_inputs((tokens, {"mask": tokens}), batch=3, ranks=4)[1]["mask"].shape
    torch.Size([3, 4])
    """
    sizes = {tensor.shape[0] for tensor in _tensors_in(inputs) if tensor.ndim}
    if len(sizes) != 1:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in _tensors_in(inputs)) or "no tensors"
        raise PlanError(f"a search changes the batch, the first dimension of all inputs; got {found}")
    return _resize(inputs, batch, ranks)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif type(value) in (tuple, list):
        for item in value:
            yield from _tensors_in(item)


def _resize(value: Any, batch: int, ranks: int) -> Any:
    if isinstance(value, torch.Tensor):
        return _resize_tensor(value, batch, ranks) if value.ndim else value
    if isinstance(value, Mapping):
        return {name: _resize(item, batch, ranks) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_resize(item, batch, ranks) for item in value)
    return value


def _resize_tensor(tensor: torch.Tensor, batch: int, ranks: int) -> torch.Tensor:
    shape = [batch, *tensor.shape[1:]]
    if ranks > 1 and tensor.ndim == 2 and not tensor.is_floating_point():
        if shape[1] % ranks:
            raise PlanError(f"cp={ranks} must divide the sequence of {shape[1]} tokens")
        shape[1] //= ranks
    first = tensor[tuple(slice(size) for size in (1, *shape[1:]))]
    return first.expand(shape).contiguous()


@dataclass(frozen=True)
class Workload:
    """A training step of which layouts are planned: the model, its inputs, and what all layouts have in common."""

    model: nn.Module
    inputs: Inputs
    options: PlanOptions
    device: Device
    network: Network | None
    efficiency: Efficiency
    fused: tuple[str, ...] = ()
    bucket_cap_mb: float | None = None

    @cached_property
    def stages(self) -> PipelineStages | str:
        """How the model is split into pipeline stages, or why that is not known."""
        try:
            return self.options.split_by or find_stages(self.model)
        except ShardingError as error:
            return str(error)

    @property
    def blocks(self) -> str:
        """The name of the module list that is divided among pipeline stages, "" if none is known."""
        return "" if isinstance(self.stages, str) else self.stages.blocks

    @property
    def layers(self) -> int:
        """The number of layers that can be divided among pipeline stages."""
        blocks: Any = self.model.get_submodule(self.blocks) if self.blocks else ()
        return len(blocks)

    @cached_property
    def sharding(self) -> object:
        """How tp splits the layers, or why that is not known."""
        try:
            return self.options.shard_by or find_sharding(self.model)
        except ShardingError as error:
            return str(error)

    @property
    def sequence_parallel(self) -> bool:
        """Whether tp can divide the sequence between the layers: if such a plan is known, and without `shard_by`."""
        if self.options.shard_by is not None:
            return False
        try:
            find_sharding(self.model, sequence=True)
        except ShardingError:
            return False
        return True

    def plan(self, candidate: Candidate) -> StepPlan:
        """Plan a step of all pipeline ranks in a layout; the errors are those of `plan_step`."""
        args, kwargs = resize_inputs(self.inputs, batch=candidate.micro_batch, ranks=candidate.size("cp"))
        options = replace(self.options, **candidate.plan_options())
        return StepPlan(plan_ranks(self.model, args, kwargs, options, whole_pipeline=True))

    def measure(self, sharding: Sharding, gpus: int) -> MicrobatchCost:
        """Return what a microbatch costs in a sharding of the layers, with as many shards as some GPUs can have."""
        (plan,) = self.plan(sharding.candidate(gpus)).ranks
        timer = KernelTimer(self.device, self.efficiency)
        in_layers = _is_below(self.blocks) if self.blocks else _never
        return measure_microbatch(plan, timer, self.network, in_layers, self.layers, self.fused)

    def evaluate(self, candidate: Candidate, limit: float | None) -> LayoutResult:
        """Plan a layout and return its time and memory; only its time if that is above a limit in seconds."""
        step = self.plan(candidate)
        timer = KernelTimer(self.device, self.efficiency)
        program = read_step(step.ranks, fused=self.fused, bucket_cap_mb=self.bucket_cap_mb)
        seconds = program.simulate(timer, self.network).seconds + self.efficiency.step
        if limit is not None and seconds >= limit:
            return LayoutResult(candidate=candidate, status="slower", seconds=seconds)
        peak = max(memory.reserved for memory in read_memories(step.ranks))
        reason = describe_lack(peak, self.device, step.ranks[0].world)
        if reason:
            return LayoutResult(candidate=candidate, status="does not fit", reason=reason, seconds=seconds, peak=peak)
        estimate = estimate_step(
            step,
            device=self.device,
            network=self.network,
            efficiency=self.efficiency,
            fused=self.fused,
            bucket_cap_mb=self.bucket_cap_mb,
        )
        return LayoutResult(
            candidate=candidate,
            status="fits",
            seconds=estimate.seconds,
            peak=peak,
            tokens_per_second=estimate.tokens_per_second,
            samples_per_second=estimate.samples_per_second,
            mfu=estimate.mfu,
            hfu=estimate.hfu,
            bubble_share=estimate.bubble_share,
            exposed_share=estimate.exposed_share,
            unknown=estimate.unknown,
            bytes_only=estimate.bytes_only,
        )


def describe_lack(nbytes: int, device: Device, ranks: int, *, at_least: bool = False) -> str:
    """Return by how much bytes on each of some ranks do not fit a device, "" if they do or its memory is not known.

    >>> from fvflops.devices.devices import find_device
    >>> describe_lack(92_000_000_000, find_device("H100"), 8)
    '92 GB of 84.9 GB'
    """
    if device.memory is None or judge(nbytes, device, ranks).fits:
        return ""
    return f"{'at least ' if at_least else ''}{format_bytes(nbytes)} of {format_bytes(device.memory)}"


def _is_below(blocks: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(f"{blocks}.")


def _never(name: str) -> bool:
    return False
