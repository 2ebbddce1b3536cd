"""Describe errors that a model raised, and reject objects that are not models."""
