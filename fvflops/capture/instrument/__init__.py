"""Instrument torch while a run lasts: modules, functions, control flow, backward, optimizers, threads."""
