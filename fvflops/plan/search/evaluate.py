"""Plan, time and measure one layout of a search, or bound its time and memory from a recording of its sharding."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn

from fvflops.capture.model.meta_copy import map_tensors
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.devices.devices import Device
from fvflops.garbage_collector import gc_paused
from fvflops.plan.memory.storage_lifetimes import MemoryTimeline
from fvflops.plan.parallel_axes import count_shares
from fvflops.plan.pipeline_schedules import find_schedule, rank_of_stage
from fvflops.plan.pipeline_stages import Inputs, PipelineStages, divide_layers, find_stages
from fvflops.plan.plan_options import PlanError, PlanOptions
from fvflops.plan.rank_model import ShortStage
from fvflops.plan.rank_plan import StepPlan, plan_ranks
from fvflops.plan.rank_step import Action
from fvflops.plan.search.candidates import Candidate, LayoutResult
from fvflops.plan.sharding.sharding_styles import ShardingError
from fvflops.plan.sharding.tensor_parallel import find_sharding
from fvflops.plan.step_time.calibration import Network, Timing
from fvflops.plan.step_time.pass_program import Collective, Run
from fvflops.plan.step_time.schedule_simulation import time_collective
from fvflops.plan.step_time.step_estimate import estimate_program
from fvflops.plan.step_time.step_program import StepProgram, read_step
from fvflops.plan.step_time.step_tables import read_memories
from fvflops.plan.step_time.step_time_report import judge
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.units import format_bytes

T = TypeVar("T")

# The least time of a further sample in a larger microbatch, as a share of its time in a smaller one.
_GROWTH = 0.9

# Kinds of memory that are sharded: each rank has the total divided by the number of ranks that share it.
_STATES = ("parameter", "gradient", "optimizer state")
# Fields of StepEstimate that LayoutResult has too.
_FIGURES = (
    *("seconds", "tokens_per_second", "samples_per_second", "mfu", "hfu", "bubble_share", "exposed_share"),
    *("unknown", "bytes_only"),
)


def resize_inputs(inputs: Any, *, batch: int, ranks: int = 1) -> Any:
    """Return nested inputs of one rank: `batch` samples, with the sequence divided among `ranks` ranks.

    The first dimension of every tensor is the batch, the second dimension of token ids is the sequence. Tensors that
    differ in their first dimension, and a sequence that `ranks` does not divide, raise PlanError.
    """
    tensors = list(tensors_of(inputs))
    if len({tensor.shape[0] for tensor in tensors if tensor.ndim}) != 1:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
        raise PlanError(f"a search changes the batch, the first dimension of all inputs; got {found}")

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        shape = [batch, *tensor.shape[1:]]
        if ranks > 1 and tensor.ndim == 2 and not tensor.is_floating_point():
            if shape[1] % ranks:
                raise PlanError(f"cp={ranks} must divide the sequence of {shape[1]} tokens")
            shape[1] //= ranks
        first = tensor[tuple(slice(size) for size in (1, *shape[1:]))]
        return first.expand(shape).contiguous()

    return map_tensors(inputs, resize)


def _result_or_error(find: Callable[[nn.Module], T], model: nn.Module) -> T | str:
    try:
        return find(model)
    except ShardingError as error:
        return str(error)


@dataclass(frozen=True)
class Workload:
    """A training step to plan layouts for: the model, its inputs, and the settings that all layouts share."""

    model: nn.Module
    inputs: Inputs
    options: PlanOptions
    timing: Timing
    _cache: dict[Hashable, ShortStage] = field(default_factory=dict, repr=False)

    @cached_property
    def stages(self) -> PipelineStages | str:
        """How the model is split into pipeline stages, or the reason why that is unknown."""
        given = self.options.split_by
        return _result_or_error(find_stages, self.model) if given is None else given

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
        """How tp splits the layers, or the reason why that is unknown."""
        return self.options.shard_by or _result_or_error(find_sharding, self.model)

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is available: the model has a plan for it, and `shard_by` is not given."""
        found = _result_or_error(partial(find_sharding, sequence=True), self.model)
        return self.options.shard_by is None and not isinstance(found, str)

    def plan(self, candidate: Candidate) -> StepPlan:
        """Plan a step of all pipeline ranks in a layout; raises the errors of `plan_step`."""
        args, kwargs = resize_inputs(self.inputs, batch=candidate.micro_batch, ranks=candidate.size("cp"))
        options = replace(self.options, **candidate.plan_options())
        return StepPlan(plan_ranks(self.model, args, kwargs, options, whole_pipeline=True, cache=self._cache))

    def measure(self, layout: Candidate) -> MicrobatchCost:
        """Return the cost of a microbatch, from the plan of a layout that `Candidate.measured_on` returned."""
        (plan,) = self.plan(layout).ranks
        program = read_step([plan], fused=self.timing.fused)
        items = (item for part in program.programs for item in part.items if isinstance(item, Collective))
        axis = next(axis for axis in map(_axis_of, items) if "fsdp" in axis.split("+"))
        ranks = tuple(tuple(item for item in actions if item[0].kind != "optimizer") for actions in program.ranks)
        alone = replace(program, ranks=ranks).with_groups({axis: ProcessGroupSpec("", 1, axis, 0, 1)}, program.places)
        timeline = plan.memory(granularity=1)
        shards = layout.size("fsdp") * layout.size("cp")
        forward = plan.step.pass_of(Action("forward", 0, 0))
        length = forward.end - forward.begin  # the step's first events
        at_end = timeline.at(len(timeline.trace.events or ()) - 1).by_kind
        after_forward = [block for block in timeline.blocks if 0 <= block.begin < length and block.is_alive(length - 1)]
        activations = [block for block in after_forward if block.kind == "activation"]
        kept = sum(block.nbytes for block in activations if block.module.startswith(f"{self.blocks}."))
        first, layers, last = self._time_parts(alone)
        return MicrobatchCost(
            seconds=alone.simulate(self.timing.timer(), self.timing.network).seconds,
            first=first,
            layer=layers / max(1, self.layers),
            last=last,
            gathered=_payload(program, "all_gather", axis),
            reduced=_payload(program, "reduce_scatter", axis),
            states=sum(at_end[kind] for kind in _STATES) * shards,
            optimizer=at_end["optimizer state"] * shards,
            kept=kept / self.layers if self.layers else 0.0,
            moments=_find_moments(timeline, shards),
            settings=plan.settings,
        )

    def _time_parts(self, program: StepProgram) -> tuple[float, float, float]:
        """Return the seconds of kernels and collectives in the first stage's modules, in all layers, in the rest."""
        if isinstance(self.stages, str):
            return 0.0, 0.0, 0.0
        timer, sums = self.timing.timer(), [0.0, 0.0, 0.0]
        prefixes = {f"{self.blocks}.": 1, **{f"{name}.": 0 for name in self.stages.first}}

        def add(module: str, seconds: float) -> None:
            sums[next((part for prefix, part in prefixes.items() if f"{module}.".startswith(prefix)), 2)] += seconds

        for _, index in program.ranks[0]:
            launches = program.programs[index].launches
            seconds = [timer.seconds(launch.kernel) * (not launch.op.startswith("fsdp::")) for launch in launches]
            for item in program.programs[index].items:
                if isinstance(item, Run):
                    for number in item.items:
                        add(launches[number].module, seconds[number])
                elif isinstance(item, Collective):
                    add(item.module, time_collective(item, timer.efficiency, self.timing.network))
        return sums[0], sums[1], sums[2]

    @gc_paused()
    def evaluate(self, candidate: Candidate, limit: float | None) -> LayoutResult:
        """Plan a layout and return its time and memory; only its time if it reaches a limit in seconds."""
        step, timing = self.plan(candidate), self.timing
        program = read_step(step.ranks, fused=timing.fused, bucket_cap_mb=timing.bucket_cap_mb)
        seconds = program.simulate(timing.timer(), timing.network).seconds + timing.efficiency.step
        if limit is not None and seconds >= limit:
            return LayoutResult(candidate=candidate, status="slower", seconds=seconds)
        peak = max(memory.reserved for memory in read_memories(step.ranks))
        reason = describe_shortage(peak, timing.device, candidate.mesh)
        if reason:
            return LayoutResult(candidate=candidate, status="does not fit", reason=reason, seconds=seconds, peak=peak)
        estimate = estimate_program(step.ranks, program, timing)
        figures = {name: getattr(estimate, name) for name in _FIGURES}
        return LayoutResult(candidate=candidate, status="fits", peak=peak, **figures)


def describe_shortage(nbytes: int, device: Device, mesh: Mapping[str, int], *, at_least: bool = False) -> str:
    """Return "needed of available" memory if bytes do not fit a device, "" if they do or its memory is unknown."""
    if device.memory is None or judge(nbytes, device, mesh).fits:
        return ""
    return f"{'at least ' if at_least else ''}{format_bytes(nbytes)} of {format_bytes(device.memory)}"


@dataclass(frozen=True, slots=True)
class MicrobatchCost:
    """The cost of a microbatch on a rank that has all layers.

    `seconds` is the time of its passes without FSDP2's collectives. Kernels and other collectives take `first` in the
    modules of the first pipeline stage, `layer` in each layer, and `last` in the rest, which is in the last stage.
    FSDP2 sends `gathered` bytes of parameters and `reduced` bytes of gradients in each pass. `states` are the bytes of
    parameters, gradients and optimizer state over all ranks that share them, `optimizer` of the state alone. `kept` is
    a lower bound of the bytes of activations that a layer's forward pass saves. `moments` are bytes allocated at the
    same time: states over all ranks, everything else, and everything else except FSDP2's buffers. `settings` are the
    plan's.
    """

    seconds: float
    first: float
    layer: float
    last: float
    gathered: int
    reduced: int
    states: int
    optimizer: int
    kept: float
    moments: tuple[tuple[int, int, int], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def extrapolate(self, smaller: MicrobatchCost, size: int, own_size: int, larger_size: int) -> MicrobatchCost:
        """Return the cost with the least times of a larger microbatch, from the cost of a smaller one.

        The time is about linear in the number of samples; `_GROWTH` allows for larger kernels' better use of a GPU.
        """
        share = _GROWTH * (larger_size - own_size) / (own_size - size)
        names = ("seconds", "first", "layer", "last")
        known = [(name, getattr(self, name), getattr(smaller, name)) for name in names]
        return replace(self, **{name: own + share * max(0.0, own - before) for name, own, before in known})


def _find_moments(timeline: MemoryTimeline, shards: int) -> tuple[tuple[int, int, int], ...]:
    """Return the moments of a MicrobatchCost, without those at which no more is allocated than at others."""
    most: dict[int, tuple[int, int]] = {}
    curves = [timeline.curve(kind) for kind in (None, "communication", *_STATES)]
    for total, buffers, *states in zip(*curves, strict=True):
        others, known = total - sum(states), most.get(sum(states), (0, 0))
        most[sum(states)] = max(known[0], others), max(known[1], others - buffers)
    moments: list[tuple[int, int, int]] = []
    for state, (others, unbuffered) in sorted(most.items(), reverse=True):
        if not moments or others > max(item[1] for item in moments) or unbuffered > max(item[2] for item in moments):
            moments.append((state * shards, others, unbuffered))
    return tuple(moments)


def _axis_of(item: Collective) -> str:
    return "" if item.call.group is None else item.call.group.axis


def _payload(program: StepProgram, collective: str, axis: str) -> int:
    """Return the bytes of a collective along an axis in a pass, the maximum of all passes: FSDP2 may gather twice."""
    passes = ([item for item in part.items if isinstance(item, Collective)] for part in program.programs)
    found = ([item.call for item in items if _axis_of(item) == axis] for items in passes)
    return max(sum(call.payload for call in calls if call.collective == collective) for calls in found)


def least_seconds(candidate: Candidate, cost: MicrobatchCost, layers: int, timing: Timing) -> float:
    """Return a lower bound of the time of a layout's step, assuming overlapped communication.

    It is the larger of two times: the passes of all microbatches with the schedule's smallest bubble, and FSDP2's
    collectives, one after the other.
    """
    collectives = _collective_seconds(candidate, cost, timing.network)
    passes = candidate.microbatches * cost.seconds
    if candidate.schedule:
        # The first stage gathers before its first pass, and reduces after its last.
        passes = _pipeline_seconds(candidate, cost, layers) + collectives / candidate.stages_per_rank
    return max(passes, collectives) + timing.efficiency.step


def _pipeline_seconds(candidate: Candidate, cost: MicrobatchCost, layers: int) -> float:
    """Return the time of all microbatches' kernels on the pipeline rank that ends last, with waits for others."""
    ranks = candidate.size("pp")
    stages = [cost.layer * count for count in divide_layers(layers, ranks * candidate.stages_per_rank)]
    stages[0] += cost.first
    stages[-1] += cost.last
    work = [0.0] * ranks
    for stage, seconds in enumerate(stages):
        work[rank_of_stage(candidate.schedule, stage, ranks)] += candidate.microbatches * seconds
    has_bubble = not find_schedule(candidate.schedule).splits_backward
    return max(work[rank] + sum(stages[:rank]) * has_bubble for rank in range(ranks))


def _collective_seconds(candidate: Candidate, cost: MicrobatchCost, network: Network | None) -> float:
    shards = candidate.size("fsdp") * candidate.size("cp")
    if network is None or candidate.size("fsdp") == 1:
        return 0.0
    group = ProcessGroupSpec("", shards, "fsdp", 0, candidate.size("tp"))
    stages = candidate.size("pp")
    gather = network.seconds("all_gather", cost.gathered // stages, group)
    reduce = network.seconds("reduce_scatter", cost.reduced // stages, group)
    if stages > 1:
        return gather + reduce
    return candidate.microbatches * (gather * (2 if candidate.reshard else 1) + reduce)


def least_peak(candidate: Candidate, cost: MicrobatchCost, layers: int) -> int:
    """Return a lower bound of a layout's peak memory on any rank: states, and activations of the layers in flight.

    Without stages FSDP2 runs each microbatch as it was recorded, except for shards of another size and, where it
    gathers parameters again, smaller buffers. With stages it keeps gathered parameters and whole gradients for a step.
    """
    shards = candidate.size("fsdp") * candidate.size("cp") if candidate.size("fsdp") > 1 else 1
    stages, per_rank = candidate.size("pp"), candidate.stages_per_rank
    passes = _passes_in_flight(candidate)
    activations = math.floor(cost.kept * passes * (layers // (stages * per_rank)))
    states = cost.states
    if candidate.optimizer_sharding != "none":
        states -= math.floor(cost.optimizer * (1 - 1 / count_shares(candidate.mesh, "tokens")))
    least = states // (stages * shards) + activations
    if candidate.size("fsdp") == 1:
        return least
    if stages == 1:
        return max(least, *(moment[0] // shards + moment[2 if candidate.reshard else 1] for moment in cost.moments))
    # There are no sharded gradients before the end of the step; torch gathers up to 3 stages at once.
    states = (cost.states - cost.reduced) // (stages * shards)
    gathered = cost.gathered * min(per_rank, 3) // (stages * per_rank)
    gradients = cost.reduced // (stages * per_rank)
    # Gradients and as many activations coexist, unless all passes are in flight at once.
    with_activations = activations + gradients * (passes < candidate.microbatches * per_rank)
    return states + gathered + max(with_activations, gradients)


def _passes_in_flight(candidate: Candidate) -> int:
    """Return how many forward passes' activations the first pipeline rank has at once, of all its stages, at least."""
    ranks, per_rank = candidate.size("pp"), candidate.stages_per_rank
    passes = candidate.microbatches * per_rank
    if candidate.schedule == "interleaved":
        return min(passes, 2 * (ranks - 1) + (per_rank - 1) * ranks + 1)
    return min(passes, ranks) if candidate.schedule == "1f1b" else 1
