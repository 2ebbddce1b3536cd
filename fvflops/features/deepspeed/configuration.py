"""The configuration of a flops profiler: which step is profiled and what is told, as in DeepSpeed's files."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from fvflops.formulas.yaml_document import Node, read_document
from fvflops.text import require_int, suggest

_SECTION = "flops_profiler"
_TRUTH = {"true": True, "false": False}
_NOTHING = ("", "null", "~")
# What DeepSpeed takes from this key, how often a forward pass is run again, is recorded here.
_COUNTED = "recompute_fwd_factor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfiguration:
    """What `StepProfiler` does: nothing unless `enabled`; the step of number `profile_step`, from 0 on, is profiled.

    The others are arguments of `FlopsProfiler.print_model_profile`. Values of other types raise ValueError.

    >>> ProfilerConfiguration(enabled=True, top_modules=3).profile_step
    1
    >>> ProfilerConfiguration(top_modules=0)
    Traceback (most recent call last):
    ValueError: top_modules must be an integer >= 1, not 0
    """

    enabled: bool = False
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None

    def __post_init__(self) -> None:
        for name in ("enabled", "detailed"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is true or false, not {getattr(self, name)!r}")
        for name, least in (("profile_step", 0), ("module_depth", -1), ("top_modules", 1)):
            require_int(name, getattr(self, name), least=least)
        if self.output_file is not None and not isinstance(self.output_file, str):
            raise ValueError(f"output_file is a path or null, not {self.output_file!r}")


def read_configuration(path: str | os.PathLike[str]) -> ProfilerConfiguration:
    """Return the configuration in a YAML or JSON file, a path or URI as in `fvflops.paths`.

    Its keys stand under "flops_profiler", beside whatever else a configuration of DeepSpeed holds, or alone in the
    file. "recompute_fwd_factor" is read over: what runs again is recorded. A file that cannot be read, an unknown key
    and a value of another kind raise TableError, a ValueError that begins with the file and the line.
    """
    document = read_document(os.fspath(path))
    keys = document.fields("a configuration")
    if _SECTION in keys:
        document = keys[_SECTION]
        keys = document.fields(_SECTION)
    known = [field.name for field in fields(ProfilerConfiguration)]
    values: dict[str, Any] = {}
    for key, node in keys.items():
        if key == _COUNTED:
            continue
        if key not in known:
            hint = suggest(key, known) or f": the keys are {', '.join(known)}"
            raise node.error(f"unknown key {key!r}{hint}")
        values[key] = _read_value(key, node)
        try:
            ProfilerConfiguration(**{key: values[key]})
        except ValueError as error:
            raise node.error(str(error)) from None
    return ProfilerConfiguration(**values)


def _read_value(key: str, node: Node) -> bool | int | str | None:
    text = node.text(key)
    if key == "output_file":
        return None if text.lower() in _NOTHING else text
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    return int(text) if text.removeprefix("-").isdecimal() else text
