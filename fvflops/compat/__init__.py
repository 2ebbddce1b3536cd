"""Interfaces of other tools over the same counts."""
