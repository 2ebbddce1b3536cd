"""What a PyTorch model costs, and where: flops, activations and parameters, by operator and by module."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fvflops.garbage_collector import gc_paused

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
    from fvflops.capture.run import record_call
    from fvflops.features.communication.compute import read_communication
    from fvflops.features.communication.ranks import gather
    from fvflops.features.conventions.compare import compare
    from fvflops.features.deepspeed.flops_profiler import FlopsProfiler, get_model_profile
    from fvflops.features.diff.diff import diff
    from fvflops.features.diff.model import ModelDifference
    from fvflops.features.generation.generation import generation_cost
    from fvflops.features.kernels.kernel_profile import KernelProfile, profile_kernels
    from fvflops.features.memory.compute import MemoryMoment, MemoryTimeline
    from fvflops.features.memory.memory import predict_memory
    from fvflops.features.parameters.model import ParameterCount
    from fvflops.features.parameters.parameters import parameter_summary, parameter_summary_table
    from fvflops.features.planning.plan import plan_rank
    from fvflops.features.profiling.profile import ProfileAnalysis
    from fvflops.features.roofline.compute import roofline
    from fvflops.features.scaling.scaling import cost_of
    from fvflops.features.utilisation.compute import UtilisationError, hfu, mfu
    from fvflops.features.utilisation.devices import Device, find_device
    from fvflops.formulas import Call, Cost, FormulaTable, load_table, register_formula
    from fvflops.trace import Counts, StopsAt, Summary, Trace

    JitModelAnalysis = ModelAnalysis

__version__ = "0.1.0"

# Where each public name lives; it is imported when first used, so that `fvflops --help` need not wait for torch.
_HOMES = {
    "ActivationCountAnalysis": "fvflops.analysis",
    "ByteCountAnalysis": "fvflops.analysis.byte_counts",
    "Call": "fvflops.formulas",
    "Cost": "fvflops.formulas",
    "Counts": "fvflops.trace",
    "Device": "fvflops.features.utilisation.devices",
    "FlopCountAnalysis": "fvflops.analysis",
    "FlopsProfiler": "fvflops.features.deepspeed.flops_profiler",
    "FormulaTable": "fvflops.formulas",
    "KernelProfile": "fvflops.features.kernels.kernel_profile",
    "MemoryMoment": "fvflops.features.memory.compute",
    "MemoryTimeline": "fvflops.features.memory.compute",
    "ModelAnalysis": "fvflops.analysis",
    "ModelDifference": "fvflops.features.diff.model",
    "ParameterCount": "fvflops.features.parameters.model",
    "ProfileAnalysis": "fvflops.features.profiling.profile",
    "StopsAt": "fvflops.trace",
    "Summary": "fvflops.trace",
    "Trace": "fvflops.trace",
    "TrainingStepAnalysis": "fvflops.analysis",
    "UtilisationError": "fvflops.features.utilisation.compute",
    "activation_count": "fvflops.analysis",
    "compare": "fvflops.features.conventions.compare",
    "diff": "fvflops.features.diff.diff",
    "cost_of": "fvflops.features.scaling.scaling",
    "find_device": "fvflops.features.utilisation.devices",
    "flop_count": "fvflops.analysis",
    "flop_count_str": "fvflops.analysis",
    "flop_count_table": "fvflops.analysis",
    "gather": "fvflops.features.communication.ranks",
    "generation_cost": "fvflops.features.generation.generation",
    "get_model_profile": "fvflops.features.deepspeed.flops_profiler",
    "hfu": "fvflops.features.utilisation.compute",
    "load_table": "fvflops.formulas",
    "mfu": "fvflops.features.utilisation.compute",
    "parameter_count": "fvflops.analysis",
    "parameter_count_table": "fvflops.analysis",
    "parameter_summary": "fvflops.features.parameters.parameters",
    "parameter_summary_table": "fvflops.features.parameters.parameters",
    "plan_rank": "fvflops.features.planning.plan",
    "read_communication": "fvflops.features.communication.compute",
    "predict_memory": "fvflops.features.memory.memory",
    "profile_kernels": "fvflops.features.kernels.kernel_profile",
    "record": "fvflops.analysis",
    "record_call": "fvflops.capture.run",
    "register_formula": "fvflops.formulas",
    "roofline": "fvflops.features.roofline.compute",
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
    with gc_paused():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
