"""Describe errors that a model raised, and refuse what is no model."""
