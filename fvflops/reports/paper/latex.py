"""The LaTeX report: a booktabs table with the columns that papers have."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.reports.names import escape_latex
from fvflops.reports.paper.paper_rows import list_paper_rows
from fvflops.trace import Summary


def render(summary: Summary, *, by: str = "module", depth: int | None = None) -> str:
    r"""Return a tabular of parameters in millions, FLOPs in thousand millions and activations in millions.

    There is one row for the model, and with `depth` one for each module down to so many levels below the root; cells
    have three figures. Comments above, for the caption, name the convention, the inputs, what is left out and the
    versions; a line below the table names the ops of unknown cost. The document needs the package booktabs, and one
    with names in other scripts XeLaTeX or LuaLaTeX. Another view than "module" raises ValueError.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> columns = {"parameters": {"": 25_557_032}, "flops": {"": 4_089_184_256}}
    >>> print(render(Summary(ModuleTree({"": ModuleInfo("", "", "Res_Net")}), columns)))
    % Model: Res_Net.
    % Needs \usepackage{booktabs}.
    \begin{tabular}{lrr}
      \toprule
      Model & Params (M) & FLOPs (G) \\
      \midrule
      Res\_Net & 25.6 & 4.09 \\
      \bottomrule
    \end{tabular}
    """
    heads, rows, notes = list_paper_rows(summary, by=by, depth=depth, report="the LaTeX report")
    first, *others = [_write_row([escape_latex(name), *cells]) for name, cells in rows]
    return "\n".join(
        [
            *(f"% {note}" for note in notes),
            r"% Needs \usepackage{booktabs}.",
            rf"\begin{{tabular}}{{l{'r' * len(heads)}}}",
            r"  \toprule",
            _write_row(["Module" if depth else "Model", *heads]),
            r"  \midrule",
            first,
            *([r"  \midrule", *others] if others else []),
            r"  \bottomrule",
            *_warn_of_unknown(summary, 1 + len(heads)),
            r"\end{tabular}",
        ]
    )


def _warn_of_unknown(summary: Summary, width: int) -> list[str]:
    unknown = [op for op, calls in summary.ledger.get("unknown", {}).items() if calls]
    if not unknown:
        return []
    listed = ", ".join(escape_latex(op) for op in sorted(unknown))
    return [rf"  \multicolumn{{{width}}}{{l}}{{\footnotesize Without the unknown cost of {listed}.}} \\"]


def _write_row(cells: Sequence[str]) -> str:
    return rf"  {' & '.join(cells)} \\"
