"""Describe errors that a model raised, and refuse objects that are no models."""
