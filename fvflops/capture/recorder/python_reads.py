"""Find Python's reads during a run: values of the data and random draws, which its control flow may follow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import takewhile
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any
from weakref import proxy

import torch

from fvflops.capture.recorder.caller_lines import PACKAGE_FOLDER, TORCH_FOLDER, find_source_line, path_of
from fvflops.capture.recorder.recorded_storages import RecordedStorages
from fvflops.capture.restore.global_state import SavedGenerator
from fvflops.capture.unseen.op_kinds import METADATA_ONLY, UNINITIALISED
from fvflops.torch_internals import current_autograd_node
from fvflops.trace import ModuleTree, Signature, tensors_in
from fvflops.trace.records import LOCATION_SEPARATOR

# Sources of a storage's values: a random draw, the inputs, and floating-point values of inputs or of the model.
_RANDOM, _INPUT, _FLOAT = 1, 2, 4
_DATA = _INPUT | _FLOAT
# Smaller tensors that existed before the run, outside the model and its inputs, are constants.
_CONSTANT_BYTES = 64
# Arguments that switch a random op off, and the value that does.
_SWITCHES = {"train": False, "training": False, "is_training": False, "p": 0.0, "dropout_p": 0.0, "dropout": 0.0}
# Code of torch that reads values to print or validate them, or to recognise a causal mask.
_WITHOUT_CONSEQUENCE = tuple(
    TORCH_FOLDER + name.replace("/", os.sep)
    for name in ("_tensor_str.py", "ao/quantization/", "distributions/", "nn/modules/transformer.py")
)


class PythonReads:
    """Reads of a run's values by Python, inside modules: `bool`, `item`, `tolist`, sizes of data-dependent ops.

    A read counts as data-dependent if the value derives from an input through floating-point values, such as
    activations; integers of the inputs (token ids, masks, lengths) are given, as shapes are, and parameters and buffers
    are the model's. It is random if the value derives from a random op. Origins are traced through the recorded events,
    when a value is read, so that runs without reads take no time. `has_draws`: a random op was computed in shape
    execution, in which else only integers that derive from inputs and constants are known (`is_real` false).
    """

    def __init__(self, recorder: RecordedStorages) -> None:
        self.recorder: RecordedStorages = proxy(recorder)  # which owns this
        self.is_real = True
        self.has_draws = False
        # In a program its tensors are the inputs.
        self.is_program = False
        # By line, the first module.
        self._data: dict[str, str] = {}
        self._random: dict[str, str] = {}
        # By storage, and the number of events that it was derived from.
        self._origins: dict[int, int] = {}
        self._position = 0
        self._rules: dict[int, tuple[int, tuple[bool, ...] | None]] = {}  # by signature

    def record(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record that Python reads tensors' values, or that they decide the size of a result."""
        recorder = self.recorder
        if not (self.is_real or self.has_draws) or recorder.paused:
            return
        if not (recorder.thread_state().opened or current_autograd_node() is not None):
            return
        self.update()
        origin = 0
        for tensor in tensors:
            for index in recorder.storages_of((tensor,)):
                origin |= self._origin_of(index, tensor.is_floating_point() or tensor.is_complex())
        is_data = origin & _DATA == _DATA
        if not (is_data or origin & _RANDOM):
            return
        frame = sys._getframe(1)
        if _is_without_consequence(frame):
            return
        module, line = recorder.current_module(), find_source_line(frame).line
        if is_data:
            self._data.setdefault(line, module)
        if origin & _RANDOM:
            self._random.setdefault(line, module)

    def record_draw(self, module: str = "", line: str = "") -> None:
        """Record that Python drew a random number outside torch, in a module and on a source line if known."""
        self._random.setdefault(line, module)

    def update(self, *, discard: bool = False) -> None:
        """Derive the origins of all storages written so far; with `discard` the events will then be discarded."""
        events, origins = self.recorder.events, self._origins
        for event in events[self._position :]:
            if event[0] != "op":
                continue
            reads, writes = event[5:7]
            rule = self._rules.get(event[1])
            if rule is None:
                rule = self._rules[event[1]] = _origin_rule(self.recorder.signature_at(event[1]))
            origin, floats = rule
            if floats is not None:
                known = floats if len(floats) == len(reads) else (any(floats),) * len(reads)
                for index, is_float in zip(reads, known, strict=True):
                    origin |= self._origin_of(index, is_float)
            origins.update({index: origin for index in writes if floats is not None or index not in reads})
        self._position = 0 if discard else len(events)

    def describe(self, modules: ModuleTree) -> dict[str, str]:
        """Return the locations of random draws and of reads of data, for a Trace's `about`."""
        kinds = {"random": self._random, "data_dependent": self._data}
        texts = {
            kind: [modules.locate(module, line) for line, module in sites.items()] for kind, sites in kinds.items()
        }
        return {kind: LOCATION_SEPARATOR.join(locations) for kind, locations in texts.items() if locations}

    def _origin_of(self, index: int, is_float: bool) -> int:
        """Return the origin of a storage, known or one that existed before the run."""
        known = self._origins.get(index)
        if known is not None:
            return known
        nbytes, _, kind = self.recorder.storages[index][:3]
        if kind == "op":
            return 0
        if kind == "input" or (kind == "outside" and self.is_program):
            return _DATA if is_float else _INPUT
        return _FLOAT if is_float and not (kind == "outside" and nbytes <= _CONSTANT_BYTES) else 0


def _origin_rule(signature: Signature) -> tuple[int, tuple[bool, ...] | None]:
    """Return an op's own part of its results' origin, and which tensors it reads are floats, None if no contents."""
    values = dict(zip(signature.names, signature.inputs, strict=False))
    is_switched_off = any(name in values and values[name] == off for name, off in _SWITCHES.items())
    origin = _RANDOM if _is_random(signature.op) and not is_switched_off else 0
    if signature.op in METADATA_ONLY | UNINITIALISED:
        return origin, None
    return origin, tuple(spec.is_floating_point or spec.is_complex for spec in tensors_in(signature.inputs))


@lru_cache(maxsize=1 << 12)
def _is_random(name: str) -> bool:
    """Return whether an op generates random numbers.

    >>> _is_random("aten::rand"), _is_random("aten::bernoulli_.float"), _is_random("aten::add.Tensor")
    (True, True, False)
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload or "default", None)
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _is_without_consequence(frame: FrameType) -> bool:
    """Return whether code of torch that steers no work reads a value, called by the model."""
    paths = (frame.f_code.co_filename for frame, _ in walk_stack(frame))
    inner = takewhile(lambda path: path.startswith((TORCH_FOLDER, PACKAGE_FOLDER)), paths)
    return any(path.startswith(_WITHOUT_CONSEQUENCE) for path in inner)


class DrawFinder:
    """Find the generators that a run draws from, and in a second run the lines that draw.

    States are compared at the end of the first run, and after each line of the model's source in the second.
    """

    def __init__(self) -> None:
        self._generators: list[SavedGenerator] = []
        self._located = False

    @property
    def needs_second_run(self) -> bool:
        """Whether a run drew numbers on unknown lines."""
        return bool(self._generators) and not self._located

    def compare(self, generators: Callable[[], Iterable[SavedGenerator]], reads: PythonReads) -> None:
        """Find the generators that a run drew from; record a draw without a line if none is known."""
        self._generators = [saved for saved in generators() if saved.has_drawn]
        if self.needs_second_run:
            reads.record_draw()

    @contextmanager
    def locating(self, reads: PythonReads) -> Iterator[None]:
        """Record the lines that draw from the generators of an earlier run, if any, while the context lasts."""
        if not self._generators:
            yield
            return
        self._located = True
        outer = sys.gettrace()
        tracer = _LineTracer(reads, self._generators)
        sys.settrace(tracer.on_call)
        try:
            yield
        finally:
            sys.settrace(outer)
            tracer.finish()


class _LineTracer:
    """A trace function that attributes changes of generators to the line that ran before."""

    def __init__(self, reads: PythonReads, generators: list[SavedGenerator]) -> None:
        self._reads = reads
        self._generators = generators
        self._states = [saved.state() for saved in generators]
        self._last: tuple[CodeType, int, int] | None = None  # with the stack of modules

    def on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Trace the lines of a function of the model's source."""
        return None if path_of(frame.f_code) is None else self._on_event(frame, event, argument)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        self._compare()
        current: FrameType | None = frame
        if event == "return":
            current = frame.f_back
            while current is not None and path_of(current.f_code) is None:
                current = current.f_back
        if current is not None:
            self._last = current.f_code, current.f_lineno, self._reads.recorder.thread_state().stack
        return self._on_event

    def finish(self) -> None:
        """Record draws after the last line, or in other threads, without a line."""
        self._last = None
        self._compare()

    def _compare(self) -> None:
        states = [saved.state() for saved in self._generators]
        if states == self._states:
            return
        self._states = states
        if self._last is None:
            self._reads.record_draw()
        else:
            code, line, stack = self._last
            self._reads.record_draw(self._reads.recorder.module_at(stack), f"{path_of(code)}:{line}")
