"""What serving a language model costs: its cache, the times of its steps, and requests through an engine."""
