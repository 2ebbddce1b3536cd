"""The table for a terminal, with its bars, collapsed layers and op coverage."""
