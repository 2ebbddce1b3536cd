"""Completion of the command line in bash, zsh and fish, as scripts that are written from the parsers.

The scripts contain the commands, options and choices, and ask `fvflops completion --names` for what may change: models,
conventions and devices, whose names are cached. Completing an option starts no Python. argcomplete, which runs the
program for each TAB, would import torch each time; shtab writes scripts too, but none for fish, and no names that are
asked for later in bash and zsh alike.
"""
