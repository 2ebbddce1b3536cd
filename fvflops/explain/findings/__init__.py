"""Why steps are slow: findings of traces, with a plan also against it."""
