"""Times of kernels on GPUs, from what the GPU is made of and a few figures of each class of kernels."""
