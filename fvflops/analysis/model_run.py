"""Model, inputs and settings of an analysis, recorded on first access to a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fvflops.analysis.bound_inputs import InputSize, bind_inputs, check_inputs, inputs_of_size
from fvflops.analysis.files.run_exported import is_program, program_module
from fvflops.capture.errors.model_check import check_model
from fvflops.capture.model.read_module_tree import unwrap_compiled
from fvflops.capture.run import EXECUTIONS, CostEstimate, Model, record_call
from fvflops.trace import StopsAt, Trace, TraceError


@dataclass(frozen=True, slots=True, eq=False)
class ModelRun:
    """A model with its inputs and the settings of `record_call`; `model` is None for an analysis of a Trace.

    A program of torch.export becomes its module; without `inputs` and `kwargs` it runs on its example inputs. Tensors
    of `input_size` become `inputs`. What is neither a module nor a function, and sizes as inputs, raise TypeError.
    """

    model: Model | None
    inputs: Any = None
    kwargs: Mapping[str, Any] | None = None
    execution: str = "auto"
    device: str | torch.device | None = None
    assume: Mapping[str, Any] | None = None
    lines: bool = False
    input_size: InputSize | None = None

    def __post_init__(self) -> None:
        if self.execution not in EXECUTIONS:
            raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}; got {self.execution!r}")
        inputs, kwargs = inputs_of_size(self.model, self.inputs, self.kwargs, self.input_size)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "kwargs", kwargs)
        object.__setattr__(self, "input_size", None)
        if is_program(self.model):
            program: Any = self.model
            if self.inputs is None and self.kwargs is None:
                if program.example_inputs is None:
                    raise ValueError("the exported program has no example inputs: pass inputs")
                args, kwargs = program.example_inputs
                object.__setattr__(self, "inputs", args)
                object.__setattr__(self, "kwargs", kwargs)
            object.__setattr__(self, "model", program_module(program))
        if isinstance(self.model, nn.Module):
            object.__setattr__(self, "model", unwrap_compiled(self.model))
        if self.model is not None or self.inputs is not None:
            check_model(self.model)
            check_inputs(self.require_model(), self.inputs)

    def with_model(self, model: Model | None, inputs: Any) -> ModelRun:
        """Return a copy with another model or other inputs, where these are not None."""
        return replace(
            self,
            model=self.model if model is None else model,
            inputs=self.inputs if inputs is None else inputs,
        )

    def require_model(self) -> Model:
        """Return the model; without one raise TraceError."""
        if self.model is None:
            raise TraceError("an analysis of a trace has no model to run: pass new_model and new_inputs to copy()")
        return self.model

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the model's call."""
        return bind_inputs(self.require_model(), self.inputs, self.kwargs)

    def record(self, *, stops_at: StopsAt, estimate_cost: CostEstimate, quiet: bool) -> Trace:
        """Run the model once and return its Trace."""
        args, kwargs = self.arguments()
        return record_call(
            self.require_model(),
            args,
            kwargs,
            stops_at=stops_at,
            execution=self.execution,
            device=self.device,
            assume=self.assume,
            estimate_cost=estimate_cost,
            quiet=quiet,
            lines=self.lines,
        )
