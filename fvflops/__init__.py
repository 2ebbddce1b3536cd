"""What a PyTorch model costs, and where: flops, activations and parameters, by operator and by module."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fvflops.collector import uncollected

if TYPE_CHECKING:
    from fvflops.analysis import (
        ActivationCountAnalysis,
        FlopCountAnalysis,
        ModelAnalysis,
        TrainingStepAnalysis,
        activation_count,
        flop_count,
        flop_count_str,
        flop_count_table,
        parameter_count,
        parameter_count_table,
        record,
        schedule,
        summarise,
    )
    from fvflops.analysis.byte_counts import ByteCountAnalysis
    from fvflops.analysis.comparison import compare
    from fvflops.analysis.diff import diff
    from fvflops.analysis.flops_profiler import FlopsProfiler, get_model_profile
    from fvflops.analysis.generation import generation_cost
    from fvflops.analysis.kernel_profile import KernelProfile, profile_kernels
    from fvflops.analysis.memory import predict_memory
    from fvflops.analysis.parameters import parameter_summary, parameter_summary_table
    from fvflops.analysis.plan import plan_rank
    from fvflops.analysis.profile import ProfileAnalysis
    from fvflops.analysis.ranks import gather
    from fvflops.analysis.scaling import cost_of
    from fvflops.capture.record import record_call
    from fvflops.formulas import Call, Cost, FormulaTable, load_table, register_formula
    from fvflops.metrics.communication import read_communication
    from fvflops.metrics.devices import Device, find_device
    from fvflops.metrics.memory import MemoryMoment, MemoryTimeline
    from fvflops.metrics.roofline import roofline
    from fvflops.metrics.utilisation import UtilisationError, hfu, mfu
    from fvflops.trace import Counts, StopsAt, Summary, Trace
    from fvflops.trace.difference import ModelDifference
    from fvflops.trace.parameters import ParameterCount

    JitModelAnalysis = ModelAnalysis

__version__ = "0.1.0"

# Where each public name lives; it is imported when first used, so that `fvflops --help` need not wait for torch.
_HOMES = {
    "ActivationCountAnalysis": "fvflops.analysis",
    "ByteCountAnalysis": "fvflops.analysis.byte_counts",
    "Call": "fvflops.formulas",
    "Cost": "fvflops.formulas",
    "Counts": "fvflops.trace",
    "Device": "fvflops.metrics.devices",
    "FlopCountAnalysis": "fvflops.analysis",
    "FlopsProfiler": "fvflops.analysis.flops_profiler",
    "FormulaTable": "fvflops.formulas",
    "KernelProfile": "fvflops.analysis.kernel_profile",
    "MemoryMoment": "fvflops.metrics.memory",
    "MemoryTimeline": "fvflops.metrics.memory",
    "ModelAnalysis": "fvflops.analysis",
    "ModelDifference": "fvflops.trace.difference",
    "ParameterCount": "fvflops.trace.parameters",
    "ProfileAnalysis": "fvflops.analysis.profile",
    "StopsAt": "fvflops.trace",
    "Summary": "fvflops.trace",
    "Trace": "fvflops.trace",
    "TrainingStepAnalysis": "fvflops.analysis",
    "UtilisationError": "fvflops.metrics.utilisation",
    "activation_count": "fvflops.analysis",
    "compare": "fvflops.analysis.comparison",
    "diff": "fvflops.analysis.diff",
    "cost_of": "fvflops.analysis.scaling",
    "find_device": "fvflops.metrics.devices",
    "flop_count": "fvflops.analysis",
    "flop_count_str": "fvflops.analysis",
    "flop_count_table": "fvflops.analysis",
    "gather": "fvflops.analysis.ranks",
    "generation_cost": "fvflops.analysis.generation",
    "get_model_profile": "fvflops.analysis.flops_profiler",
    "hfu": "fvflops.metrics.utilisation",
    "load_table": "fvflops.formulas",
    "mfu": "fvflops.metrics.utilisation",
    "parameter_count": "fvflops.analysis",
    "parameter_count_table": "fvflops.analysis",
    "parameter_summary": "fvflops.analysis.parameters",
    "parameter_summary_table": "fvflops.analysis.parameters",
    "plan_rank": "fvflops.analysis.plan",
    "read_communication": "fvflops.metrics.communication",
    "predict_memory": "fvflops.analysis.memory",
    "profile_kernels": "fvflops.analysis.kernel_profile",
    "record": "fvflops.analysis",
    "record_call": "fvflops.capture.record",
    "register_formula": "fvflops.formulas",
    "roofline": "fvflops.metrics.roofline",
    "schedule": "fvflops.analysis",
    "summarise": "fvflops.analysis",
}
_ALIASES = {"JitModelAnalysis": "ModelAnalysis"}

__all__ = [
    "ActivationCountAnalysis",
    "ByteCountAnalysis",
    "Call",
    "Cost",
    "Counts",
    "Device",
    "FlopCountAnalysis",
    "FlopsProfiler",
    "FormulaTable",
    "JitModelAnalysis",
    "KernelProfile",
    "MemoryMoment",
    "MemoryTimeline",
    "ModelAnalysis",
    "ModelDifference",
    "ParameterCount",
    "ProfileAnalysis",
    "StopsAt",
    "Summary",
    "Trace",
    "TrainingStepAnalysis",
    "UtilisationError",
    "activation_count",
    "compare",
    "cost_of",
    "diff",
    "find_device",
    "flop_count",
    "flop_count_str",
    "flop_count_table",
    "gather",
    "generation_cost",
    "get_model_profile",
    "hfu",
    "load_table",
    "mfu",
    "parameter_count",
    "parameter_count_table",
    "parameter_summary",
    "parameter_summary_table",
    "plan_rank",
    "predict_memory",
    "profile_kernels",
    "read_communication",
    "record",
    "record_call",
    "register_formula",
    "roofline",
    "schedule",
    "summarise",
]


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'fvflops' has no attribute {name!r}")
    with uncollected():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
