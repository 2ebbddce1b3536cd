#!/usr/bin/env python3
"""Compares outputs and exports of fvflops, TorchLens and fvcore for one model: tools/side_by_side.py [MODEL].

MODEL is as in `fvflops count`; default: zoo:resnet50. Each cell describes an output that the tool made in this run; "–"
means that it has none of the kind. Tools that are not installed are left out. To keep the installed torch, install
TorchLens apart: pip install --no-deps --target FOLDER torchlens graphviz; PYTHONPATH=FOLDER tools/side_by_side.py
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402
from torch.utils import _pytree  # noqa: E402

import fvflops  # noqa: E402
from fvflops.analysis.training_step_analysis import sum_results  # noqa: E402
from fvflops.comparison.budget_file import budget_keys  # noqa: E402
from fvflops.comparison.model_budget import measure  # noqa: E402
from fvflops.formulas.loading import shipped_tables  # noqa: E402
from fvflops.reports import REPORTS  # noqa: E402
from fvflops.reports.formats.csv import write_rows  # noqa: E402
from fvflops.reports.fvcore_format import pipe_table  # noqa: E402
from fvflops.sources import LoadedModel, load_model  # noqa: E402
from fvflops.units import format_quantity, format_short, format_size  # noqa: E402

# Names in the expressions, in addition to a tool's result.
Names = Mapping[str, Any]
FAILS, NOTHING = "fails:", "–"
# Not about cost: fvflops need not have them.
NOT_OURS = ("graph (Netron)", "activations' values")


def prepare_fvflops(subject: LoadedModel, folder: Path) -> Names:
    model, inputs, kwargs = subject.model, subject.inputs, subject.kwargs
    flops = fvflops.FlopCountAnalysis(model, inputs, kwargs=kwargs, lines=True, warn=False)
    trace = flops.trace()
    activations = fvflops.ActivationCountAnalysis.from_trace(trace, warn=False)
    step = fvflops.TrainingStepAnalysis(
        model, inputs, kwargs=kwargs, loss=sum_results, optimizer=torch.optim.AdamW, table="exact", warn=False
    )
    first = next(iter(inputs if isinstance(inputs, tuple) else (inputs,)))
    return {
        "flops": flops,
        "trace": trace,
        "activations": activations,
        "step": step,
        "calls": flops.to_dict(by="op"),
        "exact": fvflops.FlopCountAnalysis.from_trace(trace, table="exact", warn=False),
        "profile": fvflops.ProfileAnalysis(model, inputs, kwargs=kwargs, warmup=0, repeat=1, warn=False),
        "summary": fvflops.summarise(flops, activations),
        "batch_of": lambda batch: first.new_zeros((batch, *first.shape[1:])),
    }


def prepare_torchlens(subject: LoadedModel, folder: Path) -> Names:
    import torchlens

    log = torchlens.trace(subject.model, subject.inputs, dict(subject.kwargs) or None)

    def path(name: str, suffix: str) -> Path:
        return folder / f"torchlens.{name}.{suffix}"

    def export(name: str, suffix: str) -> str:
        getattr(torchlens.export, name)(log, path(name, suffix))
        return weigh(path(name, suffix))

    return {
        "torchlens": torchlens,
        "log": log,
        "path": path,
        "export": export,
        "ops": [op for op in log.ops if op.func_name not in (None, "none")],
        "pair": torchlens.bundle({"a": log, "b": log.fork()}),
        "on_meta": partial(_pytree.tree_map_only, torch.Tensor, lambda tensor: tensor.to("meta")),
        "draw": lambda path: log.draw(vis_outpath=str(path), vis_fileformat="dot", vis_save_only=True),
    }


def prepare_fvcore(subject: LoadedModel, folder: Path) -> Names:
    from fvcore import nn

    if subject.kwargs:
        raise ValueError("takes no keyword arguments")
    flops, activations = (
        kind(subject.model, subject.inputs).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        for kind in (nn.FlopCountAnalysis, nn.ActivationCountAnalysis)
    )
    return {"nn": nn, "flops": flops.tracer_warnings("none"), "activations": activations}


CONTENDERS: Mapping[str, Callable[[LoadedModel, Path], Names]] = {
    "fvflops": prepare_fvflops,
    "torchlens": prepare_torchlens,
    "fvcore": prepare_fvcore,
}


def count_lines(text: str) -> str:
    return format_quantity(text.rstrip().count("\n") + 1, "line")


def weigh_text(text: str) -> str:
    return f"{format_short(len(text.encode()))}B"


def weigh(path: Path) -> str:
    """Return the size of a file, or of all in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{format_short(sum(file.stat().st_size for file in files))}B"


def tell(expression: str, names: Names) -> str:
    """Return the description of an output, or the error that making it raised."""
    try:
        return str(eval(expression, dict(names))).replace("|", "\\|")
    except ImportError:
        return "needs a package that is not here"
    except Exception as error:
        return f"{FAILS} {type(error).__name__}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="zoo:resnet50", metavar="MODEL")
    name = parser.parse_args(argv).model
    subject = load_model(name)
    subject.model.eval()
    rows: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    told: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def made(make: Callable[[Path], object], name: str) -> str:
            make(Path(folder, name))
            return weigh(max(Path(folder).glob(f"{name}*")))

        common = {
            "fvflops": fvflops,
            "copy": copy,
            "partial": partial,
            "REPORTS": REPORTS,
            "write_rows": write_rows,
            "shipped_tables": shipped_tables,
            "measure": measure,
            "budget_keys": budget_keys,
            "size": format_size,
            "short": format_short,
            "many": format_quantity,
            "lines": count_lines,
            "text": weigh_text,
            "made": made,
            "model": subject.model,
            "inputs": subject.inputs,
            "kwargs": subject.kwargs,
        }
        for package, prepare in CONTENDERS.items():
            try:
                names = {**common, **prepare(subject, Path(folder))}
            except ImportError:
                print(f"{package} is not installed here, and is left out.", file=sys.stderr)
                continue
            told[f"{package} {version(package)}"] = [
                tell(str(cells[package]), names) if package in cells else NOTHING for cells in rows.values()
            ]
    print(pipe_table([name, *told], [[row, *cells] for row, *cells in zip(rows, *told.values(), strict=True)]))
    wrong = []
    for row, ours, *others in zip(rows, *told.values(), strict=True):
        is_lacking = ours == NOTHING and any(not cell.startswith((NOTHING, FAILS)) for cell in others)
        if ours.startswith(FAILS) or (is_lacking and row not in NOT_OURS):
            wrong.append(row)
            print(f"fvflops lacks what a peer has, or fails: {row}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main())
