"""Counts: totals, operators and modules of every model in every convention, the texts of fvcore's face, and Traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fvflops
from fvflops import zoo
from fvflops.formulas import shipped_tables
from goldens.expressions import break_lines, evaluate, quieten, sections
from goldens.jobs import Folder, Job, attempt, file_name
from tests.support.models.layers import LAYERS
from tests.support.models.whole_models import MODELS

Build = Callable[[], tuple[Any, tuple[Any, ...]]]


def jobs() -> list[Job]:
    """Return a job for each model in each mode; in train, and of models too large for memory, some conventions do."""
    found = [Job("counts/layers", _write_layers)]
    for name, entry in zoo.ZOO.items():
        build: Build = partial(_build_zoo, name)
        found.append(Job(f"counts/zoo/{name}/eval", partial(_write_model, build, full=not entry.meta)))
        if not entry.meta:
            found.append(Job(f"counts/zoo/{name}/train", partial(_write_model, build, train=True)))
    for name, build in MODELS.items():
        folder = f"counts/models/{file_name([name])}"
        found.append(Job(f"{folder}/eval", partial(_write_model, build, full=True)))
        found.append(Job(f"{folder}/train", partial(_write_model, build, train=True)))
    return found


def _write_layers(folder: Folder) -> None:
    for name, build in LAYERS.items():
        torch.manual_seed(0)
        layer, inputs = build()
        texts = ((table, partial(_count, layer.eval(), inputs, table)) for table in shipped_tables())
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
    for table in shipped_tables() if full else ("default", "exact", "fvcore"):
        folder.write(f"{table}.txt", attempt(partial(_count, model, inputs, table)))
    flops = quieten(fvflops.FlopCountAnalysis(model, inputs))
    if not train:
        folder.write("texts.txt", evaluate("texts", flops=flops, model=model, inputs=inputs))
    folder.write("trace.json", attempt(lambda: break_lines(flops.trace().to_json())))


def _count(model: Any, inputs: Any, table: str) -> str:
    flops = quieten(fvflops.FlopCountAnalysis(model, inputs, table=table))
    trace = flops.trace()
    found: dict[str, Any] = {"activations": fvflops.ActivationCountAnalysis.from_trace(trace, table=table)}
    for part in ("moved", "read", "written"):
        found[part] = fvflops.ByteCountAnalysis.from_trace(trace, table=table, part=part)
    return evaluate("counts", flops=flops, **{name: quieten(analysis) for name, analysis in found.items()})
