"""A table of module calls in execution order, with tensor shapes and the cost of everything inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fvflops.reports.calls.op_call_table import INPUTS, OUTPUTS, data_column
from fvflops.reports.document import Table, module_column, number_column, text_column
from fvflops.trace.calls import ModuleCall
from fvflops.units import format_parameters, format_thousands
from fvflops.views.call_rows import list_module_rows


def module_call_table(calls: Sequence[ModuleCall], *, depth: int | None = None) -> Table:
    """Return a row for each module call with at most `depth` enclosing calls, None for all.

    >>> call = ModuleCall(0, "", "ReLU", "forward", 0, ("float32[8]",), ("float32[8]",), 0, 1, 8, 0, 0, 64, 0)
    >>> from fvflops.reports.document import Document
    >>> from fvflops.reports.formats import write_document
    >>> print(write_document(Document("calls", parts=[module_call_table([call])])))
    #  module  class  in   out  params  FLOPs  acts  bytes
    -  ------  -----  ---  ---  ------  -----  ----  -----
    0  model   ReLU   [8]  [8]       0      8     0     64
    """
    selected = [call for call in calls if depth is None or call.depth <= depth]
    headings, rows = list_module_rows(selected)
    columns = {
        "number": number_column("number", "#", form=str),
        "module": module_column(),
        "class": text_column("class"),
        "phase": replace(
            text_column("phase"), hide_order=1, only_for="" if len({call.phase for call in calls}) > 1 else "data"
        ),
        "inputs": INPUTS,
        "outputs": OUTPUTS,
        "parameters": number_column("parameters", "params", form=format_parameters),
        "flops": number_column("flops", "FLOPs", form=format_thousands),
        "activations": number_column("activations", "acts", form=format_thousands),
        "bytes": number_column("bytes"),
        "unsupported": number_column(
            "unsupported",
            "unsupported ops",
            form=str,
            only_for="" if any(call.unsupported for call in calls) else "data",
        ),
    }
    return Table("calls", [columns.get(key, data_column(key)) for key in headings], rows, noun="call")
