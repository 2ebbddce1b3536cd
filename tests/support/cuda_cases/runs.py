"""Describe a recorded run as plain data, and compare two such descriptions."""

import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fvflops import FlopCountAnalysis, Trace, load_table
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.run import record_call

STOPS, _EXACT_STOPS = (load_table(name).stops_at for name in ("default", "exact"))
Run = dict[str, Any]
# Of which size they are, only cuDNN knows: op → names of its inputs, and indexes of its outputs. No count uses them.
_UNKNOWN = {
    "aten::_cudnn_rnn": (frozenset({"dropout_seed"}), frozenset({3})),
    "aten::_cudnn_rnn_backward": (frozenset({"reserve"}), frozenset()),
    "aten::_cudnn_init_dropout_state": (frozenset({"dropout_seed"}), frozenset()),
    "aten::set_.source_Storage": (frozenset({"self"}), frozenset()),
    "aten::set_.source_Storage_storage_offset": (frozenset({"self"}), frozenset()),
}
_NOTHING: tuple[frozenset[str], frozenset[int]] = (frozenset(), frozenset())


def describe(trace: Trace, for_exact: Trace | None = None) -> Run:
    """Return what a run comes to: calls by text (phase, op, arguments, results), FLOPs, MACs, and what is unknown.

    `for_exact` is recorded by the stops of that convention; by default it is the same Trace.
    """
    calls: Counter[str] = Counter()
    ops: Counter[str] = Counter()
    for (index, _, phase), number in trace.calls.items():
        signature = trace.signatures[index]
        hidden, unknown = _UNKNOWN.get(signature.op, _NOTHING)
        named = zip(signature.names, signature.inputs, strict=True)
        inputs = ", ".join("?" if name in hidden else _text(value) for name, value in named)
        outputs = ", ".join("?" if at in unknown else _text(value) for at, value in enumerate(signature.outputs))
        calls[f"{phase} {signature.op}({inputs}) -> {outputs}"] += number
        ops[f"{phase} {signature.op}"] += number
    default = FlopCountAnalysis.from_trace(trace, table="default", warn=False)
    exact = FlopCountAnalysis.from_trace(for_exact or trace, table="exact", warn=False)
    return {
        "ops": dict(sorted(ops.items())),
        "calls": dict(sorted(calls.items())),
        "flops": default.total(),
        "macs": default.macs(),
        "exact": exact.total(),
        "unsupported": dict(exact.unsupported_ops()),
        "supposed": trace.about.get("supposed", ""),
        "vocabulary": trace.about.get("vocabulary", ""),
    }


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    kind = getattr(value, "kind", None)
    if kind == "device":
        return "device"
    return str(getattr(value, "name", value)) if kind is not None else str(value)


def attempt(run: Callable[[], Any]) -> Any:
    """Return what a function returns, or the error that it raises, as plain data."""
    try:
        return run()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        return {"error": f"{type(error).__name__}: {lines[0][:400]}", "at": " ".join(places[-8:])}


def differences(ours: Run, theirs: Run) -> list[str]:
    """Return in which respects two runs differ, the gravest first; nothing where they agree."""
    found = []
    for name, run in (("shape execution", ours), ("real execution", theirs)):
        if "error" in run:
            found.append(f"{name}: {run['error']}")
    if found:
        return found
    found = [f"{key} {ours[key]}, real {theirs[key]}" for key in ("flops", "macs", "exact") if ours[key] != theirs[key]]
    for key in ("ops", "calls"):
        apart = _apart(ours[key], theirs[key])
        if apart:
            found.append(f"{key}: {apart}")
            break
    if ours["unsupported"] != theirs["unsupported"]:
        found.append(f"unsupported {ours['unsupported']}, real {theirs['unsupported']}")
    return found


def _apart(ours: Mapping[str, int], theirs: Mapping[str, int], most: int = 6) -> str:
    keys = sorted(key for key in {*ours, *theirs} if ours.get(key, 0) != theirs.get(key, 0))
    texts = [f"{key}: {ours.get(key, 0)}, real {theirs.get(key, 0)}" for key in keys[:most]]
    return "; ".join(texts) + (f"; and {len(keys) - most} more" if len(keys) > most else "")


def total_of(result: Any) -> torch.Tensor:
    """Return a loss on which every floating-point tensor of a result bears."""
    parts = [tensor for tensor in tensors_of(result) if tensor.is_floating_point() and tensor.requires_grad]
    return torch.stack([part.float().sum() for part in parts]).sum()


def move(values: Any, device: str) -> Any:
    """Return nested values with their tensors on a device, leaves that want gradients as leaves."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, there, values)


def run_all_ways(model: Any, args: Any, kwargs: dict[str, Any], *, train: bool) -> dict[str, Run]:
    """Return what a model comes to by way of counting.

    With CUDA: recorded there ("real"), by shapes of CUDA tensors ("shapes"), and of CPU tensors with device="cuda"
    ("asked"); without, by the latter alone ("without").
    """
    loss = total_of if train else None

    def count(model: Any, args: Any, kwargs: Any, **options: Any) -> Run:
        traces = []
        for stops_at in (STOPS, _EXACT_STOPS):
            torch.manual_seed(0)
            traces.append(record_call(model, args, kwargs, stops_at=stops_at, loss=loss, quiet=True, **options))
        return describe(*traces)

    if not torch.cuda.is_available():
        return {"without": attempt(lambda: count(model, args, kwargs, execution="shapes", device="cuda"))}
    found = {"asked": attempt(lambda: count(model, args, kwargs, execution="shapes", device="cuda"))}
    there = model.to("cuda") if isinstance(model, torch.nn.Module) else model
    cuda_args, cuda_kwargs = move(args, "cuda"), move(kwargs, "cuda")
    found["real"] = attempt(lambda: count(there, cuda_args, cuda_kwargs, execution="real"))
    found["shapes"] = attempt(lambda: count(there, cuda_args, cuda_kwargs, execution="shapes"))
    return found
