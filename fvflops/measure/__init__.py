"""Measure a run: the time of its modules, operators, kernels and steps."""
