"""Load a model for training as options say, and estimate its planned step."""

from __future__ import annotations

import argparse
from dataclasses import replace

from fvflops.cli import shared_options
from fvflops.cli.planning import step_options
from fvflops.cli.planning.accelerator import choose_efficiency, choose_network, kernels_emulated, kernels_of
from fvflops.cli.progress import activity
from fvflops.devices.devices import Device
from fvflops.formulas import load_table
from fvflops.plan.plan_options import PlanOptions
from fvflops.plan.rank_plan import plan_ranks
from fvflops.plan.step_time.step_estimate import StepEstimate, estimate_step
from fvflops.sources.load import load_model
from fvflops.sources.loaded_model import LoadedModel, with_input_hint


def load_step(arguments: argparse.Namespace, *, has_bf16: bool, training: bool = True) -> LoadedModel:
    """Return the model of the arguments, without weights, in its mode; choose its precision for training."""
    with activity(f"loading {arguments.model}"):
        subject = load_model(arguments.model, shared_options.model_options(arguments, device="meta"))
    if training:
        step_options.prepare_training(subject)
    else:
        subject.train(False)
    step_options.choose_precision(arguments, subject.model, has_bf16=has_bf16 and training)
    return subject


def load_training(
    arguments: argparse.Namespace, accelerator: Device | None, options: PlanOptions, optimizer: str
) -> tuple[LoadedModel, PlanOptions]:
    """Return the model of the arguments in training mode, and the options of its plan; `optimizer` is the default."""
    subject = load_step(arguments, has_bf16=accelerator is not None and "bf16" in accelerator.matrix)
    return subject, replace(
        options,
        precision=arguments.precision,
        loss=step_options.choose_loss(arguments, subject.model),
        optimizer=step_options.make_optimizer(arguments, optimizer, subject.model),
        checkpoint=step_options.find_policy(subject, arguments.checkpoint),
        device=kernels_of(accelerator, arguments.device),
    )


def estimate_training(
    subject: LoadedModel, arguments: argparse.Namespace, accelerator: Device, options: PlanOptions
) -> StepEstimate:
    """Return the estimated step of a loaded model."""
    network, efficiency = choose_network(arguments.network), choose_efficiency(arguments, accelerator)
    with activity(f"planning a step of {arguments.model}"):
        plans = with_input_hint(
            subject, lambda: plan_ranks(subject.model, subject.inputs, subject.kwargs, options, whole_pipeline=True)
        )
    with activity(f"simulating a step of {arguments.model}"):
        return estimate_step(
            plans,
            device=accelerator,
            network=network,
            efficiency=efficiency,
            fused=find_classes(subject, arguments.fused),
            bucket_cap_mb=arguments.bucket_cap_mb,
        )


def estimate_arguments(
    arguments: argparse.Namespace, accelerator: Device, optimizer: str
) -> tuple[LoadedModel, StepEstimate]:
    """Return the model of the arguments, and its estimated step."""
    step_options.check_optimizer(arguments, optimizer)
    options = step_options.read_plan_options(arguments, load_table("default"))
    subject, options = load_training(arguments, accelerator, options, optimizer)
    with kernels_emulated(accelerator), step_options.chunked_loss_explained(arguments):
        return subject, estimate_training(subject, arguments, accelerator, options)


def find_classes(subject: LoadedModel, names: list[str]) -> list[str]:
    """Return the qualified names of the classes of modules that `--fused` names."""
    found = map(subject.model.get_submodule, step_options.find_modules(subject, names, option="--fused"))
    return sorted({f"{cls.__module__}.{cls.__qualname__}" for cls in map(type, found)})
