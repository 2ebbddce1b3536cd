#!/usr/bin/env python3
"""Compares computed times of kernels with measured ones, and fits the figures that they rest on.

    tools/kernel_times.py FOLDER                         errors with the shipped configs/kernel_figures.yaml
    tools/kernel_times.py FOLDER --class product --gpu h100_sxm --engines
    tools/kernel_times.py FOLDER --write                 writes them to configs/measured_errors.yaml and its page
    tools/kernel_times.py FOLDER --fit FILE              fits each class, GPU and dtype, and writes the figures

FOLDER has the CSV files of NVIDIA's AIConfigurator, as its collectors write them. A third of the shapes, the same on
every GPU, is held out of all fits; the errors are of these shapes, of kernels above 10 us. `held_out_gpu` is the error
with the figures of the nearest other GPU in place of the GPU's own, on its own datasheet.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np  # noqa: E402
import yaml  # noqa: E402
from error_figures import write_errors  # noqa: E402
from kernel_fitting.kernel_class import CLASSES, KernelClass  # noqa: E402
from kernel_fitting.row_shapes import DEVICES, DTYPES, Sample  # noqa: E402
from scipy.optimize import least_squares  # noqa: E402
from tabulate import tabulate  # noqa: E402

from fvflops import find_device  # noqa: E402
from fvflops.devices.kernel_models.figures import find_figures, load_figures  # noqa: E402
from fvflops.devices.measured_errors import KernelErrors  # noqa: E402

_MOST = 700  # samples of a fit
_LONG = 10e-6
_PRIOR = 0.3
_FEWEST = 20
_FEWEST_FITTED = 12  # of a fit
_SAME_CHIP = dict.fromkeys(("H100 SXM", "H200"), ("H100 SXM", "H200"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/kernel_times.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the CSV files")
    parser.add_argument("--class", dest="kinds", action="append", choices=CLASSES, help="only this class")
    parser.add_argument("--gpu", action="append", choices=DEVICES, help="only this GPU; may be repeated")
    parser.add_argument("--engines", action="store_true", help="errors of each engine's kernels by themselves")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit, and write the figures to this file")
    parser.add_argument("--write", action="store_true", help="write the errors that reports show")
    options = parser.parse_args(argv)
    if options.write and (options.kinds or options.gpu or options.engines):
        parser.error("--write is for all classes and GPUs")
    groups = _read_groups(options)
    if options.fit:
        _write(options.fit, groups)
        return 0
    found = [(_measure(kind, samples), engine) for (kind, *_, engine), samples in groups.items()]
    rows = [row for row, _ in found if row]
    shown = [{**asdict(row), "kind": f"{row.kind} {engine}".strip()} for row, engine in found if row]
    print(tabulate(shown, headers="keys"))
    if options.write:
        write_errors("kernels", rows)
    return 0


_Groups = dict[tuple[str, ...], list[Sample]]


def _read_groups(options: argparse.Namespace) -> _Groups:
    """Return the samples of each class, GPU, dtype and, if asked for, engine, by class and engine."""
    groups: defaultdict[tuple[str, ...], list[Sample]] = defaultdict(list)
    for name in options.kinds or CLASSES:
        kind = CLASSES[name]
        for sample in kind.samples(options.folder):
            if options.gpu and sample.gpu not in options.gpu:
                continue
            if options.engines:
                groups[name, sample.dtype, sample.gpu, sample.engine].append(sample)
            elif kind.is_shipped(sample):
                groups[name, sample.dtype, sample.gpu, ""].append(sample)
    return groups


def is_held_out(sample: Sample) -> bool:
    """Return whether a shape is left out of fits, on all GPUs."""
    return zlib.crc32(repr(tuple(sample.shape)[:6]).encode()) % 3 == 0


def log_ratios(kind: KernelClass, samples: Sequence[Sample], figures: Any) -> list[float]:
    """Return the logarithms of computed by measured seconds."""
    return [math.log(kind.time(sample, figures) / sample.seconds) for sample in samples]


def fit(kind: KernelClass, samples: Sequence[Sample]) -> Any:
    """Return the figures with the least error over samples, short kernels at a third of the weight."""
    chosen = random.Random(0).sample(list(samples), min(_MOST, len(samples)))
    weights = np.array([1.0 if sample.seconds > _LONG else 0.3 for sample in chosen])
    low, first, high = (np.log([bound[i] for bound in kind.bounds.values()]) for i in range(3))
    best: tuple[float, Any] | None = None
    for values in itertools.product(*kind.fixed.values()):
        fixed = dict(zip(kind.fixed, values, strict=True))

        def figures_of(point: Any, fixed: dict[str, float] = fixed) -> Any:
            return kind.figures(**dict(zip(kind.bounds, np.exp(point), strict=True)), **fixed)

        def residuals(point: Any, figures_of: Any = figures_of) -> Any:
            # Figures that no sample depends on stay at their first values.
            return [*(weights * log_ratios(kind, chosen, figures_of(point))), *(_PRIOR * (point - first))]

        found = least_squares(
            residuals, first, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-2, max_nfev=40
        )
        if best is None or found.cost < best[0]:
            best = found.cost, figures_of(found.x)
    assert best is not None
    return best[1]


def _measure(kind: str, samples: Sequence[Sample]) -> KernelErrors | None:
    """Return the errors in % of a class, GPU and dtype: of kernels above 10 us, held out; None for too few."""
    chosen = [sample for sample in samples if sample.seconds > _LONG and is_held_out(sample)]
    if len(chosen) < _FEWEST:
        return None
    sample = chosen[0]
    device = find_device(DEVICES[sample.gpu])
    own, other = find_figures(device), find_figures(device, exclude=_SAME_CHIP.get(device.name, (device.name,)))
    assert own is not None and other is not None
    if not other.by_class[kind]:
        return None  # no other chip has the class
    dtype = DTYPES[sample.dtype].figures
    errors, held_out_gpu = (_errors(CLASSES[kind], chosen, figures.of(kind, dtype)) for figures in (own, other))
    return KernelErrors(
        kind=kind,
        dtype=dtype,
        device=device.name,
        kernels=len(chosen),
        mean=_mean(errors),
        bias=round(100 * statistics.mean(errors), 1),
        percentile_95=round(100 * sorted(map(abs, errors))[int(0.95 * (len(errors) - 1))], 1),
        held_out_gpu=_mean(held_out_gpu),
    )


def _errors(kind: KernelClass, samples: Sequence[Sample], figures: Any) -> list[float]:
    return [math.expm1(ratio) for ratio in log_ratios(kind, samples, figures)]


def _mean(errors: Sequence[float]) -> float:
    return round(100 * statistics.mean(map(abs, errors)), 1)


def _write(file: Path, groups: _Groups) -> None:
    """Fit the figures of all groups in the order of the classes, and write them; other figures of the file stay."""
    document = yaml.safe_load(file.read_text())
    for (kind, *_), samples in groups.items():
        sample = samples[0]
        fitted = [sample for sample in samples if not is_held_out(sample)]
        if len(fitted) < _FEWEST_FITTED:
            continue
        found = fit(CLASSES[kind], fitted)
        names = (*CLASSES[kind].bounds, *CLASSES[kind].fixed)
        dtype, device = DTYPES[sample.dtype].figures, DEVICES[sample.gpu]
        entry = document["figures"][device].setdefault(kind, {})
        entry[dtype] = {name: float(f"{getattr(found, name):.3g}") for name in names}
        header = "".join(line for line in file.read_text().splitlines(keepends=True) if line.startswith("#"))
        file.write_text(header + "\n" + yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None))
        load_figures.cache_clear()  # a class rests on those before it
        print(kind, dtype, device, flush=True)


if __name__ == "__main__":
    sys.exit(main())
