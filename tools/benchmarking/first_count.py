"""Time a process's first count, compared with `import torch`, and check that it imports neither sympy nor the compiler.

Run as a program with the name of a model in tests/support/models, it prints the seconds of this process for `import
torch`, for `from fvflops import FlopCountAnalysis`, and, once the model is built, for the total of its first analysis.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Modules that no count of a plain model needs, and that take seconds to import.
HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "torch.utils._sympy")


@dataclass(frozen=True, slots=True)
class Measured:
    """One process: seconds of the imports and the count, number of modules that the count imported, and heavy ones."""

    torch: float
    fvflops: float
    count: float
    modules: int
    asked: tuple[str, ...]


class Refusal:
    """A module finder that refuses heavy modules and records which were requested."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError for a heavy module, and leave others to the next finders."""
        if is_heavy(name):
            self.asked.append(name)
            raise ImportError(f"{name} is not to be imported")


def is_heavy(name: str) -> bool:
    """Return whether a module is heavy, or inside a heavy one.

    >>> is_heavy("sympy.core"), is_heavy("torch.fx")
    (True, False)
    """
    return any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)


def measure_here(name: str) -> Measured:
    """Measure the first count of a model in this process, which must not have imported torch."""
    begun = time.perf_counter()
    import torch

    after_torch = time.perf_counter()
    from fvflops import FlopCountAnalysis

    after_fvflops = time.perf_counter()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from tests.support.models.layers import LAYERS
    from tests.support.models.whole_models import MODELS, build_case

    model, inputs = build_case(name, {**LAYERS, **MODELS})
    before = set(sys.modules)
    counted = time.perf_counter()
    FlopCountAnalysis(model, inputs).total()
    seconds = time.perf_counter() - counted
    added = set(sys.modules) - before
    asked = sorted(filter(is_heavy, added)) or find_heavy_imports(model, inputs)
    return Measured(after_torch - begun, after_fvflops - after_torch, seconds, len(added), tuple(asked))


def find_heavy_imports(model: Any, inputs: Any) -> list[str]:
    """Return the heavy modules that a count requests if the model's library has not imported them."""
    from fvflops import FlopCountAnalysis
    from fvflops.capture.shapes.shape_cache import clear_cache

    clear_cache()
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if is_heavy(name)}
    refusal = Refusal()
    sys.meta_path.insert(0, refusal)
    try:
        FlopCountAnalysis(model, inputs).total()
    except ImportError:
        if not refusal.asked:
            raise
    finally:
        sys.meta_path.remove(refusal)
        sys.modules.update(hidden)
    return refusal.asked


def measure_apart(name: str) -> Measured:
    """Measure the first count of a model in a new process."""
    return Measured(**run_module("benchmarking.first_count", name))


def run_module(name: str, *arguments: str) -> Any:
    """Return the JSON that a module prints in a new process; if that fails, raise RuntimeError with its last line."""
    # Let Python cache bytecode, which an installed package has.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join([str(ROOT / "tools"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", name, *arguments]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or ["it failed"])[-1][:200])
    return json.loads(result.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(asdict(measure_here(sys.argv[1]))))
