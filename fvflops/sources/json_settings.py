"""Read a configuration: JSON text, a JSON file, or a folder with config.json."""

from __future__ import annotations

import os
from typing import Any

from fvflops import paths
from fvflops.text import parse_json

_MAX_CONFIG = 1 << 22  # characters: label maps of some checkpoints have 21,000 entries


def read_settings(text: str, option: str, *, file: str = "config.json") -> dict[str, Any]:
    """Return the JSON object in a text, a file, or the file of that name in a folder.

    A mistake raises ValueError that begins with `option`.

    >>> read_settings('{"num_layers": 2}', "--config")
    {'num_layers': 2}
    """
    name = f"{option} {text}".strip()
    if os.path.isdir(text):
        if not os.path.isfile(os.path.join(text, file)):
            raise ValueError(f"{name}: this folder has no {file}")
        text = os.path.join(text, file)
    try:
        content = text if text.lstrip()[:1] in ("{", "[") else paths.read_text(text, _MAX_CONFIG)
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{name}: this is not UTF-8 text ({error})") from error
    if content is None:
        raise ValueError(f"{name}: a configuration has at most {_MAX_CONFIG:,} characters")
    try:
        settings = parse_json(content.removeprefix("\ufeff"), object_hook=_decode_float)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f'{name}: a configuration is a JSON object, such as {{"num_hidden_layers": 2}}')
    return settings


def _decode_float(value: dict[str, Any]) -> Any:
    """Return the float of {"__float__": "Infinity"}, as transformers writes values that are not numbers in JSON."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value
