"""Counting: a Trace and a table in, Counts out."""

from fvflops.counting.cost_models import FreePricer, TablePricer
from fvflops.counting.count import Amount, Pricer, RegionAmounts, count
from fvflops.counting.handles import Handle, HandlePricer
from fvflops.counting.timeline import build_timeline

__all__ = [
    "Amount",
    "FreePricer",
    "Handle",
    "HandlePricer",
    "Pricer",
    "RegionAmounts",
    "TablePricer",
    "build_timeline",
    "count",
]
