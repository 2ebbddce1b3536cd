"""Predict a training step before it runs: memory, communication, and time of each rank of a mesh."""
