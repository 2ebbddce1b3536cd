"""Formulas that YAML cannot express, for `use` in tables."""
