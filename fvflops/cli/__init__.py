"""The command line: parse arguments, run a command, report errors in one line."""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from fvflops import __version__
from fvflops.cli.encoding import ascii_streams
from fvflops.cli.outputs import check_digits, check_outputs, choose_format
from fvflops.cli.parser import Parser, write_usage
from fvflops.cli.process import Terminated, prints_to_stderr, streams_opened
from fvflops.garbage_collector import gc_paused
from fvflops.text import printable
from fvflops.units import digits_shown

# Command → its help text. The module of that name in `commands` has add_arguments() and run(); it is imported only for
# its own command, so that `fvflops --help` does not import torch.
COMMANDS = {
    "count": "count a model's FLOPs, activations and parameters",
    "compare": "count a model by several conventions, and explain the differences",
    "diff": "compare the cost of two models, traces or git revisions, by module and operator",
    "check": "fail where a model exceeds its budget",
    "scale": "fit a model's cost as a polynomial in its sizes, or count text generation",
    "plan": "plan a training step on a device mesh: work of a rank, and with --device memory, time and cost",
    "serve": "estimate what serving a language model costs: cache, first token, tokens per second, requests",
    "memory": "predict the peak memory of a training step, and show what would lower it",
    "roofline": "show whether compute or memory bounds a model on a device, and a lower bound on its time",
    "peak": "measure the peaks of this machine's device, for utilisations and rooflines",
    "profile": "measure a model's time and memory, with its counts",
    "annotate": "add a model's FLOPs, bytes and modules to chrome traces that torch.profiler wrote earlier",
    "explain": "show where the time of a step went, from chrome traces: work by class, communication, idle time",
    "sweep": "count many models into a file, in worker processes with limits of time and memory",
    "list": "list the models, devices, conventions and formats that can be named",
    "ops": "list the ops that a convention counts, or explain one",
    "completion": "print a completion script for bash, zsh or fish",
}


# Meanings of the exit codes; grep, diff and pip have the same.
EXIT_CODES = """\
exit codes:
  0    success, and help
  1    a failed check: over budget, or a model of several that was not counted
  2    an error, or a wrong argument
  130  interrupted (Ctrl-C)
  143  terminated (SIGTERM): a sweep, which has written its rows"""
_INTERRUPTED, _TERMINATED = 130, 143  # 128 + SIGINT or SIGTERM, as shells report it
# Module → its package, for the needs of every command.
_REQUIRED = {"torch": "torch", "yaml": "pyyaml", "iopath": "iopath", "tabulate": "tabulate"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, one of EXIT_CODES; without a command show the help, as pip does."""
    with streams_opened(), warnings.catch_warnings(), ascii_streams():
        # torch warns of this when NumPy is not installed; nothing here needs NumPy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        argv = sys.argv[1:] if argv is None else argv
        try:
            code = _run(argv)
            sys.stdout.flush()
            return code
        except KeyboardInterrupt as interrupt:
            text = printable(" ".join(str(interrupt).split()))
            is_terminated = isinstance(interrupt, Terminated)
            event = "terminated" if is_terminated else "interrupted"
            print(f"fvflops: {event}{f': {text}' if text else ''}", file=sys.stderr)
            return _TERMINATED if is_terminated else _INTERRUPTED
        except BrokenPipeError:
            # The reader has closed the pipe (`| head`); Python flushes the rest at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _run(argv: Sequence[str]) -> int:
    try:
        with gc_paused():  # importing torch
            parser = build_parser([argument for argument in argv if argument in COMMANDS][:1])
    except ModuleNotFoundError as error:
        if error.name not in _REQUIRED or "--debug" in argv:
            raise
        package, page = _REQUIRED[error.name], "https://fvflops.github.io/fvflops/start/install/"
        advice = f"; see {page} for one without CUDA" if package == "torch" else ""
        reason = f"fvflops needs {package}, which {sys.executable} lacks: run pip install {package}{advice}"
        print(f"fvflops: error: {reason}", file=sys.stderr)
        return 2
    if not argv:
        parser.print_help()
        return 0
    arguments = parser.parse_args(argv)
    arguments.argv = tuple(argv)
    try:
        choose_format(arguments)
        check_digits(arguments)
        check_outputs(arguments)
        command = importlib.import_module(f"fvflops.cli.commands.{arguments.command}")
        with _fixed_draws(), digits_shown(getattr(arguments, "digits", None)), prints_to_stderr():
            return int(command.run(arguments))
    except BrokenPipeError:
        raise
    except (Exception, SystemExit) as error:
        if arguments.debug:
            raise
        text = format_error(error)
        for option, own in getattr(arguments, "renamed", {}).items():
            text = re.sub(rf"{option}(?![\w-])", own, text)
        text = parser.commands()[arguments.command].name_option(text, argv)
        print(f"fvflops: error: {text}", file=sys.stderr)
        return 2


def _fixed_draws() -> AbstractContextManager[None]:
    """Seed random generators, so that a model with random control flow costs the same each time."""
    if "torch" not in sys.modules:
        return nullcontext()
    from fvflops.capture.restore.global_state import seeded

    return seeded(0)


def build_parser(selected: Collection[str] = COMMANDS.keys()) -> Parser:
    """Return the parser of the command line, with the arguments of the `selected` commands."""
    parser = Parser(
        prog="fvflops",
        usage="fvflops COMMAND [OPTIONS] ...",
        description="What a PyTorch model costs, and where. `fvflops COMMAND --help` has examples of a command.",
        epilog=f"{EXIT_CODES}\n\nthe words of reports: https://fvflops.github.io/fvflops/concepts/terms/",
    )
    parser.add_argument("--version", action="version", version=f"fvflops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(
            name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.", prog=f"fvflops {name}"
        )
        if name in selected:
            module = importlib.import_module(f"fvflops.cli.commands.{name}")
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
            module.add_arguments(command)
            command.usage = write_usage(command)
            command.examples = module.EXAMPLES
            command.first, command.rare = getattr(module, "FIRST", ()), getattr(module, "RARE", ())
    return parser


def format_error(error: BaseException) -> str:
    """Return an error in one line, by `describe_error` if torch is loaded; else no model has run.

    >>> format_error(ZeroDivisionError("no inputs"))
    'ZeroDivisionError: no inputs'
    """
    if "torch" in sys.modules:
        from fvflops.capture.errors.model_errors import describe_error

        return describe_error(error, hint="--debug shows the traceback")
    text = printable(" ".join(str(error).split()))
    return text if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {text}"
