"""`fvflops memory`: the predicted memory of a training step, its peak, and what lowers the peak."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.training_step_analysis import TrainingStepAnalysis
from fvflops.cli import shared_options
from fvflops.cli.argument_values import refuse
from fvflops.cli.draws import describe_draws, repeat
from fvflops.cli.outputs import write, write_report
from fvflops.cli.parser import add_options, find_group
from fvflops.cli.planning import step_options
from fvflops.cli.planning.accelerator import find_accelerator, find_capacity, kernels_emulated, kernels_of
from fvflops.cli.planning.planned_estimate import load_step
from fvflops.cli.progress import activity
from fvflops.devices.devices import Device
from fvflops.formulas import load_table
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.memory_report import (
    DEPTH,
    MemoryPrediction,
    MemorySavings,
    draw_memory,
    memory_report,
    memory_title,
)
from fvflops.plan.memory.memory_savings import find_head, memory_savings
from fvflops.plan.memory.offload import check_offload, describe_offload
from fvflops.plan.memory.predict_memory import predict_drawn_memory, predict_memory
from fvflops.plan.memory.step_settings import Verdict
from fvflops.plan.memory.storage_lifetimes import HOST_DEVICE, MemoryTimeline, read_memory
from fvflops.plan.plan_options import PlanOptions
from fvflops.plan.plans import savings_of_rank
from fvflops.plan.rank_plan import plan_ranks
from fvflops.plan.sharding.fully_sharded import find_precision
from fvflops.plan.step_time.step_time_report import judge
from fvflops.reports.formats import DATA_FORMATS
from fvflops.sources.loaded_model import LoadedModel, cast_inputs, with_input_hint
from fvflops.units import format_bytes

EXAMPLES = (
    "fvflops memory zoo:resnet50 --batch 64",
    "fvflops memory zoo:gpt2 --dtype bf16 --optimizer sgd --no-savings",
    "fvflops memory zoo:resnet50 --inference --device 24GB",
)
FIRST = ("--batch", "--seq", "--device", "--optimizer", "--checkpoint")
RARE = ("--convention", "--table", "--sequence-parallel", "--schedule")
# The memory, a function that finds its savings, and notes on estimates.
Predicted = tuple[MemoryPrediction, Callable[[], MemorySavings | None], Sequence[str]]
# Options for a rank of a mesh.
_OF_A_MESH = (
    *("rank", "shard", "sequence_parallel", "schedule", "stages_per_rank", "stage_layers"),
    *("reshard_after_forward", "reduce_each_microbatch", "routing", "optimizer_sharding", "gradient_dtype"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser)
    shared_options.add_model(parser, shape="shape of an input of one rank and microbatch")
    step = find_group(parser, "training step")
    step_options.add_step(step, default="AdamW")
    add_options(
        step,
        """
        --first-step  predict the first step, which creates the optimizer's state
        --inference  predict a forward pass in eval mode without gradients instead
        """,
    )
    shared_options.add_repeat(step, "peak memory")
    add_options(
        step,
        """
        --device DEVICE  device whose kernels and allocator are simulated: cpu, or cuda (needs no GPU), or an
            accelerator such as H100, or the memory of a GPU such as 24GB, of which the report says whether the peak
            fits
        """,
    )
    shared_options.add_mesh(parser)
    add_options(parser, "report:\n--no-savings  do not predict what would lower the peak")
    shared_options.add_depth(parser, help=f"deepest module level shown; default: {DEPTH}, in csv and json all")
    shared_options.add_report(parser, more={"svg": "the curve as a picture"})


def run(arguments: argparse.Namespace) -> int:
    """Predict the memory of the model that the arguments name and write the report; return the exit code."""
    table = load_table(arguments.table)
    step_options.check_optimizer(arguments, "AdamW")
    capacity = find_capacity(arguments.device)
    accelerator = find_accelerator(arguments.device) if capacity is None else None
    _check(arguments)
    planned = None if arguments.mesh is None else step_options.read_plan_options(arguments, table)
    has_bf16 = capacity is not None or (accelerator is not None and "bf16" in accelerator.matrix)
    subject, autocast = _load(arguments, has_bf16=has_bf16, for_rank=planned is not None)
    loss = step_options.choose_loss(arguments, subject.model)
    choose = step_options.find_checkpointed_names if planned is None else step_options.find_policy
    step: dict[str, Any] = {
        "loss": loss,
        "optimizer": step_options.make_optimizer(arguments, "AdamW", subject.model),
        "checkpoint": choose(subject, arguments.checkpoint),
        "device": "cuda" if capacity is not None else kernels_of(accelerator, arguments.device),
    }
    of_one_device = {"assume": step_options.read_assumptions(arguments), "table": table}
    explained = step_options.chunked_loss_explained(arguments)
    with activity(f"predicting the memory of {arguments.model}"), kernels_emulated(accelerator), explained:
        if arguments.inference:
            predicted = _predict_forward(subject, {**of_one_device, "device": step["device"]}, arguments)
        elif planned is None:
            predicted = _predict_step(subject, {**step, **of_one_device, "autocast": autocast}, arguments)
        else:
            options = replace(planned, precision=arguments.precision, **step)
            predicted = _predict_rank(subject, options, first_step=arguments.first_step)
    timeline, find, notes = predicted
    typed = {} if arguments.inference else step_options.typed_settings(arguments, loss)
    timeline = replace(timeline, settings={**timeline.settings, **typed})
    device = Device("the device", {"bf16": 1}, memory=capacity, vendor="NVIDIA") if capacity else accelerator
    verdict, reserved = _judge(timeline, device, {} if planned is None else planned.mesh)
    if arguments.format == "svg":
        write(draw_memory(timeline, memory_title(timeline, arguments.model)), arguments.output)
        return 0
    with activity(f"trying what lowers the peak of {arguments.model}"), kernels_emulated(accelerator):
        savings = None if arguments.inference or arguments.no_savings else find()
    if savings is not None and arguments.loss is None and step_options.find_vocabulary(subject.model) is not None:
        head = find_head(subject.model)
        if isinstance(head, nn.Linear) and head.bias is None:  # a language model's loss can need less memory
            savings = replace(savings, untried=(*savings.untried, "--loss chunked"))
    for_data = arguments.format in DATA_FORMATS
    report = memory_report(
        timeline,
        savings=savings,
        depth=DEPTH if arguments.depth is None and not for_data else arguments.depth,
        collapsed=not for_data,
        subject=arguments.model,
        verdict=verdict,
        command=step_options.repeat_command(arguments, None if arguments.inference else "AdamW"),
        notes=[*reserved, *_describe_paged(timeline, arguments), *notes],
    )
    write_report(report, arguments)
    return 0


def _judge(timeline: MemoryTimeline, device: Device | None, mesh: Mapping[str, int]) -> tuple[Verdict, list[str]]:
    """Return whether the device has the memory, and how much of it the allocator reserves."""
    if device is None:
        return Verdict(timeline.peak, advice="Add --device, such as H100 or 24GB."), []
    reserved, otherwise = (reserved_memory(timeline, expandable_segments=with_them).peak for with_them in (True, False))
    note = (
        f"For a peak of {format_bytes(timeline.peak)} torch's allocator reserves {format_bytes(reserved)}, simulated "
        f"with expandable segments; without them {format_bytes(otherwise)}."
    )
    return judge(reserved, device, mesh, tensors=timeline.peak), [note]


def _load(arguments: argparse.Namespace, *, has_bf16: bool, for_rank: bool) -> tuple[LoadedModel, torch.dtype | None]:
    """Return the model, of one process in its precision, and the data type of its autocast."""
    subject = load_step(arguments, has_bf16=has_bf16, training=not arguments.inference)
    precision = None if for_rank else find_precision(arguments.precision)
    if precision is None:
        return subject, None
    subject.model.to(precision.parameters)
    return cast_inputs(subject, precision.parameters), None if precision.is_uniform else precision.compute


def _check(arguments: argparse.Namespace) -> None:
    of_training = ("checkpoint", "master_weights", "loss", "offload", "first_step")
    refuse(arguments, (arguments.inference, of_training, "{} is for a training step: omit it, or --inference"))
    if arguments.inference:
        if step_options.find_optimizer(arguments.optimizer or step_options.NO_OPTIMIZER) is not None:
            raise ValueError("--optimizer is for a training step: omit it, or --inference")
        if arguments.mesh is not None or arguments.microbatches != 1:
            raise ValueError("--mesh and --microbatches are for a training step: omit them, or --inference")
    check_offload(arguments.offload)
    if arguments.repeat is not None and arguments.mesh is not None:
        raise ValueError("--repeat runs the model on one device: omit it, or --mesh")
    if arguments.first_step and (arguments.optimizer or "").lower() == step_options.NO_OPTIMIZER:
        raise ValueError("--first-step creates the state of an optimizer: omit it, or --optimizer none")
    refuse(
        arguments,
        (
            arguments.table != "default",
            ("inference", "no_savings"),
            "--convention counts the FLOPs of what lowers the peak: omit it, or {}",
        ),
        (arguments.mesh is None, _OF_A_MESH, "{} is for a rank of a mesh: add --mesh, such as fsdp=8"),
        (arguments.format == "svg", ("depth", "sort", "top"), "{} does not apply to --format svg: omit it"),
    )


def _describe_paged(timeline: MemoryTimeline, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield how much state of a paged optimizer is outside of the accelerator's allocator."""
    if not getattr(step_options.find_optimizer(arguments.optimizer or "none"), "is_paged", False):
        return
    if nbytes := sum(row.nbytes for row in timeline.trace.storages if row.device == HOST_DEVICE):
        yield (
            f"{format_bytes(nbytes)} of the optimizer's state are in paged memory, not in the peak: the driver keeps "
            "them on the device while there is room, else on the host."
        )
    elif timeline.device.startswith("cpu"):
        yield "Paged memory is an accelerator's: on the CPU the optimizer's state is in the peak."


def _predict_forward(subject: LoadedModel, step: dict[str, Any], arguments: argparse.Namespace) -> Predicted:
    settings = {"kwargs": subject.kwargs, "execution": "shapes", "warn": False, **step}
    forward = FlopCountAnalysis(subject.model, subject.inputs, **settings)
    timeline = with_input_hint(subject, lambda: predict_memory(forward))
    return timeline, lambda: None, _repeat(forward, arguments)


def _predict_step(subject: LoadedModel, step: Mapping[str, Any], arguments: argparse.Namespace) -> Predicted:
    settings = {"kwargs": subject.kwargs, "micro_batches": arguments.microbatches, "warn": False, **step}
    analysis = TrainingStepAnalysis(subject.model, subject.inputs, **settings)
    options = {"first_step": arguments.first_step, "offload": arguments.offload}
    timeline = with_input_hint(subject, lambda: predict_memory(analysis, **options))
    notes = [f"{text}." for text in describe_offload(read_memory(timeline.trace), arguments.offload)]
    return timeline, lambda: memory_savings(analysis, **options), [*notes, *_repeat(analysis, arguments)]


def _repeat(analysis: FlopCountAnalysis, arguments: argparse.Namespace) -> list[str]:
    if arguments.repeat is None:
        return []
    measure = partial(predict_drawn_memory, analysis, first_step=arguments.first_step)
    peaks = repeat(analysis, arguments.repeat, lambda: measure().peak)
    return [f"Peak memory of {describe_draws(peaks, 'bytes')}."]


def _predict_rank(subject: LoadedModel, options: PlanOptions, *, first_step: bool) -> Predicted:
    args, kwargs = subject.inputs, subject.kwargs
    (plan,) = with_input_hint(subject, lambda: plan_ranks(subject.model, args, kwargs, options))
    notes = [
        *(f"Estimated: {part}." for part in plan.estimated_memory),
        *(f"Not included: {part}." for part in plan.left_out),
        *(f"{text}." for text in plan.describe_offload()),
    ]
    find = partial(savings_of_rank, subject.model, args, kwargs, options, first_step=first_step)
    return plan.memory(first_step=first_step), find, notes
