"""The completion script of bash, of version 3.2 or later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fvflops.cli.completion.grammar import FILE, Command, Option, Value

_HEAD = """\
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
_MIDDLE = """\
        *)
            case "$command" in
"""
_TAIL = """\
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


def write(commands: Sequence[Command]) -> str:
    """Return the script for the commands of the program."""
    values = [line for command in commands for option in command.options for line in _write_value(command, option)]
    options = [line for command in commands for line in _write_command(command)]
    names = " ".join([*(command.name for command in commands), "--help", "--version"])
    options.append(f'                "") options="{names}"; positional="={names}" ;;')
    return _HEAD + "".join(f"{line}\n" for line in values) + _MIDDLE + "".join(f"{line}\n" for line in options) + _TAIL


def _write_value(command: Command, option: Option) -> Iterator[str]:
    if option.value is not None:
        pattern = "|".join(f'"{command.name} {name}"' for name in option.names)
        if option.value.choices:
            choices = "\\n".join(option.value.choices)
            yield f"        {pattern}) reply=$'{choices}' ;;"
        else:
            yield f"        {pattern}) kind={option.value.kind or FILE} ;;"


def _write_command(command: Command) -> Iterator[str]:
    names = " ".join(name for option in command.options for name in option.names)
    positional = _describe(command.positionals[0]) if command.positionals else FILE
    yield f'                {command.name}) options="{names}"; positional="{positional}" ;;'


def _describe(value: Value) -> str:
    """Return a kind, or = and the choices."""
    return f"={' '.join(value.choices)}" if value.choices else value.kind or FILE
