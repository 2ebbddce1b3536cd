"""Describe the machine: device, driver, and the versions that every figure depends on."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from typing import Any

import torch

from tests.support.library_versions import installed_versions

_LIBRARIES = ("torch", "triton", "torchvision", "timm", "transformers")


def describe_machine(share: int, shares: int) -> dict[str, Any]:
    """Return the device's and libraries' names and versions, and the day."""
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError:
        driver = "unknown"
    return {
        "day": datetime.date.today().isoformat(),
        "device": properties.name,
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver, clock, power": driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch in full": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **installed_versions(_LIBRARIES),
    }
