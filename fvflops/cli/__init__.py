"""The command line: parse arguments, run a command, report errors in one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from typing import NoReturn

from fvflops import __version__
from fvflops.cli.outputs import check_outputs
from fvflops.paths import PACKAGE
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


_MAX_MESSAGE = 400  # characters


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
    """Return an error in one line: the message of an error of fvflops; for others also the type, file and line.

    One that a model's forward raised begins with the module and its inputs.

    >>> format_error(ZeroDivisionError("no inputs"))
    'ZeroDivisionError: no inputs'
    """
    text = printable(" ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split()))
    text = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " ..."
    module = sizes = ""
    if "torch" in sys.modules and isinstance(error, Exception):  # else no model has run
        from fvflops.sources.model_errors import describe_module, explain_error, suggest_sizes

        if explanation := explain_error(error):
            return explanation
        module, sizes = describe_module(error), suggest_sizes(error)
    frames = traceback.extract_tb(error.__traceback__)
    package = str(PACKAGE)
    is_own_error = bool(frames) and frames[-1].filename.startswith(package)
    if text and is_own_error and isinstance(error, (ValueError, LookupError, TypeError, OSError)):
        return text
    if isinstance(error, OSError) and error.filename is not None:
        return text
    if isinstance(error, SystemExit):
        text = printable(f"the program asked to exit with {error.code!r}")
    libraries = (package, "site-packages", "dist-packages", os.path.dirname(os.__file__), "<")
    others = [frame for frame in frames if not any(part in frame.filename for part in libraries)]
    kind = f"{type(error).__name__}: {text}" if text else type(error).__name__
    kind = f"{module}: {kind}{sizes}" if module else kind
    if not others:
        return kind
    return (
        f"{kind} ({printable(os.path.basename(others[-1].filename))}:{others[-1].lineno}; --debug shows the traceback)"
    )
