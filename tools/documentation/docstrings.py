"""Griffe extension: doctests in docstrings become blocks of code, public names links, and records options by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_STUB = Path(__file__).resolve().parents[2] / "fvflops" / "__init__.pyi"
_PUBLIC = re.findall(r" as (\w+)$", _STUB.read_text(), re.MULTILINE)
# Names of several words, which are not words of English, and any name that is written as one: `fvflops.mfu`.
_COMPOUND = "|".join(name for name in _PUBLIC if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", name))
_NAME = re.compile(rf"(?<![\w`.\[])(?:({_COMPOUND})|`fvflops\.({'|'.join(_PUBLIC)})`)(?![\w`\](]|\.\w)")
_KEYWORD: Any = griffe.ParameterKind.keyword_only
_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)


def fence_doctests(docstring: str) -> str:
    """Return a docstring with its doctests, each up to the next empty line, in fences: Markdown takes them for quotes.

    >>> fence_doctests("Add.\\n\\n>>> 1 + 1\\n2\\n\\nMore.")
    'Add.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n\\nMore.'
    """
    return _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", docstring)


def link_names(docstring: str, own: str) -> str:
    """Return a docstring in which public names other than `own` are links, doctests and blocks of code excluded.

    >>> link_names("Arguments are as for ModelAnalysis; see `fvflops.mfu`.", "record")
    'Arguments are as for [ModelAnalysis][fvflops.ModelAnalysis]; see [`fvflops.mfu`][fvflops.mfu].'
    >>> link_names("ModelAnalysis", "ModelAnalysis")
    'ModelAnalysis'
    """

    def link(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return match[0] if name == own else f"[{match[0]}][fvflops.{name}]"

    def is_code(line: str) -> bool:
        return line.startswith((">>>", "...", "    "))

    paragraphs = re.split(r"(\n\n+)", docstring)
    return "".join(text if is_code(text) else _NAME.sub(link, text) for text in paragraphs)


class Docstrings(griffe.Extension):
    """Rewrite the docstring of every object when it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Link the names and fence the doctests of one object."""
        if obj.docstring:
            obj.docstring.value = fence_doctests(link_names(obj.docstring.value, obj.name))

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Expand the options of `**options: Unpack[Options]`, as `fvflops.text.expand_options` does."""
        for last in [item for item in func.parameters if str(item.annotation).startswith("Unpack[")]:
            options: Any = last.annotation
            del func.parameters[last.name]
            for name, item in func.modules_collection[options.slice.canonical_path].attributes.items():
                kind, default = item.annotation.slice.elements
                func.parameters.add(griffe.Parameter(name, annotation=kind, kind=_KEYWORD, default=default))
