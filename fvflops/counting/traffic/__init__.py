"""Memory traffic of each op call, in bytes."""
