"""The face that programs written for fvcore know: analyses of a model, and text made from them."""

from fvflops.analysis.comparison import compare
from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.analysis.model_counts import (
    ActivationCountAnalysis,
    FlopCountAnalysis,
    activation_count,
    flop_count,
    parameter_count,
)
from fvflops.analysis.recording import record
from fvflops.analysis.schedules import schedule
from fvflops.analysis.text import flop_count_str, flop_count_table, parameter_count_table, summarise
from fvflops.analysis.training_step import TrainingStepAnalysis

__all__ = [
    "ActivationCountAnalysis",
    "FlopCountAnalysis",
    "ModelAnalysis",
    "TrainingStepAnalysis",
    "activation_count",
    "compare",
    "flop_count",
    "flop_count_str",
    "flop_count_table",
    "parameter_count",
    "parameter_count_table",
    "record",
    "schedule",
    "summarise",
]
