"""Expand patterns of model names: `timm:resnet*`, `hf:models/*`, `zoo:*`, and `@FILE` with one name per line."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from fvflops import paths
from fvflops.sources.hugging_face import CONFIGURATIONS
from fvflops.sources.load import SOURCES, load_source
from fvflops.text import nearest

_MAX_LIST = 1 << 24  # characters of a file of names
_WILDCARDS = frozenset("*?[")


def expand_names(texts: Iterable[str]) -> list[str]:
    """Return the model names that names and patterns select, in order, without duplicates.

    A pattern has `*`, `?` or `[...]`: after a source such as `timm:` it selects from the names that the source lists,
    after `hf:` from folders with a configuration, and elsewhere from files. `@FILE` reads names and patterns from a
    file, one per line, ignoring blank lines and lines that start with #.

    A name without wildcards is returned unchanged, whether it exists or not. A pattern that matches nothing and a file
    that cannot be read raise ValueError.

    >>> expand_names(["zoo:vit*", "zoo:lenet5", "zoo:*5"])
    ['zoo:vit_b_16', 'zoo:lenet5']
    """
    return list(dict.fromkeys(name for text in texts for name in _expand(text)))


def is_pattern(text: str) -> bool:
    """Return whether a MODEL argument may stand for several models.

    >>> is_pattern("timm:resnet*"), is_pattern("@names.txt"), is_pattern("timm:resnet50")
    (True, True, False)
    """
    return text.startswith("@") or not _WILDCARDS.isdisjoint(text)


def _expand(text: str) -> Iterator[str]:
    if text.startswith("@"):
        for name in _read_names(text[1:]):
            yield from _expand(name)
    elif not is_pattern(text):
        yield text
    else:
        yield from _match(text)


def _match(text: str) -> list[str]:
    source, separator, pattern = text.partition(":")
    if source in SOURCES and source != "hf":
        known = load_source(source).list_names()
        found = [f"{source}:{name}" for name in known if fnmatchcase(name, pattern)]
        if not found:
            near = nearest(pattern.strip("*"), known, cutoff=0)
            example = f", such as {source}:{near}" if near else ""
            raise ValueError(f"{text!r} matches none of the {len(known):,} models of {source}{example}")
    elif source == "hf":
        folders = sorted(glob.glob(os.path.expanduser(pattern)))
        files = {folder: [os.path.join(folder, name) for name in CONFIGURATIONS] for folder in folders}
        found = [f"hf:{folder}" for folder, names in files.items() if any(map(os.path.isfile, names))]
        if not found:
            raise ValueError(
                f"{text!r} matches no folder with a config.json: patterns after hf: select local folders, such as "
                "'hf:models/*'; name models of the hub one by one, or in a file: @names.txt"
            )
    else:
        # In file.py:factory only the file name is a pattern.
        path, factory = (source, separator + pattern) if _WILDCARDS.isdisjoint(pattern) else (text, "")
        found = [file + factory for file in sorted(glob.glob(path)) if os.path.isfile(file)]
        if not found:
            remedy = "patterns select from a source, such as 'timm:resnet*', or from files"
            raise ValueError(f"{text!r} matches no file; {remedy}")
    return found


def _read_names(path: str) -> list[str]:
    try:
        text = paths.read_text(path, _MAX_LIST)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"@{path}: {getattr(error, 'strerror', None) or error}") from None
    if text is None:
        raise ValueError(f"@{path}: a file of names has at most {_MAX_LIST:,} characters")
    lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines())
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise ValueError(f"@{path} names no model: write one name or pattern a line")
    nested = next((name for name in names if name.startswith("@")), None)
    if nested is not None:
        raise ValueError(f"@{path}: {nested!r} names another file of names: write its names here")
    return names
