"""ModelAnalysis: a model recorded on first access to a result, counted by a table and by handles."""

from __future__ import annotations

import copy as copying
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from fvflops.analysis.analysis_outputs import AnalysisOutputs
from fvflops.analysis.handle_functions import adapt_handle, list_unused, read_op
from fvflops.analysis.model_run import InputSize, ModelRun
from fvflops.capture.errors.model_check import not_analysis
from fvflops.capture.model.model_index import read_modules
from fvflops.capture.model_call import RunOptions
from fvflops.capture.recorder.tensor_specs import is_composite
from fvflops.capture.run import CostEstimate, Model
from fvflops.counting import CostModel, Handle, HandleCostModel, NullCostModel, TableCostModel, count
from fvflops.counting.cost_models import lacks_values
from fvflops.counting.metrics import METRICS
from fvflops.counting.uncounted_work import find_unsupported_locations
from fvflops.formulas import FormulaTable, load_table
from fvflops.formulas.functions.classes import may_exist, name_class, suggest_class
from fvflops.reports.escaping import printable_short
from fvflops.text import Unpack, explaining_arguments, short_repr
from fvflops.trace import Counts, ModuleTree, Signature, Status, StopsAt, Trace, TraceError
from fvflops.trace.calls import packet_of
from fvflops.trace.counts import ModuleCounts
from fvflops.units import format_quantity, format_short
from fvflops.views.analysed_run import AnalysedRun, find_uncalled, find_unused

Self = TypeVar("Self", bound="ModelAnalysis")

_LOGGER = logging.getLogger("fvflops")
_TRACER_WARNINGS = ("all", "no_tracer_warning", "none")
_ANCESTOR_MODES = ("owner", "caller")


class ModelAnalysis(AnalysisOutputs):
    """A metric of a model, by operator, by module and by both; without handles it counts nothing.

    `model` is a module or a function; `inputs` a tensor, a tuple or list of positional arguments, or a mapping
    of keyword arguments; `kwargs` adds keyword arguments. In place of inputs, `input_size` is the shape of a tensor, a
    text as `--input` takes it ("ids=1,16:int64"), a list of these, or a mapping of names to these. With `lines` each op
    call has the source line that called it. With `warn=False` no warnings of unsupported ops and uncalled modules are
    logged. The model runs once, on first access to a result, and its state is restored afterwards. An op counts for the
    innermost module call around it, and for that module's parents.

    >>> import torch
    >>> analysis = ModelAnalysis(torch.nn.Linear(3, 2), torch.ones(4, 3))
    >>> analysis.set_op_handle("aten::linear", lambda call: call.out.numel).total()
    8
    """

    _metric: str | None = None

    @explaining_arguments
    def __init__(
        self,
        model: Model,
        inputs: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        input_size: InputSize | None = None,
        warn: bool = True,
        **run: Unpack[RunOptions],
    ) -> None:
        self._run = ModelRun(model, inputs, kwargs, input_size, run)
        self._table: FormulaTable | None = None
        self._handles: dict[str, Handle | None] = {}
        self._module_handles: dict[str, Handle | None] = {}
        self._trace: Trace | None = None
        self._is_loaded = False
        self._counts: Counts | None = None
        self._modules: ModuleTree | None = None
        self._ancestors = "owner"
        self._warn_unsupported = self._warn_uncalled = warn
        self._tracer_warnings = "no_tracer_warning"

    @classmethod
    def from_trace(cls: type[Self], trace: Trace, *, warn: bool = True, **options: Any) -> Self:
        """Return an analysis of an existing trace; it never runs a model.

        `warn` is as for ModelAnalysis; other `options` are as for the class (`table=`). A handle for an op that the
        trace has already decomposed raises TraceError on access to a result.
        """
        no_model: Any = None
        analysis = cls(no_model, **options)
        analysis._warn_unsupported = analysis._warn_uncalled = warn
        analysis._load(trace)
        return analysis

    def total(self, module_name: str = "") -> int:
        """Return the count of a module; an unknown name raises KeyError with the closest match."""
        if module_name == "" and self._ancestors == "owner":  # all ops, in any scope
            return self.counts().total()
        return sum(self._counts_by_module()[self.canonical_module_name(module_name)].values())

    def by_operator(self, module_name: str = "") -> Counter[str]:
        """Return operator label → count of a module."""
        return Counter(self._counts_by_module()[self.canonical_module_name(module_name)])

    def by_module(self) -> Counter[str]:
        """Return module name → count, for every module of the model, zeros included.

        A name that no module has raises KeyError with the closest match, as in `total`; none of fvcore's tests reads
        one. The Counters of `by_operator` and `by_module_and_operator` answer 0 for an operator that was not called,
        as fvcore's tests of `by_module_and_operator` and `unsupported_ops` need.
        """
        totals = {name: sum(counts.values()) for name, counts in self._counts_by_module().items()}
        return ModuleCounts(totals, self.canonical_module_name)

    def by_module_and_operator(self) -> dict[str, Counter[str]]:
        """Return module name → operator label → count, for every module of the model."""
        return self.counts().by_module_and_operator(self._ancestors)

    def by_phase(self) -> dict[str, Counter[str]]:
        """Return phase → operator label → count over the whole model; a forward run has only the phase "forward".

        The others are "recompute", "backward", "optimizer" and "other", such as gradient clipping.
        """
        return self.counts().by_phase()

    def by_module_and_phase(self) -> dict[str, Counter[str]]:
        """Return module name → phase → count, for every module of the model."""
        return self.counts().by_module_and_phase(self._ancestors)

    def by_parameter_group(self) -> dict[str, Counter[str]]:
        """Return parameter group → operator label → count, of the recorded optimizer steps."""
        return self.counts().by_parameter_group()

    def by_dtype(self) -> Counter[str]:
        """Return compute dtype → count over the whole model; usually the dtype of an op's inputs."""
        return self.counts().by_dtype()

    def unsupported_ops(self, module_name: str = "") -> Counter[str]:
        """Return op → calls of a module that are not counted: ignored by the convention, or unsupported."""
        calls = self.counts().calls_by_module(self._ancestors, Status.IGNORED, Status.UNSUPPORTED)
        return calls[self.canonical_module_name(module_name)]

    def uncalled_modules(self) -> set[str]:
        """Return the names of the modules in which no op ran: unused, or used other than by calling them."""
        self.counts()  # logs the warnings
        return find_uncalled(self.trace(), self._ancestors)

    def set_op_handle(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Set handles of ops: pairs of op name and handle, or a mapping by keyword; returns the analysis.

        A handle is a function of a `Call` that returns an int, 0 or more, or a Counter of label → int, or a function of
        `(inputs, outputs)` as in fvcore; any other result raises ValueError. None makes the op ignored.
        Names are `aten::linear`, `aten::add.Tensor` (one overload), `mylib::op` or `prim::PythonOp.NAME` (an
        autograd.Function); `torch.ops.aten.linear.default` is one too, also as an object. A lone name, and a function
        of other arguments, raise TypeError, an unknown op ValueError; a warning names the handles of ops
        that the model did not call. An exception of a handle is a ValueError that names both.
        """
        if len(args) % 2:
            raise TypeError("set_op_handle takes pairs of an op name and a handle, such as ('aten::gelu', None)")
        passed = {**kwargs, **dict(zip(args[::2], args[1::2], strict=True))}
        # All are checked before any is set.
        named = {read_op(op): handle for op, handle in passed.items()}
        handles = {name: None if handle is None else adapt_handle(name, handle) for name, handle in named.items()}
        self._handles.update(handles)
        self._counts = None
        return self

    def set_module_handle(self: Self, *args: Any) -> Self:
        """Set handles of module classes: pairs of a class, or its name, and handle; returns the analysis.

        The ops inside such a module are not counted in addition. The handle's call has the module's input tensors as
        `input`, `input_1` ... and its public numbers, strings and parameters as `attributes`; it returns the same as an
        op's handle, and None makes the module ignored. Subclasses are included. A name that no class has raises
        ValueError.

        >>> import torch
        >>> analysis = ModelAnalysis(torch.nn.Sequential(torch.nn.LSTM(4, 8)), torch.ones(5, 1, 4))
        >>> analysis.set_module_handle(torch.nn.LSTM, lambda call: call.attributes["hidden_size"]).by_operator()
        Counter({'LSTM': 8})
        """
        if len(args) % 2:
            raise TypeError("set_module_handle takes pairs of a class and a handle, such as (torch.nn.LSTM, None)")
        for key, handle in zip(args[::2], args[1::2], strict=True):
            if not isinstance(key, (type, str)):
                near = f", {name_class(type(key))}" if isinstance(key, torch.nn.Module) else ""
                raise TypeError(f"set_module_handle takes a class or its name{near}, got a {type(key).__name__} first")
            name = name_class(key) if isinstance(key, type) else key
            if isinstance(key, type) and not issubclass(key, torch.nn.Module):
                raise ValueError(f"{name} is not a module class: a handle of an op or a function is for set_op_handle")
            if not may_exist(name):
                raise ValueError(f"no module class is named {name}: did you mean {suggest_class(name)}?")
            self._module_handles[name] = None if handle is None else adapt_handle(name, handle)
        self._counts = None
        return self

    def clear_op_handles(self: Self) -> Self:
        """Remove all handles and the table's formulas, so that nothing is counted; returns the analysis."""
        self._handles, self._module_handles = {}, {}
        self._table = self._counts = None
        return self

    def canonical_module_name(self, name: str) -> str:
        """Return the name under which a module is counted: for a shared module its first name."""
        return self.module_tree().canonical(name)

    def copy(self: Self, new_model: Model | None = None, new_inputs: Any = None) -> Self:
        """Return an analysis of the same class and settings, with another model or other inputs if given."""
        duplicate = copying.copy(self)
        duplicate._handles = dict(self._handles)
        duplicate._module_handles = dict(self._module_handles)
        if new_model is not None or new_inputs is not None:
            duplicate._trace = duplicate._counts = None
            duplicate._is_loaded = False
            duplicate._run = self._run.with_model(new_model, new_inputs)
            if new_model is not None:
                duplicate._modules = None
        return duplicate

    def ancestor_mode(self: Self, mode: str) -> Self:
        """Set the modules for which an op counts; returns the analysis.

        "owner": the innermost module call around it, and that module's parents by name. "caller": every module call
        around it. They differ where a module calls one that is not its child, as with shared modules.
        """
        if mode not in _ANCESTOR_MODES:
            raise ValueError(f"ancestor mode must be one of {', '.join(_ANCESTOR_MODES)}; got {mode!r}")
        self._ancestors = mode
        return self

    def unsupported_ops_warnings(self: Self, enabled: bool) -> Self:
        """Set whether a warning lists unsupported ops, once per analysis; returns the analysis."""
        self._warn_unsupported = enabled
        return self

    def uncalled_modules_warnings(self: Self, enabled: bool) -> Self:
        """Set whether a warning lists the modules in which no op ran; returns the analysis."""
        self._warn_uncalled = enabled
        return self

    def tracer_warnings(self: Self, mode: str) -> Self:
        """Set which warnings of the model's run are shown: "all", "no_tracer_warning" or "none"; returns the analysis.

        Nothing is traced with torch.jit, so the first two are equivalent.
        """
        if mode not in _TRACER_WARNINGS:
            raise ValueError(f"tracer warning mode must be one of {', '.join(_TRACER_WARNINGS)}; got {mode!r}")
        self._tracer_warnings = mode
        return self

    def module_tree(self) -> ModuleTree:
        """Return the model's module tree."""
        if self._modules is None:
            self._modules = read_modules(self._run.require_model())
        return self._modules

    def trace(self) -> Trace:
        """Return the Trace of the model's run, recorded on first access.

        It is recorded again if the trace has decomposed a composite op that a handle or the table counts as a whole; an
        analysis of a loaded trace raises TraceError instead.
        """
        trace = self._trace
        if trace is not None and self._is_loaded:
            self._check_loaded(trace)
        elif trace is None or self._missing_stops(trace) or lacks_values(trace, self._cost_model().stops_at):
            trace = self._trace = self._record(self._cost_model().stops_at)
            self._modules = trace.modules
        return trace

    def counts(self) -> Counts:
        """Return the counts of the model's run: every entry, with its op, scope, phase and status."""
        if self._counts is None:
            self._counts = count(self.trace(), self._cost_model(), self._metric or "handles")
            self._warn(self._counts)
        return self._counts

    def __repr__(self) -> str:
        """Return one line, without running or counting anything."""
        table = "" if self._table is None else f"convention {self._table.name}"
        return short_repr(self, self._name_model(), *list_facts(self._trace, self._counts), table)

    def _analysed_run(self) -> AnalysedRun:
        return AnalysedRun(self.trace(), self.counts(), self._table, frozenset(self._handles), self._ancestors)

    @contextmanager
    def _warnings_disabled(self) -> Iterator[None]:
        settings = self._warn_unsupported, self._warn_uncalled, self._tracer_warnings
        self._warn_unsupported, self._warn_uncalled, self._tracer_warnings = False, False, "none"
        try:
            yield
        finally:
            self._warn_unsupported, self._warn_uncalled, self._tracer_warnings = settings

    def _name_model(self) -> str:
        if self._modules is not None:
            return self._modules.root.class_name
        model = self._run.model
        if isinstance(model, torch.nn.Module) or not callable(model):
            return "" if model is None else type(model).__name__
        return str(getattr(model, "__name__", type(model).__name__))

    def _record(self, stops_at: StopsAt) -> Trace:
        return self._known_run().record(
            stops_at=stops_at, estimate_cost=cost_estimator(self), quiet=self._tracer_warnings == "none"
        )

    def _known_run(self) -> ModelRun:
        """Return the run, in real execution if its recording fell back to that: the next would fall back again."""
        fell_back = self._trace is not None and self._trace.info.execution == "real"
        return replace(self._run, options={**self._run.options, "execution": "real"}) if fell_back else self._run

    def _load(self, trace: Trace) -> None:
        if not isinstance(trace, Trace):
            raise TypeError(f"from_trace takes a Trace, got {short_repr(trace)}: read a file by Trace.from_json(text)")
        self._trace = trace
        self._is_loaded = True
        self._modules = trace.modules
        self._counts = None

    def _cost_model(self) -> CostModel:
        if self._table is None or self._metric is None:
            return self._with_handles(NullCostModel(load_table("fvcore")))
        return self._with_handles(TableCostModel(self._table, self._metric))

    def _with_handles(self, cost_model: CostModel) -> CostModel:
        if self._handles or self._module_handles:
            return HandleCostModel(cost_model, self._handles, self._module_handles)
        return cost_model

    def _missing_stops(self, trace: Trace) -> list[str]:
        stops = self._cost_model().stops_at
        return sorted({packet_of(name) for name in trace.decomposed if name in stops})

    def _check_loaded(self, trace: Trace) -> None:
        """Raise TraceError for a Trace whose composite ops were not recorded as they are counted."""
        if missing := self._missing_stops(trace):
            raise TraceError(
                f"this trace has decomposed {', '.join(missing)}: to count that op as a whole, record the model again"
            )
        if self._table is None:
            return
        stops = self._cost_model().stops_at
        recorded = {signature.op for signature in trace.signatures if signature.op in trace.stops_at}
        if whole := sorted({packet_of(op) for op in recorded if op not in stops and is_composite(op)}):
            raise TraceError(
                f"this trace has {', '.join(whole)} as a whole, and the convention {self._table.name} counts the ops "
                "inside: record the model again, by this convention"
            )

    def _counts_by_module(self) -> Mapping[str, Counter[str]]:
        return self.counts().labels_by_module(self._ancestors)

    def _warn(self, counts: Counts) -> None:
        unsupported = counts.ledger()[Status.UNSUPPORTED]
        if unsupported and self._warn_unsupported:
            from fvflops.reports.terminal.op_coverage import format_locations

            locations = find_unsupported_locations(self.trace(), counts)
            listed = [
                f"{printable_short(op)} ×{calls} (in {format_locations(locations[op], escape=printable_short)})"
                for op, calls in unsupported.most_common()
            ]
            _LOGGER.warning("Unsupported, so not counted: %s; see unsupported_ops()", _list_eight(listed))
        if self._warn_uncalled:
            if self._handles or self._module_handles:
                for text in list_unused(self.trace(), self._handles, self._module_handles):
                    _LOGGER.warning("%s", text)
            if uncalled := find_unused(self.trace(), self.uncalled_modules()):
                _LOGGER.warning(
                    "No op was seen in the modules %s, and none reads their parameters: they are unused, or run unseen",
                    _list_eight(list(map(printable_short, uncalled))),
                )


def list_facts(trace: Trace | None, counts: Counts | None) -> list[str]:
    """Return the known facts of a run, without computing more: its total, and the op calls that have no formula."""
    if counts is None:
        return ["not run yet" if trace is None else f"{format_quantity(sum(trace.calls.values()), 'op call')} recorded"]
    title = METRICS[counts.metric].short if counts.metric in METRICS else counts.metric
    unsupported = sum(entry.calls for entry in counts.entries if entry.status is Status.UNSUPPORTED)
    missing = f"{format_quantity(unsupported, 'op call')} unsupported" if unsupported else ""
    return [f"{format_short(counts.total())} {title}", missing]


def _list_eight(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def require_analysis(value: object) -> ModelAnalysis:
    """Return a caller's argument if it is an analysis; anything else raises TypeError."""
    if not isinstance(value, ModelAnalysis):
        raise not_analysis(value, "FlopCountAnalysis(model, inputs)")
    return value


def analysed_run(analysis: ModelAnalysis) -> AnalysedRun:
    return require_analysis(analysis)._analysed_run()


def estimate_by(cost_model: CostModel, signature: Signature) -> int:
    """Return the cost of a call, to compare it with an alternative call."""
    return sum(cost.value for cost in cost_model.op_cost(signature))


def model_run(analysis: ModelAnalysis) -> ModelRun | None:
    """Return the model, inputs and settings of an analysis; None for one of a Trace or of `record`."""
    return None if require_analysis(analysis)._is_loaded else analysis._known_run()


def record_again(analysis: ModelAnalysis, stops_at: StopsAt) -> Trace:
    """Run the model of an analysis again and return the new Trace; the analysis keeps its own."""
    return analysis._record(stops_at)


def cost_estimator(analysis: ModelAnalysis) -> CostEstimate:
    """Return the function that estimates the cost of a call in an analysis, for `estimate_cost` of `record_call`."""
    return partial(estimate_by, analysis._cost_model())
