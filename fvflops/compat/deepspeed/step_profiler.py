"""Profile one step of a training loop, chosen by a configuration."""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType

from torch import nn

from fvflops import paths
from fvflops.compat.deepspeed.configuration import ProfilerConfiguration, read_configuration
from fvflops.compat.deepspeed.flops_profiler import FlopsProfiler
from fvflops.formulas import FormulaTable
from fvflops.trace import TraceError
from fvflops.units import format_quantity


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
            self._profiler.print_model_profile(
                profile_step=configuration.profile_step,
                module_depth=configuration.module_depth,
                top_modules=configuration.top_modules,
                detailed=configuration.detailed,
                output_file=configuration.output_file,
            )
            self._written = True
        finally:
            self._profiler.end_profile()
