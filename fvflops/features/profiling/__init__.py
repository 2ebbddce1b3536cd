"""Profile: measured times and memory beside the counts."""
