"""Formulas of the `exact` convention: every floating-point operation."""
