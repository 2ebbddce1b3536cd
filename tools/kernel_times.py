"""Fits the figures of kernel classes to measured kernels, and prints how far the computed times are off.

The folder has the CSV files of NVIDIA's AIConfigurator, as its collectors write them. A third of the shapes, the same on
every GPU, is held out of the fit; the errors are theirs, of kernels above 10 us.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kernel_fitting import attention_rows, collective_rows, mixture_rows, product_rows
from kernel_fitting.kernel_class import KernelClass, Sample
from scipy.optimize import least_squares

CLASSES = {kind.name: kind for module in (product_rows, attention_rows, mixture_rows, collective_rows) for kind in module.CLASSES}
_MOST = 700  # samples of a fit
_LONG = 10e-6


def is_held_out(sample: Sample) -> bool:
    """Return whether a shape is left out of fits, on all GPUs."""
    return zlib.crc32(repr(tuple(sample.shape)).encode()) % 3 == 0


def log_ratios(kind: KernelClass, samples: Sequence[Sample], figures: Any) -> list[float]:
    """Return the logarithms of computed by measured seconds."""
    return [
        math.log(kind.seconds(sample.shape, kind.machine(sample.gpu, sample.dtype), figures) / sample.seconds)
        for sample in samples
    ]


def fit(kind: KernelClass, samples: Sequence[Sample]) -> Any:
    """Return the figures with the least error over samples, short kernels at a third of the weight."""
    chosen = random.Random(0).sample(list(samples), min(_MOST, len(samples)))
    weights = np.array([1.0 if sample.seconds > _LONG else 0.3 for sample in chosen])
    low, first, high = (np.log([bound[i] for bound in kind.bounds.values()]) for i in range(3))
    best: tuple[float, Any] | None = None
    for values in itertools.product(*kind.fixed.values()):
        fixed = dict(zip(kind.fixed, values, strict=True))

        def figures_of(point: Any, fixed: dict[str, int] = fixed) -> Any:
            return kind.figures(**dict(zip(kind.bounds, np.exp(point), strict=True)), **fixed)

        def residuals(point: Any, figures_of: Any = figures_of) -> Any:
            return weights * np.array(log_ratios(kind, chosen, figures_of(point)))

        found = least_squares(
            residuals, first, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-2, max_nfev=40
        )
        if best is None or found.cost < best[0]:
            best = found.cost, figures_of(found.x)
    assert best is not None
    return best[1]


def describe_errors(kind: KernelClass, samples: Sequence[Sample], figures: Any) -> str:
    """Return the mean, the 95th percentile and the bias of the errors of kernels above 10 us."""
    errors = sorted(math.expm1(ratio) for ratio in log_ratios(kind, [s for s in samples if s.seconds > _LONG], figures))
    if not errors:
        return "no kernel above 10 us"
    sizes = sorted(map(abs, errors))
    return (
        f"{len(errors):5} kernels, mean error {statistics.mean(sizes):6.1%}, 95th percentile "
        f"{sizes[int(0.95 * (len(sizes) - 1))]:6.1%}, bias {statistics.mean(errors):+6.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with the CSV files")
    parser.add_argument("kinds", nargs="+", choices=CLASSES, metavar="CLASS", help=f"of {', '.join(CLASSES)}")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpu", nargs="*")
    parser.add_argument("--borrow", action="store_true", help="also the errors with figures of each other GPU")
    parser.add_argument("--engines", action="store_true", help="fit each engine by itself")
    options = parser.parse_args()
    for name in options.kinds:
        kind = CLASSES[name]
        groups: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
        for sample in kind.samples(options.folder):
            if sample.dtype in (options.dtype, "") and (not options.gpu or sample.gpu in options.gpu):
                groups[sample.gpu, sample.engine if options.engines else ""].append(sample)
        found: dict[tuple[str, str], Any] = {}
        for (gpu, engine), samples in groups.items():
            fitted = [sample for sample in samples if not is_held_out(sample)]
            held_out = [sample for sample in samples if is_held_out(sample)]
            if len(fitted) < 30:
                continue
            figures = found[gpu, engine] = fit(kind, fitted)
            print(f"{name} {options.dtype} {gpu} {engine}: {describe_errors(kind, held_out, figures)}", flush=True)
            print(
                "   ", {key: float(f"{getattr(figures, key):.3g}") for key in (*kind.bounds, *kind.fixed)}, flush=True
            )
        for (gpu, engine), (other, same) in itertools.product(groups, found if options.borrow else ()):
            if engine == same and gpu != other:
                errors = describe_errors(kind, groups[gpu, engine], found[other, same])
                print(f"{name} {options.dtype} {gpu} {engine} with figures of {other}: {errors}", flush=True)


if __name__ == "__main__":
    main()
