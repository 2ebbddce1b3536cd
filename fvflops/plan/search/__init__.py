"""Search for the layout of a training run on a number of GPUs."""
