"""`fvflops completion`: print a completion script for a shell, or the names that the scripts ask for.

A script, which is written from the parsers, contains the commands, options and choices, and asks `fvflops completion
--names` for what may change: models, conventions and devices, whose names are cached. Completing an option starts no
Python. argcomplete, which runs the program for each TAB, would import torch each time; shtab writes scripts too, but
none for fish, and no names that are asked for later in bash and zsh alike.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping

from fvflops.cli.completed_names import KINDS, list_names
from fvflops.cli.parser import Parser
from fvflops.cli.process import report_stream

EXAMPLES = (
    "fvflops completion bash > ~/.local/share/bash-completion/completions/fvflops",
    "fvflops completion zsh > ~/.zfunc/_fvflops",
    "fvflops completion fish > ~/.config/fish/completions/fvflops.fish",
)
FILE, FOLDER = "file", "folder"
# Metavar → what a value is: names that `list_names` completes, a file, or a folder. Other values are not completed.
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
_HELP_LENGTH = 70


def shorten_help(text: str) -> str:
    """Return a help text in a line.

    >>> shorten_help("file for the report, - for standard output; default: 80%%")
    'file for the report, - for standard output'
    """
    words = " ".join(text.replace("%%", "%").partition(";")[0].split())
    return words if len(words) <= _HELP_LENGTH else f"{words[: _HELP_LENGTH - 3].rstrip()}..."


def takes_value(option: argparse.Action) -> bool:
    """Return whether an option takes a value that is completed."""
    return option.nargs not in (0, "?")


def find_metavar(action: argparse.Action) -> str:
    """Return what help calls the value of an argument."""
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper()


def _kind_of(action: argparse.Action) -> str:
    return METAVARS.get(find_metavar(action), "")


def _choices_of(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


# --- bash, of version 3.2 or later ---

_BASH_HEAD = """\
# bash completion of fvflops. Write it where bash-completion finds it:
#   fvflops completion bash > ~/.local/share/bash-completion/completions/fvflops
# or into a file that ~/.bashrc sources.

_fvflops() {
    local line="${COMP_LINE:0:$COMP_POINT}" cur="" prev="" command=""
    local kind="" reply="" options="" positional="" stem="" name=""
    local -a words
    COMPREPLY=()
    read -r -a words <<< "$line"
    if [[ $line != *[[:space:]] ]]; then
        cur="${words[${#words[@]}-1]}"
        unset "words[$((${#words[@]} - 1))]"
    fi
    if [[ ${#words[@]} -gt 1 ]]; then
        command="${words[1]}"
        prev="${words[${#words[@]}-1]}"
    fi
    if [[ $cur == --*=* ]]; then
        prev="${cur%%=*}"
        cur="${cur#*=}"
    fi
    case "$command $prev" in
"""
_BASH_MIDDLE = """\
        *)
            case "$command" in
"""
_BASH_TAIL = """\
            esac
            if [[ $cur == -* ]]; then
                reply="${options// /$'\\n'}"
            else
                case "$positional" in
                    =*) reply="${positional#=}" && reply="${reply// /$'\\n'}" ;;
                    *) kind="$positional" ;;
                esac
            fi
            ;;
    esac
    case "$kind" in
        "") ;;
        file) return ;;
        folder)
            compopt -o dirnames 2> /dev/null
            return
            ;;
        *) reply="$(fvflops completion --names "$kind" --prefix "$cur" 2> /dev/null)" ;;
    esac
    while IFS= read -r name; do
        if [[ -n $name && $name == "$cur"* ]]; then
            COMPREPLY+=("$(printf %q "$name")")
        fi
    done <<< "$reply"
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *: ]]; then
        compopt -o nospace 2> /dev/null
    fi
    # readline replaces what follows the last colon.
    if [[ $cur == *:* && $COMP_WORDBREAKS == *:* ]]; then
        stem="${cur%"${cur##*:}"}"
        COMPREPLY=("${COMPREPLY[@]#"$stem"}")
    fi
}

complete -o default -F _fvflops fvflops
"""


def write_bash(commands: Mapping[str, Parser], helps: Mapping[str, str]) -> str:
    """Return the script of bash for commands, whose `helps` it does not show."""
    lines = [line for name, command in commands.items() for line in _write_bash_values(name, command)]
    lines.append(_BASH_MIDDLE.rstrip("\n"))
    for name, command in commands.items():
        options = " ".join(text for option in command.options() for text in option.option_strings)
        first = command.positionals()[:1]
        positional = (f"={_choices_of(first[0])}" if first[0].choices else _kind_of(first[0])) if first else ""
        lines.append(f'                {name}) options="{options}"; positional="{positional or FILE}" ;;')
    names = " ".join([*commands, "--help", "--version"])
    lines.append(f'                "") options="{names}"; positional="={names}" ;;')
    return _BASH_HEAD + "\n".join(lines) + "\n" + _BASH_TAIL


def _write_bash_values(name: str, command: Parser) -> Iterator[str]:
    for option in filter(takes_value, command.options()):
        pattern = "|".join(f'"{name} {text}"' for text in option.option_strings)
        if option.choices:
            choices = "\\n".join(map(str, option.choices))
            yield f"        {pattern}) reply=$'{choices}' ;;"
        else:
            yield f"        {pattern}) kind={_kind_of(option) or FILE} ;;"


# --- fish ---

_FISH_HEAD = """\
# fish completion of fvflops. Write it where fish finds it:
#   fvflops completion fish > ~/.config/fish/completions/fvflops.fish

function __fvflops_names
    fvflops completion --names $argv[1] --prefix (commandline --current-token) 2> /dev/null
end

complete -c fvflops -n __fish_use_subcommand -f
complete -c fvflops -n __fish_use_subcommand -l version -d 'show the version'
"""


def write_fish(commands: Mapping[str, Parser], helps: Mapping[str, str]) -> str:
    """Return the script of fish for commands, with their helps."""
    lines = [line for name, command in commands.items() for line in _write_fish(name, command, helps[name])]
    return _FISH_HEAD + "".join(f"{line}\n" for line in lines)


def _write_fish(name: str, command: Parser, help: str) -> Iterator[str]:
    yield f"complete -c fvflops -n __fish_use_subcommand -a {name} -d {_quote_fish(shorten_help(help))}"
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


# --- zsh ---

_ZSH_HEAD = """\
#compdef fvflops
# zsh completion of fvflops. Write it into a folder of $fpath, before compinit runs:
#   fvflops completion zsh > ~/.zfunc/_fvflops

_fvflops_names() {
    local -a names
    names=(${(f)"$(fvflops completion --names $1 --prefix "$PREFIX" 2> /dev/null)"})
    compadd -S '' -- ${(M)names:#*:}
    compadd -- ${names:#*:}
}

_fvflops_models() {
    _fvflops_names model
    _files
}

_fvflops() {
    local curcontext="$curcontext" state line
    local -a commands
    commands=(
"""
_ZSH_MIDDLE = """\
    )
    _arguments -C '(- *)'{-h,--help}'[show the help]' '(- *)--version[show the version]' '1: :->command' '*:: :->rest'
    case $state in
        command) _describe command commands ;;
        rest)
            case $words[1] in
"""
_ZSH_TAIL = """\
            esac
            ;;
    esac
}

if [ "$funcstack[1]" = "_fvflops" ]; then
    _fvflops "$@"
else
    compdef _fvflops fvflops
fi
"""


def write_zsh(commands: Mapping[str, Parser], helps: Mapping[str, str]) -> str:
    """Return the script of zsh for commands, with their helps."""
    listed = [f"        {_quote_zsh(f'{name}:{_escape_zsh(shorten_help(helps[name]))}')}" for name in commands]
    lines = [line for name, command in commands.items() for line in _write_zsh(name, command)]
    return "\n".join([_ZSH_HEAD.rstrip("\n"), *listed, _ZSH_MIDDLE.rstrip("\n"), *lines, _ZSH_TAIL])


def _write_zsh(name: str, command: Parser) -> Iterator[str]:
    positionals = command.positionals()
    many = any(action.nargs in ("+", "*") for action in positionals)
    specs = list(map(_write_zsh_option, command.options()))
    for number, action in enumerate(positionals, start=1):
        specs.append(_quote_zsh(f"{'*' if many and action is positionals[-1] else number}{_write_zsh_value(action)}"))
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


# Shell → what writes its script from command → its parser and command → its help.
SHELLS: Mapping[str, Callable[[Mapping[str, Parser], Mapping[str, str]], str]] = {
    "bash": write_bash,
    "zsh": write_zsh,
    "fish": write_fish,
}


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
    cli = importlib.import_module("fvflops.cli")  # which imports this module, for the parser of all commands
    script = SHELLS[arguments.shell](cli.build_parser().commands(), cli.COMMANDS)
    print(script, end="", file=report_stream())
    return 0
