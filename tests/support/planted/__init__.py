"""Steps with planted defects: real ones on the CPU, and synthetic traces of GPUs."""
