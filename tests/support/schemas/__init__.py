"""Schemas of ops of libraries that are not installed, so that their calls can be recorded."""
