"""`fvflops plan --search`: the layouts of a training run on a number of GPUs."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from fvflops.capture.model.input_specs import parse_input
from fvflops.cli.argument_values import refuse
from fvflops.cli.parser import add_options
from fvflops.cli.planning.accelerator import choose_efficiency, choose_network
from fvflops.cli.planning.planned_estimate import find_classes
from fvflops.cli.planning.step_options import AXIS_OF, typed_settings
from fvflops.cli.progress import Progress
from fvflops.devices.devices import Device
from fvflops.plan.plan_options import PlanOptions
from fvflops.plan.search.candidates import CHOICES, Candidate
from fvflops.plan.search.layout_search import search_layouts
from fvflops.plan.search.search_report import search_report
from fvflops.reports.document import Document
from fvflops.sources.loaded_model import LoadedModel, with_input_hint

# Options of one layout, which a search chooses or does not show.
CHOSEN = (
    *("mesh", "rank", "microbatches", "schedule", "stages_per_rank", "stage_layers", "sequence_parallel"),
    *("reshard_after_forward", "checkpoint", "batch", "optimizer_sharding", "gradient_dtype"),
    *("trace", "tokens", "price", "watts", "depth", "step_time"),
)
# Options of one layout that apply to every layout of a search.
KEPT = (
    *("input", "seq", "image_size", "dtype", "denoising_steps", "guidance", "assume"),
    *("config", "task", "adapter", "trust_remote_code", "arg", "path", "trust_file"),
    *("shard", "reduce_each_microbatch", "routing", "precision", "optimizer", "master_weights", "loss", "offload"),
    *("device", "network", "efficiency", "fused", "bucket_cap_mb"),
)
# Options of a plan that all layouts of a search have.
_OF_ALL_LAYOUTS = (
    *("shard_by", "reduce_each_microbatch", "routing", "offload", "assume", "table"),
    *("optimizer", "precision", "loss"),
)
_BEST = 20


def add_search(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
        search:
        --search  instead of one layout, find the fastest that fit --gpus of --device for --global-batch
        --gpus N  number of GPUs
        --global-batch N  samples in a step of all GPUs
        --choices NAME=A,B ...  values to try, of {", ".join(CHOICES)}, such as tp=4,8 or checkpoint=none,full;
            may be repeated
        --best N  layouts that are shown; default: {_BEST}
        --jobs N  processes of a search; default: one for each core
        """,
        type=dict.fromkeys(("gpus", "global_batch", "best", "jobs"), int),
    )


def check_search(arguments: argparse.Namespace, accelerator: Device | None) -> None:
    """Raise ValueError for options that a search, or one layout, does not have."""
    refuse(
        arguments,
        (not arguments.search, ("gpus", "global_batch", "choices", "best", "jobs"), "{} is for a search: add --search"),
        (arguments.search, CHOSEN, "a search chooses {}: omit it, or limit what is tried by --choices"),
    )
    if not arguments.search:
        if arguments.mesh is None:
            raise ValueError("a plan needs --mesh, such as --mesh fsdp=8, or --search with --gpus and --global-batch")
        return
    for name in ("gpus", "global_batch", "device"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--search needs {_option(name)}: such as --gpus 64 --global-batch 512 --device H100")
    if accelerator is None:
        got = arguments.device
        raise ValueError(f"--search needs an accelerator, such as --device H100; got the torch device {got}")


def describe_command(arguments: argparse.Namespace, candidate: Candidate) -> str:
    """Return the command that plans one layout of a search in full."""
    words = ["fvflops", "plan", arguments.model]
    for name in KEPT:
        value = getattr(arguments, name)
        if value is None or AXIS_OF.get(name, "") not in ("", *candidate.mesh):
            continue
        if name == "image_size":
            value = "x".join(map(str, value))
        if name == "seq":
            value //= candidate.size("cp")
        if name == "input":
            value = [_of_a_rank(text, candidate) for text in value]
        if name == "reduce_each_microbatch" and not value:
            words.append("--no-reduce-each-microbatch")
        elif isinstance(value, bool):
            words += [_option(name)] * value
        else:
            for item in value if isinstance(value, list) else [value]:
                words += [_option(name), str(item)]
    options = candidate.command()
    if arguments.input:  # have the size of the batch themselves
        options = options.replace(f" --batch {candidate.micro_batch}", "")
    return shlex.join([*words, *shlex.split(options)])


def _of_a_rank(text: str, candidate: Candidate) -> str:
    """Return an `--input` with the samples of a microbatch and a rank's part of the sequence.

    >>> _of_a_rank("ids=1,128:int64", Candidate({"fsdp": 2, "cp": 4}, 8, 1))
    'ids=8,32:int64'
    """
    spec = parse_input(text)
    sizes = [candidate.micro_batch, *spec.shape[1:]]
    if len(sizes) == 2 and not getattr(torch, spec.dtype).is_floating_point:
        sizes[1] //= candidate.size("cp")
    return f"{spec.name}=" * (spec.name is not None) + f"{','.join(map(str, sizes))}:{spec.dtype}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parse_choices(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Parse `--choices`: return name → choices to try.

    >>> parse_choices(["tp=4,8", "checkpoint=none,full"])
    {'tp': [4, 8], 'checkpoint': ['none', 'full']}
    """
    choices: dict[str, list[Any]] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        if not separator or not values or name in choices:
            raise ValueError(f"--choices {text}: write each NAME=A,B once, such as tp=4,8")
        choices[name] = [int(value) if value.isdecimal() else value for value in values.split(",")]
    return choices


def search_arguments(
    subject: LoadedModel, arguments: argparse.Namespace, accelerator: Device, options: PlanOptions
) -> Document:
    """Search with the arguments' options, and return the report; show the progress on a terminal."""
    bar, totals = Progress(), dict[str, int]()

    def show(what: str, left: int) -> None:
        total = totals.setdefault(what, left + 1)
        bar.show(max(total - left, 0), total, noun="recording" if what == "recording" else "layout, at most,")

    settings = {
        **{name: getattr(options, name) for name in _OF_ALL_LAYOUTS},
        "gpus": arguments.gpus,
        "global_batch": arguments.global_batch,
        "kwargs": subject.kwargs,
        "device": accelerator,
        "kernels": options.device,
        "bucket_cap_mb": arguments.bucket_cap_mb,
        "network": choose_network(arguments.network),
        "efficiency": choose_efficiency(arguments, accelerator),
        "fused": find_classes(subject, arguments.fused),
        "best": _BEST if arguments.best is None else arguments.best,
        "jobs": (os.cpu_count() or 1) if arguments.jobs is None else arguments.jobs,
        "on_progress": show,
    }
    try:
        choices = parse_choices(arguments.choices)
        search = with_input_hint(
            subject, lambda: search_layouts(subject.model, subject.inputs, choices=choices, **settings)
        )
    finally:
        bar.clear()
    loss = typed_settings(arguments, options.loss)["loss"]
    search = replace(search, settings={**search.settings, "loss": loss})
    commands = [describe_command(arguments, result.candidate) for result in search.best(1)]
    return search_report(search, name=arguments.model, command="".join(commands))
