"""The grammar that completion scripts are written from: commands, options and what their values are."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from fvflops.cli.parser import Parser

FILE, FOLDER = "file", "folder"
# Metavar → what a value is: names that `list_names` completes, a file, or a folder. Other values are not completed.
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("MODEL", "A", "B"), "model"),
    **dict.fromkeys(("CONVENTION", "CONVENTION,..."), "table"),
    "DEVICE": "device",
    "TORCH_DEVICE": "torch-device",
    "DTYPE": "dtype",
    "KIND": "list",
    **dict.fromkeys(("FILE", "FILE.yaml", "PATH", "JSON", "TRACE"), FILE),
    **dict.fromkeys(("DIR", "FOLDER"), FOLDER),
}
_HELP_LENGTH = 70


@dataclass(frozen=True, slots=True)
class Value:
    """What an argument takes: `choices`, or else names of a `kind`, "" for anything."""

    metavar: str
    choices: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """An option: its names, its help in a line, its value (None for a flag), and whether it may be repeated."""

    names: tuple[str, ...]
    help: str
    value: Value | None = None
    repeatable: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its name, its help, its options, and its positional arguments, the last of which may be `many`."""

    name: str
    help: str
    options: tuple[Option, ...]
    positionals: tuple[Value, ...] = ()
    many: bool = False


def read_commands(parser: Parser, helps: Mapping[str, str]) -> list[Command]:
    """Return the commands of a parser; `helps` is command → its help."""
    commands = []
    for name, command in parser.commands().items():
        positionals = command.positionals()
        commands.append(
            Command(
                name,
                _shorten(helps[name]),
                tuple(_read_option(action) for action in command.options()),
                tuple(_read_value(action) for action in positionals),
                many=any(action.nargs in ("+", "*") for action in positionals),
            )
        )
    return commands


def _read_option(action: argparse.Action) -> Option:
    value = None if action.nargs in (0, "?") else _read_value(action)
    repeatable = isinstance(action, argparse._AppendAction)
    return Option(tuple(action.option_strings), _shorten(action.help or ""), value, repeatable)


def _read_value(action: argparse.Action) -> Value:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return Value(metavar, tuple(map(str, action.choices or ())), KINDS.get(metavar, ""))


def _shorten(text: str) -> str:
    """Return a help text in a line.

    >>> _shorten("file for the report, - for standard output; default: 80%%")
    'file for the report, - for standard output'
    """
    words = " ".join(text.replace("%%", "%").partition(";")[0].split())
    return words if len(words) <= _HELP_LENGTH else f"{words[: _HELP_LENGTH - 3].rstrip()}..."
