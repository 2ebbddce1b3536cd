"""Compare shapes, strides and dtypes of CUDA's results with shape execution's, on torch's own op samples."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fvflops.capture.run import record_call
from tests.support.cuda_cases.runs import STOPS
from tests.support.opinfo import in_format, layouts, op_infos

_REFUSED = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, IndexError, NotImplementedError)


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


def compare_layouts(share: int, shares: int, *, device: str = "cuda", most: int = 6) -> dict[str, Any]:
    """Return how many samples agree, and the first difference of each op that has one."""
    warnings.simplefilter("ignore")
    apart: dict[str, str] = {}
    refused: dict[str, str] = {}
    counts = {"agreed": 0, "differ": 0}
    for info in op_infos()[share::shares]:
        name = f"{info.name}{'.' + info.variant_test_name if info.variant_test_name else ''}"
        if name.startswith("jiterator") or "sparse" in name:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            if not info.supports_dtype(dtype, device):
                continue
            torch.manual_seed(0)
            try:
                samples = [item for item, _ in zip(info.sample_inputs(device, dtype), range(most), strict=False)]
            except Exception as error:
                refused[name] = f"no samples: {error}"[:200]
                continue
            for number, sample in enumerate(samples):
                given = (sample.input, *sample.args), dict(sample.kwargs)
                for form in ("contiguous", "transposed", "channels_last"):
                    args, kwargs = in_format(given, form)
                    if form != "contiguous" and layouts(given) == layouts((args, kwargs)):
                        continue
                    try:
                        real = _run(info.op, args, kwargs, "real")
                    except _REFUSED:
                        continue
                    case = f"{dtype}, sample {number}, {form}"
                    try:
                        shapes = _run(info.op, args, kwargs, "shapes")
                    except Exception as error:
                        text = str(error).splitlines()[0] if str(error) else ""
                        refused.setdefault(name, f"{case}: {type(error).__name__}: {text}"[:300])
                        continue
                    counts["agreed" if real == shapes else "differ"] += 1
                    if real != shapes:
                        apart.setdefault(name, f"{case}: {shapes}, real {real}"[:400])
    return {**counts, "apart": apart, "refused": refused}
