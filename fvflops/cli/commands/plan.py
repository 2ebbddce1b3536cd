"""`fvflops plan`: work, memory, communication and time of a training step on a mesh of ranks."""

from __future__ import annotations

import argparse
from dataclasses import replace

from fvflops import paths
from fvflops.cli import shared_options
from fvflops.cli.argument_values import parse_amount, refuse
from fvflops.cli.outputs import write_ordered, write_report
from fvflops.cli.parser import add_options, find_group
from fvflops.cli.planning import step_options
from fvflops.cli.planning.accelerator import find_accelerator, kernels_emulated
from fvflops.cli.planning.planned_estimate import estimate_training, load_training
from fvflops.cli.planning.search_options import add_search, check_search, search_arguments
from fvflops.cli.progress import activity
from fvflops.devices.devices import Device
from fvflops.formulas import FormulaTable, load_table
from fvflops.plan.plan_options import PlanOptions
from fvflops.plan.plan_report import plan_report
from fvflops.plan.rank_plan import plan_ranks
from fvflops.plan.step_time.buckets import check_bucket_cap
from fvflops.plan.step_time.calibration import load_networks
from fvflops.plan.step_time.step_tables import write_step_trace
from fvflops.plan.step_time.step_time_report import estimate_report
from fvflops.sources.loaded_model import LoadedModel, with_input_hint

EXAMPLES = (
    "fvflops plan zoo:llama3_8b --mesh dp=8,tp=8",
    "fvflops plan zoo:llama3_8b --mesh pp=4,fsdp=8 --microbatches 8",
    "fvflops plan zoo:llama3_8b --mesh fsdp=64 --device H100 --tokens 1e12",
    "fvflops plan zoo:llama3_8b --search --gpus 64 --global-batch 256 --device H100",
)
FIRST = ("--mesh", "--device", "--batch", "--seq", "--checkpoint")
RARE = ("--convention", "--table", "--image-size", "--master-weights", "--loss", "--offload", "--sort")
_OPTIMIZER = "AdamW"  # default
_NEED_TOKENS = ("price", "watts")
_NEED_DEVICE = (
    *("network", "efficiency", "fused", "bucket_cap_mb"),
    *("tokens", "price", "watts", "trace", "depth", "step_time"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser)
    shared_options.add_model(
        parser,
        shape="shape of an input of one rank (its share of the batch, with cp also of the sequence) and microbatch",
    )
    shared_options.add_mesh(parser)
    add_search(parser)
    step_options.add_step(find_group(parser, "training step"), default=_OPTIMIZER)
    _add_time(parser)
    shared_options.add_depth(
        parser, help="with a DEVICE: deepest module level shown; default: 3, rows of at least 1%% of the time"
    )
    shared_options.add_report(parser)


def _add_time(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
        time:
        --device DEVICE  accelerator of each rank, for the time of a step: a name such as H100, FILE.yaml or
            FILE.yaml:NAME; with cpu or cuda, the kernels of that torch device and no time
        --network NAME  links within and among nodes: {", ".join(load_networks())}, or FILE.yaml:NAME; default: the
            entry of networks.yaml that names the device
        --efficiency NAME  speed of kernels and launches: a software stack such as "MPT 2023", or FILE.yaml[:NAME];
            default: the newest software stack
        --fused CLASS ...  class of modules whose ops, other than products, run as one kernel for each call; may be
            repeated
        --bucket-cap-mb N  MiB of the buckets of gradients that DDP reduces during the last backward pass, 0 for all
            after it; default: DDP's, 1 for the first and 25 for the others
        --tokens N  tokens of the whole training, such as 15e12
        --step-time S  measured seconds of a step, for its MFU
        --price X  price of a GPU hour, for the cost of --tokens
        --watts W  power of a GPU, for the energy of --tokens
        additional files:
        --trace PATH  a timeline of the simulated ranks for Perfetto, in Chrome's trace format
        """,
        type={"bucket_cap_mb": float, **dict.fromkeys(("tokens", "step_time", "price", "watts"), parse_amount)},
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan a training step of the model that the arguments name and write the report; return the exit code."""
    accelerator = find_accelerator(arguments.device)
    refuse(
        arguments,
        (accelerator is None, _NEED_DEVICE, "{} is for the time of a step: add --device, such as --device H100"),
        (arguments.tokens is None, _NEED_TOKENS, "{} is for a whole training: add --tokens, such as --tokens 15e12"),
    )
    check_search(arguments, accelerator)
    if arguments.bucket_cap_mb is not None:
        check_bucket_cap(arguments.bucket_cap_mb, name="--bucket-cap-mb")
    table = load_table(arguments.table)
    step_options.check_optimizer(arguments, _OPTIMIZER)
    options = step_options.read_plan_options(arguments, table)
    subject, options = load_training(arguments, accelerator, options, _OPTIMIZER)
    with kernels_emulated(accelerator), step_options.chunked_loss_explained(arguments):
        if arguments.search:
            assert accelerator is not None  # checked
            write_report(search_arguments(subject, arguments, accelerator, options), arguments)
        elif accelerator is None:
            _report_rank(subject, arguments, table, options)
        else:
            _report_step(subject, arguments, accelerator, options)
    return 0


def _report_rank(
    subject: LoadedModel, arguments: argparse.Namespace, table: FormulaTable, options: PlanOptions
) -> None:
    with activity(f"planning rank {arguments.rank} of {arguments.model}"):
        (plan,) = with_input_hint(subject, lambda: plan_ranks(subject.model, subject.inputs, subject.kwargs, options))
    plan = replace(plan, settings={**plan.settings, **step_options.typed_settings(arguments, options.loss)})
    command = step_options.repeat_command(arguments, _OPTIMIZER)
    write_report(plan_report(plan, table, name=arguments.model, command=command), arguments)


def _report_step(
    subject: LoadedModel, arguments: argparse.Namespace, accelerator: Device, options: PlanOptions
) -> None:
    estimate = estimate_training(subject, arguments, accelerator, options)
    first, *others = estimate.plans
    first = replace(first, settings={**first.settings, **step_options.typed_settings(arguments, options.loss)})
    estimate = replace(estimate, plans=(first, *others))
    if arguments.trace is not None:
        paths.write_text(arguments.trace, write_step_trace(estimate))
    cost = None
    if arguments.tokens is not None:
        cost = estimate.cost_to_train(arguments.tokens, price=arguments.price, watts=arguments.watts)
    with activity(f"predicting the memory of {arguments.model}"):
        report = estimate_report(
            estimate,
            name=arguments.model,
            cost=cost,
            measured=arguments.step_time,
            command=step_options.repeat_command(arguments, _OPTIMIZER),
            finder=f"fvflops memory {arguments.model} --mesh {arguments.mesh}",
            depth=arguments.depth,
            sort=arguments.sort,
            top=arguments.top,
            pictures=arguments.format == "html",
        )
    write_ordered(report, arguments.format, arguments.output)
