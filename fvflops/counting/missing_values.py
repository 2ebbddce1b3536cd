"""Find calls of which a Trace lacks the values that their cost depends on."""

from __future__ import annotations

from fvflops.trace import StopsAt, TensorSpec, Trace, Value
from fvflops.trace.records import ALL_LISTS


def lacks_values(trace: Trace, stops_at: StopsAt) -> bool:
    """Return whether a call has a list whose values `stops_at` keeps, and the recording was not asked to."""
    for signature in trace.signatures if stops_at.values else ():
        wanted = stops_at.values_of(signature.op)
        if not wanted or {*wanted} <= {*trace.stops_at.values_of(signature.op)}:
            continue
        arguments = zip(signature.names, signature.inputs, strict=False)
        if any(_lacks_values(value) for name, value in arguments if wanted == ALL_LISTS or name in wanted):
            return True
    return False


def _lacks_values(value: Value) -> bool:
    if not isinstance(value, TensorSpec) or value.values is not None:
        return False
    return value.ndim <= 1 and not (value.is_floating_point or value.is_complex)
