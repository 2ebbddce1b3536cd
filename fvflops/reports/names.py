"""Escape names of modules and ops for terminals, Markdown, LaTeX and spreadsheets.

A module may have any name without a dot: `a|b`, `=1+1`, a line break. A report shows such a name as text. Tables on a
terminal cut very long ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fvflops.text import printable, printable_short, truncate
from fvflops.units import format_quantity

_LONGEST = 120  # characters of a name in a sentence

_MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;", **{mark: "\\" + mark for mark in "\\`*[]~|$"}}
_MARKDOWN_MARK = re.compile("[" + re.escape("".join(_MARKDOWN)) + "]")
# Within a word an underscore is one in CommonMark too; only at an end of a word can it open or close emphasis.
_OUTER_UNDERSCORES = re.compile(r"(?<!\w)_+|_+(?!\w)")
# TeX's special characters; what the end of a row would read as its argument (`*`, `[`), what fonts join (`--`, `,,`)
# or lack (`<`), and what packages make active (`"`).
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    '"': r"{\char34}",
    **{mark: "\\" + mark for mark in "{}$&#_%"},
    **{mark: "{" + mark + "}" for mark in "-,*[]"},
}
# Blanks that Markdown strips from a cell, and that end no emphasis (`** **`).
_OUTER_BLANKS = re.compile("^ +| +$")
# TeX drops blanks at the ends of a cell, and sets a run of them as one.
_LOST_BLANKS = re.compile("^ +| +$|(?<= ) +")
# What Excel, LibreOffice and Google Sheets take for the start of a formula, full-width forms included.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def escape_markdown(name: str) -> str:
    """Return a name so that it reads as itself in a cell or a line of GitHub's Markdown.

    >>> print(escape_markdown("layer_1.a|b<c>"), escape_markdown("_x_"))
    layer_1.a\\|b&lt;c&gt; \\_x\\_
    >>> print(f"**{escape_markdown(' ')}**")
    **&#32;**
    """
    text = _OUTER_UNDERSCORES.sub(lambda found: found.group().replace("_", "\0"), printable(name))
    text = _MARKDOWN_MARK.sub(lambda found: _MARKDOWN[found.group()], text).replace("\0", "\\_")
    return _OUTER_BLANKS.sub(lambda found: "&#32;" * len(found.group()), text)


def plain_name(name: str) -> str:
    """Return a name as a sentence of a text has it, cut to 120 characters.

    >>> plain_name("layer_1\\n"), len(plain_name("x" * 10_000))
    ('layer_1\\\\n', 121)
    """
    return printable(truncate(name, _LONGEST))


def list_ops(calls: Mapping[str, int]) -> str:
    """Return ops with their calls, as a sentence has them.

    >>> list_ops({"mylib::scan": 2, "mylib::gather": 1})
    'mylib::scan (2 calls), mylib::gather (1 call)'
    """
    return ", ".join(f"{plain_name(op)} ({format_quantity(count, 'call')})" for op, count in calls.items())


def escape_latex(name: str) -> str:
    r"""Return a name so that it reads as itself in LaTeX's text and tables; letters of all scripts stay as they are.

    >>> print(escape_latex("layer_1.a%b"), escape_latex("{x}~"))
    layer\_1.a\%b \{x\}\textasciitilde{}
    """
    text = "".join(_LATEX.get(mark, mark) for mark in printable(name))
    return _LOST_BLANKS.sub(lambda found: r"\mbox{ }" * len(found.group()), text)


def neutralise_formula(name: str) -> str:
    """Return a name with an apostrophe in front if a spreadsheet would take it for a formula.

    >>> neutralise_formula("=1+1"), neutralise_formula("fc")
    ("'=1+1", 'fc')
    """
    # Some spreadsheets strip a cell before they read it.
    if name.startswith(_FORMULA_STARTS) or name.lstrip().startswith(_FORMULA_STARTS):
        return "'" + name
    return name


__all__ = [
    "escape_latex",
    "escape_markdown",
    "list_ops",
    "neutralise_formula",
    "plain_name",
    "printable",
    "printable_short",
]
