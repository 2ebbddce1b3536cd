"""Analyses of a model and their text output, with fvcore's interface."""
