"""Profile one step of a training loop, chosen by a configuration."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from fvflops import paths
from fvflops.compat.flops_profiler import FlopsProfiler
from fvflops.formulas import FormulaTable
from fvflops.formulas.yaml_document import Node, read_document
from fvflops.text import require_int, suggest
from fvflops.trace import TraceError
from fvflops.units import format_quantity

_SECTION = "flops_profiler"
_BOOLS = {"true": True, "false": False}
_NULLS = ("", "null", "~")
# DeepSpeed multiplies by this factor for recomputed forward passes; here recomputation is recorded.
_IGNORED_KEY = "recompute_fwd_factor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfiguration:
    """Configuration of `StepProfiler`: `enabled`, and the number of the step to profile, from 0 on.

    The other fields are arguments of `FlopsProfiler.print_model_profile`. An invalid value raises ValueError.

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
                raise ValueError(f"{name} must be true or false; got {getattr(self, name)!r}")
        for name, least in (("profile_step", 0), ("module_depth", -1), ("top_modules", 1)):
            require_int(name, getattr(self, name), least=least)
        if self.output_file is not None and not isinstance(self.output_file, str):
            raise ValueError(f"output_file must be a path or null; got {self.output_file!r}")


def read_configuration(path: str | os.PathLike[str]) -> ProfilerConfiguration:
    """Return the configuration in a YAML or JSON file, a path or URI as in `fvflops.paths`.

    The keys are in the section "flops_profiler" of a DeepSpeed configuration, or at the top level of the file.
    "recompute_fwd_factor" is ignored, since recomputation is recorded. An unreadable file, an unknown key and an
    invalid value raise TableError, a ValueError that begins with the file and the line.
    """
    document = read_document(os.fspath(path))
    keys = document.fields("a configuration")
    if _SECTION in keys:
        document = keys[_SECTION]
        keys = document.fields(_SECTION)
    names = [field.name for field in fields(ProfilerConfiguration)]
    values: dict[str, Any] = {}
    for key, node in keys.items():
        if key == _IGNORED_KEY:
            continue
        if key not in names:
            hint = suggest(key, names) or f": the keys are {', '.join(names)}"
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
        return None if text.lower() in _NULLS else text
    if text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    return int(text) if text.removeprefix("-").isdecimal() else text


class StepProfiler:
    """Context manager that profiles one step of a training loop and writes its profile when the step ends.

    `configuration` is a ProfilerConfiguration or the path of a YAML or JSON file. Call `step()` at the end of each
    step. If the loop ends before the configured step, the end of the with block raises RuntimeError; an output file
    that cannot be written raises OSError before the loop. Does nothing unless enabled.

    >>> model = nn.Linear(3, 2)
    >>> with StepProfiler(model, ProfilerConfiguration(enabled=True, profile_step=7)) as profiler:
    ...     profiler.step()
    Traceback (most recent call last):
    RuntimeError: there is no profile: the loop ended after 1 step, before step 7 (counted from 0)
    """

    def __init__(
        self,
        model: nn.Module,
        configuration: ProfilerConfiguration | str | os.PathLike[str],
        *,
        table: str | FormulaTable = "deepspeed",
    ) -> None:
        if not isinstance(configuration, ProfilerConfiguration):
            configuration = read_configuration(configuration)
        if configuration.enabled and configuration.output_file:
            paths.check_writable(configuration.output_file)
        self._configuration = configuration
        self._profiler = FlopsProfiler(model, table=table)
        self._step = 0
        self._active = False
        self._written = False

    def __enter__(self) -> StepProfiler:
        self._begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._profiler.end_profile()
            return
        with suppress(TraceError):  # no module was called in the profiled step
            self._write()
        if self._configuration.enabled and not self._written:
            raise RuntimeError(
                f"there is no profile: the loop ended after {format_quantity(self._step, 'step')}, before step"
                f" {self._configuration.profile_step} (counted from 0)"
            )

    def step(self) -> None:
        """Mark the end of a step."""
        self._write()
        self._step += 1
        self._begin()

    def _begin(self) -> None:
        if self._configuration.enabled and self._step == self._configuration.profile_step:
            self._profiler.start_profile()
            self._active = True

    def _write(self) -> None:
        if not self._active:
            return
        self._active = False
        configuration = self._configuration
        self._profiler.stop_profile()
        try:
            names = (field.name for field in fields(configuration) if field.name != "enabled")
            self._profiler.print_model_profile(**{name: getattr(configuration, name) for name in names})
            self._written = True
        finally:
            self._profiler.end_profile()
