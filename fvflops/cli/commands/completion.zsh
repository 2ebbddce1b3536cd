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
@HELPS@
    )
    _arguments -C '(- *)'{-h,--help}'[show the help]' '(- *)--version[show the version]' '1: :->command' '*:: :->rest'
    case $state in
        command) _describe command commands ;;
        rest)
            case $words[1] in
@COMMANDS@
            esac
            ;;
    esac
}

if [ "$funcstack[1]" = "_fvflops" ]; then
    _fvflops "$@"
else
    compdef _fvflops fvflops
fi
