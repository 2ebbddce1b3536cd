"""Helpers for texts: escaping, truncation, "did you mean", argument checks, JSON and checksums."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = getattr(typing, "Unpack", list)  # in typing from Python 3.11 on

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Words with another name here: of options, of arguments in Python, and of devices.
_SYNONYMS = {
    "lora": "adapter",
    "bs": "batch",
    "context": "seq",
    "gradient-accumulation-steps": "microbatches",
    "convention": "table",
    "gpu": "cuda",
}
_ITEM_TYPES = re.compile(r"\[(?:[^][]|\[[^][]*\])*\]")  # of a generic type, in brackets, which may be generic too
# Annotation → the types that fit it, in words; arguments with other annotations are not checked.
_KINDS: dict[str, tuple[type, str]] = {
    "None": (type(None), "None"),
    "bool": (bool, "True or False"),
    "float": (Real, "a number"),
    "int": (Integral, "an integer"),
    "str": (str, "a string"),
    "os.PathLike": (os.PathLike, "a path"),
    **dict.fromkeys(("Collection", "Iterable", "Sequence"), (Iterable, "a sequence")),
    **dict.fromkeys(("Mapping", "dict"), (Mapping, "a mapping")),
}
_MAX_PART = 120  # characters of an attribute or class name
_MAX_VALUE = 32  # characters of a value in a repr
_MAX_REPR = 117  # characters within the angle brackets of a repr


def printable(name: str) -> str:
    """Return a name with unprintable characters as Python escapes.

    A CI system reads a line that starts with `::`, or contains `##[`, as a command: these are escaped too.

    >>> print(printable("line\\nbreak"), printable("::set-output name=x::y"))
    line\\nbreak \\x3a:set-output name=x::y
    """
    if "##" in name:
        name = name.replace("##[", r"#\x23[").replace("##vso[", r"#\x23vso[")
    if "::" in name and name.lstrip().startswith("::"):
        name = name.replace(":", r"\x3a", 1)
    if name.isprintable():
        return name
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in name)


def printable_short(name: str) -> str:
    """Return a printable name for a table, with each part between dots truncated to 120 characters.

    The number of parts is not limited: names with many parts may have a long common prefix.

    >>> print(printable_short("layer.0"), len(printable_short("x" * 10_000)))
    layer.0 121
    """
    if len(name) > _MAX_PART:
        name = ".".join(truncate(part, _MAX_PART) for part in name.split("."))
    return printable(name)


def truncate(text: str, limit: int = 60) -> str:
    """Return a text, truncated to `limit` characters and … if it is longer.

    >>> truncate("aten::mm"), len(truncate("x" * 900_000))
    ('aten::mm', 61)
    """
    return text if len(text) <= limit else text[:limit] + "…"


def shown(value: object) -> str:
    """Return a value of a caller as one short line, to show it in an error.

    >>> import torch
    >>> print(shown("bf16"), shown(torch.nn.Sequential(torch.nn.ReLU())))
    'bf16' Sequential(\\n  (0): ReLU()\\n)
    """
    return printable(truncate(repr(value)))


def record_data(record: Any, *names: str) -> dict[str, Any]:
    """Return attributes of a record as data for JSON; a name "KEY=PATH" is the key of a dotted attribute.

    Mappings, dataclasses and NamedTuples are dicts, sequences lists; an attribute of None is None.

    >>> record_data(range(2, 9), "start", "end=stop")
    {'start': 2, 'end': 9}
    """
    data = {}
    for name in names:
        key, _, path = name.partition("=")
        value = record
        for part in (path or key).split("."):
            value = None if value is None else getattr(value, part)
        data[key] = _as_data(value)
    return data


def _as_data(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _as_data(item) for key, item in value.items()}
    return [*map(_as_data, value)] if isinstance(value, (list, tuple)) else value


def short_repr(value: object, subject: str = "", *facts: str) -> str:
    """Return `<CLASS of SUBJECT: FACTS>` in one line of fewer than 120 characters, without empty facts.

    >>> short_repr([], "Net", "4.09G FLOPs", "", "convention default")
    '<list of Net: 4.09G FLOPs, convention default>'
    >>> short_repr([], "", "3 rows"), len(short_repr([], "x" * 900))
    ('<list: 3 rows>', 119)
    """
    head = type(value).__name__ + (f" of {subject}" if subject else "")
    text = printable(": ".join(filter(None, [head, ", ".join(filter(None, facts))])))
    return f"<{text}>" if len(text) <= _MAX_REPR else f"<{text[: _MAX_REPR - 1]}…>"


def shown_by_fields(cls: type[T]) -> type[T]:
    """Give a class of records the repr of `record_repr`."""
    cls.__repr__ = record_repr  # type: ignore[method-assign]
    return cls


def record_repr(record: Any) -> str:
    """Return a NamedTuple or dataclass with its fields that are not defaults, in one line of fewer than 120 characters.

    >>> from typing import NamedTuple
    >>> class Row(NamedTuple):
    ...     model: str
    ...     flops: int = 0
    ...     error: str = ""
    >>> record_repr(Row("net", 24)), len(record_repr(Row("x" * 900)))
    ("Row(model='net', flops=24)", 43)
    """
    names = getattr(record, "_fields", None) or [field.name for field in fields(record) if field.repr]
    defaults = getattr(record, "_field_defaults", None)
    if defaults is None:
        defaults = {
            field.name: field.default if field.default_factory is MISSING else field.default_factory()
            for field in fields(record)
        }
    shown: list[str] = []
    for name in names:
        value = getattr(record, name)
        if name not in defaults or value != defaults[name]:
            shown.append(f"{name}={_repr_value(value)}")
    text = f"{type(record).__name__}({', '.join(shown)})"
    return text if len(text) <= _MAX_REPR + 2 else f"{text[:_MAX_REPR]}…)"


def _repr_value(value: Any) -> str:
    """Return a short repr; of a container with many items only their number."""
    if isinstance(value, (Sequence, Mapping, Set)) and not isinstance(value, (str, bytes)) and len(value) > 3:
        return f"<{len(value):,} items>"
    text = repr(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 2]}…{text[-1]}"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the closest match among known names, or a synonym, or ""; with cutoff=0 the closest one in any case.

    >>> nearest("flps", ("macs", "flops")), nearest("x", ("macs", "flops"))
    ('flops', '')
    """
    if not isinstance(name, str):
        return ""
    names = list(known)
    synonym = _SYNONYMS.get(name.lower())
    return synonym if synonym in names else "".join(get_close_matches(name, names, n=1, cutoff=cutoff))


def list_nearest(name: str, known: Iterable[str], *, limit: int = 5) -> str:
    """Return ": the nearest is 'NAME'", or are up to `limit` names, as the end of a message; "" where none is close.

    >>> list_nearest("resnet5", ["resnet50", "resnet101", "vit"])
    ": the nearest are 'resnet50', 'resnet101'"
    >>> list_nearest("vti", ["resnet50", "ViT"])
    ": the nearest is 'ViT'"
    """
    folded = {item.casefold(): item for item in known}
    near = [folded[item] for item in get_close_matches(name.casefold(), folded, n=limit)]
    return f": the nearest {'is' if len(near) == 1 else 'are'} {', '.join(map(repr, near))}" if near else ""


def suggest(name: str, known: Iterable[str], *, separator: str = ": ", quote: bool = True, cutoff: float = 0.6) -> str:
    """Return "did you mean" with the closest known name, as the end of a message; "" where none is close.

    With quote=False the name is unquoted, as in messages about a table's formulas.

    >>> suggest("flps", ("macs", "flops")), suggest("flps", ("macs", "flops"), separator="; ", quote=False)
    (": did you mean 'flops'?", '; did you mean flops?')
    >>> suggest("x", ("macs", "flops")) or ": available are macs, flops"
    ': available are macs, flops'
    """
    near = nearest(name, known, cutoff=cutoff)
    return f"{separator}did you mean {repr(near) if quote else near}?" if near else ""


def expand_options(function: Callable[..., Any]) -> tuple[Signature, dict[str, Any]]:
    """Return a signature with the items of `**options: Unpack[Options]` as keywords, and their defaults.

    >>> from typing import TypedDict
    >>> Options = TypedDict("Options", {"depth": "Annotated[int | None, 3]"}, total=False)
    >>> def size(model: int, **options: Unpack[Options]) -> int: ...
    >>> print(*expand_options(size))
    (model: 'int', *, depth: 'int | None' = 3) -> 'int' {'depth': 3}
    """
    accepted, keywords = signature(function), []
    *named, last = accepted.parameters.values()
    if not str(last.annotation).startswith("Unpack["):
        return accepted, {}
    for name, item in function.__globals__[last.annotation[len("Unpack[") : -1]].__annotations__.items():
        annotated: Any = ast.parse(item.__forward_arg__, mode="eval").body  # as written, short names included
        kind, default = annotated.slice.elts
        options = {"default": ast.literal_eval(default), "annotation": ast.unparse(kind)}
        keywords.append(Parameter(name, Parameter.KEYWORD_ONLY, **options))
    return accepted.replace(parameters=[*named, *keywords]), {item.name: item.default for item in keywords}


def explaining_arguments(function: F) -> F:
    """Return a function, or a class of records, whose TypeError for wrong arguments names them.

    The TypeError lists the arguments, and the nearest to a wrong keyword. An error that names no argument becomes a
    TypeError that names the first one whose type does not fit its annotation. An `__init__` is named by the class that
    is created, which may have inherited it. The signature is `expand_options`'s, and the function gets all options.

    >>> @explaining_arguments
    ... def size(model, depth: int | None = 3): return model + depth
    >>> size(1, dept=2)
    Traceback (most recent call last):
    TypeError: size(model, depth): got an unexpected keyword argument 'dept': did you mean 'depth'?
    >>> size(1, depth="all")
    Traceback (most recent call last):
    TypeError: size: depth must be an integer or None; got 'all'
    """
    if isinstance(function, type):
        function.__init__ = explaining_arguments(function.__init__)  # type: ignore[misc]
        return cast(F, function)
    accepted, defaults = expand_options(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = accepted.bind(*args, **kwargs)
        except TypeError as error:
            parameters = [item for item in accepted.parameters.values() if item.name != "self"]
            shown = Signature([item.replace(annotation=item.empty, default=item.empty) for item in parameters])
            wrong = next((keyword for keyword in kwargs if keyword not in accepted.parameters), "")
            hint = suggest(wrong, shown.parameters) if repr(wrong) in str(error) else ""
            raise TypeError(f"{_called_name(function, args)}{shown}: {error}{hint}") from None
        try:
            return function(*args, **{**defaults, **kwargs})
        except Exception as error:
            if (misfit := _find_misfit(accepted, bound.arguments, str(error))) is None:
                raise
            raise TypeError(f"{_called_name(function, args)}: {misfit}") from error

    call.__signature__ = accepted  # type: ignore[attr-defined]
    return cast(F, call)


def _called_name(function: Callable[..., Any], args: Sequence[Any]) -> str:
    return type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__


def _find_misfit(accepted: Signature, arguments: Mapping[str, Any], error: str) -> str | None:
    """Return what the first argument must be that does not fit its annotation; None if the error names an argument."""
    if any(re.search(rf"\b{name}\b", error) for name in arguments):
        return None
    for name, value in arguments.items():
        kinds = _ITEM_TYPES.sub("", str(accepted.parameters[name].annotation)).split(" | ")
        if _KINDS.keys() >= {*kinds} and not any(isinstance(value, _KINDS[kind][0]) for kind in kinds):
            return f"{name} must be {' or '.join(_KINDS[kind][1] for kind in kinds)}; got {shown(value)}"
    return None


def require_int(name: str, value: object, *, least: int) -> int:
    """Return an integer >= `least`; anything else, including bools, raises ValueError.

    >>> require_int("repeat", 0, least=1)
    Traceback (most recent call last):
    ValueError: repeat must be an integer >= 1, not 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, not {shown(value)}")
    return value


def parse_json(text: str, *, finite: bool = False, **options: Any) -> Any:
    """Return the value of a JSON text; any other, and one that is nested too deeply, raises ValueError.

    With `finite`, NaN, Infinity and 1e999 do too. `options` are further ones of json.loads.

    >>> parse_json("[Infinity]", finite=True)
    Traceback (most recent call last):
    ValueError: Infinity is not a JSON number
    """
    try:
        if finite:
            options = {**options, "parse_constant": _parse_finite, "parse_float": _parse_finite}
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{truncate(text)} is not a JSON number")
    return number


def describe_import_error(error: BaseException) -> str:
    """Return the first cause of an error of an import in one line, with the remedy where it is known.

    >>> describe_import_error(RuntimeError("operator torchvision::nms does not exist")).partition(";")[2]
    ' torchvision was built for another torch: install both from one index (see the page Install)'
    """
    while error.__cause__ is not None:
        error = error.__cause__
    reason = " ".join(str(error).split())
    remedy = ""
    if "torchvision::" in reason:  # raised by torchvision beside a torch that it was not compiled for
        remedy = "; torchvision was built for another torch: install both from one index (see the page Install)"
    return f"{type(error).__name__}: {reason}{remedy}"


def checksum(text: str) -> str:
    """Return the CRC-32 of a text in UTF-8, as eight hexadecimal digits.

    >>> checksum("123456789")
    'cbf43926'
    """
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"
