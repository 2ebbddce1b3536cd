"""Real execution: ops run normally and are recorded."""
