"""Settings of the launch scripts of published benchmarks, which the files of their measurements lack.

From the scripts in the folder benchmarks/ of github.com/SemiAnalysisAI/InferenceX (Apache-2.0): the dtype of the cache,
the budget of tokens of a step, and how long requests wait on purpose. Its client sends ten requests for each of its
connections, the first ones at once; lengths are uniform from 0.8 of the longest (--random-range-ratio). Runs of
AIConfigurator have the settings that its generator writes (github.com/ai-dynamo/aiconfigurator, Apache-2.0,
generator/rule_plugin/): sequences, and tokens of a step; the cache is of fp8 in TensorRT-LLM where the weights are fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fvflops.serve.serving_layout import ServingLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings of a benchmark's launch script.

    `settings` are changes to the engine's usual settings. `shortest` is the ratio of the shortest to the longest prompt
    and output, whose lengths are uniform between them. `waits` is the mean number of steps that a request waits besides
    in queues: until an engine looks for new ones, or for others to share a step with it. `bursts` says how many
    requests a client sends, of which the first ones come all at once. `utilisation` is the part of a GPU's memory that
    the engine takes; it schedules a step while the one before it runs if it `is_asynchronous`.
    """

    cache: str = "bf16"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    shortest: float = 1.0
    waits: float = 0.0
    bursts: int = 10
    utilisation: float = 0.9
    is_asynchronous: bool = True


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
    launch: Launch = field(default_factory=Launch)
    prompt: int
    output: int
    clients: int
    ttft: float
    tpot: float
    unused: str = ""

    @property
    def name(self) -> str:
        return self.model.rpartition("/")[2]

    @property
    def gpus(self) -> int:
        """The ranks of the attention."""
        return self.layout.tensor * self.layout.data

    @property
    def is_blackwell(self) -> bool:
        return self.gpu.startswith("B")

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
        layout = self.layout
        return (
            f"line {self.line}: {self.name} {layout.weights}, {self.engine} {self.version or '(no version)'}, "
            f"{self.gpu}, tp {layout.tensor} dp {layout.data} ep {layout.expert}, "
            f"{self.prompt}/{self.output}, {self.clients} clients"
        )


INFERENCEX = "InferenceX"
_SHORTEST = 0.8
# Part of the memory with --mem-fraction-static 0.95, which is without activations.
_CROWDED = 0.97
# Tokens of a step that vLLM's server takes on GPUs of 70 GiB and more.
_VLLM = {"max_batched_tokens": 8192, "max_sequences": 1024}


def find_launch(run: ServingRun) -> Launch:
    """Return the settings of a run from its other fields."""
    if run.publisher != INFERENCEX:
        return _generated(run)
    return {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[run.engine](run)


def _generated(run: ServingRun) -> Launch:
    """Return AIConfigurator's settings: little more than one prompt fits in a step.

    Its first generators let TensorRT-LLM 1.0 have as many sequences as clients, without the overlap scheduler: the next
    request of a client still comes too late for the step after its last one. vLLM schedules a step after the one before
    it until 0.14, unless told otherwise.
    """
    tokens = run.prompt + 1500
    if run.engine == "sglang":
        return Launch(settings={"max_batched_tokens": tokens})
    if run.engine == "vllm":
        settings = {"max_batched_tokens": 512 + tokens, "max_sequences": 512}
        is_old = run.version.startswith("0.12")
        return Launch(settings={**settings, "steps_ahead": 0 if is_old else 1}, is_asynchronous=not is_old)
    is_first = run.version.startswith("1.0")
    sequences = run.clients if is_first else 512
    return Launch(
        cache="fp8" if run.layout.weights == "fp8" else "bf16",
        settings={"max_batched_tokens": sequences + tokens, "max_sequences": sequences},
        is_asynchronous=not is_first,
    )


def _vllm(run: ServingRun) -> Launch:
    """Return the settings; checkpoints of nvfp4 ask for a cache of fp8 themselves."""
    is_small = (
        "Llama" in run.model
        or run.layout.weights == "nvfp4"
        or (run.is_blackwell and ("gpt-oss" in run.model or run.version.startswith("0.19")))
    )
    return Launch(cache="fp8" if is_small else "bf16", settings=_VLLM, shortest=_SHORTEST)


def _sglang(run: ServingRun) -> Launch:
    """Return the settings of DeepSeek's: on B200 the scheduler looks for requests every 10 or 30 steps."""
    if not run.is_blackwell:
        return Launch(settings={"max_batched_tokens": 32768}, shortest=_SHORTEST)
    is_large = run.layout.weights == "nvfp4" or run.gpus > 4
    tokens = 16384 if run.layout.weights == "nvfp4" else 32768 if run.gpus > 4 else 8192
    settings = {"max_batched_tokens": tokens, "max_sequences": 256}
    waits = (30 if is_large and run.clients >= 16 else 10) / 2
    # On four GPUs the weights of fp8 leave so little that the script raises the part of the memory.
    utilisation = 0.9 if is_large else _CROWDED
    return Launch(cache="fp8", settings=settings, shortest=_SHORTEST, waits=waits, utilisation=utilisation)


def _trtllm(run: ServingRun) -> Launch:
    """Return the settings: Llama's wait 20 steps to put prompts of 1,024 tokens together on up to 4 GPUs."""
    is_short = run.prompt == run.output
    is_fp8 = run.is_blackwell and run.layout.weights == "fp8"
    waits = 0.0
    cache = "fp8"
    if "Llama" in run.model:
        tokens = 16384 if is_fp8 else run.prompt + run.output + 200
        waits = 20.0 if is_short and run.gpus < 8 else 0.0
    elif "gpt-oss" in run.model:
        tokens = 20000
        cache = "fp8" if run.is_blackwell else "bf16"
    else:
        tokens = max(8192, run.clients + run.prompt + 64)
        waits = 40.0 if is_fp8 and is_short and 64 <= run.clients < 256 else 0.0
    settings: dict[str, Any] = {"max_batched_tokens": tokens, "max_sequences": min(2048, tokens)}
    return Launch(cache=cache, settings=settings, shortest=_SHORTEST, waits=waits, utilisation=_TRTLLM_MEMORY)


# TensorRT-LLM takes 75 to 85 % of the memory free after loading the weights, 90 % by itself.
_TRTLLM_MEMORY = 0.96
