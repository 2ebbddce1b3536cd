"""Count many models: a row for each, in this process, in worker processes or on a cluster."""

from __future__ import annotations

from fvflops.sweep.count_many import count_many
from fvflops.sweep.count_model import CountSettings, count_model
from fvflops.sweep.model_count import COLUMNS, ModelCount

__all__ = ["COLUMNS", "CountSettings", "ModelCount", "count_many", "count_model"]
