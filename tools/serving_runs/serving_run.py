"""A measured serving run: a closed loop of clients on a model, an engine, GPUs and a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fvflops.serve.serving_layout import ServingLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a benchmark's launch script sets.

    `settings` are changes to the engine's usual settings. `shortest` is the ratio of the shortest to the longest prompt
    and output, whose lengths are uniform between them. `waits` is the mean number of steps that a request waits besides
    in queues: until an engine looks for new ones, or for others to share a step with it. `bursts` says how many
    requests a client sends, of which the first ones come all at once. `utilisation` is the part of a GPU's memory that
    the engine takes.
    """

    cache: str = "bf16"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    shortest: float = 1.0
    waits: float = 0.0
    bursts: int = 10
    utilisation: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun:
    """A row of a file of measured runs; lengths are in tokens, times in seconds.

    `line` is its line in the file; `gpu` and `model` are the row's names. `unused` says why it is left out, if it is.
    """

    line: int
    publisher: str
    engine: str
    version: str
    model: str
    gpu: str
    layout: ServingLayout
    launch: Launch
    prompt: int
    output: int
    clients: int
    ttft: float
    tpot: float
    unused: str = ""

    @property
    def name(self) -> str:
        """The model without its publisher."""
        return self.model.rpartition("/")[2]

    @property
    def tokens(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an output."""
        mean = (1 + self.launch.shortest) / 2
        return mean * self.prompt, mean * self.output

    @property
    def running(self) -> float:
        """The mean number of sequences that decode, by Little's law from the measured times."""
        decoding = (self.tokens[1] - 1) * self.tpot
        return self.clients * decoding / (self.ttft + decoding)

    def throughput(self, ttft: float, tpot: float) -> float:
        """Return the output tokens a second of all clients, by Little's law, from two times."""
        output = self.tokens[1]
        return self.clients * output / (ttft + (output - 1) * tpot)

    def describe(self) -> str:
        """Return a line that names the run."""
        layout = self.layout
        return (
            f"line {self.line}: {self.name} {layout.weights}, {self.engine} {self.version or '(no version)'}, "
            f"{self.gpu}, tp {layout.tensor} dp {layout.data} ep {layout.expert}, "
            f"{self.prompt}/{self.output}, {self.clients} clients"
        )
