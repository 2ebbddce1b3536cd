"""Quantise a model built from a configuration, as its `quantization_config` says, without its weights."""
