"""Fits the figures of kernels to measured times, and says how far the times computed from them are off."""
