"""Estimate the time of a training step on a device and a network, by simulating its kernels and collectives."""
