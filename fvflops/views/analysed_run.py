"""An analysed run as plain data, the input of all views, and its Summary."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from fvflops import __version__
from fvflops.counting.metrics import METRICS, MetricCounts
from fvflops.counting.uncounted_work import describe_ignored_work, describe_unknown_masks, find_unsupported_locations
from fvflops.formulas import FormulaTable
from fvflops.formulas.table import FUNCTION_PREFIX
from fvflops.formulas.torch_registry import is_halved
from fvflops.trace import PHASES, Counts, Summary, Trace
from fvflops.trace.module_tree import innermost


@dataclass(frozen=True, slots=True)
class AnalysedRun:
    """A Trace, its counts, and the formula table and handles that counted them.

    `table` is None where no table was used. `handled` are the ops counted by handles of the program. `ancestors` is
    "owner" or "caller", the modules that an op counts for, as in `Counts`.
    """

    trace: Trace
    counts: Counts
    table: FormulaTable | None = None
    handled: frozenset[str] = frozenset()
    ancestors: str = "owner"


def describe_run(run: AnalysedRun) -> dict[str, str]:
    """Return metadata of a run for reports: its Trace's, the model's class, and the table."""
    about = {**run.trace.about, "model": run.trace.modules.root.class_name}
    if run.table is not None:
        table = run.table
        about |= {"table": table.name, "multiply_add": str(table.multiply_add), "description": table.description}
        about |= _describe_registered(run, table)
        if ignored := describe_ignored_work(run.trace, run.counts, table, run.handled):
            about["ignored_work"] = ignored
        if masks := describe_unknown_masks(run.trace, table):
            about["unknown_masks"] = masks
    unused = _find_unused_backwards(run)
    return {**about, "unused_rows": ", ".join(unused)} if unused else about


def _find_unused_backwards(run: AnalysedRun) -> list[str]:
    """Return the rows and handles of torch's `prim::PythonOp.NAMEBackward`, since a backward is counted op by op."""
    if not any(phase == "backward" for *_, phase in run.trace.calls):
        return []
    named = run.handled.union(() if run.table is None else run.table.rows)
    functions = {f"{FUNCTION_PREFIX}{region.name}" for region in run.trace.regions if region.kind == "function"}
    return sorted({f"{name}Backward" for name in functions} & named - functions)


def _describe_registered(run: AnalysedRun, table: FormulaTable) -> dict[str, str]:
    """Return the ops counted by torch's registered formulas, by whether their result is halved to multiply-adds."""
    ops: dict[str, dict[str, None]] = {}
    for signature in run.trace.signatures if table.registered_formulas else ():
        if table.row(signature.op) is None and not {signature.op, signature.packet} & run.handled:
            halved = is_halved(signature)
            if halved is not None:
                ops.setdefault("registered_halved" if halved else "registered", {})[signature.packet] = None
    return {key: ", ".join(names) for key, names in ops.items()}


def make_summary(runs: Mapping[str, AnalysedRun]) -> Summary:
    """Return the summary of runs by heading; columns of phases, and all except counts, are from the first run."""
    first = next(iter(runs.values()))
    by_both = {
        heading: {name: dict(labels) for name, labels in run.counts.labels_by_module(run.ancestors).items()}
        for heading, run in runs.items()
    }
    columns = {"parameters": dict(first.trace.modules.count_parameters())}
    for heading, modules in by_both.items():
        columns[heading] = {name: sum(labels.values()) for name, labels in modules.items()}
    phases = {phase for *_, phase in first.trace.calls}
    if not phases <= {"forward"}:
        by_module = first.counts.by_module_and_phase(first.ancestors)
        for phase in filter(phases.__contains__, PHASES):
            columns[phase] = {name: values[phase] for name, values in by_module.items()}
    return Summary(
        modules=first.trace.modules,
        columns=columns,
        operators={heading: modules[""] for heading, modules in by_both.items()},
        by_both=by_both,
        uncalled={heading: frozenset(find_uncalled(run.trace, run.ancestors)) for heading, run in runs.items()},
        ledger={status.value: dict(calls) for status, calls in first.counts.ledger().items()},
        unsupported_elements=dict(first.counts.unsupported_elements()),
        unsupported_locations=find_unsupported_locations(first.trace, first.counts),
        about={"fvflops": __version__, **describe_run(first)},
    )


def with_columns(run: AnalysedRun) -> dict[str, AnalysedRun]:
    """Return metric → run: the metric of `run` and, where that is a table's FLOPs, the others that tables show."""
    runs = {run.counts.metric: run}
    if "flops" in runs and run.table is not None:
        counts = MetricCounts(run.trace, run.table, run.counts)
        runs |= {name: replace(run, counts=counts[name]) for name in column_metrics() if name not in runs}
    return runs


def column_metrics() -> tuple[str, ...]:
    """Return the metrics with a column in tables, except parameters."""
    return tuple(name for name, metric in METRICS.items() if metric.column and name != "parameters")


def name_heading(heading: str) -> str:
    """Return the displayed heading of a column: a metric's title, lower case unless an acronym, or a phase."""
    title = METRICS[heading].title if heading in METRICS else heading
    return title.lower() if title[1:].islower() else title


def find_uncalled(trace: Trace, ancestors: str) -> set[str]:
    """Return the names of modules in which no op ran: unused, or used without being called."""
    scopes = trace.scopes()
    active = [scopes[stack] for stack in trace.active]
    seen = set().union(*active)
    if ancestors == "owner":
        owners = set(map(innermost, active))
        for name in owners.copy():
            while (name := name.rpartition(".")[0]) not in owners:
                owners.add(name)
        seen |= owners
    return {module.name for module in trace.modules.modules()} - seen


def find_unused(trace: Trace, uncalled: Collection[str]) -> list[str]:
    """Return the uncalled modules that should have worked: they own parameters, and no op read one.

    The others do nothing in this mode (dropout), or their weights are used by another module, as `out_proj`'s by
    nn.MultiheadAttention. Without ordered events it is not known which parameters were read.
    """
    modules = trace.modules.by_name
    expected = [name for name in uncalled if modules[name].has_forward and modules[name].parameters]
    if not expected:
        return []
    read = {index for event in trace.events or () for index in event.reads}
    storages = [trace.storages[index] for index in read]
    used = {storage.name.rpartition(".")[0] for storage in storages if storage.origin == "parameter"}
    return sorted(name for name in expected if name not in used)
