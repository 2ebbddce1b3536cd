"""Count the cases for which CUDA has kernels of its own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.cuda_cases import list_cases
from tests.support.cuda_cases.case import Case
from tests.support.cuda_cases.runs import attempt, run_all_ways


def count_kernels(share: int, shares: int) -> dict[str, Any]:
    """Return "family: case, variant" → way → run."""
    found: dict[str, Any] = {}
    for name, make in list(list_cases())[share::shares]:
        torch.manual_seed(0)
        for train in (False, True):
            case = attempt(make)
            if isinstance(case, dict):
                found[name] = case
                break
            if train in case.train:
                variant = f"{name}, {'training' if train else 'forward'}"
                found[variant] = attempt(lambda case=case, train=train: _count(case, train))  # type: ignore[misc]
    return found


def _count(case: Case, train: bool) -> dict[str, Any]:
    with case.context():
        return run_all_ways(case.model, case.args, {}, train=train)


def write_recorded(found: Mapping[str, Any], path: Path) -> None:
    """Write what the cases came to on the device, for tests on machines without one."""
    runs = {name: ways["real"] for name, ways in found.items() if "ops" in ways.get("real", ())}
    kept = {name: {key: run[key] for key in ("flops", "macs", "exact", "ops")} for name, run in runs.items()}
    path.write_bytes(gzip.compress(json.dumps(kept, sort_keys=True).encode(), mtime=0))
