"""The row of one model among many, and the columns of such rows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass

from fvflops.counting.metrics import METRICS
from fvflops.reports.document import Column, number_column, text_column
from fvflops.text import short_repr
from fvflops.units import format_bytes, format_parameters, format_seconds, format_short


@dataclass(frozen=True, slots=True, repr=False)
class ModelCount:
    """Costs of one model; a model that could not be counted has an `error` of one line, and the numbers known so far.

    `model` is the name as the user wrote it. `flops` are in the convention `table`, `macs` are the multiply-adds among
    them; `bytes` is memory traffic without cache reuse or fusion, and `peak_memory` the predicted peak memory of the
    forward pass in bytes, None where it was not asked for. `unsupported` lists ops without a formula with their calls,
    such as `aten::foo ×2; aten::bar ×1`, and of work outside the dispatcher the module and line; `ignored` lists matrix
    products that the convention ignores, with their calls and share.

    `execution` is "shapes" or "real". `device` is where the model was built, "meta" being without weights, and `dtype`
    the dtype of most parameters. `built` is the model built instead where the named model could not be counted, such as
    a smaller configuration. `options` are the settings of building and counting that are not the defaults, and
    `versions` the libraries'. `seconds` includes building and every attempt. `failure` is the kind of an error, one of
    FAILURES. A metric of METRICS that is not named here is one more field.
    """

    model: str
    parameters: int | None = None
    flops: int | None = None
    macs: int | None = None
    activations: int | None = None
    bytes: int | None = None
    peak_memory: int | None = None
    unsupported: str = ""
    ignored: str = field(default="", kw_only=True)
    execution: str = ""
    inputs: str = ""
    device: str = ""
    dtype: str = ""
    table: str = ""
    built: str = ""
    options: str = ""
    versions: str = ""
    seconds: float = 0.0
    failure: str = ""
    error: str = ""

    def __repr__(self) -> str:
        shown = [column for column in COLUMNS[1:] if column.key in COSTS and getattr(self, column.key) is not None]
        costs = [f"{column.show(getattr(self, column.key))} {column.heading}" for column in shown]
        return short_repr(self, self.model, self.error.partition("\n")[0], *costs)

    def __str__(self) -> str:
        known = [(column, getattr(self, column.key)) for column in COLUMNS if getattr(self, column.key)]
        return "\n".join(f"{column.heading}: {column.show(value)}" for column, value in known)


# Why a model has no row of numbers. A killed worker may have been out of memory: the system does not say.
FAILURES = ("error", "timeout", "out of memory", "killed")


_FIELDS = [item.name for item in fields(ModelCount)]
MORE_METRICS = tuple(name for name in METRICS if name not in _FIELDS)
if MORE_METRICS:
    more = [(name, "int | None", field(default=None, kw_only=True)) for name in MORE_METRICS]
    # Under the same name, since workers unpickle it by that.
    ModelCount = make_dataclass(  # type: ignore[misc, assignment]
        "ModelCount", more, bases=(ModelCount,), frozen=True, slots=True, repr=False, namespace={"__module__": __name__}
    )
_METRICS = (*(name for name in _FIELDS if name in METRICS), *MORE_METRICS)


# Field → its heading, where that is not its name.
_HEADINGS = {"peak_memory": "Peak memory", "ignored": "Ignored products", "table": "Convention", "seconds": "Time"}
_FORMS = {"parameters": format_parameters, "peak_memory": format_bytes, "seconds": format_seconds}


def _column(name: str) -> Column:
    if name in METRICS:
        form = _FORMS.get(name, format_bytes if METRICS[name].unit == "B" else format_short)
        return number_column(name, METRICS[name].title, form=form)
    heading = _HEADINGS.get(name, name.capitalize())
    if name in _FORMS:
        return number_column(name, heading, form=_FORMS[name])
    return text_column(name, heading, shorten_last=name in ("unsupported", "ignored", "error"))


# The fields of ModelCount in their order. Text columns have is_text; of the others `seconds` is a float and the rest
# are integers: bytes in `bytes` and `peak_memory`, elements in `parameters` and `activations`.
COLUMNS = tuple(map(_column, ("model", *_METRICS, *(name for name in _FIELDS[1:] if name not in METRICS))))
# The columns of a model's costs.
COSTS = (*_METRICS, "peak_memory")
