"""Shape execution: tensors with shapes and strides, without numbers."""
