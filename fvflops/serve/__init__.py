"""Cost of serving a language model: its cache, the times of its steps, and requests through an engine."""
