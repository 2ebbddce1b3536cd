"""Shorten a model with many equal layers, so that a few of them run for all."""
