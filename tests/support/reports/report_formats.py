"""Run a command, and check that its report is well formed in each format."""

import csv
import io
import json
import re
import unicodedata
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest

from fvflops.cli import main, outputs
from fvflops.reports.display_width import display_width
from fvflops.reports.document import Document
from fvflops.reports.formats import write_document
from fvflops.reports.formats.json import SCHEMA

WIDTH = 80  # cells of a line where the output is not a terminal
_VOID = {"meta", "input"}


def run(capsys, *argv):
    """Return the exit code of a command, and what it wrote to standard output and error."""
    try:
        code = main([*argv])
    except SystemExit as error:  # of the parser
        code = error.code
    return code, *capsys.readouterr()


def output_of(capsys, *argv):
    """Return the output of a command that succeeds."""
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    return out


def write_as(format: str, *argv: str) -> str:
    """Return the report of a command in a format; each command line runs once."""
    text = write_document(_run_once(argv), format, width=WIDTH)
    return text + "\n" * (format != "csv")


@cache
def _run_once(argv: tuple[str, ...]) -> Document:
    kept = []

    def keep(document, *args, **options):
        kept.append(document)
        return write_document(document, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "write_document", keep)
        assert main(argv) == 0
    (document,) = kept
    return document


def take_cells(text: str) -> int:
    """Return how many cells a terminal gives a text: wide letters two, marks on letters none."""
    wide = sum(unicodedata.east_asian_width(mark) in "WF" for mark in text)
    return len(text) + wide - sum(unicodedata.category(mark) in ("Mn", "Me") for mark in text)


class _Tags(HTMLParser):
    """Fails on an end tag that closes another element than the last one opened."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.tables = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tables += tag == "table"
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_report(format: str, text: str, kind: str) -> Any:
    """Fail where a report is not well formed; return the rows of CSV, the record of JSON, else the text."""
    assert text.endswith("\n") and not text.endswith("\n\n")
    return _CHECKS[format](text.removesuffix("\n"), kind)


def _check_text(text: str, kind: str) -> str:
    assert max(map(display_width, text.split("\n"))) <= WIDTH
    assert all(line.isprintable() and line == line.rstrip() for line in text.split("\n"))
    return text


def _check_markdown(text: str, kind: str) -> str:
    for block in text.split("\n\n"):
        if block.startswith("|"):
            heads, rules, *rows = block.split("\n")
            assert set(rules) <= set("| :-")
            cells = {len(re.findall(r"(?<!\\)\|", line)) for line in (heads, rules, *rows)}
            assert len(cells) == 1 and rows
    return text


def _check_csv(text: str, kind: str) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(text)))
    assert all(None not in row and None not in row.values() for row in rows)
    assert not any(re.fullmatch(r"[+-]?\d[\d.,]*[KMGTP%]", cell) for row in rows for cell in row.values())
    return rows


def _check_json(text: str, kind: str) -> dict[str, Any]:
    record = json.loads(text)
    assert (record["format"], record["schema"]) == (f"fvflops.{kind}", SCHEMA)
    return record


def _check_html(text: str, kind: str) -> str:
    parser = _Tags()
    parser.feed(text)
    parser.close()
    assert not parser.open and text.startswith("<!doctype html>")
    return text


def _check_latex(text: str, kind: str) -> str:
    for name in ("tabular", "itemize"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}")
    for columns, body in re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        for line in body.split("\n"):
            if line.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
    return text


_CHECKS = {
    "text": _check_text,
    "markdown": _check_markdown,
    "csv": _check_csv,
    "json": _check_json,
    "html": _check_html,
    "latex": _check_latex,
}
