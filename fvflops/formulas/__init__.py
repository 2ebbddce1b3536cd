"""Formula tables, which define the cost of each call, and formulas in Python that YAML cannot express."""

from fvflops.formulas.cost import Cost, OpCost
from fvflops.formulas.language.call import Call
from fvflops.formulas.loading import load_table, resolve_table, shipped_tables
from fvflops.formulas.registry import register_formula
from fvflops.formulas.rows import Row
from fvflops.formulas.table import FormulaTable
from fvflops.formulas.yaml_document import TableError

__all__ = [
    "Call",
    "Cost",
    "FormulaTable",
    "OpCost",
    "Row",
    "TableError",
    "load_table",
    "register_formula",
    "resolve_table",
    "shipped_tables",
]
