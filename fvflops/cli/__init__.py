"""The command line: parse arguments, run a command, report errors in one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Collection, Sequence
from typing import NoReturn

from fvflops import __version__
from fvflops.cli.outputs import check_outputs
from fvflops.text import printable

# Command → its help text. The module of that name in `commands` has add_arguments() and run(); it is imported only for
# its own command, so that `fvflops --help` does not import torch.
COMMANDS = {
    "count": "count a model's FLOPs, activations and parameters",
    "compare": "count a model by several conventions, and explain the differences",
    "diff": "compare the cost of two models, traces or git revisions, by module and operator",
    "check": "fail where a model exceeds its budget",
    "plan": "estimate what one rank of a device mesh computes and communicates in a training step",
    "list": "list the models, devices, conventions and formats that can be named",
    "ops": "list the ops that a table counts, or explain one",
    "memory": "predict the peak memory of a training step, and show what would lower it",
    "roofline": "show whether compute or memory bounds a model on a device, and a lower bound on its time",
    "peak": "measure the peaks of this machine's device, for utilisations and rooflines",
    "profile": "measure a model's time and memory, with its counts",
    "annotate": "add a model's FLOPs, bytes and modules to chrome traces that torch.profiler wrote earlier",
    "sweep": "count many models into a file, in worker processes with limits of time and memory",
    "scale": "fit a model's cost as a polynomial in its sizes, or count text generation",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 for success, 1 for a failed check, 2 for errors."""
    with warnings.catch_warnings():
        # torch warns of this when NumPy is not installed; nothing here needs NumPy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        argv = sys.argv[1:] if argv is None else argv
        return _run(build_parser([argument for argument in argv if argument in COMMANDS][:1]).parse_args(argv))


def _run(arguments: argparse.Namespace) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a character shows its escape; the report is not lost.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        check_outputs(arguments)
        command = importlib.import_module(f"fvflops.cli.commands.{arguments.command}")
        return int(command.run(arguments))
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, SystemExit) as error:
        if arguments.debug:
            raise
        print(f"fvflops: error: {format_error(error)}", file=sys.stderr)
        return 2


def build_parser(selected: Collection[str] = COMMANDS.keys()) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the arguments of the `selected` commands."""
    parser = _Parser(prog="fvflops", description="What a PyTorch model costs, and where.")
    parser.add_argument("--version", action="version", version=f"fvflops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name not in selected:
            continue
        from fvflops.formulas import shipped_tables

        module = importlib.import_module(f"fvflops.cli.commands.{name}")
        default = getattr(module, "DEFAULT_TABLE", "default")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.add_argument(
            "--table",
            default="default",
            help=f"convention: {', '.join(shipped_tables())}, or the path or URI of a YAML file; default: {default}",
        )
        module.add_arguments(command)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        self.exit(2, f"fvflops: error: {printable(message)} ({self.prog} --help lists the arguments)\n")


def format_error(error: BaseException) -> str:
    """Return an error in one line: that of `describe_error`, if torch is loaded; else no model has run.

    >>> format_error(ZeroDivisionError("no inputs"))
    'ZeroDivisionError: no inputs'
    """
    if "torch" in sys.modules:
        from fvflops.sources.model_errors import describe_error

        return describe_error(error, hint="--debug shows the traceback")
    text = printable(" ".join(str(error).split()))
    return text if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {text}"
