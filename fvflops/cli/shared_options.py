"""Arguments shared by several commands, and the parsers of their values."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fvflops.cli.argument_values import parse_count, parse_depth, parse_sides, parse_trace_name
from fvflops.cli.parser import add_options, find_group
from fvflops.cli.planning.accelerator import parse_device
from fvflops.formulas import shipped_tables
from fvflops.plan.parallel_axes import AXES
from fvflops.plan.pipeline_schedules import SCHEDULES
from fvflops.plan.plan_options import OPTIMIZER_SHARDINGS
from fvflops.plan.sharding.fully_sharded import PRECISIONS
from fvflops.plan.sharding.optimizer_shards import GRADIENT_DTYPES
from fvflops.reports.formats import FORMATS
from fvflops.sources.imports import add_current_folder
from fvflops.sources.load import FORMS
from fvflops.sources.options import SourceOptions


def add_convention(parser: argparse.ArgumentParser, default: str | None = "default", *, note: str = "") -> None:
    """Add the convention, by name or as a file; `note` describes a default that is not one convention."""
    add_options(
        parser.add_mutually_exclusive_group(),
        f"""
        --convention CONVENTION  convention to count by: {", ".join(shipped_tables())}; default: {note or default}
        --table FILE  a convention of your own: the path or URI of a YAML file
        """,
        dest={"convention": "table"},
        default=dict.fromkeys(("convention", "table"), default),
        choices={"convention": shipped_tables()},
    )


def add_model(
    parser: argparse.ArgumentParser, *, nargs: str | None = None, shape: str = "shape of an input", assume: bool = True
) -> None:
    """Add MODEL, its inputs, and with `assume` the output sizes of data-dependent ops."""
    forms = ", ".join(FORMS.values())
    add_options(parser, f"model MODEL  {forms}; fvflops list SOURCE lists the names of each", nargs={"model": nargs})
    add_inputs(parser, shape=shape)
    if assume:
        add_assume(parser)


def add_inputs(parser: argparse.ArgumentParser, *, shape: str = "shape of an input") -> None:
    """Add the options of SourceOptions: a model's inputs, whose help starts with `shape`, and how it is built."""
    add_options(
        find_group(parser, "inputs"),
        f"""
        --input [NAME=]SHAPE[:DTYPE] ...  {shape}, such as 1,3,224,224 or input_ids=1,128:int64; once for each input
        --batch N  batch size of the default inputs
        --seq N  tokens of text in the default inputs, for encoder and decoder; image and audio tokens come on top
        --image-size N|HxW  height and width of the default inputs' images
        --dtype DTYPE  cast the model and its inputs: fp32, tf32 (stored as fp32), fp16, bf16 or fp64
        --denoising-steps N  steps of a diffusers pipeline; default: 1
        --guidance  double the denoiser's batch, for classifier-free guidance
        """,
        type={"image_size": parse_sides, **dict.fromkeys(("batch", "seq", "denoising_steps"), parse_count)},
    )
    add_building(parser)


def add_building(parser: argparse.ArgumentParser) -> None:
    """Add the options that build a MODEL."""
    add_options(
        find_group(parser, "building the model"),
        """
        --config JSON  configuration of a Hugging Face model: JSON text, a file, or a folder with config.json
        --task TASK  class of hf:MODEL by a task of transformers' pipelines, such as text-generation
        --adapter FOLDER  add a PEFT adapter, a folder with adapter_config.json
        --trust-remote-code  run the modelling code in the repository of hf:MODEL
        --arg NAME=VALUE ...  argument of FACTORY or of a library's constructor, or setting of a Hugging Face
            configuration, such as width=64: a Python literal or a string; may be repeated
        --path DIR ...  folder to import modules from; may be repeated
        --trust-file, --unpickle  load a program of torch.export, TorchScript or a pickled module (torch.save(model)),
            which can run code: only if you trust the file
        """,
    )


def model_options(
    arguments: argparse.Namespace, *, inputs: Sequence[str] | None = None, device: str | None = None
) -> SourceOptions:
    """Return the options that build the arguments' MODEL, on a device; `inputs` defaults to the arguments'."""
    names = ("batch", "seq", "image_size", "dtype", "denoising_steps", "guidance")
    sizes = {name: getattr(arguments, name) for name in names}
    inputs = tuple(arguments.input if inputs is None else inputs)
    return replace(building_options(arguments), device=device, inputs=inputs, **sizes)


def building_options(arguments: argparse.Namespace) -> SourceOptions:
    """Return the options that build the arguments' MODEL, without its inputs, device and dtype."""
    return SourceOptions(
        **{name: getattr(arguments, name) for name in ("config", "task", "trust_remote_code")},
        args=tuple(arguments.arg),
        paths=tuple(map(os.path.abspath, arguments.path)),
        adapter=None if arguments.adapter is None else os.path.abspath(arguments.adapter),
        trust=arguments.trust_file,
    )


def add_assume(parser: argparse.ArgumentParser) -> None:
    """Add the output sizes of data-dependent ops."""
    add_options(
        find_group(parser, "inputs"),
        """
        --assume OP=SIZE ...  number of elements that a data-dependent op selects, such as aten::nonzero=100, or their
            fraction, such as 0.5; may be repeated
        """,
    )


def add_run(parser: argparse.ArgumentParser, *, runs_on: bool = True) -> None:
    """Add the device on which the model is built and, unless a command has its own, would run, execution and mode."""
    run = find_group(parser, "run")
    if runs_on:
        add_options(
            run,
            """
            --device DEVICE  device on which the model would run, whose kernels are counted (none is needed): cpu, cuda,
                or an accelerator such as H100; default: the model's device
            """,
            dest={"device": "run_device"},
            type={"device": parse_device},
        )
    build_on = "--build-on" if runs_on else "--build-on, --build"  # its name in version 1.0
    add_options(
        run,
        f"""
        {build_on} TORCH_DEVICE  torch device on which the model is built: cpu, cuda, or meta for no weights
        --execution  shapes: without values; real: with real tensors; auto (default): shapes, or real where values are
            needed
        --train  count the model in training mode, not in eval mode
        """,
        choices={"execution": ("auto", "shapes", "real")},
        default={"execution": "auto"},
    )


def add_backward(parser: argparse.ArgumentParser, loss: str = "the sum of the model's outputs") -> None:
    """Add the backward pass and its loss, which is `loss` by default."""
    add_options(
        find_group(parser, "run"),
        f"""
        --backward  include the backward pass; the loss is {loss}, or --loss
        --loss PATH:FUNCTION  function of the model's result that returns the loss; includes --backward
        """,
        action={"loss": _Loss},
    )


class _Loss(argparse.Action):
    """`--loss`, which includes `--backward`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.loss, namespace.backward = values, True


def add_repeat(group: argparse._ActionsContainer, what: str) -> None:
    """Add the number of draws over which the minimum, mean and maximum of `what` are reported."""
    text = f"--repeat N  for a model with random control flow: minimum, mean and maximum of the {what} over N draws"
    add_options(group, text, type={"repeat": parse_count})


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the mesh of ranks, the rank, and how the model is split."""
    of_ranks, of_experts = (
        [f"{name} ({axis.title})" for name, axis in AXES.items() if axis.regroups is regroups]
        for regroups in (False, True)
    )
    add_options(
        find_group(parser, "mesh of ranks"),
        f"""
        --mesh AXIS=N,...  sizes of the axes, outermost first: {", ".join(of_ranks)};
            {" and ".join(of_experts)} regroup these ranks
        --rank N  rank to plan; default: 0
        --shard PATH:FUNCTION  a function of (model, DeviceMesh of tp) that shards the model
        --sequence-parallel  shard the sequence over tp between the layers too
        --microbatches N  microbatches of a step; default: 1
        --schedule NAME  order of a pipeline's microbatches: {", ".join(SCHEDULES)}; default: 1f1b, or interleaved
        --stages-per-rank N  pipeline stages of each rank; default: the schedule's number
        --stage-layers N,N,...  layers of each pipeline stage; default: as equal as possible
        --reshard-after-forward  whether FSDP2 gathers parameters again for the backward pass; default: unless there
            are pipeline stages
        --reduce-each-microbatch  whether FSDP2 reduces gradients in each microbatch or only in the last; default: in
            each
        --optimizer-sharding AXIS  replicas, over dp (and cp), divide the optimizer's state and master weights (ZeRO-1,
            as Megatron-Core's distributed optimizer); default: each has all
        --gradient-dtype NAME  dtype of the buffers in which gradients are accumulated and then reduced, with
            --optimizer-sharding or --master-weights: {", ".join(GRADIENT_DTYPES)}; default: the parameters'
        --routing N,N,...  tokens of each expert of a mixture, in proportion; default: equal
        --precision NAME  dtypes of parameters, compute and gradient reduction: {", ".join(PRECISIONS)}; default:
            bf16-mixed for a float32 model on an accelerator that has bf16, else the model's
        """,
        type=dict.fromkeys(("rank", "microbatches", "stages_per_rank"), int),
        default={"rank": 0, "microbatches": 1, "reshard_after_forward": None, "reduce_each_microbatch": None},
        choices={
            "schedule": tuple(SCHEDULES),
            "precision": tuple(PRECISIONS),
            "optimizer_sharding": OPTIMIZER_SHARDINGS,
            "gradient_dtype": tuple(GRADIENT_DTYPES),
        },
        action=dict.fromkeys(("reshard_after_forward", "reduce_each_microbatch"), argparse.BooleanOptionalAction),
    )


def add_report(
    parser: argparse._ActionsContainer,
    *,
    more: Mapping[str, str] | None = None,
    sort: str = "a column, named as in --format csv, or by name",
    top: int | None = None,
    output: bool = True,
) -> None:
    """Add the report's format, `more` for this command, its order, by keys that `sort` describes, and its path."""
    group = find_group(parser, "report")
    formats = (*FORMATS, *(more or {}))
    names = ", ".join([*FORMATS, *(f"{name} ({note})" for name, note in (more or {}).items())])
    add_options(
        group,
        f"""
        --format FORMAT  {names}; default: by the suffix of --output, or text
        --sort KEY  rank rows by {sort}
        --top N  number of rows; default: {"all" if top is None else top}
        --digits N  significant digits in text, markdown and latex; default: 3, more if models would look equal
        {"--output PATH  file for the report, - for standard output; default: -" if output else ""}
        """,
        choices={"format": formats},
        type={"top": parse_count, "digits": parse_count},
        default={"top": top},
    )
    group.set_defaults(formats=formats)


def add_save_trace(files: argparse._ActionsContainer) -> None:
    uses = "for use as MODEL of count, compare, roofline, diff and check"
    text = f"additional files:\n--save-trace FILE  save the Trace as .json or .json.gz, {uses}"
    add_options(files, text, type={"save_trace": parse_trace_name})


def add_exports(files: argparse._ActionsContainer, *, weights: str) -> None:
    """Add the paths of files for Perfetto, speedscope and flame graphs."""
    add_options(
        files,
        f"""
        --trace PATH  a timeline for Perfetto, in Chrome's trace format; not a Trace for diff
        --speedscope PATH  a flame graph in the order of the run, for speedscope.app
        --flamegraph PATH  collapsed stacks, for flamegraph.pl and others
        --weight W  metric that sets the widths in these files: {weights}
        """,
    )


def add_trace_only(parser: argparse.ArgumentParser) -> None:
    """Add the option that refuses every MODEL except a saved Trace, for untrusted files."""
    add_options(parser, "inputs:\n--trace-only  refuse a MODEL that is not a saved Trace: nothing else is loaded")


def add_imports(parser: argparse._ActionsContainer, *, help: str) -> None:
    add_options(parser, f"--import MODULE ...  {help}; may be repeated", dest={"import": "imports"})


def import_modules(names: Sequence[str]) -> None:
    """Import the modules of `--import`, also from the current folder; a failed import raises ValueError."""
    if names:
        add_current_folder()
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"--import {name}: {error}") from error


def add_depth(parser: argparse._ActionsContainer, default: int | None = None, help: str = "") -> None:
    """Add the deepest module level shown."""
    text = (help or "deepest module level shown") + ("" if default is None else f"; default: {default}")
    add_options(parser, f"report:\n--depth N  {text}", type={"depth": parse_depth}, default={"depth": default})


def add_plot(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "additional files:\n--plot PATH  also write a plot, .svg or .png; needs matplotlib")
