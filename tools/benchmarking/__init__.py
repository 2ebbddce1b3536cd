"""The parts of tools/benchmark.py: the runs, their timing and the report."""
