"""Strides of results, where kernels differ from torch's shape rules."""
