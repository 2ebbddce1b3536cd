"""Record a run: a model and its inputs in, a Trace out."""
