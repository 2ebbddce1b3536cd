"""Detect work that does not go through the dispatcher."""
