"""Kernels and autocast of CUDA in shape execution."""
