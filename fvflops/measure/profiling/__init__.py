"""Profile: measured times and memory with the counts."""
