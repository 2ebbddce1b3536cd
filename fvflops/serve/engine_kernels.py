"""Times of the kernels of an inference engine on one GPU, and its overhead over them, read from a YAML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from fvflops import paths
from fvflops.devices.devices import Device
from fvflops.devices.kernel_models.collectives import Collective, NodeLink, PeerFigures, peer_seconds
from fvflops.devices.kernel_models.figures import KernelFigures, find_figures
from fvflops.devices.kernel_models.fused_attention import Attention, attention_seconds, decode_seconds
from fvflops.devices.kernel_models.memory_bound import memory_seconds
from fvflops.devices.kernel_models.mixtures import Mixture, mixture_seconds
from fvflops.devices.kernel_models.products import Processor, Product, group_seconds, product_seconds
from fvflops.devices.kernel_models.recurrent import Recurrence, recurrent_seconds, recurrent_step_seconds
from fvflops.formulas.yaml_document import Node, read_entries
from fvflops.plan.step_time.calibration import Network
from fvflops.serve.serving_layout import WEIGHTS, Precision
from fvflops.serve.serving_model import ServingError
from fvflops.text import suggest
from fvflops.trace.process_group import ProcessGroupSpec

# Engines reduce payloads of up to 8 MiB themselves, larger ones by NCCL.
_PEERS = 8 * 2**20
_DTYPES = {item.dtype for item in WEIGHTS.values()}
_HOPPER = 9  # CUDA's compute capability


@dataclass(frozen=True, slots=True)
class EngineKernels:
    """Times of kernels on a device in seconds; without `figures` each takes its bound.

    The bound of a kernel is the longer of its FLOPs at the peak of its dtype, and of the bytes of weights and cache at
    the memory's bandwidth: its result may stay on the chip for the next kernel.
    """

    device: Device
    network: Network | None
    figures: KernelFigures | None
    engine: str = ""
    _processors: dict[str, Processor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, device: Device, network: Network | None, start: float = 1.0, engine: str = "") -> EngineKernels:
        """Return the kernels of a device, from its figures, its generation's, or the mean of all.

        `start` is the part of their start times that shows when one kernel follows another in a CUDA graph.
        """
        figures = find_figures(device)
        if figures is not None and start != 1.0:
            by_class = {
                kind: {dtype: replace(item, start=start * item.start) for dtype, item in by_dtype.items()}
                for kind, by_dtype in figures.by_class.items()
            }
            figures = replace(figures, by_class=by_class)
        return cls(device, network, figures, engine)

    def bound(self, **changes: Any) -> EngineKernels:
        """Return the same with the bound of each kernel, with changes to the peaks of each dtype."""
        kernels = EngineKernels(self.device, self.network, None)
        kernels._processors.update((name, self.processor(name)._replace(**changes)) for name in _DTYPES if changes)
        return kernels

    def processor(self, dtype: str) -> Processor:
        """Return the peaks for a dtype, of bf16 where the device has no units for it."""
        known, device = self._processors.get(dtype), self.device
        if known is None:
            name = next((item for item in (dtype, "bf16", "fp16") if item in device.dtypes()), "")
            if device.bandwidth is None:
                raise ServingError(f"{device.name} has no bandwidth, which a time needs: add one in bytes/s")
            if not name:
                raise ServingError(f"{device.name} has no peak for bf16 or fp16: add one in FLOP/s")
            known = Processor(device.multiprocessors or 1, device.peak(name), device.bandwidth)
            self._processors[dtype] = known
        return known

    def product(self, rows: int, columns: int, inner: int, precision: Precision) -> float:
        """Return the time of a product of `rows` tokens with a weight of `columns` by `inner` elements."""
        if not rows:
            return 0.0
        gpu = self.processor(precision.dtype)
        # Activations have the dtype of the product, weights of four bits are converted for it.
        row_bytes = 2.0 if precision.dtype == "bf16" else precision.nbytes
        if self.figures is None:
            return max(2 * rows * columns * inner / gpu.peak, inner * columns * precision.nbytes / gpu.bandwidth)
        figures = self.figures.of("product", precision.dtype)
        each = Product(rows, columns, inner, operand_bytes=row_bytes, column_bytes=precision.nbytes)
        # Figures of fp8 and fp4 include the kernels that scale a product's input; in an engine the normalisation or the
        # activation function before it does that.
        start = self.figures.of("product", "bf16").start
        return float(start + group_seconds(((rows, 1),), each, gpu, figures))

    def products(self, shape: Product) -> float:
        """Return the time of bf16 products outside of the language model, such as for an image's patches."""
        gpu = self.processor("bf16")
        if self.figures is None:
            work = 2 * shape.batch * shape.rows * shape.columns * shape.inner
            return max(work / gpu.peak, (shape.moved or shape.nbytes) / gpu.bandwidth)
        return product_seconds(shape, gpu, self.figures.of("product", "bf16"))

    def prompt(self, shape: Attention, dtype: str = "bf16") -> float:
        """Return the time of prefill attention, latent where keys and values differ in size."""
        if self.figures is None:
            pairs = min(shape.keys - shape.queries / 2, shape.window) * shape.queries
            return self._attention_bound(shape, pairs, shape.keys)
        kind = "latent" if shape.values != shape.size else "attention"
        return attention_seconds(shape, *self._attention(kind, dtype))

    def encoder(self, shape: Attention) -> float:
        """Return the time of attention inside an encoder, in which each token attends to all."""
        if self.figures is None:
            return self._attention_bound(shape, shape.queries * shape.keys, 0)
        return attention_seconds(shape, *self._attention("encoder", "bf16"))

    def decode(self, shape: Attention, dtype: str = "bf16") -> float:
        """Return the time of decode attention, one new token of each sequence."""
        if self.figures is None:
            keys = min(shape.keys, shape.window)
            return self._attention_bound(shape, keys, keys)
        return decode_seconds(shape, *self._attention(self._decoding(shape, dtype), dtype))

    def _attention_bound(self, shape: Attention, pairs: float, keys: float) -> float:
        """Return the bound of attention, given its pairs of a query and a key and the number of keys that it reads."""
        gpu = self.processor("bf16")
        work = 2 * shape.batch * shape.heads * pairs * (shape.size + shape.values)
        return max(work / gpu.peak, shape.batch * keys * shape.token_bytes / gpu.bandwidth)

    def _attention(self, kind: str, dtype: str) -> tuple[Processor, Any]:
        """Return the peaks and figures of a class of attention; figures of a dtype are fractions of its peak."""
        assert self.figures is not None
        known = self.figures.by_class[kind]
        own = dtype if dtype in known else next(iter(known))
        return self.processor(own), known[own]

    def _decoding(self, shape: Attention, dtype: str) -> str:
        """Return the class of kernels: TensorRT-LLM has its own for an fp8 cache on Hopper."""
        if shape.latent:
            return "latent decode"
        is_hopper = (self.device.capability or (0, 0))[0] == _HOPPER
        return "trtllm decode" if self.engine == "trtllm" and dtype == "fp8" and is_hopper else "decode"

    def mixture(self, mixture: Mixture, precision: Precision) -> float:
        """Return the time of a rank's experts."""
        gpu = self.processor(self.expert_dtype(precision))
        if self.figures is None:
            columns = (2 if mixture.gated else 1) * mixture.inner + mixture.inner
            tokens = sum(height * count for height, count in mixture.rows)
            touched = sum(count for height, count in mixture.rows if height)
            weight = mixture.hidden * columns
            return max(2 * tokens * weight / gpu.peak, touched * weight * mixture.weight_bytes / gpu.bandwidth)
        return mixture_seconds(mixture, gpu, self.figures.of("mixture", precision.figures or precision.dtype))

    def expert_dtype(self, precision: Precision) -> str:
        """Return the dtype of experts' products: GPUs with units for four bits multiply weights of mxfp4 in fp8."""
        return "fp8" if precision.figures == "mxfp4" and "fp4" in self.device.dtypes() else precision.dtype

    def state(self, shape: Recurrence) -> float:
        """Return the time of a recurrent layer on new tokens of sequences with a state."""
        gpu = self.processor("bf16")
        if self.figures is None:
            return shape.state_bytes / gpu.bandwidth
        if shape.tokens == 1:
            return recurrent_step_seconds(shape, gpu, self.figures.of("memory", ""))
        return recurrent_seconds(shape, gpu, self.figures.of("recurrent", ""))

    def moved(self, nbytes: float) -> float:
        """Return the time of a kernel that reads and writes a number of bytes, 0 as a bound."""
        if self.figures is None:
            return 0.0
        return memory_seconds(nbytes, self.processor("bf16").bandwidth, self.figures.of("memory", ""))

    def collective(self, kind: str, ranks: int, nbytes: float) -> float:
        """Return the time of a collective of neighbouring ranks; small sums inside a node are the engine's own."""
        if ranks < 2 or not nbytes:
            return 0.0
        if self.network is None:
            raise ServingError(f"{ranks} GPUs of {self.device.name} need a network: name one by --network")
        inside = self.network.inside
        if self.figures is None:
            link = inside.fabric.bandwidth if isinstance(inside, NodeLink) else inside.bandwidth
            members = min(ranks, self.network.gpus_per_node)
            nodes = math.ceil(ranks / members)
            # Each rank exchanges data of its own, or all of a node share the adapters for the same result.
            between = self.network.between.bandwidth * (1 if kind == "all_to_all" else members)
            slowest = max((members - 1) / members / link, (nodes - 1) / nodes / between)
            return (2 if kind == "all_reduce" else 1) * nbytes * slowest
        seconds = self.network.seconds(kind, math.ceil(nbytes), ProcessGroupSpec("", ranks, "tp", 0, 1))
        is_small = kind == "all_reduce" and nbytes <= _PEERS and ranks <= self.network.gpus_per_node
        if is_small and isinstance(inside, NodeLink):
            figures: PeerFigures = self.figures.of("peers", "")
            seconds = min(seconds, peer_seconds(Collective(kind, ranks, nbytes), inside.fabric, figures))
        return seconds


ENGINES = paths.SCHEME + "engines.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """Overhead of an engine over its kernels; times are in seconds.

    `start` is the part of kernels' start times that shows when one follows another in a CUDA graph, and `kernel` the
    gap between two. `rendezvous` is the wait for the other ranks at a collective. `step` and `sequence` are the time of
    a step on the host, and of each decoding sequence in it, in which the GPU waits; `synchronous` and
    `synchronous_sequence` their increases without asynchronous scheduling.

    `launch` is the host's time for launching a kernel of a step with prompts, which is not a CUDA graph: the GPU
    waits where its kernels are shorter. `computing` and `experts` are the factors of the time of such a step's products
    and attention, and of its mixtures: 1 as measured alone. `request` is the server's time for a request before the
    engine, and `token` for each token of its prompt. `source` says where the figures are from.

    >>> EngineFigures().start, EngineFigures().step
    (1.0, 0.0)
    """

    start: float = 1.0
    kernel: float = 0.0
    rendezvous: float = 0.0
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

    def server(self, tokens: int) -> float:
        """Return the seconds that the server takes for a request with a prompt of this length."""
        return self.request + self.token * tokens

    def host(self, *, is_asynchronous: bool) -> tuple[float, float]:
        """Return the seconds of a step on the host, and of each decoding sequence in it, in which the GPU waits."""
        if is_asynchronous:
            return self.step, self.sequence
        return self.step + self.synchronous, self.sequence + self.synchronous_sequence


NUMBERS = tuple(item.name for item in fields(EngineFigures) if item.name != "source")
# An engine that adds nothing.
NO_OVERHEAD: EngineFigures = EngineFigures()


def find_engine_figures(engine: str) -> EngineFigures:
    """Return the figures of an engine; an unknown one raises ValueError with the nearest, or all.

    >>> find_engine_figures("vllm").source.partition(" ")[0]
    'fitted'
    """
    engines = load_engines()
    if engine not in engines:
        hint = suggest(engine, engines) or f": {ENGINES} has {', '.join(engines)}"
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
