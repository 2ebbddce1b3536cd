"""Times of kernels on GPUs, from the datasheet and a few fitted figures of each class of kernels."""
