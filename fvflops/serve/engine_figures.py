"""Overhead of each inference engine over the times of its kernels, read from a YAML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from fvflops import paths
from fvflops.formulas.yaml_document import Node, read_entries
from fvflops.text import suggest

ENGINES = paths.SCHEME + "engines.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """Overhead of an engine over its kernels; times are in seconds.

    `start` is the part of kernels' start times that shows when one follows another in a CUDA graph, and `kernel` the
    gap between two. `meet` is the time until all ranks have come to a collective. `step` and `sequence` are the time of
    a step on the host, and of each decoding sequence in it, in which the GPU waits; `synchronous` and
    `synchronous_sequence` their increases without asynchronous scheduling.

    `launch` is the time in which the host launches a kernel of a step with prompts, which is no CUDA graph: the GPU
    waits where its kernels are shorter. `computing` and `experts` are the factors of the time of such a step's products
    and attention, and of its mixtures: 1 as measured alone. `request` is the server's time for a request before the
    engine, and `token` for each token of its prompt. `source` says where the figures are from.

    >>> EngineFigures().start, EngineFigures().step
    (1.0, 0.0)
    """

    start: float = 1.0
    kernel: float = 0.0
    meet: float = 0.0
    step: float = 0.0
    sequence: float = 0.0
    synchronous: float = 0.0
    synchronous_sequence: float = 0.0
    launch: float = 0.0
    computing: float = 1.0
    experts: float = 1.0
    request: float = 0.0
    token: float = 0.0
    source: str = "no time besides the kernels"

    def __post_init__(self) -> None:
        for name in NUMBERS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0; got {getattr(self, name)}")

    def host(self, *, is_asynchronous: bool) -> tuple[float, float]:
        """Return the seconds of a step on the host, and of each decoding sequence in it, in which the GPU waits."""
        if is_asynchronous:
            return self.step, self.sequence
        return self.step + self.synchronous, self.sequence + self.synchronous_sequence


NUMBERS = tuple(item.name for item in fields(EngineFigures) if item.name != "source")
# An engine that adds nothing.
NO_OVERHEAD = EngineFigures()


def find_engine_figures(engine: str, *, file: str = ENGINES) -> EngineFigures:
    """Return the figures of an engine; an unknown one raises ValueError with the nearest, or all.

    >>> find_engine_figures("vllm").source.partition(" ")[0]
    'fitted'
    """
    engines = load_engines(file)
    if engine not in engines:
        hint = suggest(engine, engines) or f": {file} has {', '.join(engines)}"
        raise ValueError(f"no figures of the engine {engine!r}{hint}")
    return engines[engine]


@lru_cache(maxsize=4)
def load_engines(file: str = ENGINES) -> Mapping[str, EngineFigures]:
    """Return engine → its figures; a mistake in the file raises TableError with the file and the line."""
    return read_entries(file, "engines", _read)


def _read(node: Node, name: str) -> EngineFigures:
    found = node.fields(f"the engine {name}", (*NUMBERS, "source"), ("source",))
    numbers: dict[str, Any] = {key: found[key].number(f"{key} of {name}") for key in NUMBERS if key in found}
    source = found["source"].text(f"source of {name}")
    return node.make(lambda: EngineFigures(source=source, **numbers), name)
