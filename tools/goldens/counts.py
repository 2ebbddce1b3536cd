"""Counts: totals, operators and modules of every model in every convention, the texts of fvcore's face, and Traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import fvflops
from fvflops import zoo
from fvflops.formulas import shipped_tables
from goldens.jobs import Folder, Job, attempt, file_name
from tests.support.models.layers import LAYERS
from tests.support.models.whole_models import MODELS

Build = Callable[[], tuple[Any, tuple[Any, ...]]]

# Of these, all is written by module too; of the others by operator, and flops by module.
_IN_FULL = ("default", "exact", "fvcore")


def jobs() -> list[Job]:
    """Return a job for each model in each mode; in train, and of models too large for memory, some conventions do."""
    found = []
    for name, entry in zoo.ZOO.items():
        build: Build = partial(_build_zoo, name)
        found.append(Job(f"counts/zoo/{name}/eval", partial(_write_model, build, full=not entry.meta)))
        if not entry.meta:
            found.append(Job(f"counts/zoo/{name}/train", partial(_write_model, build, train=True)))
    for name, build in MODELS.items():
        folder = f"counts/models/{file_name([name])}"
        found.append(Job(f"{folder}/eval", partial(_write_model, build, full=True)))
        found.append(Job(f"{folder}/train", partial(_write_model, build, train=True)))
    found.append(Job("counts/layers", _write_layers))
    return found


def _write_layers(folder: Folder) -> None:
    for name, build in LAYERS.items():
        torch.manual_seed(0)
        layer, inputs = build()
        layer.eval()
        texts = {table: partial(_tell_counts, layer, inputs, table) for table in shipped_tables()}
        folder.write(f"{file_name([name])}.txt", sections(texts))


def _build_zoo(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    inputs = tuple(
        torch.zeros(shape, dtype=getattr(torch, dtype), device="meta") for _, shape, dtype in zoo.ZOO[name].inputs
    )
    return zoo.build(name, device="meta"), inputs


def _write_model(build: Build, folder: Folder, *, train: bool = False, full: bool = False) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    if isinstance(model, nn.Module):
        model.train(train)
    for table in shipped_tables() if full else _IN_FULL:
        folder.write(f"{table}.txt", attempt(partial(_tell_counts, model, inputs, table)))
    if not train:
        folder.write("texts.txt", attempt(partial(_tell_texts, model, inputs)))
    folder.write("trace.json", attempt(lambda: break_lines(_analyse(model, inputs, "default").trace().to_json())))


def _analyse(model: Any, inputs: Any, table: str) -> fvflops.FlopCountAnalysis:
    analysis = fvflops.FlopCountAnalysis(model, inputs, table=table)
    return quieten(analysis)


def quieten(analysis: Any) -> Any:
    return analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)


def _tell_counts(model: Any, inputs: Any, table: str) -> str:
    flops = _analyse(model, inputs, table)
    trace = flops.trace()
    activations = quieten(fvflops.ActivationCountAnalysis.from_trace(trace, table=table))
    full = table in _IN_FULL
    lines = [f"table {table}", f"execution {trace.about['execution']}", f"inputs {trace.about['inputs']}", ""]
    lines += [f"macs {flops.macs()}"]
    if full:
        top = [name for name in flops.by_module() if name and "." not in name]
        lines += [f"macs of {name} {flops.macs(name)}" for name in top]
    lines += ["", *tell_analysis("flops", flops, by_module=True)]
    lines += ["", *tell_analysis("activations", activations, by_module=full)]
    for part in ("moved", "read", "written"):
        moved = quieten(fvflops.ByteCountAnalysis.from_trace(trace, table=table, part=part))
        lines += ["", *tell_analysis(f"bytes {part}", moved, by_module=full and part == "moved")]
    lines += ["", *_tell_mapping("flops by dtype", flops.by_dtype())]
    lines += _tell_mapping("unsupported ops", flops.unsupported_ops())
    lines += _tell_mapping("bytes unknown of", moved.unsupported_ops())
    lines += ["uncalled modules", *(f"  {name}" for name in sorted(flops.uncalled_modules()))]
    return "\n".join(lines)


def tell_analysis(title: str, analysis: Any, *, by_module: bool) -> list[str]:
    """Return the total, the operators and the modules of an analysis in lines; modules with their operators."""
    operators, both = analysis.by_operator(), analysis.by_module_and_operator()
    lines = [f"{title} {analysis.total()}", *_tell_mapping(f"{title} by operator", operators)]
    counted = {name: labels for name, labels in both.items() if any(labels.values())}
    if by_module:
        lines.append(f"{title} by module and operator, {len(both) - len(counted)} modules without")
        for name, labels in counted.items():
            parts = " ".join(f"{label}={value}" for label, value in sorted(labels.items()) if value)
            lines.append(f"  {name or '(model)'} {parts}")
    sums = {name: sum(labels.values()) for name, labels in both.items()}
    if dict(analysis.by_module()) == sums and list(analysis.by_module()) == list(sums):
        lines.append(f"{title} by module: the sums of that")
    else:
        lines += _tell_mapping(f"{title} by module", analysis.by_module())
    return lines


def _tell_mapping(title: str, counts: Mapping[str, int]) -> list[str]:
    return [title, *(f"  {name or '(model)'} {value}" for name, value in sorted(counts.items()))]


def _tell_texts(model: Any, inputs: Any) -> str:
    flops = _analyse(model, inputs, "default")
    activations = fvflops.ActivationCountAnalysis.from_trace(flops.trace())
    texts: dict[str, Callable[[], Any]] = {
        "flop_count_table": lambda: fvflops.flop_count_table(flops),
        "flop_count_table, activations": lambda: fvflops.flop_count_table(flops, 2, activations, False),
        "flop_count_table, sorted": lambda: fvflops.flop_count_table(flops, 9, sort="flops", top=10),
        "flop_count_table, collapsed": lambda: fvflops.flop_count_table(flops, 9, collapse=True),
        "flop_count_str": lambda: fvflops.flop_count_str(flops),
        "flop_count_str, activations": lambda: fvflops.flop_count_str(flops, activations),
        "parameter_count_table": lambda: fvflops.parameter_count_table(model),
        "parameter_summary_table": lambda: fvflops.parameter_summary_table(flops),
        "flop_count": lambda: _sorted(fvflops.flop_count(model, inputs)),
        "activation_count": lambda: _sorted(fvflops.activation_count(model, inputs)),
        "to_dict": lambda: json.dumps(flops.to_dict(by="both", depth=2), ensure_ascii=False),
    }
    return sections(texts)


def _sorted(counts: tuple[Mapping[str, Any], ...]) -> str:
    return "\n".join(str(sorted(part.items())) for part in counts)


def sections(texts: Mapping[str, Callable[[], Any]]) -> str:
    """Return texts under their titles, each made or the error that it raises."""
    return "\n".join(f"=== {title}\n{attempt(make)}\n" for title, make in texts.items())


def break_lines(text: str) -> str:
    """Return JSON on one line in many: without line ends it is the same, byte for byte."""
    if "\n" in text:
        return text
    for found in ("],", "},", ":{", ":["):
        text = text.replace(found, found + "\n")
    return text
