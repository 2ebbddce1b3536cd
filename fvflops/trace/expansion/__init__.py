"""Expand the Trace of a model with few of its equal layers to the full model's."""
