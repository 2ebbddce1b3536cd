"""Strides of results, where the kernels' differ from torch's shape rules."""
