"""Memory of a planned rank over its step."""
