"""Analyses of FLOPs and activations, and fvcore's functions for them and for parameters."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from fvflops.analysis.exporting import prepare_export, write_export
from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.analysis.model_run import InputSize
from fvflops.capture.errors.model_check import check_model
from fvflops.capture.model.model_index import read_modules
from fvflops.capture.model_call import RunOptions
from fvflops.capture.run import Model
from fvflops.counting import CostModel, TableCostModel, count
from fvflops.counting.listed_calls import list_module_calls, list_op_calls, select_calls, sum_lines
from fvflops.counting.traffic.byte_costs import TrafficCostModel, split_by_aliasing
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.reports import REPORTS
from fvflops.text import Unpack, explaining_arguments
from fvflops.trace import PHASES, Counts, Trace, TraceError, check_phase
from fvflops.trace.calls import LineCount, ModuleCall, OpCall, OpGraph, packet_of

if TYPE_CHECKING:
    from fvflops.reports.document import Table


class _TableAnalysis(ModelAnalysis):
    @explaining_arguments
    def __init__(
        self,
        model: Model,
        inputs: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        input_size: InputSize | None = None,
        table: str | FormulaTable = "default",
        warn: bool = True,
        **run: Unpack[RunOptions],
    ) -> None:
        super().__init__(model, inputs, kwargs=kwargs, input_size=input_size, warn=warn, **run)
        self._table = resolve_table(table)


class FlopCountAnalysis(_TableAnalysis):
    """FLOPs of a model's forward pass, in the convention of a table.

    `table` is the name of a shipped convention ("default": a multiply-add is one FLOP; "fvcore": fvcore's numbers,
    including its gaps), a path or URI of a YAML file, or a FormulaTable. The other arguments are as for ModelAnalysis.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 10, 1), nn.Flatten(), nn.Linear(1000, 10))
    >>> flops = FlopCountAnalysis(model, torch.ones(1, 3, 10, 10))
    >>> flops.total(), flops.total("2")
    (13000, 10000)
    >>> flops.by_operator()
    Counter({'linear': 10000, 'conv': 3000})
    """

    _metric = "flops"

    def macs(self, module_name: str = "", *, phase: str | None = None) -> int:
        """Return the multiply-adds of a module, in one phase or in all, independent of `multiply_add`.

        A complex multiply-add counts as one; its real operations are in the total of `exact`. An unknown phase raises
        ValueError.

        >>> import torch
        >>> flops = FlopCountAnalysis(nn.Linear(3, 2), torch.ones(4, 3), table="exact")
        >>> flops.macs(), flops.total()
        (24, 56)
        """
        name, counts = self.canonical_module_name(module_name), self.counts()
        if phase is not None:
            check_phase(phase, PHASES)
        return sum(
            entry.macs
            for entry in counts.entries
            if phase in (None, entry.phase) and name in counts.of_scope(entry.scope, self._ancestors)
        )

    def op_calls(self, *, phase: str | None = None, ignore: Collection[str] = ()) -> tuple[OpCall, ...]:
        """Return the op calls in the order of the run, of one phase or of all.

        `ignore` names ops that are not listed, such as "aten::view" or "aten::add.Tensor". Raises
        ValueError for an unknown op, with the closest match, and TraceError for a phase that was not run.
        """
        return select_calls(self._list_op_calls(), phase, ignore, self._table)[0]

    def op_table(
        self, *, phase: str | None = None, ignore: Collection[str] = (), sort: str | None = None, top: int | None = None
    ) -> str:
        """Return the op calls as a text table: module, shapes, FLOPs, time and memory.

        They are in the order of the run, or sorted by `sort` ("time", "flops", "memory", "peak" or "name"), largest
        first; `top` limits the rows. The other arguments are as for `op_calls`.
        """
        from fvflops.reports.call_tables import op_call_notes, op_call_table

        calls, ignored = select_calls(self._list_op_calls(), phase, ignore, self._table)
        convention = "" if self._table is None else self._table.name
        notes = op_call_notes(calls, ignored=ignored, convention=convention)
        return _write(op_call_table(calls, sort=sort, top=top), notes)

    def module_calls(self) -> tuple[ModuleCall, ...]:
        """Return the module calls in the order of the run, each with its tensors and the cost of everything inside it.

        An aggregated trace raises TraceError.

        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        >>> for call in FlopCountAnalysis(model, torch.ones(4, 3)).module_calls():
        ...     print(call.number, call.module, call.class_name, *call.outputs, call.flops)
        0  Sequential float32[4, 2] 24
        1 0 Linear float32[4, 2] 24
        2 1 ReLU float32[4, 2] 0
        """
        return list_module_calls(self.trace(), self._cost_model(), self._activations_model())

    def module_call_table(self, *, depth: int | None = None) -> str:
        """Return the module calls as a text table: shapes, parameters, FLOPs, activations and bytes.

        `depth` limits the number of enclosing calls.
        """
        return _write(list_call_rows(self, "call", depth))

    def line_counts(self) -> tuple[LineCount, ...]:
        """Return the cost of the op calls by source line of the model, most FLOPs first.

        The line is the innermost outside of torch and the standard library. Ops of autograd and optimizers have none.
        An analysis without `lines=True` raises TraceError.
        """
        calls = self._list_op_calls()
        if not (self._run.options["lines"] or self.trace().lines):
            raise TraceError("no source lines were recorded: create the analysis with lines=True")
        return sum_lines(calls)

    def line_table(self) -> str:
        """Return the source lines as a text table: op calls, FLOPs, share, activations and bytes."""
        return _write(list_call_rows(self, "line"))

    def to_graph(self, format: str = "dot", *, depth: int | None = None) -> str:
        """Return the forward pass as a graph: calls with their FLOPs as nodes, tensors as edges.

        As "dot", for Graphviz, a module is a node if it has no submodules, or is `depth` levels below the root. As
        "model-explorer", for Google's viewer, nodes are op calls in expandable modules. Any other format raises
        ValueError, an aggregated trace TraceError.

        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        >>> print(FlopCountAnalysis(model, torch.ones(4, 3)).to_graph().splitlines()[-2])
          n0 -> n1 [label="[4,2]"]
        """
        graphs = [name for name, report in REPORTS.items() if report.source == "graph"]
        if format not in graphs:
            raise ValueError(f"graph format must be one of {', '.join(graphs)}; got {format!r}")
        return str(REPORTS[format](OpGraph(self._list_op_calls(), self.trace().modules), depth=depth))

    def export(self, path: str | os.PathLike[str], *, format: str | None = None, weight: str | None = None) -> None:
        """Export the run as a timeline or a flame graph for other programs.

        `format` is "chrome-trace" (Perfetto, chrome://tracing), "speedscope" or "flame-graph" (collapsed stacks); by
        default it follows from the file extension: `.speedscope.json`, other `.json`, `.txt`. `weight` is the unit of
        widths: "time" (measured), "flops", "macs", "bytes" or "memory"; None is time where measured, else FLOPs. Raises
        OSError before the run for a path that cannot be written, ValueError for an unknown format or weight, and
        TraceError for a weight without data.

        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     FlopCountAnalysis(nn.Linear(3, 2), torch.ones(4, 3)).export(f"{folder}/stacks.txt")
        ...     with open(f"{folder}/stacks.txt") as file:
        ...         print(file.read(), end="")
        forward;Linear;aten::linear 24
        """
        export_format = prepare_export(path, format, weight)
        write_export(self.trace(), self._cost_model(), path, export_format, weight)

    def _list_call_rows(self, by: str, depth: int | None) -> Table:
        return list_call_rows(self, by, depth)

    def _list_op_calls(self) -> tuple[OpCall, ...]:
        return list_op_calls(self.trace(), self._cost_model(), self._activations_model())

    def _activations_model(self) -> CostModel | None:
        return None if self._table is None else TableCostModel(self._table, "activations")


class ActivationCountAnalysis(_TableAnalysis):
    """Activations of a model's forward pass: output elements of its convolutions and matrix products.

    Arguments are as for FlopCountAnalysis; with an attention op, "default" counts its scores and its output.

    >>> import torch
    >>> ActivationCountAnalysis(nn.Linear(3, 5), torch.ones(4, 3)).total()
    20
    """

    _metric = "activations"


class ByteCountAnalysis(ModelAnalysis):
    """Memory traffic of a model's run in bytes, without cache reuse or fusion.

    `part` is "moved" (read and written), "read" or "written". Composite ops that `table` has a row for count as one
    kernel. The other arguments are as for ModelAnalysis. Ops whose bytes are unknown are in `unsupported_ops()`. For
    the rules see `fvflops.counting.traffic.traffic`.

    >>> import torch
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
        warn: bool = True,
        **run: Unpack[RunOptions],
    ) -> None:
        super().__init__(model, inputs, kwargs=kwargs, input_size=input_size, warn=warn, **run)
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


def _write(table: Table, notes: Sequence[str] = ()) -> str:
    from fvflops.reports.document import Document, Items
    from fvflops.reports.formats import write_document

    return write_document(Document("calls", parts=[table, Items("", notes)]))


def list_call_rows(analysis: FlopCountAnalysis, by: str, depth: int | None = None) -> Table:
    """Return a row per op call (`by` "op"), per source line ("line") or per module call ("call", to `depth`)."""
    from fvflops.reports.call_tables import line_table, module_call_table, op_call_table

    if by == "op":
        return op_call_table(analysis.op_calls())
    if by == "line":
        return line_table(analysis.line_counts())
    return module_call_table(analysis.module_calls(), depth=depth)


@explaining_arguments
def flop_count(
    model: nn.Module, inputs: Any, supported_ops: Mapping[str, Callable[..., Any]] | None = None
) -> tuple[defaultdict[str, float], Counter[str]]:
    """Return (operator label → GFLOPs, op → calls that are not counted); `supported_ops` are additional handles.

    >>> import torch
    >>> dict(flop_count(nn.Linear(1000, 1000), (torch.ones(1, 1000),))[0])
    {'linear': 0.001}
    """
    return _scaled(FlopCountAnalysis(model, inputs), supported_ops, 1e9)


@explaining_arguments
def activation_count(
    model: nn.Module, inputs: Any, supported_ops: Mapping[str, Callable[..., Any]] | None = None
) -> tuple[defaultdict[str, float], Counter[str]]:
    """Return (operator label → millions of activations, op → calls that are not counted).

    >>> import torch
    >>> dict(activation_count(nn.Linear(10, 1000), (torch.ones(1, 10),))[0])
    {'linear': 0.001}
    """
    return _scaled(ActivationCountAnalysis(model, inputs), supported_ops, 1e6)


@explaining_arguments
def parameter_count(model: nn.Module) -> defaultdict[str, int]:
    """Return module or parameter name → elements, "" being the model; a tied parameter counts once.

    >>> parameter_count(nn.Linear(3, 2))[""]
    8
    """
    check_model(model)
    return read_modules(model).count_parameters()


def _scaled(
    analysis: ModelAnalysis, supported_ops: Mapping[str, Callable[..., Any]] | None, unit: float
) -> tuple[defaultdict[str, float], Counter[str]]:
    analysis.set_op_handle(**(supported_ops or {}))
    scaled = {label: value / unit for label, value in analysis.by_operator().items()}
    return defaultdict(float, scaled), analysis.unsupported_ops()
