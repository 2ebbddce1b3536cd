"""The interface of DeepSpeed's flops profiler: its calls, arguments and results.

Forward counts are DeepSpeed's by default (`table="deepspeed"`): a multiply-add is two FLOPs, and ops that DeepSpeed
ignores are ignored. The backward pass, for which DeepSpeed assumes twice the forward pass, is counted if it was
recorded, and otherwise reported as not recorded. No attributes are added to the model, and no function stays patched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from fvflops import paths
from fvflops.analysis.recording import record
from fvflops.capture.restore.interrupts import allowed, deferred
from fvflops.compat.deepspeed_profile import Costs, ModelProfile, read_profile, render, render_top
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.formulas.yaml_document import Node, read_document
from fvflops.measure.profile_analysis import ProfileAnalysis
from fvflops.measure.step_meter.metered_calls import ModelModes
from fvflops.text import require_int, short_repr, suggest
from fvflops.trace import Trace, TraceError
from fvflops.units import (
    duration_to_string,
    flops_to_string,
    format_quantity,
    macs_to_string,
    number_to_string,
    params_to_string,
)

__all__ = [
    "FlopsProfiler",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

_MODES = ("forward", "generate")
OutputFile = str | os.PathLike[str] | None


class FlopsProfiler:
    """Profile the calls of a model between `start_profile` and `stop_profile`.

    The model's results do not change. The profile covers the calls since the last `start_profile`, and is available
    until `end_profile`. `table` is the convention of the forward pass: a name, a path or a FormulaTable. As a context
    manager it starts on entry and ends on exit. Under autograd composite ops are counted by the core ops that they
    call, so the bias of a linear layer counts in DeepSpeed's convention too.

    >>> model = nn.Linear(3, 2)
    >>> profiler = FlopsProfiler(model)
    >>> profiler.start_profile()
    >>> with torch.inference_mode():
    ...     y = model(torch.ones(4, 3))
    >>> profiler.stop_profile()
    >>> profiler.get_total_flops(), profiler.get_total_macs(as_string=True), profiler.get_total_params()
    (48, '24 MACs', 8)
    >>> profiler.end_profile()
    """

    def __init__(self, model: nn.Module, *, table: str | FormulaTable = "deepspeed") -> None:
        _check_model(model)
        self._model = model
        self._table = resolve_table(table)
        self._ignored: tuple[type, ...] = ()
        self._run: record | None = None
        self._active = False
        self._cached: tuple[Trace | None, ModelProfile | None] = (None, None)

    def __repr__(self) -> str:
        state = "recording" if self._active else "not started" if self._run is None else "stopped"
        return short_repr(self, type(self._model).__name__, state, f"convention {self._table.name}")

    def __enter__(self) -> FlopsProfiler:
        try:
            self.start_profile()
        except BaseException:
            self.stop_profile()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end_profile()

    def start_profile(self, ignore_list: Collection[type] | None = None) -> None:
        """Start a new profile, discarding an earlier one.

        The work of a module whose exact class is in `ignore_list`, without its submodules, is attributed to its caller.
        """
        self.end_profile()
        self._ignored = _check_ignored(ignore_list)
        self._begin()

    def stop_profile(self) -> None:
        """Stop recording and keep the results."""
        if self._active and self._run is not None:
            with deferred():
                self._active = False
                self._run.__exit__(None, None, None)

    def reset_profile(self) -> None:
        """Discard the results so far; an active profile starts again from zero."""
        active = self._active
        self.stop_profile()
        self._run = None
        self._cached = None, None
        if active:
            self._begin()

    def end_profile(self) -> None:
        """Stop recording and discard the results."""
        self.stop_profile()
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the FLOPs of the forward pass, in the table's convention."""
        flops = self._forward().flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the MACs of the forward pass."""
        macs = self._forward().macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the time of the model's forward calls in seconds."""
        seconds = self._forward().duration_ns / 1e9
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of elements of the model's parameters; a tied parameter counts once."""
        elements = self._profile().by_module[""].parameters
        return params_to_string(elements) if as_string else elements

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: OutputFile = None,
    ) -> None:
        """Write the profile to a file, or to standard output: a header, the top modules, and all modules if `detailed`.

        `profile_step` is the number in the header. `module_depth` is the last depth with top modules (0 is the
        model, -1 means all), and `top_modules` their number at each depth. Folders of `output_file` are created.
        """
        top = {"module_depth": module_depth, "top_modules": require_int("top_modules", top_modules, least=1)}
        _write(render(self._profile(), profile_step=profile_step, **top, detailed=detailed), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Write the top modules at each depth to standard output; arguments are as for `print_model_profile`."""
        require_int("top_modules", top_modules, least=1)
        _write(render_top(self._profile(), module_depth=module_depth, top_modules=top_modules), None)

    def _begin(self) -> None:
        run = record(self._model, table=self._table, measure={"time"}, warn=False)
        with deferred():
            run.__enter__()
            self._run, self._active = run, True

    def _profile(self) -> ModelProfile:
        if self._run is None:
            remedy = "call start_profile() before the run, and read results before end_profile()"
            raise RuntimeError(f"there is no profile: {remedy}")
        trace = self._run.trace()
        cached_trace, profile = self._cached
        if profile is None or cached_trace is not trace:
            profile = read_profile(trace, table=self._table, ignored=self._ignored)
            self._cached = trace, profile
        return profile

    def _forward(self) -> Costs:
        return self._profile().phases["forward"]


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: OutputFile = None,
    ignore_modules: Collection[type] | None = None,
    mode: str = "forward",
    *,
    table: str | FormulaTable = "deepspeed",
) -> tuple[str, str, str] | tuple[int, int, int]:
    """Return (flops, macs, params) of one run of a model in evaluation mode, and write its profile.

    The model runs on `args` and `kwargs`, or on one tensor of `input_shape` with the dtype and device of its first
    parameter, after `warm_up` runs that are not counted. mode="generate" calls `model.generate` instead. With
    `as_string` the three are strings. `table` is the convention. The other arguments are as for
    `FlopsProfiler.print_model_profile` and its `start_profile`. The modules' training flags are restored. An output
    file that cannot be written raises OSError before the model runs, invalid arguments ValueError or TypeError.

    >>> get_model_profile(nn.Linear(3, 2), (4, 3), print_profile=False)
    ('48 ', '24 MACs', '8')
    >>> get_model_profile(nn.Linear(3, 2), (4, 3), print_profile=False, as_string=False, table="exact")
    (56, 24, 8)
    """
    _check_model(model)
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, _MODES))}; got {mode!r}")
    require_int("warm_up", warm_up, least=0)
    require_int("top_modules", top_modules, least=1)
    if print_profile and output_file:
        paths.check_writable(os.fspath(output_file))
    args = _build_args(model, input_shape, args, kwargs)
    ignored = _check_ignored(ignore_modules)
    formulas = resolve_table(table)
    with deferred(), ModelModes(model, []).applied(), allowed():
        model.eval()
        if mode == "generate":
            trace = _generate(model, args, dict(kwargs or {}), warm_up, formulas)
        else:
            options: dict[str, Any] = {"warmup": warm_up, "repeat": 1, "measure": {"time"}, "table": formulas}
            trace = ProfileAnalysis(model, args, kwargs=kwargs, **options).trace()
    profile = read_profile(trace, table=formulas, ignored=ignored)
    if print_profile:
        top = {"module_depth": module_depth, "top_modules": top_modules}
        _write(render(profile, profile_step=warm_up, **top, detailed=detailed), output_file)
    total = profile.by_module[""]
    if as_string:
        return number_to_string(total.flops), macs_to_string(total.macs), params_to_string(total.parameters)
    return total.flops, total.macs, total.parameters


def _generate(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], warm_up: int, table: FormulaTable
) -> Trace:
    generate = getattr(model, "generate", None)
    if not callable(generate):
        problem = f"mode='generate' calls model.generate, which {type(model).__name__} lacks"
        raise TypeError(f"{problem}: pass mode='forward'")
    with torch.no_grad():
        for _ in range(warm_up):
            generate(*args, **kwargs)
        with record(model, table=table, measure={"time"}) as run:
            generate(*args, **kwargs)
    return run.trace()


def _build_args(
    model: nn.Module, input_shape: Sequence[int] | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Any, ...]:
    if input_shape is None and not args and not kwargs:
        raise ValueError("the model has no inputs: pass input_shape, args or kwargs")
    if input_shape is None:
        return tuple(args)
    given = "a tensor" if isinstance(input_shape, torch.Tensor) else repr(input_shape)
    if isinstance(input_shape, (str, torch.Tensor)) or not isinstance(input_shape, Sequence) or not input_shape:
        raise ValueError(f"input_shape must be a tuple of sizes such as (1, 3, 224, 224); got {given}")
    first = next(model.parameters(), torch.empty(0))
    return (torch.ones(*input_shape, dtype=first.dtype, device=first.device),)


def _check_ignored(classes: Collection[type] | None) -> tuple[type, ...]:
    invalid = [item for item in classes or () if not isinstance(item, type)]
    if invalid:
        raise TypeError(f"modules to ignore must be classes such as torch.nn.Dropout; got {invalid[0]!r}")
    return tuple(classes or ())


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module; got {type(model).__name__}")


def _write(text: str, output_file: OutputFile) -> None:
    """Write text to a file, or to standard output, as DeepSpeed's interface prints."""
    if not output_file:
        sys.stdout.write(f"{text}\n")
        return
    path = os.fspath(output_file)
    paths.check_writable(path)
    paths.write_text(path, f"{text}\n")


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
            wanted = f"before step {self._configuration.profile_step} (counted from 0)"
            raise RuntimeError(
                f"there is no profile: the loop ended after {format_quantity(self._step, 'step')}, {wanted}"
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
