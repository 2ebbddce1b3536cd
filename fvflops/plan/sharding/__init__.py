"""Divide a model among ranks: tensor, expert, context and data parallelism."""
