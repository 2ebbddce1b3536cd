"""Compare conventions: one model counted in several, and why they differ."""
