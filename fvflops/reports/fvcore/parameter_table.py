"""A pipe table of a model's parameters, in the format of fvcore's `parameter_count_table`."""

from __future__ import annotations

from fvflops.reports.escaping import printable_short
from fvflops.reports.text.pipe_table import pipe_table
from fvflops.trace import ModuleTree
from fvflops.units import format_elements, format_shape
from fvflops.views.summary_rows import index_children


def render(modules: ModuleTree, *, depth: int = 3) -> str:
    """Return the elements of each module and the shape of each parameter, `depth` levels of names below the root.

    A tied parameter is counted once, under its first name. A model without parameters, on which fvcore fails, has one
    row, "model" with 0.

    >>> from fvflops.trace import ModuleInfo, ParameterInfo, TensorSpec
    >>> weight = ParameterInfo("weight", TensorSpec((20, 10)), identity=0, trainable=True)
    >>> print(render(ModuleTree({"": ModuleInfo("", "", "Linear", parameters=(weight,))})))
    | name    | #elements or shape   |
    |:--------|:---------------------|
    | model   | 0.2K                 |
    |  weight |  (20, 10)            |
    """
    shapes = {parameter.name: parameter.spec.shape for parameter in modules.parameters()}
    counts = modules.count_parameters()
    children = index_children(counts)
    rows = [("model", format_elements(counts[""]))]
    pending = [(child, 1) for child in reversed(children.get("", ()))]
    while pending:
        name, level = pending.pop()
        if level > depth:
            continue
        blanks = " " * level
        if name in shapes:
            rows.append((blanks + printable_short(name), blanks + format_shape(shapes[name])))
        else:
            rows.append((blanks + printable_short(name), blanks + format_elements(counts[name])))
            pending += [(child, level + 1) for child in reversed(children.get(name, ()))]
    return pipe_table(["name", "#elements or shape"], rows)
