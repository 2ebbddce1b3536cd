"""A table for terminals with bars, collapsed layers and op coverage."""
