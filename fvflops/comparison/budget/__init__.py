"""Check a model against its budget file."""
