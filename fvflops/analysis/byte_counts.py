"""Count memory traffic by op, module and phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.analysis.model_run import InputSize
from fvflops.capture.run import Model
from fvflops.counting import CostModel, count
from fvflops.counting.traffic.byte_costs import TrafficCostModel, split_by_aliasing
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.text import explaining_arguments
from fvflops.trace import Counts, Trace
from fvflops.trace.signature import packet_of


class ByteCountAnalysis(ModelAnalysis):
    """Memory traffic of a model's run in bytes, without cache reuse or fusion.

    `part` is "moved" (read and written), "read" or "written". Composite ops that `table` has a row for count as one
    kernel. The other arguments are those of ModelAnalysis. Ops whose bytes are unknown are in `unsupported_ops()`. For
    the rules see `fvflops.counting.traffic.traffic`.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(100, 10), nn.Flatten(0))
    >>> ByteCountAnalysis(model, torch.ones(8, 100)).by_module_and_operator()["0"]
    Counter({'linear': 7560})
    >>> ByteCountAnalysis(model, torch.ones(8, 100), part="written").total()
    320
    """

    _metric = "bytes"

    @explaining_arguments
    def __init__(
        self,
        model: Model,
        inputs: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        input_size: InputSize | None = None,
        part: str = "moved",
        table: str | FormulaTable = "exact",
        execution: str = "auto",
        device: str | torch.device | None = None,
        assume: Mapping[str, Any] | None = None,
        warn: bool = True,
    ) -> None:
        run: dict[str, Any] = {"execution": execution, "device": device, "assume": assume, "warn": warn}
        super().__init__(model, inputs, kwargs=kwargs, input_size=input_size, **run)
        TrafficCostModel(part)  # raises for an unknown part
        self._part = part
        self._kernel_table = resolve_table(table)

    def counts(self) -> Counts:
        """Return the counts of the model's run in bytes; an op without traffic is zero-cost."""
        if self._counts is None:
            trace, cost_model = split_by_aliasing(self.trace(), self._part)
            self._counts = count(trace, self._with_handles(cost_model), "bytes")
            self._warn(self._counts)
        return self._counts

    def _cost_model(self) -> CostModel:
        return self._with_handles(TrafficCostModel(self._part, stops_at=self._kernel_table.stops_at))

    def _missing_stops(self, trace: Trace) -> list[str]:
        """Return the ops with a handle that the trace has decomposed; without handles there are none."""
        stops = self._with_handles(TrafficCostModel(self._part)).stops_at
        return sorted({packet_of(name) for name in trace.decomposed if name in stops})
