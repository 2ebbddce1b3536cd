"""Real execution: ops run as they are and are recorded."""
