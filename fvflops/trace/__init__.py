"""Plain data of a recorded run: tensor specs, call signatures, module tree, trace, counts."""

from fvflops.trace.calls import RegionSignature, Signature
from fvflops.trace.counts import Counts, Entry, Status, Summary
from fvflops.trace.module_tree import ModuleInfo, ModuleTree, ParameterInfo
from fvflops.trace.records import PHASES, Event, Region, RunInfo, StopsAt, Storage, TraceError
from fvflops.trace.spec import Symbol, TensorSpec, Value, tensors_in
from fvflops.trace.trace import Trace, check_phase

__all__ = [
    "PHASES",
    "Counts",
    "Entry",
    "Event",
    "ModuleInfo",
    "ModuleTree",
    "ParameterInfo",
    "Region",
    "RegionSignature",
    "RunInfo",
    "Signature",
    "Status",
    "StopsAt",
    "Storage",
    "Summary",
    "Symbol",
    "TensorSpec",
    "Trace",
    "TraceError",
    "Value",
    "check_phase",
    "tensors_in",
]
