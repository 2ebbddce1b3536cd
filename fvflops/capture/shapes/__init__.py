"""Shape execution: tensors with shape, strides, dtype and device, without values."""
