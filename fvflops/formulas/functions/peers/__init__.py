"""Formulas that reproduce other tools' conventions."""
