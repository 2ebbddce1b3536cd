"""Compare counted FLOPs with executed ones by hardware counters, read by Nsight Compute where it is installed."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fvflops import record

_TENSOR = [
    f"sm__ops_path_tensor_op_{unit}_src_{dtype}_dst_fp32_sparsity_off.sum"
    for unit in ("hgmma", "hmma")
    for dtype in ("bf16", "tf32")
]
_FMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
_MARK = "fvflops: "


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def list_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for dtype in (torch.bfloat16, torch.float32):
        a, b = _random(1024, 1024, dtype=dtype), _random(1024, 1024, dtype=dtype)
        yield f"matrix product, {str(dtype)[6:]}", lambda a=a, b=b: a @ b  # type: ignore[misc]
    x, w = _random(8, 64, 56, 56), _random(64, 64, 3, 3)
    for tf32 in (True, False):

        def convolve(tf32: bool = tf32) -> None:
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
                F.conv2d(x, w, padding=1)

        yield f"convolution, {'tf32' if tf32 else 'float32'}", convolve
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        for causal in (False, True):
            q, k, v = (_random(2, 8, 1024, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
            held: list[torch.Tensor] = []

            def forward(name: str = name, causal: bool = causal, args: Any = (q, k, v), held: Any = held) -> None:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    held.append(F.scaled_dot_product_attention(*args, is_causal=causal))  # type: ignore[misc]

            def backward(held: Any = held) -> None:
                held.pop().backward(torch.ones(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16))

            text = f"{name.partition('_')[0].lower()} attention{', causal' if causal else ''}"
            yield f"{text}, forward", forward
            yield f"{text}, backward", backward


@contextmanager
def _marked(name: str) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(_MARK + name.replace(", ", "/"))
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()


def run_cases() -> None:
    """Run each case once, marked; autograd in this thread, so that its kernels are marked too."""
    with torch.autograd.set_multithreading_enabled(False):
        for name, run in list_cases():
            with _marked(name):
                run()


def count_cases() -> dict[str, int]:
    found = {}
    for name, run in list_cases():
        with record() as counted:
            run()
        found[name] = 2 * counted.macs()
    return found


def compare_counters(share: int, shares: int) -> dict[str, Any]:
    """Return "case" → FLOPs counted, and executed by tensor cores and by fused multiply-adds."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return {"not measured": "ncu is not installed"}
    program = f"import sys; sys.path[:0] = {sys.path!r}; from gpu_checks.counters import run_cases; run_cases()"
    command = [ncu, "--nvtx", "--csv", "--page", "raw", "--metrics", ",".join([*_TENSOR, _FMA])]
    done = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    at = done.stdout.find('"ID"')
    if at < 0:
        return {"not measured": (done.stdout + done.stderr)[-600:]}
    executed = read_counters(done.stdout[at:])
    counted = count_cases()
    return {name: {"counted": counted[name], "executed": executed.get(name.replace(", ", "/"), 0)} for name in counted}


def read_counters(text: str) -> dict[str, int]:
    """Return the FLOPs that ran in each marked range, of the CSV that ncu prints.

    >>> rows = [["ID", "Range", _FMA], ["", "", "inst"], ["0", "<default domain>:fvflops: a:none", "1,000"]]
    >>> read_counters("\\n".join(",".join(f'"{cell}"' for cell in row) for row in rows))
    {'a': 2000}
    """
    header, _, *rows = csv.reader(io.StringIO(text))
    found: dict[str, int] = defaultdict(int)
    for row in rows:
        marks = [cell for cell in row if _MARK in cell]
        if not marks:
            continue
        name = marks[0].partition(_MARK)[2].partition(":")[0]
        for key, cell in zip(header, row, strict=False):
            if key in _TENSOR or key == _FMA:
                found[name] += int(float(cell.replace(",", "") or 0)) * (2 if key == _FMA else 1)
    return dict(found)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    run_cases()
