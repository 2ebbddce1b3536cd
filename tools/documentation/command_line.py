"""Page of the command line, from its parsers: each command, its arguments and examples; shared options once."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fvflops.cli import COMMANDS, EXIT_CODES, build_parser

# Options that as many commands have with the same words are described once, below the commands.
SHARED_BY = 4
_INTRODUCTION = """\
# Command line

`fvflops COMMAND --help` shows the same as this page. `python -m fvflops` is the same program. Options cannot be
abbreviated, and may be anywhere after the command.

| Command | Purpose |
|:---|:---|
"""


class Argument(NamedTuple):
    """An argument of a command: how it is written, what it means, and the heading of its group in the help."""

    usage: str
    meaning: str
    group: str


def page() -> str:
    parsers = _commands(build_parser())
    arguments = {name: list(_arguments(parser)) for name, parser in parsers.items()}
    shared = _shared(arguments.values())
    lines = [_INTRODUCTION, *(f"| [`{name}`](#fvflops-{name}) | {_cell(COMMANDS[name])} |\n" for name in parsers)]
    for name, parser in parsers.items():
        lines += [f"\n## fvflops {name}\n\n{parser.description}\n"]
        module = importlib.import_module(f"fvflops.cli.commands.{name}")
        if examples := getattr(module, "EXAMPLES", ()):
            lines += ["\n```sh\n", *(f"{example}\n" for example in examples), "```\n"]
        own = [argument for argument in arguments[name] if argument not in shared]
        lines += _table(own)
        if common := [argument for argument in arguments[name] if argument in shared]:
            names = ", ".join(f"`{name}`" for argument in common for name in _names(argument.usage))
            lines += [f"\nAlso [shared options](#shared-options): {names}.\n"]
    lines += ["\n## Exit codes\n\n| Code | Meaning |\n|:---|:---|\n"]
    lines += [f"| {code} | {_cell(meaning)} |\n" for code, meaning in _exit_codes()]
    lines += ["\n## Shared options\n\nSeveral commands have these, as listed above.\n", *_by_group(shared)]
    return "".join(lines)


def _names(usage: str) -> list[str]:
    """Return all names of an argument.

    >>> _names("--build-on, --device TORCH_DEVICE"), _names("MODEL ...")
    (['--build-on', '--device'], ['MODEL'])
    """
    words = usage.replace(",", " ").split()
    return [word for word in words if word.startswith("-")] or words[:1]


def _exit_codes() -> Iterator[tuple[str, str]]:
    for line in EXIT_CODES.splitlines()[1:]:
        code, _, meaning = line.strip().partition("  ")
        yield code, meaning


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[Argument]:
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.help != argparse.SUPPRESS and action.dest != "help":
                yield Argument(_usage(action), (action.help or "").replace("%%", "%"), group.title or "")


def _usage(action: argparse.Action) -> str:
    """Return an argument as it is written: `MODEL`, or `--format FORMAT`."""
    if isinstance(action.metavar, tuple):
        value = " ".join(action.metavar)
    else:
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return f"[{value}]" if action.nargs == "?" else value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def _shared(commands: Iterable[list[Argument]]) -> list[Argument]:
    counted: dict[Argument, int] = {}
    for arguments in commands:
        for argument in arguments:
            counted[argument] = counted.get(argument, 0) + 1
    return [argument for argument, times in counted.items() if times >= SHARED_BY and argument.usage.startswith("-")]


def _by_group(arguments: list[Argument]) -> Iterator[str]:
    groups = list(dict.fromkeys(argument.group for argument in arguments))
    for group in groups:
        if len(groups) > 1:
            yield f"\n### {group[:1].upper()}{group[1:]}\n"
        yield from _table([argument for argument in arguments if argument.group == group])


def _table(arguments: list[Argument]) -> Iterator[str]:
    if arguments:
        yield "\n| Argument | Meaning |\n|:---|:---|\n"
    for argument in arguments:
        yield f"| {_code(argument.usage)} | {_cell(argument.meaning)} |\n"


def _code(text: str) -> str:
    """Return a text as code in a cell; renderers of Markdown disagree on a pipe between backticks.

    >>> _code("--by A|B"), _code("--top N")
    ('<code>--by A&#124;<wbr>B</code>', '`--top N`')
    """
    return f"<code>{text.replace('|', '&#124;<wbr>')}</code>" if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    r"""Return a text as a cell of a table in Markdown.

    >>> _cell("a|b  *c*")
    'a\\|b \\*c\\*'
    """
    text = " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
    return text.replace("<", "&lt;").replace("[", "\\[") if "`" not in text else text
