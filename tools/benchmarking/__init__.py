"""The parts of tools/benchmark.py: what is run, how it is timed, and how it is shown."""
