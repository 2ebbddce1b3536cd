"""The head of a prediction's report: whether it fits, and its assumptions, as text and as data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fvflops.capture.model.model_index import has_packed
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.shapes.metadata import dtype_name
from fvflops.reports.escaping import plain_name
from fvflops.text import record_data
from fvflops.trace import Trace
from fvflops.units import format_bytes, format_parameters


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether `needed` bytes fit a device's `memory`, as torch reports it, less a `reserve`; None if it is not known.

    Of the needed bytes `tensors` are in use at the peak; the others are cached by torch's allocator.

    >>> print(Verdict(92_300_000_000, "H100 SXM", 84_932_977_459, 536_870_912))
    Does not fit: 92.3 GB of 84.9 GB. That is 7.9 GB too much for H100 SXM, where 537 MB are set aside (an allowance).
    """

    needed: int
    device: str = ""
    memory: float | None = None
    reserve: int = 0
    reserved_for: str = ""
    advice: str = ""
    tensors: int | None = None

    @property
    def room(self) -> float | None:
        """The bytes that are left, negative where they are too few; None if the memory is not known."""
        return None if self.memory is None else self.memory - self.reserve - self.needed

    @property
    def fits(self) -> bool | None:
        """Whether the memory is enough; None if it is not known."""
        return None if self.room is None else self.room >= 0

    def __str__(self) -> str:
        needed = format_bytes(self.needed)
        if self.memory is None or self.room is None:
            unknown = f"the memory of {self.device} is not known" if self.device else "no device is named"
            return f"Needs {needed}: {unknown}. {self.advice}".rstrip()
        aside = f"{format_bytes(self.reserve)} are set aside{self.reserved_for and f' for {self.reserved_for}'}"
        aside = f", where {aside} (an allowance)" if self.reserve else ""
        room, total = format_bytes(abs(self.room)), format_bytes(self.memory)
        if self.fits:
            return f"Fits: {needed} of {total}. {room} are left on {self.device}{aside}."
        text = f"Does not fit: {needed} of {total}. That is {room} too much for {self.device}{aside}."
        near = ""
        if self.tensors is not None and self.tensors + self.reserve <= self.memory:
            near = f"The tensors alone, {format_bytes(self.tensors)}, fit: if torch's allocator frees cached blocks in "
            near += "time, the step runs, more slowly."
        return " ".join(filter(None, [text, near, self.advice]))

    def encode(self) -> dict[str, Any]:
        names = ("fits", "needed", "device", "memory", "reserve", "reserved_for")
        return {"text": str(self), **record_data(self, *names)}


_ATTENTION = re.compile(r"(?:_scaled_dot_product_)?(\w*?)_?attention(?:_forward|_math|_for_cpu)*(?:\.|$)")
# Setting → its name in a text, where its key says too little.
_NAMES = {"bucket_cap_mb": "MiB of DDP's buckets", "host_waits": "host waits for the device"}
NO_CHECKPOINTING = "none"
OWN_CHECKPOINTING = "the model's own"  # it calls torch.utils.checkpoint
_SOFTMAX = ("aten::_softmax", "aten::softmax")


def describe_settings(settings: Mapping[str, Any]) -> str:
    return f"Assumes: {'; '.join(f'{name_of(key)}: {show(value)}' for key, value in settings.items())}."


def introduction(verdict: Verdict, settings: Mapping[str, Any], command: str = "") -> tuple[list[str], dict[str, Any]]:
    """Return the first paragraphs of a report, its verdict and settings, and these as data with its command line."""
    settings = dict(settings)
    if verdict.memory is not None:  # it is compared with the memory that the allocator reserves
        settings["allocator"] = "expandable segments"
    texts = [str(verdict), *([describe_settings(settings)] if settings else [])]
    return texts, {"verdict": verdict.encode(), "settings": settings, **({"command": command} if command else {})}


def name_of(key: str) -> str:
    return _NAMES.get(key, key.replace("_", " "))


def show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return plain_name(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


def given(**settings: Any) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def settings_of_model(model: nn.Module, compute: torch.dtype | None = None) -> dict[str, Any]:
    """Return the data types of a model's weights and of its compute, and the trained parameters if not all are."""
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        sizes[dtype_name(parameter.dtype)] += parameter.numel()
    weights = ", ".join(dtype for dtype, _ in sizes.most_common()) or "none"
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return given(
        weights=f"{weights} (packed)" if has_packed(model) else weights,
        compute=weights if compute is None else dtype_name(compute),
        trained_parameters=None if trained == sizes.total() else format_parameters(trained),
    )


def settings_of_inputs(inputs: Any) -> dict[str, Any]:
    """Return the batch size and, of token ids, the length of the sequence.

    >>> settings_of_inputs(torch.zeros(2, 128, dtype=torch.int64))
    {'batch': 2, 'sequence': 128}
    """
    tensors = [tensor for tensor in tensors_of(inputs) if tensor.ndim]
    ids = next((tensor for tensor in tensors if tensor.ndim == 2 and not tensor.is_floating_point()), None)
    return given(batch=tensors[0].shape[0] if tensors else None, sequence=None if ids is None else ids.shape[1])


def settings_of_trace(trace: Trace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer, the attention, the kernels and the assumed values of a recorded step.

    `settings` are known before the run: weights of more bits than the compute are their own master weights, and
    recomputation that was not asked for is the model's own.
    """
    about, weights, compute = trace.about, settings.get("weights"), settings.get("compute")
    is_own = settings.get("checkpointing") == NO_CHECKPOINTING and "recompute" in {phase for *_, phase in trace.calls}
    is_mixed = weights != compute and weights == "float32"
    has_optimizer = about.get("optimizer", "none") != "none"
    masters = "the float32 weights" if is_mixed else "none" if compute in ("bfloat16", "float16") else None
    return given(
        checkpointing=OWN_CHECKPOINTING if is_own else None,
        optimizer=about.get("optimizer"),
        optimizer_state=about.get("optimizer_state") if has_optimizer else None,
        master_weights=about.get("master_weights", masters) if has_optimizer else None,
        attention=_find_attention(signature.op for signature in trace.signatures),
        data_dependent=about.get("supposed"),
        kernels=trace.info.device or None,
    )


def describe_checkpointed(modules: Iterable[nn.Module]) -> str:
    counts = Counter(type(module).__name__ for module in modules)
    return ", ".join(f"{name} × {count}" for name, count in counts.items()) or NO_CHECKPOINTING


def describe_loss(loss: Any) -> str:
    """Return the name of a loss function, or that it is the model's."""
    return "the model's" if loss is None else getattr(loss, "__name__", type(loss).__name__)


def _find_attention(ops: Iterable[str]) -> str | None:
    """Return the kinds of attention kernels among ops, None without attention.

    >>> _find_attention(["aten::_scaled_dot_product_flash_attention", "aten::mm"])
    'flash'
    >>> _find_attention(["aten::bmm", "aten::_softmax"])
    'not fused'
    """
    names = list(dict.fromkeys(ops))
    kinds: dict[str, None] = {}
    for name in names:
        found = None if "backward" in name else _ATTENTION.match(name.rpartition("::")[2])
        if found is not None:
            kind = "" if "_math" in name else found[1].strip("_").removeprefix("scaled_dot_product").strip("_")
            kinds["not fused" if "_math" in name else kind or "fused"] = None
    if not kinds and any(name.startswith(_SOFTMAX) for name in names):
        return "not fused"
    return ", ".join(kinds) or None
