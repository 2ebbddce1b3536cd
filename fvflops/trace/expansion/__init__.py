"""Expand the Trace of a model with few of its equal layers to that of the full model."""
