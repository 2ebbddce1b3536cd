"""The shape rules of our own: ops whose rule torch lacks or has too strict, and sizes that are assumed."""

from fvflops.capture.shapes.rules.shape_rules import CPU_RULES, RULES, ShapeRules

__all__ = ["CPU_RULES", "RULES", "ShapeRules"]
