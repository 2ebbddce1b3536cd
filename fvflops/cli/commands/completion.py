"""`fvflops completion`: print a completion script for a shell, or the names, cached, that the scripts ask for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path

from fvflops import __version__, paths
from fvflops.cli.parser import Parser
from fvflops.cli.process import report_stream

EXAMPLES = (
    "fvflops completion bash > ~/.local/share/bash-completion/completions/fvflops",
    "fvflops completion zsh > ~/.zfunc/_fvflops",
    "fvflops completion fish > ~/.config/fish/completions/fvflops.fish",
)
FILE, FOLDER = "file", "folder"
# Metavar → kind of value: names that `list_names` completes, a file, or a folder. Other values are not completed.
METAVARS: Mapping[str, str] = {
    **dict.fromkeys(("MODEL", "A", "B"), "model"),
    **dict.fromkeys(("CONVENTION", "CONVENTION,..."), "table"),
    "DEVICE": "device",
    "TORCH_DEVICE": "torch-device",
    "DTYPE": "dtype",
    "KIND": "list",
    **dict.fromkeys(("FILE", "FILE.yaml", "PATH", "JSON", "TRACE"), FILE),
    **dict.fromkeys(("DIR", "FOLDER"), FOLDER),
}
# Source of models → the distribution whose version its names belong to.
DISTRIBUTIONS: Mapping[str, str] = {
    "zoo": "",
    **{name: name for name in ("timm", "torchvision", "transformers", "diffusers")},
    "open_clip": "open_clip_torch",
}
# Sources whose names are folders or functions of the user.
_OTHERS = ("hf:", "torchhub:")
_FIXED: Mapping[str, Sequence[str]] = {
    "list": (*DISTRIBUTIONS, "hf", "devices", "conventions", "formats"),
    "torch-device": ("cpu", "cuda", "meta"),
    "dtype": ("fp32", "tf32", "fp16", "bf16", "fp64"),
}
# Kind → its name in `fvflops list`.
_LISTED = {"table": "conventions", "device": "devices"}
# Kinds of names that `list_names` lists.
KINDS = ("model", *_LISTED, *_FIXED)


def list_names(kind: str, prefix: str = "", environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of a kind that start with a prefix; of models without a colon, the sources.

    >>> list_names("model", "t"), list_names("dtype", "b")
    (['timm:', 'torchvision:', 'transformers:', 'torchhub:'], ['bf16'])
    """
    if kind == "model" and ":" not in prefix:
        names: Sequence[str] = [*(f"{source}:" for source in DISTRIBUTIONS), *_OTHERS]
    elif kind == "model":
        source = prefix.partition(":")[0]
        names = [f"{source}:{name}" for name in _list_models(source, environment)]
    else:
        names = _FIXED.get(kind) or _read_cached(_LISTED[kind], __version__, environment)
    return [name for name in names if name.startswith(prefix)]


def _list_models(source: str, environment: Mapping[str, str]) -> Sequence[str]:
    if source not in DISTRIBUTIONS:
        return ()
    try:
        version = metadata.version(DISTRIBUTIONS[source]) if DISTRIBUTIONS[source] else __version__
    except metadata.PackageNotFoundError:
        return ()
    return _read_cached(source, version, environment)


def _read_cached(name: str, version: str, environment: Mapping[str, str]) -> Sequence[str]:
    """Return names from the user's cache, or list them, which may import a library, and write them there."""
    folder = os.path.join(find_cache(environment), "names")
    path = os.path.join(folder, f"{name}-{version}.txt")
    try:
        text = paths.read_text(path, limit=10_000_000) if os.path.isfile(path) else None
    except (OSError, ValueError):  # listed anew, and written again
        text = None
    if text is not None:
        return text.splitlines()
    names = list(import_module("fvflops.cli.commands.list").LISTS[name]())
    try:
        os.makedirs(folder, exist_ok=True)
        paths.write_text(path, "".join(f"{line}\n" for line in names))
    except (OSError, ValueError):  # completion works without a cache, slower
        pass
    return names


def find_cache(environment: Mapping[str, str]) -> str:
    """Return the folder of the user's cache of this program.

    >>> find_cache({"XDG_CACHE_HOME": os.path.join("home", "cache")}) == os.path.join("home", "cache", "fvflops")
    True
    """
    base = environment.get("XDG_CACHE_HOME") or environment.get("LOCALAPPDATA")
    return os.path.join(base or os.path.join(os.path.expanduser("~"), ".cache"), "fvflops")


def shorten_help(text: str) -> str:
    """Return a help text in a line.

    >>> shorten_help("file for the report, - for standard output; default: 80%%")
    'file for the report, - for standard output'
    """
    words = " ".join(text.replace("%%", "%").partition(";")[0].split())
    return words if len(words) <= 70 else f"{words[:67].rstrip()}..."


def takes_value(option: argparse.Action) -> bool:
    return option.nargs not in (0, "?")


def find_metavar(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper()


def _kind_of(action: argparse.Action) -> str:
    return METAVARS.get(find_metavar(action), "")


def _choices_of(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


def _fill(shell: str, **parts: Iterator[str]) -> str:
    """Return the script of a shell with lines in place of the names in it."""
    script = Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8")
    for name, lines in parts.items():
        script = script.replace(f"@{name.upper()}@\n", "".join(f"{line}\n" for line in lines))
    return script


def write_bash(commands: Mapping[str, Parser], helps: Mapping[str, str]) -> str:
    """Return the script of bash, of version 3.2 or later, for commands, whose `helps` it does not show."""
    return _fill("bash", values=_write_bash_values(commands), commands=_write_bash_commands(commands))


def _write_bash_values(commands: Mapping[str, Parser]) -> Iterator[str]:
    for name, command in commands.items():
        for option in filter(takes_value, command.options()):
            pattern = "|".join(f'"{name} {text}"' for text in option.option_strings)
            choices = "\\n".join(map(str, option.choices or ()))
            reply = f"reply=$'{choices}'" if choices else f"kind={_kind_of(option) or FILE}"
            yield f"        {pattern}) {reply} ;;"


def _write_bash_commands(commands: Mapping[str, Parser]) -> Iterator[str]:
    for name, command in commands.items():
        options = " ".join(text for option in command.options() for text in option.option_strings)
        first = command.positionals()[:1]
        positional = (f"={_choices_of(first[0])}" if first[0].choices else _kind_of(first[0])) if first else ""
        yield f'                {name}) options="{options}"; positional="{positional or FILE}" ;;'
    names = " ".join([*commands, "--help", "--version"])
    yield f'                "") options="{names}"; positional="={names}" ;;'


def write_fish(commands: Mapping[str, Parser], helps: Mapping[str, str]) -> str:
    return _fill("fish", commands=_write_fish(commands, helps))


def _write_fish(commands: Mapping[str, Parser], helps: Mapping[str, str]) -> Iterator[str]:
    for name, command in commands.items():
        yield f"complete -c fvflops -n __fish_use_subcommand -a {name} -d {_quote_fish(shorten_help(helps[name]))}"
        start = f"complete -c fvflops -n '__fish_seen_subcommand_from {name}'"
        for option in command.options():
            names = [f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}" for text in option.option_strings]
            value = _write_fish_value(option) if takes_value(option) else ""
            yield f"{start} {' '.join(names)}{value} -d {_quote_fish(shorten_help(option.help or ''))}"
        for first in command.positionals()[:1]:
            if listed := _list_in_fish(first):
                yield f"{start} {'' if _kind_of(first) == 'model' else '-f '}-a {_quote_fish(listed)}"


def _write_fish_value(option: argparse.Action) -> str:
    if listed := _list_in_fish(option):
        return f" -{'r' if _kind_of(option) == 'model' else 'x'} -a {_quote_fish(listed)}"
    return " -r -F" if _kind_of(option) in (FILE, FOLDER) else " -x"


def _list_in_fish(action: argparse.Action) -> str:
    kind = _kind_of(action)
    return _choices_of(action) or (f"(__fvflops_names {kind})" if kind not in ("", FILE, FOLDER) else "")


def _quote_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def write_zsh(commands: Mapping[str, Parser], helps: Mapping[str, str]) -> str:
    listed = (f"        {_quote_zsh(f'{name}:{_escape_zsh(shorten_help(helps[name]))}')}" for name in commands)
    return _fill("zsh", helps=listed, commands=_write_zsh(commands))


def _write_zsh(commands: Mapping[str, Parser]) -> Iterator[str]:
    for name, command in commands.items():
        positionals = command.positionals()
        many = any(action.nargs in ("+", "*") for action in positionals)
        specs = list(map(_write_zsh_option, command.options()))
        for number, action in enumerate(positionals, start=1):
            place = "*" if many and action is positionals[-1] else number
            specs.append(_quote_zsh(f"{place}{_write_zsh_value(action)}"))
        yield f"                {name})"
        yield "                    _arguments \\"
        yield from (f"                        {spec} \\" for spec in specs[:-1])
        yield f"                        {specs[-1]}"
        yield "                    ;;"


def _write_zsh_option(option: argparse.Action) -> str:
    value, equals = (_write_zsh_value(option), "=") if takes_value(option) else ("", "")
    shown = _quote_zsh(f"[{_escape_zsh(shorten_help(option.help or ''))}]{value}")
    names = option.option_strings
    if len(names) > 1:
        return f"'({' '.join(names)})'{{{','.join(names)}}}{shown}"
    repeat = "\\*" if isinstance(option, argparse._AppendAction) else ""
    return f"{repeat}{names[0]}{equals}{shown}"


def _write_zsh_value(action: argparse.Action) -> str:
    kinds = {"": " ", FILE: "_files", FOLDER: "_files -/", "model": "_fvflops_models"}
    kind = _kind_of(action)
    values = f"({_choices_of(action)})" if action.choices else kinds.get(kind, f"_fvflops_names {kind}")
    return f":{_escape_zsh(find_metavar(action))}:{values}"


def _escape_zsh(text: str) -> str:
    return "".join(f"\\{character}" if character in "[]:\\" else character for character in text)


def _quote_zsh(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# Shell → the function that writes its script from command → its parser and command → its help.
SHELLS: Mapping[str, Callable[[Mapping[str, Parser], Mapping[str, str]], str]] = {
    "bash": write_bash,
    "zsh": write_zsh,
    "fish": write_fish,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    cli = import_module("fvflops.cli")  # which imports this module, for the parser of all commands
    print(SHELLS[arguments.shell](cli.build_parser().commands(), cli.COMMANDS), end="", file=report_stream())
    return 0
