"""Parse YAML into plain nodes with line numbers, without tags, aliases or type resolution."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from fvflops import paths
from fvflops.text import suggest, truncate

Returned = TypeVar("Returned")

MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 8
MAX_NAME = 200

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but a tab and a line feed

# libyaml's parser is about ten times faster; both yield the same events.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class TableError(ValueError):
    """An error in a formula table; the message starts with `FILE:LINE: `."""


def make_error(file: str, line: int, text: str) -> TableError:
    """Return the error for a line of a file.

    >>> make_error("mine.yaml", 3, "unknown key 'mac': did you mean 'macs'?")
    TableError("mine.yaml:3: unknown key 'mac': did you mean 'macs'?")
    """
    return TableError(f"{file}:{line}: {text}")


@dataclass(frozen=True, slots=True)
class Node:
    """A string, a list or a mapping in a document, with its line or its key's."""

    file: str
    line: int
    value: str | list[Node] | dict[str, Node]

    def text(self, what: str) -> str:
        """Return a string without control characters; any other value raises TableError."""
        if not isinstance(self.value, str):
            raise self.error(f"{what} is {self.form}, not a string")
        control = _CONTROL.search(self.value)
        if control:
            raise self.error(f"{what} is {self.form}, with the control character {control[0]!r}")
        return self.value

    def name(self, what: str) -> str:
        """Return a string of at most 200 characters, such as the name of an op or a key."""
        text = self.text(what)
        if len(text) > MAX_NAME:
            raise self.error(f"{what} has {len(text):,} characters; at most {MAX_NAME} are allowed: {truncate(text)!r}")
        return text

    def items(self, what: str, example: str = "[aten::view, aten::t]") -> list[Node]:
        """Return a list; `example` is shown in the error."""
        if not isinstance(self.value, list):
            raise self.error(f"{what} is {self.form}, not a list such as {example}")
        return self.value

    def number(self, what: str) -> float:
        text = self.text(what)
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.error(f"{what} is {truncate(text)!r}: write a number such as 2.5e-6")
        return number

    def fields(self, what: str, known: Sequence[str] | None = None, required: Sequence[str] = ()) -> dict[str, Node]:
        """Return a mapping; with `known`, any other key raises TableError with the closest match."""
        if not isinstance(self.value, dict):
            raise self.error(f"{what} is {self.form}, not a mapping of keys to values")
        for key, value in self.value.items():
            if known is not None and key not in known:
                hint = suggest(key, known) or f": {what} has {', '.join(known)}"
                raise value.error(f"unknown key {truncate(key)!r}{hint}")
        for key in required:
            if key not in self.value:
                remedy = ": say where its figures are from" if key == "source" else ""
                raise self.error(f"{what} has no {key}{remedy}")
        return self.value

    def make(self, make: Callable[[], Returned], what: str = "") -> Returned:
        """Return the result of a function; a ValueError becomes a TableError with the line."""
        try:
            return make()
        except ValueError as error:
            raise self.error(f"{what}: {error}" if what else str(error)) from None

    @property
    def form(self) -> str:
        """Description of the value for messages."""
        if isinstance(self.value, str):
            return f"the string {truncate(self.value)!r}" if self.value else "empty"
        return "a list" if isinstance(self.value, list) else "a mapping"

    def error(self, text: str) -> TableError:
        return make_error(self.file, self.line, text)


def read_entries(file: str, key: str, read: Callable[[Node, str], Returned]) -> dict[str, Returned]:
    """Return name → what `read` makes of its node and name, of a file with a description and entries under `key`."""
    document = read_document(file)
    fields = document.fields(f"a file of {key}", ("description", key))
    if "description" in fields:
        fields["description"].text("description")
    entries = fields[key].fields(key) if key in fields else {}
    if not entries:
        raise document.error(f"there are no {key}: add {key}, and under it a name")
    return {name: read(node, name) for name, node in entries.items()}


def read_document(path: str, file: str = "") -> Node:
    """Parse a file, a path as in `fvflops.paths`; `file` is its name in errors.

    Invalid YAML, an anchor, an alias, a tag, a duplicate key, more than 2^20 characters or an unreadable file raises
    TableError.
    """
    file = file or path
    try:
        text = paths.read_text(path, MAX_CHARACTERS)
    except UnicodeDecodeError as error:
        raise make_error(file, 1, f"this is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise make_error(file, 1, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise make_error(file, 1, f"cannot be read: {error}") from error
    if text is None:
        raise make_error(file, 1, f"a file has at most {MAX_CHARACTERS:,} characters, and this one has more")
    return parse_document(text, file)


def parse_document(text: str, file: str) -> Node:
    """Parse YAML text, an empty one to an empty string; errors are as for `read_document`.

    >>> parse_document("multiply_add: 2", "mine.yaml").fields("a table")["multiply_add"].line
    1
    """
    events = yaml.parse(text, Loader=_LOADER)
    try:
        documents = [
            _compose(next(events), events, file, None, 0)
            for event in events
            if isinstance(event, yaml.DocumentStartEvent)
        ]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise make_error(file, line, f"this is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise make_error(file, 1, f"this is not YAML: {' '.join(str(error).split())}") from None
    if len(documents) > 1:
        raise make_error(file, 1, f"this file has {len(documents)} YAML documents: write one")
    return documents[0] if documents else Node(file, 1, "")


def _compose(event: Any, events: Iterator[Any], file: str, line: int | None, depth: int) -> Node:
    here = event.start_mark.line + 1
    if event.anchor is not None:  # of an alias too
        sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
        raise make_error(
            file, here, f"{sign}{truncate(event.anchor)}: anchors and aliases are not supported; repeat the value"
        )
    if event.tag is not None:
        raise make_error(
            file, here, f"the tag {truncate(event.tag)} is not supported: write strings, lists and mappings only"
        )
    line = line or here
    if isinstance(event, yaml.ScalarEvent):
        return Node(file, line, event.value)
    if depth > MAX_DEPTH:
        raise make_error(file, here, f"more than {MAX_DEPTH} levels of nesting")
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_compose(event, events, file, None, depth + 1))
        return Node(file, line, items)
    fields: dict[str, Node] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _compose(event, events, file, None, depth + 1)
        name = key.name("a key")
        if name in fields:
            raise key.error(f"{name!r} is defined twice, first on line {fields[name].line}")
        fields[name] = _compose(next(events), events, file, key.line, depth + 1)
    return Node(file, line, fields)
