#!/usr/bin/env python3
"""Measures a process' first count beside `import torch`: tools/first_count.py [--only NAME] [--layers] [--repeat N].

The models are those of tests/support/models/whole_models.py, with --layers also those of layers.py beside it. Each is
counted in N new processes (5 by default) of one thread, which time `import torch`, then `from fvflops import
FlopCountAnalysis`, then, when the model has been built, the total of its first analysis. Shown are medians of seconds
and of ratios within a process, how many modules the count imported, and whether it asked for sympy or the compiler: it
is made once more without those that the model's library had imported. Exits with 1 if a model is slower than the limits
or asks for one of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Shares of `import torch`: what `import fvflops` may take, and that with the first count.
IMPORT_LIMIT, LIMIT = 0.1, 0.25
# What no count of a plain model needs, and takes seconds to import.
HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "torch.utils._sympy")
HEADERS = ("model", "import torch (s)", "import fvflops (s)", "first count (s)", "ratio", "modules", "sympy", "")


@dataclass(frozen=True, slots=True)
class Measured:
    """One process: seconds of the imports and of the count, modules that the count imported, and heavy ones asked."""

    torch: float
    fvflops: float
    count: float
    modules: int
    asked: tuple[str, ...]


class Refusal:
    """A finder of modules that refuses the heavy ones and notes which were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError for a heavy module, and leave others to the finders behind."""
        if is_heavy(name):
            self.asked.append(name)
            raise ImportError(f"{name} is not to be imported")


def is_heavy(name: str) -> bool:
    """Return whether a module is one of the heavy, or in one.

    >>> is_heavy("sympy.core"), is_heavy("torch.fx")
    (True, False)
    """
    return any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)


def measure_here(name: str) -> Measured:
    """Return what this process, which has imported none of it, takes for a model."""
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
    asked = sorted(filter(is_heavy, added)) or ask_without_heavy(model, inputs)
    return Measured(after_torch - begun, after_fvflops - after_torch, seconds, len(added), tuple(asked))


def ask_without_heavy(model: Any, inputs: Any) -> list[str]:
    """Return the heavy modules that a count asks for where the model's library has not imported them."""
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
    """Return what a new process takes for a model; RuntimeError with its last line where it fails."""
    # An installed package has its bytecode: let Python keep this one's.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", name]
    result = subprocess.run(command, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or ["it failed"])[-1][:200])
    return Measured(**json.loads(result.stdout.splitlines()[-1]))


def make_row(name: str, measured: Sequence[Measured]) -> tuple[str, ...]:
    """Return a model's cells: medians, and in the last one what misses a limit.

    >>> make_row("toy", [Measured(torch=1.0, fvflops=0.12, count=0.2, modules=3, asked=())])[4:]
    ('0.32', '3', 'no', 'import fvflops: 0.12 of import torch, limit 0.1; with the first count: 0.32, limit 0.25')
    """
    imports = median(one.fvflops / one.torch for one in measured)
    ratio = median((one.fvflops + one.count) / one.torch for one in measured)
    asked = sorted({module for one in measured for module in one.asked})
    missed = []
    if imports >= IMPORT_LIMIT:
        missed.append(f"import fvflops: {imports:.2f} of import torch, limit {IMPORT_LIMIT:g}")
    if ratio >= LIMIT:
        missed.append(f"with the first count: {ratio:.2f}, limit {LIMIT:g}")
    if asked:
        missed.append(f"asked for {', '.join(asked[:3])}")
    return (
        name,
        f"{median(one.torch for one in measured):.3f}",
        f"{median(one.fvflops for one in measured):.3f}",
        f"{median(one.count for one in measured):.3f}",
        f"{ratio:.2f}",
        str(max(one.modules for one in measured)),
        "yes" if any(module.partition(".")[0] == "sympy" for module in asked) else "no",
        "; ".join(missed),
    )


def measure_all(names: Iterable[str], repeat: int) -> Mapping[str, Sequence[Measured] | str]:
    """Return name → what its processes took, or why one failed; say on stderr how far it is."""
    found: dict[str, Sequence[Measured] | str] = {}
    begun = time.perf_counter()
    for name in names:
        if not found:
            measure_apart(name)  # the bytecode is written, and the files are in memory
        try:
            found[name] = [measure_apart(name) for _ in range(repeat)]
        except RuntimeError as error:
            found[name] = str(error)
        print(f"{time.perf_counter() - begun:5.0f} s  {name}", file=sys.stderr)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models, print a table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--layers", action="store_true", help="the layers of the tests too")
    parser.add_argument("--repeat", type=int, default=5, help="processes a model (default: 5)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure is not None:
        print(json.dumps(asdict(measure_here(given.measure))))
        return 0
    from fvflops.reports.fvcore_table import pipe_table
    from tests.support.models.layers import LAYERS
    from tests.support.models.whole_models import MODELS

    names = [name for name in (*MODELS, *(LAYERS if given.layers else ())) if given.only in name]
    if not names or given.repeat < 1:
        parser.error(f"--only {given.only!r} is in no model's name" if not names else "--repeat is 1 or more")
    found = measure_all(names, given.repeat)
    blank = ("",) * (len(HEADERS) - 2)
    rows = [(name, *blank, it) if isinstance(it, str) else make_row(name, it) for name, it in found.items()]
    print(pipe_table(HEADERS, rows))
    missed = sum(bool(row[-1]) for row in rows)
    print(f"\n{len(rows)} models, {missed} of which miss a limit or failed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
