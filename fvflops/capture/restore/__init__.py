"""Restore a model and its process after a run, also after an error or a signal."""
