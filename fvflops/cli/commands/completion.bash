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
@VALUES@
        *)
            case "$command" in
@COMMANDS@
            esac
            if [[ $cur == -* ]]; then
                reply="${options// /$'\n'}"
            else
                case "$positional" in
                    =*) reply="${positional#=}" && reply="${reply// /$'\n'}" ;;
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
