"""Recording: a model and its inputs in, a Trace out; torch's internals live only here."""
