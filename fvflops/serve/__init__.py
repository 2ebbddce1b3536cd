"""Estimate what serving a language model costs: its cache, the time of tokens, and requests."""
