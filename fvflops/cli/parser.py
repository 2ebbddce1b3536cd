"""The parser of the command line: errors in one line that name the choices and the nearest, and help with examples."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from fvflops.text import printable, suggest

# Beginning of an epilog whose lines are kept as they are.
_VERBATIM = ("examples:", "exit codes:")


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs, and keeps the lines of examples and exit codes."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_VERBATIM):
            return "\n".join(indent + line for line in text.split("\n"))
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; options cannot be abbreviated, so that a new one breaks no script."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        self.exit(2, f"fvflops: error: {printable(message)} ({self.prog} --help lists the arguments)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments; unknown ones are an error that names the nearest option of the command."""
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands().get(getattr(arguments, "command", None) or "", self)
            command.error(_describe_unknown(unknown, command))
        return arguments

    def commands(self) -> dict[str, Parser]:
        """Return command → its parser."""
        subparsers = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: parser for action in subparsers for name, parser in action.choices.items()}

    def options(self) -> list[argparse.Action]:
        """Return the options with a help text."""
        return [action for action in self._actions if action.option_strings and action.help != argparse.SUPPRESS]

    def positionals(self) -> list[argparse.Action]:
        """Return the positional arguments."""
        return [action for action in self._actions if not action.option_strings]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, _describe_choices(map(str, action.choices), str(value)))


def _describe_choices(choices: Iterable[str], value: str) -> str:
    names = list(choices)
    return f"must be one of {', '.join(names)}; got {value!r}{suggest(value, names)}"


def _describe_unknown(unknown: Sequence[str], command: Parser) -> str:
    first = next((text for text in unknown if text.startswith("-")), unknown[0])
    name = first.partition("=")[0]
    known = [text for action in command.options() for text in action.option_strings]
    hint = suggest(name, known, separator="; ") if name.startswith("-") else ""
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


def write_usage(parser: Parser) -> str:
    """Return the usage of a command in one line: its required arguments, and that there are options.

    >>> parser = Parser(prog="fvflops check")
    >>> actions = parser.add_argument("model", metavar="MODEL"), parser.add_argument("--budget", required=True)
    >>> actions[1].metavar = "FILE"
    >>> write_usage(parser)
    'fvflops check [OPTIONS] --budget FILE MODEL'
    """
    parts = [parser.prog, "[OPTIONS]"]
    parts += [f"{action.option_strings[-1]} {action.metavar}" for action in parser.options() if action.required]
    for action in parser.positionals():
        name = str(action.metavar or action.dest)
        parts.append(f"[{name}]" if action.nargs == "?" else f"{name} ..." if action.nargs == "+" else name)
    return " ".join(parts).replace("%", "%%")


def write_examples(lines: Sequence[str]) -> str:
    """Return the epilog with the examples of a command."""
    return "\n".join(["examples:", *(f"  {line}" for line in lines)]).replace("%", "%%")
