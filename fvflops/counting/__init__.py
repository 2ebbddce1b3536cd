"""Count a Trace by a formula table."""

from fvflops.counting.cost_models import Handle, HandleCostModel, NullCostModel, TableCostModel
from fvflops.counting.count_trace import CostModel, RegionCost, count
from fvflops.counting.nested_timeline import build_timeline

__all__ = [
    "CostModel",
    "Handle",
    "HandleCostModel",
    "NullCostModel",
    "RegionCost",
    "TableCostModel",
    "build_timeline",
    "count",
]
