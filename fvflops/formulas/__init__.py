"""Formulas: tables that put a price on every call, and the few formulas that YAML cannot say."""

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.formulas.loading import load_table, resolve_table, shipped_tables
from fvflops.formulas.registry import register_formula
from fvflops.formulas.rows import Price, Row
from fvflops.formulas.table import FormulaTable
from fvflops.formulas.yaml_document import TableError

__all__ = [
    "Call",
    "Cost",
    "FormulaTable",
    "Price",
    "Row",
    "TableError",
    "load_table",
    "register_formula",
    "resolve_table",
    "shipped_tables",
]
