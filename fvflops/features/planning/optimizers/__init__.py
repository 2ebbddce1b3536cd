"""Optimizers that people train with and torch.optim lacks."""
