"""What tools/gpu.py measures on a machine with a GPU, a file a section."""
