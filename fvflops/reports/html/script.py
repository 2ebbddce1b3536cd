"""The script and the styles of the page, without comments and needless whitespace."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files

_SPACE = re.compile(r"(?:\s|//[^\n]*|/\*[\s\S]*?\*/)+")
_WORD = re.compile(r"[\w$#]+")
_WHOLE = re.compile(rf"""{_SPACE.pattern}|{_WORD.pattern}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""")
_REGEX = re.compile(r"/(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\[\n])+/\w*")
# A part of a template up to an expression in it, or to its end.
_TEMPLATE = re.compile(r"(?:\\.|\$(?!\{)|[^`\\$])*(?:`|\$\{)", re.DOTALL)
# After these a slash begins a regular expression; after other words, and after `)` and `]`, it divides.
_BEFORE_REGEX = re.compile(r"[(,=:\[!&|?{};+\-*%<>~^]|return|typeof|case")
# Where a line can end within a statement.
_OPEN, _GOES_ON = frozenset("{;,([=&|?:<>!*%"), frozenset("})],.;:?&|*%=<>")

_STYLE = re.compile(r"""("[^"]*")|/\*[\s\S]*?\*/|\s*([{};,])\s*|(:)\s+|(\s)\s*""")


def minify_script(text: str) -> str:
    r"""Return JavaScript with the same tokens; semicolons that end a block and commas that end a list are omitted."""
    tokens: list[str] = []
    space = ""
    for token in _tokens(text):
        if _SPACE.match(token):
            space = "\n" if "\n" in token else " "
            continue
        if space and tokens:
            before, after = tokens[-1][-1], token[0]
            is_needed = (_WORD.match(before) and _WORD.match(after)) or (before == after and after in "+-")
            ends_line = space == "\n" and before not in _OPEN and after not in _GOES_ON
            if is_needed or ends_line:
                tokens.append(space)
        space = ""
        if token in ("}", ")", "]") and tokens[-1:] == [","] and tokens[-2] not in (",", "["):
            tokens.pop()
        elif token == "}" and tokens[-1:] == [";"] and tokens[-2] != ")":
            tokens.pop()  # after `)` it may be the body of a loop
        tokens.append(token)
    return "".join(tokens)


def _tokens(text: str) -> Iterator[str]:
    """Yield the tokens of a script and what is between them; a template is a token for each part beside expressions."""
    position = 0
    last = ";"
    braces: list[str] = []
    while position < len(text):
        mark = text[position]
        if mark == "`" or (mark == "}" and braces[-1:] == ["${"]):
            if mark == "}":
                braces.pop()
            found = _TEMPLATE.match(text, position + 1)
            end = len(text) if found is None else found.end()
            if text[position:end].endswith("${"):
                braces.append("${")
        else:
            found = _WHOLE.match(text, position)
            if found is None and mark == "/" and _BEFORE_REGEX.fullmatch(last):
                found = _REGEX.match(text, position)
            end = position + 1 if found is None else found.end()
            if mark == "{":
                braces.append(mark)
            elif mark == "}" and braces:
                braces.pop()
        token = text[position:end]
        yield token
        if not _SPACE.match(token):
            last = "{" if token.endswith("${") else token
        position = end


def minify_style(text: str) -> str:
    """Return CSS without comments and needless whitespace."""
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
    """Return one script: a module of `scripts/`, after the modules that it imports and those of `views`.

    A module becomes a function that returns what it exports, so that its other names stay its own. `result` is an
    expression over `modules`, which maps the path of a module to its exports, that the script evaluates to.
    """
    parts = [_wrap(name) for name in order_modules(*(VIEWS[view] for view in views), entry)]
    end = f"return {result};\n" if result else ""
    return f'"use strict";\n(() => {{\nconst modules = {{}};\n{"".join(parts)}{end}}})();\n'


def order_modules(*entries: str) -> list[str]:
    """Return the paths of modules and of all that they import, each after its own imports.

    A cycle raises ValueError.
    """
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
    text = _IMPORT.sub(lambda found: _bind(found[1], _resolve(found[2], name)), text)
    text = minify_script(_EXPORT.sub(r"\1 \2", f"{text}return {{ {exports} }}"))
    return f'modules["{name}"]=(()=>{{{text}}})();\n'


def _bind(names: str, module: str) -> str:
    return f'const {{ {names.replace(" as ", ": ")} }} = modules["{module}"];\n'


def _resolve(path: str, importer: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(importer), path))


@cache
def _read(name: str) -> str:
    return files(__package__).joinpath("scripts", *name.split("/")).read_text(encoding="utf-8")
