"""Arguments of `--arg NAME=VALUE`: parse them, check them against a signature, and call factories and libraries."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions
from fvflops.text import suggest, truncate


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Return name → value of `--arg` texts; a value that is not a Python literal is a string.

    >>> parse_arguments(["width=64", "sizes=(1, 2)", "act=relu", "bias=False"])
    {'width': 64, 'sizes': (1, 2), 'act': 'relu', 'bias': False}
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise ValueError(f"--arg {text}: write NAME=VALUE, such as width=64")
        if name in values:
            raise ValueError(f"--arg {text}: {name} is passed already; pass it once")
        values[name] = _parse_value(value)
    return values


def _parse_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def call_with(function: Callable[..., Any], values: Mapping[str, Any], name: str) -> Any:
    """Return the result of a function on named values, positional-only arguments included.

    An unknown or missing name raises ValueError with the signature of the function, which it calls `name`.

    >>> call_with(lambda width, depth=2: width * depth, {"width": 3}, "net.py:build")
    6
    >>> call_with(lambda width, depth=2: width * depth, {"widht": 3}, "net.py:build")
    Traceback (most recent call last):
    ValueError: --arg widht: net.py:build(width, depth=2) has no such argument: did you mean 'width'?
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a builtin
        return function(**values)
    check_names(function, values, name)
    parameters = signature.parameters.values()
    named = {item.name: item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)}
    extra = {key: value for key, value in values.items() if key not in named}
    keywords = next((item.name for item in parameters if item.kind is item.VAR_KEYWORD), None)
    missing = [key for key, item in named.items() if item.default is item.empty and key not in values]
    if missing:
        shown = _write_call(name, signature)
        remedy = f"pass --arg {missing[0]}=VALUE, or name a function that makes the object"
        raise ValueError(f"{shown} needs {', '.join(missing)}: {remedy}")
    bound = {key: values[key] for key in named if key in values} | ({keywords: extra} if keywords else {})
    arguments = inspect.BoundArguments(signature, bound)
    try:
        return function(*arguments.args, **arguments.kwargs)
    except AttributeError as error:
        key = next((key for key, value in values.items() if error.obj is value and isinstance(value, str)), None)
        if key is None:
            raise
        raise ValueError(
            f"--arg {key}={values[key]} is a text, and {_write_call(name, signature)} reads its {error.name}: "
            "name a function that makes the object and returns the model"
        ) from error


def check_names(function: Callable[..., Any], values: Mapping[str, Any], name: str) -> None:
    """Raise ValueError with the signature of a function, which it calls `name`, for a name that it does not take."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return
    known = [item.name for item in parameters if item.kind is not item.VAR_POSITIONAL]
    for key in values:
        if key not in known:
            shown = _write_call(name, signature)
            raise ValueError(f"--arg {key}: {shown} has no such argument{suggest(key, known)}")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name.

    >>> takes(lambda pretrained=True: pretrained, "pretrained"), takes(print, "pretrained")
    (True, False)
    """
    try:
        return name in inspect.signature(function).parameters
    except (ValueError, TypeError):  # a builtin, or no function
        return False


def _write_call(name: str, signature: inspect.Signature) -> str:
    parameters = [item.replace(annotation=item.empty) for item in signature.parameters.values()]
    return name + truncate(str(inspect.Signature(parameters)), 200)


def call_library(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    name: str,
    *,
    fixed: Mapping[str, Any] | None = None,
    image_size: Mapping[str, Any] | None = None,
) -> Any:
    """Return the model that a library's function builds from `--arg` values, which it passes on to a constructor.

    `fixed` are further arguments, such as one without which it would download weights, and `image_size` is the one that
    `--image-size` sets. A value for one of these, or one that the constructor refuses, raises ValueError.

    >>> call_library(dict, {"depth": 2, "pretrained": True}, "timm:vit", fixed={"pretrained": False})
    Traceback (most recent call last):
    ValueError: --arg pretrained: timm:vit is built with pretrained=False, without weights: omit it
    """
    fixed, image_size = fixed or {}, image_size or {}
    for key in values:
        if key in image_size:
            raise ValueError(f"--arg {key}: --image-size sets it: omit one")
        if key in fixed:
            raise ValueError(f"--arg {key}: {name} is built with {key}={fixed[key]!r}, without weights: omit it")
    try:
        return function(**values, **fixed, **image_size)
    except (TypeError, ValueError, AssertionError) as error:
        chosen = [f"--arg {key}={value!r}" for key, value in values.items()]
        sizes = [(size,) if isinstance(size, int) else size for size in image_size.values()]
        chosen += [f"--image-size {'x'.join(map(str, sides))}" for sides in sizes]
        if not chosen:
            raise
        raise ValueError(f"{name} with {' '.join(chosen)}: {' '.join(str(error).split())}") from error


def call_factory(factory: Any, name: str, options: SourceOptions) -> BuiltModel:
    """Return the model of a factory (or class) that returns a module or (module, inputs), or a module itself."""
    arguments = parse_arguments(options.args)
    if isinstance(factory, nn.Module):
        if arguments:
            raise ValueError(f"--arg {next(iter(arguments))}: {name} is a module, not a factory: omit --arg")
        result = factory
    elif callable(factory):
        try:
            result = call_with(factory, arguments, name)
        except OSError as error:
            if not isinstance(error.filename, str):
                raise
            relative = "" if os.path.isabs(error.filename) else f"; a relative path begins at {os.getcwd()}"
            raise ValueError(f"{name} cannot open {error.filename!r}: {error.strerror}{relative}") from error
    else:
        remedy = "name a function that returns a torch.nn.Module, or a class"
        raise ValueError(f"{name} is {type(factory).__name__}: {remedy}")
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned {type(model).__name__}: return a torch.nn.Module, or (module, inputs)")
    return BuiltModel(model, inputs=inputs)
