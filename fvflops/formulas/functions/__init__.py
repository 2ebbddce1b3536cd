"""Formulas that YAML cannot express, which a table names with `use`."""
