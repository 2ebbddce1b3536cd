"""Measurements of tools/gpu.py on a machine with a GPU, a file a section."""
