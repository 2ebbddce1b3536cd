"""Values of large tensors as expressions of small ones, such as an attention mask of positions."""
