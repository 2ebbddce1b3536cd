"""Counting: a Trace and a table in, Counts out."""

from fvflops.metrics.counting import Amount, Pricer, RegionAmounts, count
from fvflops.metrics.handles import Handle, HandlePricer
from fvflops.metrics.pricing import FreePricer, TablePricer
from fvflops.metrics.timeline import build_timeline

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
