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
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

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

# Row of the table → the function that makes that output and returns its description.
Makers = Mapping[str, Callable[[], Any]]
# For viewers of models and people who look into networks, not for costs.
FAILS, NOTHING = "fails:", "–"
NOT_OURS = ("graph (Netron)", "activations' values")


def make_fvflops(subject: LoadedModel, folder: Path) -> Makers:
    model, inputs, kwargs = subject.model, subject.inputs, subject.kwargs
    flops = fvflops.FlopCountAnalysis(model, inputs, kwargs=kwargs, lines=True)
    trace = flops.trace()
    exact = fvflops.FlopCountAnalysis.from_trace(trace, table="exact")
    activations = fvflops.ActivationCountAnalysis.from_trace(trace)
    step = fvflops.TrainingStepAnalysis(
        model, inputs, kwargs=kwargs, loss=sum_results, optimizer=torch.optim.AdamW, table="exact"
    )
    profile = fvflops.ProfileAnalysis(model, inputs, kwargs=kwargs, warmup=0, repeat=1)
    summary = fvflops.summarise(flops, activations)
    quiet(flops, exact, activations, step, profile)

    def count_on_meta() -> int:
        bare = fvflops.FlopCountAnalysis(copy.deepcopy(model).to("meta"), inputs, kwargs=kwargs)
        quiet(bare)
        return bare.total()

    def export(analysis: Any, name: str) -> str:
        analysis.export(folder / name)
        return weigh(folder / name)

    def vary() -> str:
        first = next(tensor for tensor in (inputs if isinstance(inputs, tuple) else (inputs,)))
        make = lambda batch: first.new_zeros((batch, *first.shape[1:]))  # noqa: E731
        return str(fvflops.cost_of(model, make, vary={"batch": (1, 8)}))

    return {
        "FLOPs": lambda: f"{format_size(flops.total())} ({format_size(exact.total())} exact)",
        "multiply-adds": lambda: format_size(flops.macs()),
        "activations": lambda: format_size(activations.total()),
        "bytes read and written": lambda: format_size(fvflops.ByteCountAnalysis.from_trace(trace).total()),
        "parameters": lambda: format_size(fvflops.parameter_count(model)[""]),
        "backward FLOPs": lambda: format_size(sum(step.by_phase()["backward"].values())),
        "optimizer's FLOPs": lambda: format_size(sum(step.by_phase()["optimizer"].values())),
        "weightless model (meta)": lambda: format_size(count_on_meta()),
        "unsupported ops listed": lambda: f"{len(summary.ledger['unsupported'])} here",
        "conventions": lambda: f"{len(shipped_tables())} and your own",
        "by module": lambda: many(len(flops.by_module()), "module"),
        "by operator": lambda: many(len(flops.by_operator()), "operator"),
        "calls of modules": lambda: many(len(flops.module_calls()), "call"),
        "calls of ops": lambda: many(len(flops.op_calls()), "call"),
        "tensors between ops": lambda: many(sum(len(call.after) for call in flops.op_calls()), "edge"),
        "lines of source": lambda: many(len(flops.line_counts()), "line"),
        "time of ops": lambda: many(sum(call.duration_ns is not None for call in profile.op_calls()), "call"),
        "memory over the run": lambda: f"{format_short(fvflops.predict_memory(step).peak)}B at the step's peak",
        "text table": lambda: many_lines(fvflops.flop_count_table(flops)),
        "Markdown": lambda: many_lines(REPORTS["markdown"](summary)),
        "LaTeX": lambda: many_lines(REPORTS["latex"](summary, depth=1)),
        "CSV": lambda: many_lines(write_rows([*(calls := flops.to_dict(by="op"))], zip(*calls.values(), strict=True))),
        "JSON": lambda: weigh_text(REPORTS["json"](summary)),
        "pandas": lambda: "{} × {}".format(*flops.to_pandas(by="op").shape),
        "Parquet": lambda: (
            flops.to_pandas(by="op").to_parquet(folder / "fvflops.parquet") or weigh(folder / "fvflops.parquet")
        ),
        "HTML page": lambda: weigh_text(flops.to_html()),
        "graph (DOT)": lambda: weigh_text(flops.to_graph()),
        "graph (Model Explorer)": lambda: weigh_text(flops.to_graph("model-explorer")),
        "SVG picture": lambda: weigh_picture(flops, folder / "fvflops.svg"),
        "Perfetto, timed": lambda: export(profile, "timed.json"),
        "Perfetto, counted": lambda: export(flops, "counted.json"),
        "speedscope, timed": lambda: export(profile, "timed.speedscope.json"),
        "speedscope, counted": lambda: export(flops, "counted.speedscope.json"),
        "flame graph, timed": lambda: export(profile, "timed.txt"),
        "flame graph, counted": lambda: export(flops, "counted.txt"),
        "saved run": lambda: weigh_text(trace.to_json()),
        "roofline": lambda: f"{fvflops.roofline(trace, device='H100').total().seconds * 1e6:.0f} µs on an H100",
        "difference of two models": lambda: many_lines(str(fvflops.diff(flops, exact))),
        "regression check (CI)": lambda: f"{many(len(measure(flops, tuple(budget_keys()))), 'figure')} with limits",
        "polynomial in sizes": vary,
    }


def make_torchlens(subject: LoadedModel, folder: Path) -> Makers:
    import torchlens

    log = torchlens.trace(subject.model, subject.inputs, dict(subject.kwargs) or None)
    frame = log.to_pandas()
    ops = [op for op in log.ops if op.func_name not in (None, "none")]

    def trace_on_meta() -> int:
        inputs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), subject.inputs)
        return int(torchlens.trace(copy.deepcopy(subject.model).to("meta"), inputs).total_flops_forward)

    def export(name: str, suffix: str) -> str:
        path = folder / f"torchlens.{name}{suffix}"
        getattr(torchlens.export, name)(log, path)
        return weigh(path)

    def pipe_table() -> str:
        log.pipe_table(vis_outpath=str(folder / "torchlens.graph"), vis_fileformat="dot", vis_save_only=True)
        return weigh(max(folder.glob("torchlens.graph*")))

    def compare() -> str:
        torchlens.export.chrome_trace_diff(
            torchlens.bundle({"a": log, "b": log.fork()}), folder / "torchlens.diff.json"
        )
        return f"{weigh(folder / 'torchlens.diff.json')}, timelines"

    def save() -> str:
        torchlens.save(log, folder / "torchlens.run")
        return weigh(max(folder.glob("torchlens.run*")))

    return {
        "FLOPs": lambda: format_size(int(log.total_flops_forward)),
        "multiply-adds": lambda: format_size(int(log.total_macs_forward)),
        "parameters": lambda: format_size(log.num_params),
        "backward FLOPs": lambda: f"{format_size(int(log.total_flops_backward))}, by formula",
        "weightless model (meta)": lambda: format_size(trace_on_meta()),
        "unsupported ops listed": lambda: f"{len(log.unknown_flop_ops)} here",
        "conventions": lambda: f"{sum(bool(log.summary(flop_convention=name)) for name in ('fma1', 'fma2'))}",
        "by module": lambda: many(len(log.modules), "module"),
        "by operator": lambda: many(len(log.flops_by_op_type()), "kind"),
        "calls of modules": lambda: many(len(log.profile(level="call").to_pandas()), "call"),
        "calls of ops": lambda: many(len(ops), "call"),
        "tensors between ops": lambda: many(log.num_edges, "edge"),
        "lines of source": lambda: many(
            len({f"{at.file}:{at.line_number}" for op in ops for at in op.code_context}), "line"
        ),
        "time of ops": lambda: many(sum(op.func_duration is not None for op in ops), "call"),
        "memory over the run": lambda: export("memory_timeline", ".json"),
        "text table": lambda: many_lines(str(log.summary())),
        "CSV": lambda: many_lines(pick(export("csv", ".csv"), (folder / "torchlens.csv.csv").read_text())),
        "JSON": lambda: export("json", ".json"),
        "pandas": lambda: "{} × {}".format(*frame.shape),
        "Parquet": lambda: export("parquet", ".parquet"),
        "HTML page": lambda: export("html", ".html"),
        "graph (DOT)": pipe_table,
        "SVG picture": lambda: export("svg", ".svg"),
        "Perfetto, timed": lambda: export("chrome_trace", ".json"),
        "speedscope, timed": lambda: export("speedscope", ".json"),
        "flame graph, timed": lambda: export("flamegraph", ".txt"),
        "saved run": save,
        "difference of two models": compare,
        "regression check (CI)": lambda: f"a hash: {log.graph_shape_hash:.8}…",
        "graph (Model Explorer)": lambda: export("model_explorer", ".json"),
        "graph (Netron)": lambda: export("netron", ".json"),
        "activations' values": lambda: many(sum(op.has_saved_activation for op in ops), "tensor"),
    }


def make_fvcore(subject: LoadedModel, folder: Path) -> Makers:
    from fvcore import nn

    if subject.kwargs:
        raise ValueError("takes no keyword arguments")
    flops, activations = (
        kind(subject.model, subject.inputs) for kind in (nn.FlopCountAnalysis, nn.ActivationCountAnalysis)
    )
    quiet(flops, activations)
    flops.tracer_warnings("none")
    return {
        "FLOPs": lambda: format_size(flops.total()),
        "activations": lambda: format_size(activations.total()),
        "parameters": lambda: format_size(nn.parameter_count(subject.model)[""]),
        "unsupported ops listed": lambda: f"{len(flops.unsupported_ops())} here",
        "conventions": lambda: "1",
        "by module": lambda: many(len(flops.by_module()), "module"),
        "by operator": lambda: many(len(flops.by_operator()), "operator"),
        "text table": lambda: many_lines(nn.flop_count_table(flops)),
        "Markdown": lambda: many_lines(nn.flop_count_table(flops)),
    }


CONTENDERS = {"fvflops": make_fvflops, "torchlens": make_torchlens, "fvcore": make_fvcore}


def quiet(*analyses: Any) -> None:
    for analysis in analyses:
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)


def pick(_: Any, value: str) -> str:
    """Return the second, after the first was made."""
    return value


def many(count: int, noun: str) -> str:
    return format_quantity(count, noun)


def many_lines(text: str) -> str:
    return many(text.rstrip().count("\n") + 1, "line")


def weigh_text(text: str) -> str:
    return f"{format_short(len(text.encode()))}B"


def weigh(path: Path) -> str:
    """Return the size of a file, or of all in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{format_short(sum(file.stat().st_size for file in files))}B"


def weigh_picture(analysis: fvflops.FlopCountAnalysis, path: Path) -> str:
    analysis.to_picture(path)
    return weigh(path)


def tell(make: Callable[[], Any]) -> str:
    """Return the description of an output, or the error that making it raised."""
    try:
        return str(make()).replace("|", "\\|")
    except ImportError:
        return "needs a package that is not here"
    except Exception as error:
        return f"{FAILS} {type(error).__name__}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="zoo:resnet50", metavar="MODEL")
    subject = load_model(parser.parse_args(argv).model)
    subject.model.eval()
    told: dict[str, dict[str, str]] = {}
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for package, contend in CONTENDERS.items():
            try:
                makers = contend(subject, Path(folder))
                rows = rows or [*makers, *NOT_OURS]
            except ImportError:
                print(f"{package} is not installed here, and is left out.", file=sys.stderr)
                continue
            told[f"{package} {version(package)}"] = {
                row: tell(makers[row]) if row in makers else NOTHING for row in rows
            }
    print(
        pipe_table(
            [parser.parse_args(argv).model, *told], [[row, *(cells[row] for cells in told.values())] for row in rows]
        )
    )
    ours, *others = told.values()
    missing = [row for row in rows if row not in NOT_OURS and ours[row] == NOTHING]
    lacking = [row for row in missing if any(not cells[row].startswith((NOTHING, FAILS)) for cells in others)]
    failed = [row for row in rows if ours[row].startswith(FAILS)]
    for row in (*lacking, *failed):
        print(f"fvflops lacks what a peer has, or fails: {row}", file=sys.stderr)
    return int(bool(lacking or failed))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main())
