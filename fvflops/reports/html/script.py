"""The script and the styles of the page, without comments and needless whitespace."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

_SPACE = r"(?:\s|//[^\n]*|/\*[\s\S]*?\*/)+"
_TEXT = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
# A template literal, left as it is; templates inside its expressions must not contain another one.
_INNER = r"`(?:\\.|[^`\\])*`"
_TEMPLATE = rf"`(?:\\.|\$\{{(?:[^`{{}}]|{_INNER}|\{{[^{{}}]*\}})*\}}|[^`\\])*`"
# After these a slash begins a regular expression; elsewhere it divides.
_REGEX = r"(?:(?<=[(,=:!&|?])|(?<=[(,=:!&|?] )|(?<=return ))/(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\[\n])+/"
_TOKENS = re.compile(rf"{_TEXT}|{_TEMPLATE}|(?P<space>{_SPACE})|{_REGEX}")
_WORD = re.compile(r"[\w$#]")
# Characters before and after a line end within a statement.
_BEFORE_BREAK, _AFTER_BREAK = frozenset("{;,([=&|?:<>!*%"), frozenset("})],.;:?&|*%=<>")

_STYLE = re.compile(r"""("[^"]*")|/\*[\s\S]*?\*/|\s*([{};,])\s*|(:)\s+|(\s)\s*""")


def minify_script(text: str) -> str:
    return _TOKENS.sub(_shorten, text)


def _shorten(found: re.Match[str]) -> str:
    space = found["space"]
    if space is None:
        return found[0]
    before, after = found.string[found.start() - 1 : found.start()], found.string[found.end() : found.end() + 1]
    if "\n" in space:
        return "\n" if before and after and before not in _BEFORE_BREAK and after not in _AFTER_BREAK else ""
    is_needed = (_WORD.match(before) and _WORD.match(after)) or (before == after and after in "+-")
    return " " if is_needed else ""


def minify_style(text: str) -> str:
    short = _STYLE.sub(lambda found: found[1] or found[2] or found[3] or (found[4] and " ") or "", text)
    return short.replace(";}", "}").strip()


ENTRY = "page/start.js"
REPORT = "page/document.js"  # of a report of tables
# Modules that nothing imports: each adds a view to the page, and is omitted from a page without data for it.
VIEWS = {"timeline": "views/timeline.js", "memory": "views/memory.js", "roofline": "views/roofline.js"}
_IMPORT = re.compile(r'^import \{ (.+) \} from "(.+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)


@cache
def join_scripts(entry: str = ENTRY, result: str = "", *, views: Sequence[str] = ()) -> str:
    """Return one script: a module of `scripts/`, after the modules that it and `views` import.

    A module becomes a function that returns its exports, so that its other names stay private. `result` is the
    expression that the script evaluates to; it may read `modules`, which maps the path of a module to its exports.
    """
    parts = [_wrap(name) for name in order_modules(*(VIEWS[view] for view in views), entry)]
    end = f"return {result};\n" if result else ""
    return f'"use strict";\n(() => {{\nconst modules = {{}};\n{"".join(parts)}{end}}})();\n'


def order_modules(*entries: str) -> list[str]:
    """Return the paths of modules and all that they import, each after its own imports; a cycle raises ValueError."""
    ordered: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"scripts import each other: {' → '.join((*above, name))}")
        if name not in ordered:
            for _, path in _IMPORT.findall(_read(name)):
                visit(_resolve(path, name), (*above, name))
            ordered.append(name)

    for entry in entries:
        visit(entry, ())
    return ordered


def _wrap(name: str) -> str:
    """Return a module as an assignment of its exports."""
    text = _read(name)
    exports = ", ".join(match[1] for match in _EXPORT.findall(text))
    bind = r'const {{ {} }} = modules["{}"];'.format
    text = _IMPORT.sub(lambda found: bind(found[1].replace(" as ", ": "), _resolve(found[2], name)) + "\n", text)
    text = minify_script(_EXPORT.sub(r"\1 \2", f"{text}return {{ {exports} }}"))
    return f'modules["{name}"]=(()=>{{{text}}})();\n'


def _resolve(path: str, importer: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(importer), path))


@cache
def _read(name: str) -> str:
    return files(__package__).joinpath("scripts", *name.split("/")).read_text(encoding="utf-8")
