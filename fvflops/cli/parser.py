"""The parser of the command line: errors in one line that name the choices and the nearest, and help with examples."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn, cast

from fvflops.text import nearest, printable, suggest

# Options that only `--help all` shows, of any command.
_RARE = frozenset(
    [
        *("--debug", "--assume", "--task", "--adapter", "--trust-remote-code", "--path", "--trust-file"),
        *("--denoising-steps", "--guidance", "--execution", "--repeat", "--digits", "--name"),
        *("--trace", "--speedscope", "--flamegraph", "--weight", "--join", "--x", "--y", "--lower", "--trace-only"),
        *("--rank", "--shard", "--stages-per-rank", "--stage-layers", "--reshard-after-forward", "--routing"),
        *("--reduce-each-microbatch", "--gradient-dtype", "--optimizer-sharding", "--choices", "--best", "--jobs"),
        *("--efficiency", "--fused", "--bucket-cap-mb", "--watts", "--price", "--steps", "--ignore", "--deepspeed"),
        *("--phase", "--pp", "--images", "--hit-rate", "--acceptance", "--draft-tokens", "--at", "--utilisation"),
    ]
)
_ALL = "all"  # --help all
_SHORT = 25  # a command with as many options or fewer has no rare ones


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs between words, keeps the lines of examples and exit codes, and names a value once an option."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(("examples:", "exit codes:")):
            return "\n".join(indent + line for line in text.split("\n"))
        return super()._fill_text(text, width, indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; options cannot be abbreviated, so that a new one breaks no script.

    `first` are the options that help shows first, `rare` the options that it leaves to `--help all`, beside the rare
    ones of every command, and `examples` the lines before them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, add_help=False, **options)
        self.first: Sequence[str] = ()
        self.rare: Sequence[str] = ()
        self.examples: Sequence[str] = ()
        text = "show this help; all: every option"
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar=_ALL, help=text)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fvflops: error: {printable(message)} ({self.prog} --help lists the arguments)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments, with `options`: destination → option and default; unknown ones are an error."""
        arguments, unknown = self.parse_known_args(args, namespace)
        command = self.commands().get(getattr(arguments, "command", None) or "", self)
        if unknown:
            command.error(_describe_unknown(unknown, command))
        arguments.options = {}
        for action in command.options():
            arguments.options.setdefault(action.dest, (action.option_strings[0], action.default))
        return arguments

    def commands(self) -> dict[str, Parser]:
        subparsers = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: parser for action in subparsers for name, parser in action.choices.items()}

    def options(self) -> list[argparse.Action]:
        return [action for action in self._actions if action.option_strings and action.help != argparse.SUPPRESS]

    def name_option(self, text: str, argv: Sequence[str]) -> str:
        """Return an error with the option of `argv` whose value it quotes, or begins with, unless it names that.

        >>> parser = Parser()
        >>> action = parser.add_argument("--sort", help="a column")
        >>> parser.name_option("sort must be one of flops, name; got 'foo'", ["--sort", "foo"])
        "argument --sort: must be one of flops, name; got 'foo'"
        """
        names = [name for action in self.options() if action.nargs != 0 for name in action.option_strings]
        given = [argument.split("=", 1) for argument in argv if argument.startswith("--") and "=" in argument]
        given = [pair for pair in (*given, *map(list, pairwise(argv))) if pair[0] in names]
        given.sort(key=lambda pair: pair[0][2:] not in text)  # first an option that the error is about
        for option, value in given:
            parts = {value, *re.split("[,=]", value)} - {""}
            is_repeated = any(repr(part) in text for part in parts) or text.startswith((f"{value}:", f"{value} "))
            if is_repeated and not re.search(rf"^--|{option}(?![\w-])", text):
                return f"argument {option}: {text.removeprefix(f'{option[2:]} ') if ' must ' in text else text}"
        return text

    def positionals(self) -> list[argparse.Action]:
        return [action for action in self._actions if not action.option_strings]

    def format_help(self, *, everything: bool = False) -> str:
        """Return the help; with `everything` it includes rare options."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        if self.examples:
            formatter.add_text("\n  ".join(["examples:", *self.examples]).replace("%", "%%"))
        rare = set() if everything or len(self.options()) <= _SHORT else _RARE.union(self.rare).difference(self.first)
        shown = [action for action in self.options() if rare.isdisjoint(action.option_strings)]
        first = [action for name in self.first for action in shown if name in action.option_strings]
        sections: list[tuple[str | None, list[argparse.Action]]] = [
            (group.title, [action for action in group._group_actions if action in shown or not action.option_strings])
            for group in self._action_groups
        ]
        sections.insert(1, ("most used", first))
        for title, actions in sections:
            formatter.start_section(title)
            formatter.add_arguments([action for action in actions if actions is first or action not in first])
            formatter.end_section()
        hidden = len(self.options()) - len(shown)
        formatter.add_text(f"{hidden} more options: {self.prog} --help {_ALL}" if hidden else self.epilog)
        return formatter.format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            text = f"must be one of {', '.join(names)}; got {str(value)!r}{suggest(str(value), names)}"
            others = [other for other in self.options() if other.dest == action.dest and other.metavar == "FILE"]
            if others and os.path.splitext(str(value))[1]:
                text += f": a file is for {others[0].option_strings[0]} {value}"
            raise argparse.ArgumentError(action, text)


class _Help(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(cast(Parser, parser).format_help(everything=values == _ALL), end="")
        parser.exit()


def find_group(parser: argparse._ActionsContainer, title: str) -> argparse._ActionsContainer:
    """Return the group of a title, a new one where the parser has none; a group is returned itself."""
    if not isinstance(parser, argparse.ArgumentParser):
        return parser
    groups = {group.title: group for group in parser._action_groups}
    return groups[title] if title in groups else parser.add_argument_group(title)


def add_options(parser: argparse._ActionsContainer, text: str, **settings: Mapping[str, Any]) -> None:
    """Add arguments as a help page lists them: names and metavar, two spaces, and the help, further lines indented.

    A line such as `report:` names the group of the options after it. An option without a metavar is a flag, one with `
    ...` after it may be repeated. `settings` are further arguments of `add_argument`, each with its values by argument,
    named as its destination is by default.

    >>> parser = argparse.ArgumentParser()
    >>> add_options(parser, "--batch N  samples\\n--path DIR ...  a folder\\n--train  train", type={"batch": int})
    >>> parser.parse_args(["--batch", "3", "--path", "a", "--train"])
    Namespace(batch=3, path=['a'], train=True)
    """
    container = parser
    for entry in re.split(r"\n(?! )", inspect.cleandoc(text)):
        head, _, help = entry.partition("  ")
        if not help:
            container = find_group(parser, head.removesuffix(":"))
            continue
        first, *words = head.split()
        names = [first, *(word for word in words if word.startswith("-"))]
        values = words[len(names) - 1 :]
        name = first.strip("-,").replace("-", "_")
        options = {keyword: by_name[name] for keyword, by_name in settings.items() if name in by_name}
        if "..." in values:
            options |= {"action": "append", "default": []}
        if values:
            options["metavar"] = values[0]
        elif not options.keys() & {"action", "choices"}:
            options["action"] = "store_true"
        container.add_argument(*(name.rstrip(",") for name in names), help=" ".join(help.split()), **options)


def _describe_unknown(unknown: Sequence[str], command: Parser) -> str:
    first = next((text for text in unknown if text.startswith("-")), unknown[0])
    name = first.partition("=")[0]
    known = {text.lstrip("-"): text for action in command.options() for text in action.option_strings}
    hint = ""
    if name.startswith("-"):  # by the words alone: dashes make all options alike
        word = name.lstrip("-")
        near = known.get(nearest(word, known, cutoff=0.65))
        hint = f"; did you mean {near!r}?" if near else ""
    elif command.prog.endswith(" compare"):
        hint = "; it compares conventions: 'fvflops diff A B' compares two models"
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
