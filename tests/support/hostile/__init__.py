"""Hostile files, and the actions that none of them may cause."""
