"""The completion script of zsh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fvflops.cli.completion.grammar import FILE, FOLDER, Command, Option, Value

_HEAD = """\
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
_MIDDLE = """\
    )
    _arguments -C '(- *)'{-h,--help}'[show the help]' '(- *)--version[show the version]' '1: :->command' '*:: :->rest'
    case $state in
        command) _describe command commands ;;
        rest)
            case $words[1] in
"""
_TAIL = """\
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


def write(commands: Sequence[Command]) -> str:
    """Return the script for the commands of the program."""
    listed = "".join(f"        {_quote(f'{command.name}:{_escape(command.help)}')}\n" for command in commands)
    return _HEAD + listed + _MIDDLE + "".join(f"{line}\n" for item in commands for line in _write(item)) + _TAIL


def _write(command: Command) -> Iterator[str]:
    specs = [*map(_write_option, command.options), *_write_positionals(command)]
    yield f"                {command.name})"
    yield "                    _arguments \\"
    yield from (f"                        {spec}{' ' + chr(92) if spec is not specs[-1] else ''}" for spec in specs)
    yield "                    ;;"


def _write_option(option: Option) -> str:
    value = "" if option.value is None else _write_value(option.value)
    separator = "" if option.value is None else "="
    shown = f"[{_escape(option.help)}]{value}"
    repeat = "\\*" if option.repeatable else ""
    if len(option.names) > 1:
        listed = ",".join(option.names)
        return f"'({' '.join(option.names)})'{{{listed}}}{_quote(shown)}"
    return f"{repeat}{option.names[0]}{separator}{_quote(shown)}"


def _write_positionals(command: Command) -> Iterator[str]:
    for index, value in enumerate(command.positionals):
        last = index == len(command.positionals) - 1
        yield _quote(f"{'*' if command.many and last else index + 1}{_write_value(value)}")


def _write_value(value: Value) -> str:
    actions = {"": " ", FILE: "_files", FOLDER: "_files -/", "model": "_fvflops_models"}
    action = (
        f"({' '.join(value.choices)})" if value.choices else actions.get(value.kind, f"_fvflops_names {value.kind}")
    )
    return f":{_escape(value.metavar)}:{action}"


def _escape(text: str) -> str:
    return "".join(f"\\{character}" if character in "[]:\\" else character for character in text)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
