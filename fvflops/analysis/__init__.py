"""Analyses of a model and their text output, with fvcore's interface."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fvflops.analysis.fvcore_text import flop_count_str, flop_count_table, parameter_count_table, summarise
    from fvflops.analysis.model_analysis import ModelAnalysis
    from fvflops.analysis.model_counts import (
        ActivationCountAnalysis,
        FlopCountAnalysis,
        activation_count,
        flop_count,
        parameter_count,
    )
    from fvflops.analysis.recording import record
    from fvflops.analysis.steps import schedule
    from fvflops.analysis.training_step_analysis import TrainingStepAnalysis

# Name → defining module, imported on first use: a count needs a third of them.
_MODULES = {
    "ActivationCountAnalysis": "fvflops.analysis.model_counts",
    "FlopCountAnalysis": "fvflops.analysis.model_counts",
    "ModelAnalysis": "fvflops.analysis.model_analysis",
    "TrainingStepAnalysis": "fvflops.analysis.training_step_analysis",
    "activation_count": "fvflops.analysis.model_counts",
    "flop_count": "fvflops.analysis.model_counts",
    "flop_count_str": "fvflops.analysis.fvcore_text",
    "flop_count_table": "fvflops.analysis.fvcore_text",
    "parameter_count": "fvflops.analysis.model_counts",
    "parameter_count_table": "fvflops.analysis.fvcore_text",
    "record": "fvflops.analysis.recording",
    "schedule": "fvflops.analysis.steps",
    "summarise": "fvflops.analysis.fvcore_text",
}

__all__ = [
    "ActivationCountAnalysis",
    "FlopCountAnalysis",
    "ModelAnalysis",
    "TrainingStepAnalysis",
    "activation_count",
    "flop_count",
    "flop_count_str",
    "flop_count_table",
    "parameter_count",
    "parameter_count_table",
    "record",
    "schedule",
    "summarise",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fvflops.analysis' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
