"""A finding: a loss of a step, its size, the evidence and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fvflops.devices.devices import Device
from fvflops.devices.measured_errors import expect_kernel_error
from fvflops.explain.explained_trace import ExplainedTrace
from fvflops.explain.launch_contexts import shorten_kernel
from fvflops.explain.step_records import IdleRow, WorkRow
from fvflops.plan.step_time.calibration import KernelTimer, find_efficiency
from fvflops.text import shown_by_fields
from fvflops.units import format_quantity, format_seconds


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class Finding:
    """One reason why a step is slow.

    `code` is a stable name of the reason, `text` a sentence with the numbers, `seconds` the time that a step would
    save, `evidence` the rows that show it, `advice` the remedy, and `certainty` how accurate the seconds are.
    """

    code: str
    text: str
    seconds: float
    evidence: tuple[str, ...]
    advice: str
    certainty: str


MEASURED = "measured: the time that the trace shows"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The rows of all steps of a trace; `timer` estimates kernel times on the device, None for an unknown device."""

    trace: ExplainedTrace
    steps: int
    total_ns: int
    work: tuple[WorkRow, ...]
    idle: tuple[IdleRow, ...]
    timer: KernelTimer | None
    is_planned: bool = False

    @property
    def device(self) -> Device | None:
        return self.trace.device

    @property
    def on_gpu(self) -> bool:
        return any(timeline.on_gpu for timeline in self.trace.timelines)

    def seconds(self, ns: float) -> float:
        """Convert nanoseconds of all steps to seconds per step."""
        return ns / 1e9 / self.steps

    def time(self, ns: float) -> str:
        """Format nanoseconds of all steps as the time per step."""
        return format_seconds(self.seconds(ns))

    def finding(
        self, code: str, text: str, ns: float, rows: Sequence[WorkRow], advice: str, certainty: str = MEASURED
    ) -> Finding:
        """Return a finding with its time per step, from `ns` of all steps, and the three longest `rows` as evidence."""
        longest = sorted(rows, key=lambda row: -row.kernel_ns)[:3]
        return Finding(code, text, self.seconds(ns), tuple(map(self._describe, longest)), advice, certainty)

    def _describe(self, row: WorkRow) -> str:
        calls = format_quantity(max(row.kernels // self.steps, 1), "kernel")
        return f"{describe_work(row)}: {calls}, {self.time(row.kernel_ns)} ({row.kernel[:60]})"

    def each(self, count: float) -> int:
        """Return a count of all steps as the rounded count per step."""
        return round(count / self.steps)

    def certainty(self, kind: str) -> str:
        """Return the expected error of the kernel model for a class of kernels; without a device, the other source."""
        if self.device is None:
            return "estimated from the other kernels of the trace"
        return expect_kernel_error(kind, "bf16", self.device).text

    def typical(self) -> float:
        """Return the slowdown of matrix products in a step, at least 1: measured over modelled time, median by time."""
        known = [
            (row.modelled_ns / row.expected_ns, row.modelled_ns)
            for row in self.work
            if row.kind == "matmul" and row.expected_ns and types_of(row)[:1] not in (("float",), ("double",))
        ]
        known.sort()
        half, passed = sum(ns for _, ns in known) / 2, accumulate(ns for _, ns in known)
        return next((max(ratio, 1.0) for (ratio, _), ns in zip(known, passed, strict=True) if ns >= half), 1.0)


def gather_evidence(trace: ExplainedTrace, *, is_planned: bool = False) -> Evidence:
    """Return the rows of all steps of a trace."""
    steps = trace.steps()
    work = tuple(trace.work(lambda row: (row.kind, row.op, row.kernel, row.phase, str(row.inputs), row.details)))
    idle = tuple(trace.idle(lambda row: (row.cause, row.name)))
    timer = None if trace.device is None else KernelTimer(trace.device, find_efficiency(trace.device))
    return Evidence(trace, max(len(steps), 1), trace.total_ns(), work, idle, timer, is_planned)


def describe_work(row: WorkRow) -> str:
    """Return a row's op with its tensors' shapes and dtype, or its kernel's name where no op launched it.

    >>> inputs = [[4, 8], [8, 2], []], ["c10::Half", "c10::Half", "Scalar"], None
    >>> describe_work(WorkRow("matmul", "compute", "aten::mm", "gemm", "forward", "", inputs))
    'mm 4x8 8x2 half'
    """
    if not row.op:
        return shorten_kernel(row.kernel)
    shapes = ["x".join(map(str, shape)) for shape in shapes_of(row)[:3]]
    return " ".join([row.op.removeprefix("aten::"), *shapes, *types_of(row)[:1]])


def shapes_of(row: WorkRow) -> list[tuple[int, ...]]:
    """Return the shapes of a row's tensors, in the order of its arguments."""
    dims = (row.inputs[0] or ()) if row.inputs else ()
    return [tuple(dim) for dim in dims if dim and all(isinstance(size, int) for size in dim)]


def types_of(row: WorkRow) -> tuple[str, ...]:
    """Return the dtypes of a row's tensors, without c10::, in lower case."""
    dims, types = (row.inputs[0] or (), row.inputs[1] or ()) if row.inputs else ((), ())
    found = zip(dims, types, strict=False)
    return tuple(str(name).removeprefix("c10::").lower() for dim, name in found if dim and isinstance(name, str))


Findings = Iterator[Finding]
Group = dict[Any, list[WorkRow]]
