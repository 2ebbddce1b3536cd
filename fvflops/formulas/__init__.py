"""Formulas: tables that put a price on every call, and the few formulas that YAML cannot say."""

from fvflops.formulas.call import Call
from fvflops.formulas.cost import Cost
from fvflops.formulas.document import TableError
from fvflops.formulas.loading import load_table, shipped_tables
from fvflops.formulas.row import Price, Row
from fvflops.formulas.shipped import register_formula
from fvflops.formulas.table import FormulaTable

__all__ = [
    "Call",
    "Cost",
    "FormulaTable",
    "Price",
    "Row",
    "TableError",
    "load_table",
    "register_formula",
    "shipped_tables",
]
