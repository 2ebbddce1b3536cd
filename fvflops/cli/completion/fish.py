"""The completion script of fish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fvflops.cli.completion.grammar import FILE, FOLDER, Command, Option, Value

_HEAD = """\
# fish completion of fvflops. Write it where fish finds it:
#   fvflops completion fish > ~/.config/fish/completions/fvflops.fish

function __fvflops_names
    fvflops completion --names $argv[1] --prefix (commandline --current-token) 2> /dev/null
end

complete -c fvflops -n __fish_use_subcommand -f
complete -c fvflops -n __fish_use_subcommand -l version -d 'show the version'
"""


def write(commands: Sequence[Command]) -> str:
    """Return the script for the commands of the program."""
    return _HEAD + "".join(f"{line}\n" for command in commands for line in _write(command))


def _write(command: Command) -> Iterator[str]:
    yield f"complete -c fvflops -n __fish_use_subcommand -a {command.name} -d {_quote(command.help)}"
    start = f"complete -c fvflops -n '__fish_seen_subcommand_from {command.name}'"
    for option in command.options:
        yield f"{start} {_write_names(option)}{_write_value(option.value)} -d {_quote(option.help)}"
    if command.positionals:
        first = command.positionals[0]
        if names := _list(first):
            yield f"{start} {'' if first.kind == 'model' else '-f '}-a {_quote(names)}"


def _write_names(option: Option) -> str:
    return " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)


def _write_value(value: Value | None) -> str:
    if value is None:
        return ""
    if names := _list(value):
        return f" -{'r' if value.kind == 'model' else 'x'} -a {_quote(names)}"
    return " -r -F" if value.kind in (FILE, FOLDER) else " -x"


def _list(value: Value) -> str:
    if value.choices:
        return " ".join(value.choices)
    return f"(__fvflops_names {value.kind})" if value.kind not in ("", FILE, FOLDER) else ""


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
