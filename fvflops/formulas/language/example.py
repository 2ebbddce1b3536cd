"""Example in a row of a formula table: one call, small enough to recompute by hand, and its FLOPs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Union

from fvflops.text import truncate
from fvflops.trace import TensorSpec

# Value of an argument: a tensor's spec, a number, a string, true, false, none, or a list of these.
Argument = Union[TensorSpec, None, bool, int, float, str, "tuple[Argument, ...]"]

MAX_LENGTH = 1000
MAX_DEPTH = 8

_SHAPE = re.compile(r"((?:\(\)|\d+(?: +\d+)*))(?: +([a-z]\w+))?(?: *:((?: +-?\d+)+))?", re.ASCII)
_NAMED_ARGUMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_CONSTANTS: Mapping[str, Argument] = {"true": True, "false": False, "none": None}


class ExampleError(ValueError):
    """An example that cannot be read."""


@dataclass(frozen=True, slots=True)
class Example:
    """One call and its FLOPs.

    Written `2 3 8, 5 8 = 240`: the op's tensors in schema order (the arguments of type Tensor, Tensor? and Tensor[]),
    each by its sizes; `()` is 0-dimensional, a dtype may follow (`2 3 int64`, else float32), then a vector's values (`3
    int64: 0 4 10`), `_` is an absent tensor, and `[2 3, 3 4]` a list of tensors. Every other argument is named:
    `dim=1`, `p=2.0`, `equation='ij->ji'`, `stride=[2, 2]`, `training=true`, `weight=none`; a tensor in a named argument
    is in angle brackets, `offs=<4 int32>`. Results may follow after `->`, separated by `;`: then the op is not run, for
    ops that have no meta kernel or belong to a library that is not installed. The number at the end is the FLOPs,
    multiply_add * macs + flops.
    """

    text: str
    tensors: tuple[Argument, ...]
    named: Mapping[str, Argument]
    outputs: tuple[Argument, ...] | None
    total: int

    @staticmethod
    def parse(text: str) -> Example:
        """Parse an example; a syntax error raises ExampleError.

        >>> Example.parse("2 3 8, 5 8 = 240").total
        240
        """
        if len(text) > MAX_LENGTH:
            raise ExampleError(
                f"an example has at most {MAX_LENGTH} characters, this has {len(text):,}: {truncate(text)!r}"
            )
        call, results, total = _split_sections(text)
        tensors: list[Argument] = []
        named: dict[str, Argument] = {}
        for item in _split(call, ",", text):
            match = _NAMED_ARGUMENT.fullmatch(item)
            if match is None:
                tensors.append(_parse_tensor(item, text))
            elif match[1] in named:
                raise ExampleError(f"the example {text!r} gives the argument {match[1]!r} twice")
            else:
                named[match[1]] = _parse_value(match[2].strip(), text)
        outputs = None if results is None else tuple(_parse_tensor(item, text) for item in _split(results, ";", text))
        return Example(text, tuple(tensors), named, outputs, total)


def _split_sections(text: str) -> tuple[str, str | None, int]:
    call, equals, total = text.rpartition(" = ")
    if not equals or not re.fullmatch(r" *[0-9]+ *", total):
        raise ExampleError(f"the example {text!r} does not end in ' = ' and an integer, as in '4 5, 5 6 = 120'")
    parts = list(_split(call, "->", text))
    if len(parts) > 2:
        raise ExampleError(f"the example {text!r} has more than one ->")
    return parts[0] if parts else "", parts[1] if len(parts) == 2 else None, int(total)


def _split(text: str, separator: str, example: str) -> Iterator[str]:
    """Yield the stripped parts of a text between separators that are outside of brackets and quotes."""
    depth, quoted, start = 0, False, 0
    for index, character in enumerate(text):
        if character == "'":
            quoted = not quoted
        elif not quoted and character in "[<":
            depth += 1
            if depth > MAX_DEPTH:
                raise ExampleError(f"the example {truncate(example)!r} has more than {MAX_DEPTH} levels of nesting")
        elif not quoted and (character == "]" or (character == ">" and text[index - 1] != "-")):
            depth -= 1
        elif not quoted and depth == 0 and text.startswith(separator, index):
            yield text[start:index].strip()
            start = index + len(separator)
    if quoted or depth:
        raise ExampleError(f"the example {example!r} has an unmatched bracket or quote")
    if text[start:].strip() or start:
        yield text[start:].strip()


def _parse_tensor(item: str, example: str) -> Argument:
    if item.startswith("[") and item.endswith("]"):
        return tuple(_parse_tensor(part, example) for part in _split(item[1:-1], ",", example))
    if item in ("_", "none"):
        return None
    match = _SHAPE.fullmatch(item)
    if match is None:
        raise ExampleError(f"the example {example!r} has {item!r}, which is not a tensor: write its sizes, as in '2 3'")
    sizes = tuple(int(size) for size in match[1].split() if size.isdigit())
    values = None if match[3] is None else tuple(map(int, match[3].split()))
    if values is not None and (len(sizes) > 1 or len(values) != math.prod(sizes)):
        raise ExampleError(f"the example {example!r} has {item!r}: write one value for each element of a vector")
    return TensorSpec(sizes, match[2] or "float32", "meta", values=values)


def _parse_value(item: str, example: str) -> Argument:
    if item.startswith("[") and item.endswith("]"):
        return tuple(_parse_value(part, example) for part in _split(item[1:-1], ",", example))
    if item.startswith("<") and item.endswith(">"):
        return _parse_tensor(item[1:-1].strip(), example)
    if len(item) >= 2 and item[0] == item[-1] == "'":
        return item[1:-1]
    if item in _CONSTANTS:
        return _CONSTANTS[item]
    for read in (int, float):
        try:
            return read(item)
        except ValueError:
            continue
    raise ExampleError(
        f"the example {example!r} has {item!r}: write a number, true, false, none, 'text', [list] or <tensor>"
    )
