"""The parts of tools/benchmark: what is run, how it is timed, and how it is shown."""
