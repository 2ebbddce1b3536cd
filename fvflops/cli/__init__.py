"""The command line: arguments in, a recorded and counted model out."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from fvflops import __version__
from fvflops.cli.outputs import check_outputs
from fvflops.paths import PACKAGE
from fvflops.text import printable

# Subcommand → what it is for; its file of the same name is imported when it is asked for, so that help needs no torch.
COMMANDS = {
    "count": "count a model's flops, activations and parameters",
    "compare": "count a model in several conventions, and say why they differ",
    "diff": "say what changed in a model's cost, by module and operator, between two models, traces or git revisions",
    "check": "fail where a model costs more than its budget allows",
    "plan": "say what one rank of a mesh of any size computes and sends in a training step",
    "ops": "list the ops that a table counts, or explain one",
    "roofline": "tell what bounds a model on a device, and the least time that it takes there",
    "profile": "run a model under the clock, and show what it takes beside what is counted",
    "scale": "tell a model's cost as a polynomial in its sizes, or what it costs to generate text",
}


_LONGEST = 400


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 for success, 1 where what it checked does not hold, 2 for errors."""
    arguments = build_parser().parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a character shows its escape; the report is not lost.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            # torch says this when NumPy is not installed; nothing here needs NumPy.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            check_outputs(arguments)
            command = importlib.import_module(f"fvflops.cli.commands.{arguments.command}")
            return int(command.run(arguments))
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`): there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, SystemExit) as error:
        if arguments.debug:
            raise
        print(f"fvflops: error: {format_error(error)}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="fvflops", description="What a PyTorch model costs, and where.")
    parser.add_argument("--version", action="version", version=f"fvflops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose.capitalize() + ".")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.add_argument(
            "--table",
            default="default",
            help="convention: default, fvcore, exact ..., or the path or URI of a YAML file",
        )
        _ARGUMENTS[name](command)
    return parser


def _add_subject_arguments(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    _add_source_arguments(parser, nargs=nargs)
    _add_assume_argument(parser)


def _add_assume_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="OP=SIZE",
        help="the size of what an op selects by value: aten::nonzero=100, or a share as 0.5; may be repeated",
    )


def _add_source_arguments(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    parser.add_argument(
        "model",
        nargs=nargs,
        metavar="MODEL",
        help="zoo:NAME, torchvision:NAME, timm:NAME, transformers:CLASS, package.module:FACTORY or file.py:FACTORY",
    )
    _add_input_arguments(parser)


def _add_input_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="shape of an input, such as 1,3,224,224 or input_ids=1,128:int64; once for each input",
    )
    parser.add_argument("--config", metavar="JSON", help="configuration of a transformers model: JSON text, or a file")
    parser.add_argument("--output", metavar="PATH", help="where the report goes; default: the terminal")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    _add_subject_arguments(parser)
    _add_run_arguments(parser, built_on="--device")


def _add_run_arguments(parser: argparse.ArgumentParser, *, built_on: str) -> None:
    parser.add_argument(built_on, default=None, help="where the model is built: cpu, cuda, or meta for no weights")
    parser.add_argument(
        "--execution",
        choices=("auto", "shapes", "real"),
        default="auto",
        help="by shapes, for real, or for real where shapes do not do; default: auto",
    )
    parser.add_argument("--train", action="store_true", help="count the model in training mode, not in eval mode")


def _add_count_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser)
    parser.add_argument(
        "--by",
        choices=("module", "operator", "both", "op", "call", "line"),
        default="module",
        help="a line for each module (default), each operator, both, each op call, each call of a module, "
        "or each line of source",
    )
    parser.add_argument("--depth", type=_depth, metavar="N", help="deepest module level that is shown")
    parser.add_argument(
        "--format",
        default="table",
        metavar="F",
        help="table, fvcore (the table with shapes of parameters, on a terminal too), tree, json, csv, "
        "markdown, paper, latex, html, svg, png, dot (for Graphviz) or model-explorer",
    )
    _add_order_arguments(parser, "parameters, flops, activations or name, all levels in one list; default: in order")
    parser.add_argument(
        "--collapse", action="store_true", help="show equal layers that follow each other as one row with their sum"
    )
    parser.add_argument("--strict", action="store_true", help="an op without a formula is an error")
    files = parser.add_argument_group("files beside the report, of counted work")
    _add_export_arguments(files, weights="flops (default), macs, bytes, memory")


def _add_order_arguments(parser: argparse._ActionsContainer, keys: str) -> None:
    parser.add_argument("--sort", metavar="KEY", help=f"by what lines are ranked: {keys}")
    parser.add_argument("--top", type=int, metavar="N", help="how many lines are shown, those with most first")


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser)
    parser.add_argument(
        "--tables", metavar="A,B,...", help="the conventions to compare with that of --table; default: all shipped ones"
    )
    parser.add_argument("--format", default="text", metavar="F", help="text or json")


def _add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a MODEL as count takes it, a saved trace (.json), a torch.export program (.pt2), or REV:file.py:FACTORY"
    parser.add_argument("model", metavar="A", help=f"{what}, as a git revision has it")
    parser.add_argument("other", metavar="B", help="the same, after the change")
    _add_input_arguments(parser)
    parser.add_argument(
        "--input-b", action="append", default=[], metavar="INPUT", help="inputs of B where they differ; as --input"
    )
    parser.add_argument("--config-b", metavar="JSON", help="configuration of B where it differs; as --config")
    _add_assume_argument(parser)
    _add_run_arguments(parser, built_on="--device")
    parser.add_argument(
        "--measure",
        choices=("flops", "macs", "activations", "parameters"),
        default="flops",
        help="what is shown before and after, and ranks the lines; default: flops",
    )
    parser.add_argument(
        "--top", type=_depth, default=20, metavar="N", help="how many lines each table has; default: 20"
    )
    parser.add_argument("--format", default="text", metavar="F", help="text, markdown or json")


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser)
    parser.set_defaults(table=None)  # that of the budget
    parser.add_argument("--budget", required=True, metavar="FILE", help="the YAML file with the budgets of models")
    parser.add_argument("--name", metavar="NAME", help="the model's name in the file; default: MODEL")
    parser.add_argument("--update", action="store_true", help="write what the model costs now into the file")
    parser.add_argument(
        "--depth", type=_depth, metavar="N", help="with --update: note the flops of modules down to this level too"
    )
    parser.add_argument("--summary", metavar="FILE", help="append the verdict in Markdown, as to $GITHUB_STEP_SUMMARY")


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    _add_subject_arguments(parser)
    parser.add_argument(
        "--mesh", required=True, metavar="AXIS=N,...", help="axes pp, dp, fsdp, cp and tp, outermost first"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the rank that is planned; default: 0")
    parser.add_argument(
        "--shard", metavar="PATH:FUNCTION", help="a function of (model, DeviceMesh of tp) that splits the model"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="split the sequence over tp too, between the layers"
    )
    parser.add_argument(
        "--microbatches", type=int, default=1, metavar="N", help="how often the inputs go through in a step; default: 1"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="dtype of the weights, such as bfloat16")
    parser.add_argument("--device", default=None, help="the device whose kernels are shown: cpu or cuda")
    parser.add_argument("--format", default="text", metavar="F", help="text or json")


def _add_ops_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the op to explain, such as aten::linear or linear")
    parser.add_argument("--check", action="store_true", help="run the examples of the table's rows")


def _add_roofline_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(table="exact")  # the other conventions leave work out
    _add_subject_arguments(parser, nargs="?")
    _add_run_arguments(parser, built_on="--build")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="whose peaks to take: a name such as H100, or FILE.yaml or FILE.yaml:NAME; with --measure cpu or cuda",
    )
    parser.add_argument("--measure", action="store_true", help="measure this machine's peaks; without MODEL print them")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="cast the model and its inputs: fp32, tf32, fp16, bf16 or fp64"
    )
    parser.add_argument(
        "--backward", action="store_true", help="with the backward pass of the sum of what the model returns"
    )
    parser.add_argument("--by", choices=("module", "operator", "op"), default="module", help="default: module")
    parser.add_argument("--depth", type=_depth, metavar="N", help="deepest module level that is shown; default: 3")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="how many ops are shown by op; default: 20")
    _add_plot_argument(parser)


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(table=None)  # that of DeepSpeed for its report; else exact, as the others leave work out
    _add_source_arguments(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where the model runs; default: where it is built")
    parser.add_argument("--train", action="store_true", help="run the model in training mode, not in eval mode")
    parser.add_argument(
        "--backward", action="store_true", help="with the backward pass of the sum of what the model returns"
    )
    runs = parser.add_argument_group("how often it runs")
    runs.add_argument("--warmup", type=int, metavar="N", help="runs before the clock is looked at; default: 1")
    runs.add_argument("--repeat", type=int, metavar="N", help="runs under the clock; default: 5")
    runs.add_argument(
        "--schedule",
        metavar="KEY=N,...",
        help="instead of both: skip_first, wait, warmup, active and repeat, as torch.profiler.schedule takes them",
    )
    runs.add_argument("--steps", type=int, metavar="N", help="the runs of the schedule")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--by", choices=("module", "operator", "op"), default="module", help="default: module")
    shown.add_argument("--phase", metavar="P", help="one phase: forward, recompute or backward; default: all")
    shown.add_argument("--depth", type=_depth, metavar="N", help="deepest module level that is shown; default: 2")
    _add_order_arguments(
        shown,
        "time, self, calls, flops, rate, bytes, intensity, roofline, memory, peak, mismatch or name; default: modules "
        "and op calls in order, operators by time",
    )
    shown.add_argument(
        "--peaks", metavar="DEVICE", help="show the share of a device's roofline: H100, FILE.yaml or FILE.yaml:NAME"
    )
    shown.add_argument(
        "--ignore", action="append", default=[], metavar="OP", help="leave an op out of --by op; may be repeated"
    )
    shown.add_argument("--deepspeed", action="store_true", help="show DeepSpeed's report instead")
    files = parser.add_argument_group("files beside the report")
    _add_export_arguments(files, weights="time (default), flops, macs, bytes, memory")
    files.add_argument("--html", metavar="PATH", help="a page for the browser, with time and FLOP/s by module")


def _add_export_arguments(files: argparse._ArgumentGroup, *, weights: str) -> None:
    files.add_argument("--trace", metavar="PATH", help="a chrome trace, for Perfetto and chrome://tracing")
    files.add_argument("--speedscope", metavar="PATH", help="a flame graph in the order of the run, for speedscope.app")
    files.add_argument("--flamegraph", metavar="PATH", help="collapsed stacks, for flamegraph.pl and others")
    files.add_argument("--weight", metavar="W", help=f"what widths stand for: {weights}")


def _add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser)
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=A..B[:STEP]",
        help="a size to vary, such as batch=1..64 or size=224..1024:32: a name in the place of a number of --input, an "
        "argument of FACTORY, or a size of the inputs that the model's library gives; may be repeated",
    )
    parser.add_argument(
        "--generate",
        metavar="KEY=N,...",
        help="instead: what a transformers model takes to generate text, such as prompt=128,new=256,batch=1",
    )
    parser.add_argument(
        "--metric", default="flops", metavar="M", help="flops, macs, activations or parameters; default: flops"
    )
    parser.add_argument(
        "--backward", action="store_true", help="with the backward pass of the sum of what the model returns"
    )
    parser.add_argument("--depth", type=_depth, default=1, metavar="N", help="deepest module level shown; default: 1")
    parser.add_argument("--format", default="text", metavar="F", help="text or json")
    _add_plot_argument(parser)


def _add_plot_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="PATH", help="a picture beside the report, .svg or .png; needs matplotlib")


_ARGUMENTS = {
    "count": _add_count_arguments,
    "compare": _add_compare_arguments,
    "diff": _add_diff_arguments,
    "check": _add_check_arguments,
    "plan": _add_plan_arguments,
    "ops": _add_ops_arguments,
    "roofline": _add_roofline_arguments,
    "profile": _add_profile_arguments,
    "scale": _add_scale_arguments,
}


def _depth(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a depth is a whole number from 0, not {text!r}")
    return int(text)


def format_error(error: BaseException) -> str:
    """Return an error in one line: our own by its message, another's with its type and the place where it was raised.

    >>> format_error(ZeroDivisionError("no inputs"))
    'ZeroDivisionError: no inputs'
    """
    text = printable(" ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split()))
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
    frames = traceback.extract_tb(error.__traceback__)
    package = str(PACKAGE)
    ours = bool(frames) and frames[-1].filename.startswith(package)
    if text and ours and isinstance(error, (ValueError, LookupError, TypeError, OSError)):
        return text
    if isinstance(error, OSError) and error.filename is not None:
        return text
    if isinstance(error, SystemExit):
        text = printable(f"the program asked to exit with {error.code!r}")
    libraries = (package, "site-packages", "dist-packages", os.path.dirname(os.__file__), "<")
    places = [frame for frame in frames if not any(part in frame.filename for part in libraries)]
    kind = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if not places:
        return kind
    return (
        f"{kind} ({printable(os.path.basename(places[-1].filename))}:{places[-1].lineno}; --debug shows the traceback)"
    )
