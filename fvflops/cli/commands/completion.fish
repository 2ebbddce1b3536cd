# fish completion of fvflops. Write it where fish finds it:
#   fvflops completion fish > ~/.config/fish/completions/fvflops.fish

function __fvflops_names
    fvflops completion --names $argv[1] --prefix (commandline --current-token) 2> /dev/null
end

complete -c fvflops -n __fish_use_subcommand -f
complete -c fvflops -n __fish_use_subcommand -l version -d 'show the version'
@COMMANDS@
