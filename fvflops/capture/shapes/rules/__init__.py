"""Shape rules that torch lacks or has too strict, and assumed sizes."""

from fvflops.capture.shapes.rules.shape_rules import CPU_RULES, RULES, ShapeRules

__all__ = ["CPU_RULES", "RULES", "ShapeRules"]
