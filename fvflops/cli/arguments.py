"""Arguments shared by several commands, and the parsers of their values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial

from fvflops.analysis.trace_file import ENDINGS
from fvflops.capture.shapes.assumptions import check_assumptions
from fvflops.reports.formats import FORMATS, check_format
from fvflops.sources.load import FORMS
from fvflops.sources.options import SourceOptions


def add_model(parser: argparse.ArgumentParser, *, nargs: str | None = None, shape: str = "shape of an input") -> None:
    """Add MODEL, its inputs, and the output sizes of data-dependent ops."""
    add_model_source(parser, nargs=nargs, shape=shape)
    add_assume(parser)


def add_model_source(
    parser: argparse.ArgumentParser, *, nargs: str | None = None, shape: str = "shape of an input"
) -> None:
    """Add MODEL and its inputs."""
    parser.add_argument(
        "model",
        nargs=nargs,
        metavar="MODEL",
        help=f"{', '.join(FORMS.values())}; fvflops list SOURCE lists the names of each",
    )
    add_inputs(parser, shape=shape)


def add_inputs(parser: argparse.ArgumentParser, *, shape: str = "shape of an input") -> None:
    """Add the options of SourceOptions: a model's inputs, whose help starts with `shape`, and how it is built."""
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]SHAPE[:DTYPE]",
        help=f"{shape}, such as 1,3,224,224 or input_ids=1,128:int64; once for each input",
    )
    _add_sizes(parser)
    _add_building(parser)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the default inputs, and their dtype."""
    parser.add_argument("--batch", type=parse_count, metavar="N", help="batch size of the default inputs")
    parser.add_argument(
        "--seq",
        type=parse_count,
        metavar="N",
        help="tokens of text in the default inputs, of encoder and decoder; those of images and audio are added",
    )
    parser.add_argument(
        "--image-size", type=parse_sides, metavar="N|HxW", help="height and width of the default inputs' images"
    )
    parser.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="cast the model and its inputs: fp32, tf32 (stored as fp32), fp16, bf16 or fp64",
    )
    parser.add_argument(
        "--denoising-steps",
        type=partial(parse_at_least, 1),
        metavar="N",
        help="steps of a diffusers pipeline; default: 1",
    )
    parser.add_argument(
        "--guidance", action="store_true", help="double the denoiser's batch, for classifier-free guidance"
    )


def _add_building(parser: argparse.ArgumentParser) -> None:
    """Add what is built: configurations, arguments, adapters and code that may run."""
    parser.add_argument(
        "--config",
        metavar="JSON",
        help="configuration of a Hugging Face model: JSON text, a file, or a folder with config.json",
    )
    parser.add_argument(
        "--task", metavar="TASK", help="class of hf:MODEL by a task of transformers' pipelines, such as text-generation"
    )
    parser.add_argument("--adapter", metavar="FOLDER", help="add a PEFT adapter, a folder with adapter_config.json")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the modelling code in the repository of hf:MODEL",
    )
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of FACTORY or of a library's constructor, or setting of a Hugging Face configuration, such as "
        "width=64: a Python literal or a string; may be repeated",
    )
    parser.add_argument(
        "--path", action="append", default=[], metavar="DIR", help="folder to import modules from; may be repeated"
    )
    parser.add_argument(
        "--unpickle",
        action="store_true",
        help="load a pickled module (torch.save(model)) or pickled example inputs, which runs code that the file "
        "names: only if you trust it",
    )


def model_options(
    arguments: argparse.Namespace,
    *,
    inputs: Sequence[str] | None = None,
    device: str | None = None,
) -> SourceOptions:
    """Return how the MODEL of the arguments is built, on a device; `inputs` defaults to those of the arguments."""
    return SourceOptions(
        inputs=tuple(arguments.input if inputs is None else inputs),
        config=arguments.config,
        device=device,
        args=tuple(arguments.arg),
        paths=tuple(map(os.path.abspath, arguments.path)),
        batch=arguments.batch,
        seq=arguments.seq,
        image_size=arguments.image_size,
        dtype=arguments.dtype,
        task=arguments.task,
        adapter=None if arguments.adapter is None else os.path.abspath(arguments.adapter),
        trust_remote_code=arguments.trust_remote_code,
        denoising_steps=arguments.denoising_steps,
        guidance=arguments.guidance,
        unpickle=arguments.unpickle,
    )


def add_assume(parser: argparse.ArgumentParser) -> None:
    """Add the output sizes of data-dependent ops."""
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="OP=SIZE",
        help="number of elements that a data-dependent op selects, such as aten::nonzero=100, or their fraction, such "
        "as 0.5; may be repeated",
    )


def add_run(parser: argparse.ArgumentParser, *, device_option: str = "--device") -> None:
    """Add the device, by the name of its option, the execution and the mode of the model."""
    parser.add_argument(
        device_option, default=None, help="device on which the model is built: cpu, cuda, or meta for no weights"
    )
    parser.add_argument(
        "--execution",
        choices=("auto", "shapes", "real"),
        default="auto",
        help="shapes: without values; real: with real tensors; auto (default): shapes, or real where values are needed",
    )
    parser.add_argument("--train", action="store_true", help="count the model in training mode, not in eval mode")


def add_backward(parser: argparse.ArgumentParser) -> None:
    """Add the backward pass of the sum of the model's results."""
    parser.add_argument(
        "--backward", action="store_true", help="include the backward pass; the loss is the sum of the model's outputs"
    )


def add_mesh(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the mesh of ranks, the rank, and how the model is split."""
    parser.add_argument(
        "--mesh",
        required=required,
        metavar="AXIS=N,...",
        help="sizes of the axes, outermost first: pp (pipeline parallel), dp (DDP), fsdp (FSDP), cp (context parallel) "
        "and tp (tensor parallel)",
    )
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="rank to plan; default: 0")
    parser.add_argument(
        "--shard", metavar="PATH:FUNCTION", help="a function of (model, DeviceMesh of tp) that shards the model"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="shard the sequence over tp between the layers too"
    )
    parser.add_argument("--microbatches", type=int, default=1, metavar="N", help="microbatches of a step; default: 1")


def add_report(
    parser: argparse._ActionsContainer,
    *,
    more: Mapping[str, str] | None = None,
    sort: str = "a column, named as in --format csv, or by name",
    top: int | None = None,
) -> None:
    """Add the format of the report, the order of its rows, and its path; the arguments are those of `add_table`."""
    add_table(parser, more=more, sort=sort, top=top)
    add_output(parser)


def add_table(
    parser: argparse._ActionsContainer,
    *,
    more: Mapping[str, str] | None = None,
    sort: str = "a column, named as in --format csv, or by name",
    top: int | None = None,
) -> None:
    """Add the format of the report and the order of its rows.

    `more` are formats of this command only, `sort` describes the keys of `--sort`.
    """
    formats = {**FORMATS, **(more or {})}
    names = ", ".join([*FORMATS, *(f"{name} ({note})" for name, note in (more or {}).items())])
    parser.add_argument(
        "--format", type=partial(parse_format, formats), default="text", metavar="F", help=f"{names}; default: text"
    )
    parser.add_argument("--sort", metavar="KEY", help=f"rank rows by {sort}")
    default = "all" if top is None else str(top)
    parser.add_argument("--top", type=parse_count, default=top, metavar="N", help=f"number of rows; default: {default}")


def add_order(parser: argparse._ActionsContainer, keys: str) -> None:
    """Add the order of the rows, by a command's own keys."""
    parser.add_argument("--sort", metavar="KEY", help=f"rank rows by: {keys}")
    parser.add_argument("--top", type=int, metavar="N", help="number of rows, largest first")


def add_output(parser: argparse._ActionsContainer) -> None:
    """Add the path of the report."""
    parser.add_argument("--output", metavar="PATH", help="file for the report, - for standard output; default: -")


def add_save_trace(files: argparse._ActionsContainer) -> None:
    """Add the path of the recorded Trace."""
    files.add_argument(
        "--save-trace",
        type=parse_trace_name,
        metavar="FILE",
        help="save the Trace as .json or .json.gz, for use as MODEL of count, compare, roofline, diff and check",
    )


def add_exports(files: argparse._ArgumentGroup, *, weights: str) -> None:
    """Add the paths of files for Perfetto, speedscope and flame graphs."""
    files.add_argument(
        "--trace", metavar="PATH", help="a timeline for Perfetto, in Chrome's trace format; not a Trace for diff"
    )
    files.add_argument("--speedscope", metavar="PATH", help="a flame graph in the order of the run, for speedscope.app")
    files.add_argument("--flamegraph", metavar="PATH", help="collapsed stacks, for flamegraph.pl and others")
    files.add_argument("--weight", metavar="W", help=f"metric that sets the widths in these files: {weights}")


def add_depth(parser: argparse._ActionsContainer, default: int | None = None, help: str = "") -> None:
    """Add the deepest level of modules that is shown."""
    text = help or "deepest module level shown"
    text += "" if default is None else f"; default: {default}"
    parser.add_argument("--depth", type=parse_depth, default=default, metavar="N", help=text)


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Add the path of a plot."""
    parser.add_argument("--plot", metavar="PATH", help="also write a plot, .svg or .png; needs matplotlib")


def parse_at_least(least: int, text: str) -> int:
    """Return an integer, as argparse's `type` of one argument."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}; got {text!r}")
    return int(text)


parse_depth = partial(parse_at_least, 0)
parse_count = partial(parse_at_least, 1)


def parse_sides(text: str) -> tuple[int, int]:
    """Return (height, width), as argparse's `type`.

    >>> parse_sides("224"), parse_sides("480x640")
    ((224, 224), (480, 640))
    """
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"must be N or HEIGHTxWIDTH, such as 224 or 480x640; got {text!r}")
    return int(sides[0]), int(sides[-1])


def parse_trace_name(text: str) -> str:
    """Return the file name of a saved Trace, as argparse's `type`."""
    if not text.endswith(ENDINGS):
        raise argparse.ArgumentTypeError(f"the name of a saved Trace ends in {' or '.join(ENDINGS)}; got {text!r}")
    return text


def parse_format(formats: Mapping[str, str], text: str) -> str:
    """Return the name of a format, as argparse's `type` of one argument."""
    try:
        check_format(text, formats)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("format ")) from None
    return text


def parse_assumptions(texts: Sequence[str]) -> dict[str, int | float]:
    """Return op → size from the values of `--assume`; another op, or a wrong size, raises ValueError.

    >>> parse_assumptions(["aten::nonzero=100", "aten::index=0.5"])
    {'aten::nonzero': 100, 'aten::index': 0.5}
    """
    sizes: dict[str, int | float] = {}
    for text in texts:
        op, _, size = text.partition("=")
        try:
            sizes[op] = int(size) if size.lstrip("-").isdigit() else float(size)
        except ValueError:
            raise ValueError(
                f"--assume {text!r} has no size: write aten::nonzero=100, or a share such as 0.5"
            ) from None
    check_assumptions(sizes)
    return sizes


def parse_mesh(text: str) -> dict[str, int]:
    """Return axis → size of a `--mesh` text, outermost first; a mistake raises ValueError.

    >>> parse_mesh("dp=128,tp=8")
    {'dp': 128, 'tp': 8}
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis or not size.isdecimal() or axis in mesh:
            raise ValueError(f"--mesh {text}: expected AXIS=N, each axis once, such as dp=128,tp=8; got {part!r}")
        mesh[axis] = int(size)
    return mesh
