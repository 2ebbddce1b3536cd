"""Shape rules for results whose strides from kernels differ from those of torch's own rules."""
