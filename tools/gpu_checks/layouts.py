"""Compare shapes, strides and dtypes of CUDA's results with those of shape execution, on torch's own op samples."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fvflops.capture.run import record_call
from tests.support.cuda_cases.runs import STOPS

_REFUSED = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, IndexError, NotImplementedError)


def load_samples() -> list[Any]:
    """Return torch's own samples of its ops; they come with its tests, which import a package that it does not need."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def describe(values: Any) -> list[Any]:
    """Return shape, steps over more than one element, dtype and device of every tensor."""
    found: list[Any] = []
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            steps = [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]
            found.append([list(value.shape), [] if 0 in value.shape else steps, str(value.dtype), str(value.device)])
        else:
            found.append(str(type(value)))
    return found


def _run(op: Any, args: Any, kwargs: Any, execution: str) -> list[Any]:
    results: list[Any] = []

    def model(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        results.append(describe(result))
        return result

    torch.manual_seed(0)
    record_call(model, args, kwargs, stops_at=STOPS, execution=execution, quiet=True)
    return results[-1]


def _in_memory(value: Any, form: str) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        if form == "channels_last" and tensor.ndim == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        if form == "transposed" and tensor.ndim >= 2:
            return tensor.mT.contiguous().mT
        return tensor

    return pytree.tree_map_only(torch.Tensor, change, value)


def compare_layouts(share: int, shares: int, *, device: str = "cuda", most: int = 6) -> dict[str, Any]:
    """Return how many samples agree, and the first difference of each op that has one."""
    warnings.simplefilter("ignore")
    apart: dict[str, str] = {}
    refused: dict[str, str] = {}
    agreed = 0
    differ = 0
    dtypes = (torch.float32, torch.bfloat16)
    for info in load_samples()[share::shares]:
        name = f"{info.name}{'.' + info.variant_test_name if info.variant_test_name else ''}"
        if name.startswith("jiterator") or "sparse" in name:
            continue
        for dtype in dtypes:
            if not info.supports_dtype(dtype, device):
                continue
            torch.manual_seed(0)
            try:
                samples = [item for item, _ in zip(info.sample_inputs(device, dtype), range(most), strict=False)]
            except Exception as error:
                refused[name] = f"no samples: {error}"[:200]
                continue
            for number, sample in enumerate(samples):
                for form in ("contiguous", "transposed", "channels_last"):
                    args, kwargs = _in_memory(((sample.input, *sample.args), sample.kwargs), form)
                    if form != "contiguous" and _same((args, kwargs), (sample.input, *sample.args, sample.kwargs)):
                        continue
                    try:
                        real = _run(info.op, args, kwargs, "real")
                    except _REFUSED:
                        continue
                    try:
                        shapes = _run(info.op, args, kwargs, "shapes")
                    except Exception as error:
                        text = str(error).splitlines()[0] if str(error) else ""
                        refused.setdefault(
                            name, f"{dtype}, sample {number}, {form}: {type(error).__name__}: {text}"[:300]
                        )
                        continue
                    if real == shapes:
                        agreed += 1
                    else:
                        differ += 1
                        apart.setdefault(name, f"{dtype}, sample {number}, {form}: {shapes}, real {real}"[:400])
    return {"agreed": agreed, "differ": differ, "apart": apart, "refused": refused}


def _same(left: Any, right: Any) -> bool:
    left, right = (
        [item for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)] for value in (left, right)
    )
    return all(a is b for a, b in zip(left, right, strict=True))
