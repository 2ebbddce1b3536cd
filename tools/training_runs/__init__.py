"""Measured training runs, to compare plans with."""
