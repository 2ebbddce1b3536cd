"""Measured serving runs for tools/serving_times.py."""
