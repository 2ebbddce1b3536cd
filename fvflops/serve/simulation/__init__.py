"""Requests through an inference engine: its scheduler, pages of the cache, and latencies."""
