"""Predict memory: which tensors are alive when, and the peak."""
