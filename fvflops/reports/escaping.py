"""Escape names of modules and ops, such as `a|b`, `=1+1` or a line break, for reports of each format."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fvflops.text import printable as printable
from fvflops.text import printable_short as printable_short
from fvflops.text import truncate
from fvflops.units import format_quantity

_MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;", **{char: "\\" + char for char in "\\`*[]~|$"}}
_MARKDOWN_SPECIAL = re.compile("[" + re.escape("".join(_MARKDOWN)) + "]")
# Within a word an underscore is one in CommonMark too; only at an end of a word can it open or close emphasis.
_OUTER_UNDERSCORES = re.compile(r"(?<!\w)_+|_+(?!\w)")
# TeX's special characters; characters that the end of a row would read as its argument (`*`, `[`), that fonts join
# (`--`, `,,`) or lack (`<`), and that packages make active (`"`).
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
    **{char: "\\" + char for char in "{}$&#_%"},
    **{char: "{" + char + "}" for char in "-,*[]"},
}
# Blanks that Markdown strips from a cell, and that end no emphasis (`** **`).
_OUTER_BLANKS = re.compile("^ +| +$")
# TeX drops blanks at the ends of a cell, and merges consecutive ones.
_DROPPED_BLANKS = re.compile("^ +| +$|(?<= ) +")
# Characters that begin a formula in Excel, LibreOffice or Google Sheets, full-width forms included.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def escape_markdown(name: str) -> str:
    """Return a name escaped for a cell or a line of GitHub's Markdown.

    >>> print(escape_markdown("layer_1.a|b<c>"), escape_markdown("_x_"))
    layer_1.a\\|b&lt;c&gt; \\_x\\_
    >>> print(f"**{escape_markdown(' ')}**")
    **&#32;**
    """
    text = _OUTER_UNDERSCORES.sub(lambda match: match.group().replace("_", "\0"), printable(name))
    text = _MARKDOWN_SPECIAL.sub(lambda match: _MARKDOWN[match.group()], text).replace("\0", "\\_")
    return _OUTER_BLANKS.sub(lambda match: "&#32;" * len(match.group()), text)


def plain_name(name: str) -> str:
    """Return a printable name for a sentence, truncated to 120 characters."""
    return printable(truncate(name, 120))


def show_status(status: str) -> str:
    return "zero-FLOP" if status == "zero_flop" else status


def list_ops(calls: Mapping[str, int]) -> str:
    """Return the ops with their numbers of calls, for a sentence."""
    return ", ".join(f"{plain_name(op)} ({format_quantity(count, 'call')})" for op, count in calls.items())


def escape_latex(name: str) -> str:
    r"""Return a name escaped for LaTeX's text and tables; letters of all scripts are unchanged.

    >>> print(escape_latex("layer_1.a%b"), escape_latex("{x}~"))
    layer\_1.a\%b \{x\}\textasciitilde{}
    """
    text = "".join(_LATEX.get(char, char) for char in printable(name))
    return _DROPPED_BLANKS.sub(lambda match: r"\mbox{ }" * len(match.group()), text)


def neutralise_formula(name: str) -> str:
    """Return a name, with an apostrophe in front if a spreadsheet would read it as a formula."""
    # Some spreadsheets strip a cell before they read it.
    is_formula = name.startswith(_FORMULA_STARTS) or name.lstrip().startswith(_FORMULA_STARTS)
    return f"'{name}" if is_formula else name
