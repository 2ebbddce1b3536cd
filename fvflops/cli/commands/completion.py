"""`fvflops completion`: print a completion script for a shell, or the names that the scripts ask for."""

from __future__ import annotations

import argparse
import importlib

from fvflops.cli.completion.completed_names import KINDS, list_names
from fvflops.cli.process import report_stream

EXAMPLES = (
    "fvflops completion bash > ~/.local/share/bash-completion/completions/fvflops",
    "fvflops completion zsh > ~/.zfunc/_fvflops",
    "fvflops completion fish > ~/.config/fish/completions/fvflops.fish",
)
# Shell → its module has `write`.
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops completion`."""
    parser.add_argument("shell", nargs="?", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    parser.add_argument(
        "--names", choices=KINDS, metavar="NAMES", help=f"print names, for the scripts: {', '.join(KINDS)}"
    )
    parser.add_argument("--prefix", default="", metavar="TEXT", help="with --names: how the names start")


def run(arguments: argparse.Namespace) -> int:
    """Print a script or names; return the exit code."""
    if arguments.names is not None:
        print("\n".join(list_names(arguments.names, arguments.prefix)), file=report_stream())
        return 0
    if arguments.shell is None:
        raise ValueError(f"completion needs a shell: {', '.join(SHELLS)}")
    # The parsers import torch, which names do not need.
    cli = importlib.import_module("fvflops.cli")
    grammar = importlib.import_module("fvflops.cli.completion.grammar")
    shell = importlib.import_module(f"fvflops.cli.completion.{arguments.shell}")
    print(shell.write(grammar.read_commands(cli.build_parser(), cli.COMMANDS)), end="", file=report_stream())
    return 0
