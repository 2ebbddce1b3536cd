"""Detect unseen work: computation that does not go through the dispatcher."""
