"""An analysed run as plain data, the input of all views."""

from __future__ import annotations

from dataclasses import dataclass

from fvflops.counting.ignored_work import describe_ignored_work
from fvflops.counting.unknown_masks import describe_unknown_masks
from fvflops.formulas import FormulaTable
from fvflops.formulas.table import FUNCTION_PREFIX
from fvflops.formulas.torch_registry import is_halved
from fvflops.trace import Counts, Trace


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
    """Return metadata of a run for reports: that of its Trace, the model's class, and the table."""
    about = dict(run.trace.about)
    about["model"] = run.trace.modules.root.class_name
    if run.table is not None:
        about |= {"table": run.table.name, "multiply_add": str(run.table.multiply_add)}
        about["description"] = run.table.description
        about |= _describe_registered(run, run.table)
        if ignored := describe_ignored_work(run.trace, run.counts, run.table, run.handled):
            about["ignored_work"] = ignored
        if masks := describe_unknown_masks(run.trace, run.table):
            about["unknown_masks"] = masks
    unused = _find_unused_backwards(run)
    return {**about, "unused_rows": ", ".join(unused)} if unused else about


def _find_unused_backwards(run: AnalysedRun) -> list[str]:
    """Return the rows and handles named after torch's backward of a function, `prim::PythonOp.NAMEBackward`.

    No call has that name, unless a function is called so: a backward pass is counted op by op.
    """
    if not any(phase == "backward" for *_, phase in run.trace.calls):
        return []
    named = run.handled.union(() if run.table is None else run.table.rows)
    functions = {f"{FUNCTION_PREFIX}{region.name}" for region in run.trace.regions if region.kind == "function"}
    return sorted({f"{name}Backward" for name in functions} & named - functions)


def _describe_registered(run: AnalysedRun, table: FormulaTable) -> dict[str, str]:
    """Return the ops counted by formulas of torch.utils.flop_counter, by how their result is read.

    "registered_halved" are read as 2 FLOPs per multiply-add, "registered" as FLOPs.
    """
    ops: dict[str, dict[str, None]] = {}
    for signature in run.trace.signatures if table.registered_formulas else ():
        if table.row(signature.op) is None and not {signature.op, signature.packet} & run.handled:
            halved = is_halved(signature)
            if halved is not None:
                ops.setdefault("registered_halved" if halved else "registered", {})[signature.packet] = None
    return {key: ", ".join(names) for key, names in ops.items()}
