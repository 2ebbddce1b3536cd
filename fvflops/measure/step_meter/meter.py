"""`StepMeter`: throughput and utilisation of the steps of a training loop."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fvflops import paths
from fvflops.analysis.recording import record
from fvflops.capture.model.read_module_tree import unwrap_compiled
from fvflops.devices.devices import Device, resolve_device
from fvflops.devices.utilisation import UtilisationError, with_attention
from fvflops.formulas import resolve_table
from fvflops.measure.step_meter.call_costs import Peaks, predict_call_memory, quiet_log
from fvflops.measure.step_meter.clock import Clock
from fvflops.measure.step_meter.meter_report import Reported, meter_report
from fvflops.measure.step_meter.metered_calls import (
    CallObserver,
    ModelCall,
    describe,
    sizes_of,
    unwrap_model,
    unwrap_optimizer,
)
from fvflops.measure.step_meter.step_costs import StepCosts, StepWork
from fvflops.measure.step_meter.step_figures import (
    JUDGED,
    MeterOptions,
    MeterSummary,
    StepFigures,
    mean_figures,
    read_planned,
    sum_ranks,
)
from fvflops.reports.document import Document
from fvflops.reports.formats import write_document
from fvflops.reports.terminal.terminal_line import TerminalLine
from fvflops.text import Unpack, explaining_arguments, require_int, short_repr
from fvflops.trace import TraceError
from fvflops.units import format_quantity, format_seconds

_LOGGER = logging.getLogger("fvflops")
_MOST_SECONDS = 10.0  # for the calls that are left to count at the end
_COMPARED = 3  # steps whose calls are compared with a recorded step's


@dataclass(slots=True)
class _Step:
    """A step: its work, its time once the clock has it, and its figures by the `version` of the costs."""

    number: int
    work: StepWork
    samples: float
    tokens: float
    start: Any
    stop: Any
    seconds: float = math.nan
    memory_peak: float = math.nan
    figures: StepFigures | None = None
    version: int = -1


class StepMeter:
    """Measure the steps of a training loop: time, MFU, HFU, FLOP/s, tokens and samples per second.

        meter = fvflops.StepMeter(model, optimizer=optimizer, device="H100")
        for batch in loader:
            with meter.step():
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            log(meter.last.as_dict())

    `models` are the modules that the loop calls: one, or several (generator and discriminator, student and teacher).
    Each distinct call, by the shapes of its inputs, is counted once, after its step and in shape execution: nothing
    runs again, and compiled models stay compiled. From then on a step costs a clock and a hook per call. With many
    distinct calls, as with variable sequence lengths, counting takes at most 0.5 % of the loop's time. A figure without
    a count is NaN until `close` at the latest, or until a polynomial in the length fits all counts so far. A call that
    needs values is counted by recording the next step that has one. Work between the models' forward passes, such as a
    loss, is not counted; `meter.step(batch)` records a step to see whether that is all of its work. A model's work may
    depend on its inputs, modes and trainable parameters; after adding adapters, make another meter.

    `optimizer` is one or several, whose steps are hardware FLOPs. `device` is a name or a Device as for `fvflops.mfu`,
    by default the first parameter's CUDA device; `table` is the convention, `attention` and `float32_matmul` are as in
    `mfu`. Each process meters its own work: figures are per device. On CUDA times are read from events on the
    current stream, which no step waits for: `last` is the last step whose events have passed. In a loop
    nothing raises: an unknown figure is NaN, with one warning that says why; with `strict` it raises UtilisationError.
    `live` shows the last step of rank 0 in one line of the terminal, on standard error or a stream; nothing if it is
    no terminal. `expected` is the time of a step as planned, a StepEstimate or seconds: after 20 steps, and in
    the summary, the meter reports the share of the time that it does not explain.

    >>> import torch
    >>> model = nn.Linear(64, 32)
    >>> meter = StepMeter(model, device=Device("mine", matrix={"fp32": 10**12}))
    >>> for rows in (4, 8, 4):
    ...     with meter.step(samples=rows):
    ...         model(torch.ones(rows, 64)).sum().backward()
    >>> [figures.macs for figures in meter.steps], 0 < meter.last.mfu < 1
    ([16384, 32768, 16384], True)
    """

    @explaining_arguments
    def __init__(
        self, *models: nn.Module, optimizer: Optimizer | Sequence[Optimizer] = (), **options: Unpack[MeterOptions]
    ) -> None:
        if not models:
            raise ValueError("there is no model to meter: pass the modules that the loop calls")
        for model in models:
            if not isinstance(model, nn.Module):
                raise TypeError(f"a model must be a torch.nn.Module, got {type(model).__name__}")
        models = tuple(map(unwrap_model, models))
        wrapped = list(optimizer) if isinstance(optimizer, Iterable) and not isinstance(optimizer, str) else [optimizer]
        optimizers = self._optimizers = [unwrap_optimizer(item) for item in wrapped]
        table, attention, expected = options["table"], options["attention"], options["expected"]
        self._planned = read_planned(expected, has_default_counts=table == "default" and attention == "dense")
        self._strict, live = options["strict"], options["live"]
        self._warned: set[str] = set()
        self._clock = Clock(map(unwrap_compiled, models))
        found = self._find_device(options["device"])
        if found is not None and (mismatch := self._clock.find_mismatch(found)):
            _LOGGER.warning("StepMeter: %s: mfu and hfu are shares of another device's peaks", mismatch)
        peaks = Peaks(found, options["float32_matmul"], self._warn)
        self._costs = StepCosts(models, optimizers, with_attention(resolve_table(table), attention), peaks, self._warn)
        self._observer = CallObserver(models, self._costs.is_known)
        self._optimizer_steps: Counter[int] = Counter()
        self._handles = [
            item.register_step_post_hook(lambda *_, number=number, steps=self._optimizer_steps: steps.update((number,)))
            for number, item in enumerate(optimizers)
        ]
        self._number, self._in_with, self._is_closed = 0, False, False
        self._start: Any = None
        self._recording: record | None = None
        self._wants_recording = False
        self._key: Hashable = None
        self._batch_sizes: tuple[int, int] | None = None
        # Whether steps with a batch are counted by their calls; None until that is known.
        self._calls_suffice: bool | None = None
        self._recorded_kinds: Counter[Hashable] | None = None  # of the calls of the recorded step
        self._compared = 0
        self._first = models[0]
        self._untimed: deque[_Step] = deque()
        self._steps: deque[_Step] = deque(maxlen=require_int("history", options["history"], least=0))
        self._predicted: tuple[ModelCall | None, float] = None, math.nan
        is_first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
        self._is_compared = is_first and expected is not None
        self._live = TerminalLine(sys.stderr if live is True else live) if live and is_first else None
        self._begun = time.perf_counter()

    def __repr__(self) -> str:
        """Return one line, without counting or warning."""
        return short_repr(self, type(self._first).__name__, format_quantity(len(self._steps), "step"))

    def __str__(self) -> str:
        """Return the steps so far in one line, for a loop that prints it; nothing waits, and nothing is counted."""
        mean, last = self.mean(), self.last
        if mean is None or last is None:
            return "no step yet"
        if len(self._steps) == 1:
            return str(mean)
        return f"{format_quantity(len(self._steps), 'step')}, mean {mean.rates()}; last {last.rates()}"

    def _repr_html_(self) -> str:
        """Count the pending calls, and return the page of `to_html` for a notebook."""
        from fvflops.reports import notebook_page

        report = self._make_report()
        return f"<pre>{self}</pre>" if report is None else notebook_page.render_document(report)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self)}

    @contextmanager
    def step(self, batch: Any = None, *, samples: float | None = None, tokens: float | None = None) -> Iterator[None]:
        """Meter one step, as `begin` and `end`; a step that raises is discarded."""
        self.begin(batch)
        self._in_with = True
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        finally:
            self._in_with = False
        self.end(samples=samples, tokens=tokens)

    def begin(self, batch: Any = None) -> None:
        """Begin a step, and discard an unfinished one; after `close` nothing happens, except for a warning.

        With a `batch`, any nested structure of tensors, the first step is recorded with all that runs in it. If the
        calls of the models have all its multiply-adds, steps are counted by their calls as without a batch; else the
        first step of each distinct batch, by its shapes, is recorded.
        """
        if self._is_closed:
            return self._say_once("a step after close() is not metered, since the hooks are gone: make another meter")
        if self._in_with and self._start is not None:
            self._say_once("a step began inside another one, which is discarded: let `with meter.step()` end first")
        self.cancel()
        self._optimizer_steps.clear()
        self._key = None if batch is None or self._calls_suffice else ("batch", describe(batch))
        self._batch_sizes = None if batch is None else sizes_of((batch,), {})
        if self._key is None or self._calls_suffice is None:
            self._observer.start()
        wants_batch = self._key is not None and self._recorded_kinds is None
        if self._wants_recording or (wants_batch and self._costs.needs_batch(self._key)):
            self._recording = self._costs.start_recording()
        self._start = self._clock.read()

    def end(self, *, samples: float | None = None, tokens: float | None = None) -> None:
        """End a step; without `begin` nothing happens.

        `samples` and `tokens` are by default the rows of the first tensor of the batch or of the first model's inputs,
        and its elements if they are token ids (`input_ids`, or integers of two dimensions).
        """
        if self._start is None:
            return
        start, stop, self._start = self._start, self._clock.read(), None
        calls, recording = self._observer.stop(), self._end_recording()
        work = self._costs.add(calls, self._optimizer_steps, self._key)
        if recording is not None:
            self._costs.add_recording(work, recording)
        self._costs.count_waiting(time.perf_counter() - self._begun)
        if work.is_batch and self._calls_suffice is None:
            work = self._compare_calls(work, Counter(call.kind for call in calls), recording is not None)
        self._wants_recording = not work.is_batch and self._costs.needs_recording(work)
        self._number += 1
        sizes = [(call.samples, call.tokens) for call in calls if call.model is self._first] or [(0, 0)]
        sizes = sizes if self._batch_sizes is None else [self._batch_sizes]
        rows, ids = (sum(part) or math.nan for part in zip(*sizes, strict=True))
        rows, ids = rows if samples is None else samples, ids if tokens is None else tokens
        self._untimed.append(_Step(self._number, work, rows, ids, start, stop))
        self._add_times()
        if self._strict:
            _ = self.last  # raises where a figure is unknown
        if self._live is not None and self._live.is_due() and (last := self.last) is not None:
            self._live.draw(str(last))

    def cancel(self) -> None:
        """Discard an unfinished step."""
        if self._start is not None:
            self._start = None
            self._observer.stop()
            self._end_recording()

    def mean(self, steps: int | None = None) -> StepFigures | None:
        """Return the mean figures of the last `steps`, by default of all; None before the first.

        Utilisations and rates are over the total time of these steps; a figure that any of them lacks is NaN.
        """
        self._add_times()
        return mean_figures([self._figures(step) for step in list(self._steps)[-steps if steps else 0 :]])

    def summary(self, *, gather: bool = False) -> MeterSummary | None:
        """Count the pending calls, and return the mean step; None before the first step.

        With `gather` it covers all ranks of torch.distributed, and every rank has to call it: the figures are
        exchanged once, by all_gather_object. Otherwise it covers this rank.
        """
        self._costs.count_all()
        ranks: list[Any] = [self.mean()]
        if gather and dist.is_available() and dist.is_initialized():
            mean, ranks = ranks[0], [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mean)
        if None in ranks:
            return None
        return MeterSummary(len(self._steps), sum_ranks(ranks), tuple(ranks), self._predict_memory())

    def to_html(
        self, path: str | os.PathLike[str] | None = None, *, profile: Reported | None = None, gather: bool = False
    ) -> str:
        """Return an HTML page of the loop: utilisation over the steps, and where the FLOPs went; write it to `path`.

        `profile` is a ProfileAnalysis, whose report of the time is added, `gather` is as in `summary`. Before the first
        step it raises TraceError.
        """
        report = self._make_report(profile, gather=gather)
        if report is None:
            raise TraceError("there is no step to report: meter one with `with meter.step(): ...`")
        if path is not None:
            paths.check_writable(os.fspath(path))
        page = write_document(report, "html")
        if path is not None:
            paths.write_text(os.fspath(path), page)
        return page

    def _make_report(self, profile: Reported | None = None, *, gather: bool = False) -> Document | None:
        """Return the report of the loop, None before the first step."""
        summary = self.summary(gather=gather)
        if summary is None:
            return None
        parts, counted = self._costs.parts_of(step.work for step in self._steps)
        return meter_report(summary, self.steps, parts, counted, None if profile is None else profile.report())

    def _predict_memory(self) -> float:
        """Return the predicted peak of the largest call as a training step with the optimizer, in bytes."""
        call = self._costs.largest[1]
        if call is not None and self._predicted[0] is not call:
            try:
                peak = predict_call_memory(call, self._optimizers)
            except UtilisationError:
                raise
            except Exception as error:  # a page without a prediction is better than none
                self._warn("memory_predicted", str(error))
                peak = math.nan
            self._predicted = call, peak
        return self._predicted[1]

    @property
    def last(self) -> StepFigures | None:
        """Figures of the last step whose time is known, None before the first."""
        self._add_times()
        return self._figures(self._steps[-1]) if self._steps else None

    @property
    def steps(self) -> tuple[StepFigures, ...]:
        """Figures of the steps whose time is known, the last `history` of them."""
        self._add_times()
        return tuple(map(self._figures, self._steps))

    def close(self) -> None:
        """Remove all hooks, and count the pending calls; the figures stay.

        Counting may take 10 seconds, or 1 % of the loop's time if that is more.
        """
        self._remove_hooks()
        self._costs.count_all(max(_MOST_SECONDS, (time.perf_counter() - self._begun) / 100))

    def __enter__(self) -> StepMeter:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        self.cancel()
        self._is_closed = True
        self._observer.remove()
        for handle in self._handles:
            handle.remove()
        if self._live is not None:
            self._live.leave()

    def _find_device(self, device: str | Device | None) -> Device | None:
        reason = "the device is unknown: pass device='H100', a fvflops.Device, or FILE.yaml of 'fvflops peak'"
        try:
            if device := device or self._clock.device_name():
                return resolve_device(device)
        except ValueError as error:
            reason = str(error)
        self._warn("mfu", reason)
        return None

    def _compare_calls(self, work: StepWork, kinds: Counter[Hashable], is_recorded: bool) -> StepWork:
        """Return the work of a step with a batch, by its calls if these are all of it.

        They are if they have all multiply-adds of the recorded step, and if a step without recording has the same
        calls: in a compiled function, which only runs uncompiled in a recording, no calls are observed.
        """
        by_calls = work._replace(recorded=work.calls, is_batch=False)
        if is_recorded:
            if self._costs.of(by_calls).macs == self._costs.of(work).macs:
                self._recorded_kinds = kinds
            else:
                self._calls_suffice = False
        elif kinds == self._recorded_kinds:
            self._calls_suffice = True
            return by_calls
        else:
            self._compared += 1
            if self._compared == _COMPARED:
                self._calls_suffice, self._recorded_kinds = False, None
        return work

    def _end_recording(self) -> record | None:
        recording, self._recording = self._recording, None
        if recording is not None:
            with quiet_log():
                recording.__exit__(None, None, None)
        return recording

    def _add_times(self) -> None:
        """Complete the steps whose time is known by now."""
        while self._untimed:
            step = self._untimed[0]
            seconds = self._clock.seconds_between(step.start, step.stop)
            if seconds is None:
                return
            step.seconds, step.memory_peak, step.start, step.stop = seconds, self._clock.memory_peak(), None, None
            self._steps.append(self._untimed.popleft())
            if step.number == JUDGED and self._is_compared:
                self._planned.compare(list(map(self._figures, self._steps)))

    def _figures(self, step: _Step) -> StepFigures:
        """Return the figures of a timed step, as far as its cost is known."""
        if step.figures is None or step.version != self._costs.version:
            cost = self._costs.of(step.work)
            step.version = self._costs.version
            step.figures = StepFigures(
                step.number,
                step.seconds,
                *cost[:3],
                mfu=self._share("mfu", cost.model_seconds, step.seconds),
                hfu=self._share("hfu", cost.hardware_seconds, step.seconds),
                samples=step.samples,
                tokens=step.tokens,
                memory_peak=step.memory_peak,
                expected_seconds=self._planned.seconds,
            )
        return step.figures

    def _share(self, name: str, least: float, seconds: float) -> float:
        if least > seconds:
            times = f"takes at least {format_seconds(least)}, and the step took {format_seconds(seconds)}"
            self._warn(name, f"the work of a step {times}: check device and dtype")
            return math.nan
        return least / seconds if seconds else math.nan

    def _warn(self, figure: str, reason: str) -> None:
        """Log once why a figure is NaN, or raise UtilisationError if the meter is strict."""
        unknown = "is unknown" if self._strict else "is NaN where it is unknown"
        self._say_once(f"{figure} {unknown}: {reason}", key=figure)

    def _say_once(self, text: str, *, key: str = "") -> None:
        if self._strict:
            raise UtilisationError(f"StepMeter: {text}")
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            _LOGGER.warning("StepMeter: %s", text)
