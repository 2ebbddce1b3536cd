"""Load and record programs exported by `torch.export`, with the modules of the original model."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.formulas import FormulaTable
from fvflops.trace import ModuleTree, Trace


def is_program(source: object) -> bool:
    """Return whether `source` is a `torch.export.ExportedProgram`, without importing torch.export (which takes 1 s).

    >>> is_program(nn.Linear(2, 2))
    False
    """
    return any(kind.__name__ == "ExportedProgram" for kind in type(source).__mro__)


def load_program(path: str | os.PathLike[str]) -> Any:
    """Return the program that `torch.export.save` wrote; any other file raises ValueError naming it."""
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise ValueError(f"{name}: there is no such file")
    if not zipfile.is_zipfile(name):  # torch would log a long warning
        raise ValueError(f"{name}: not a program of torch.export: it is not a complete zip archive")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export itself calls deprecated functions of torch
            return torch.export.load(name)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")
        raise ValueError(f"{name}: not a program of torch.export: {reason}") from error


def record_program(
    program: Any,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    table: str | FormulaTable = "default",
    **options: Any,
) -> Trace:
    """Return the Trace of a program, with the module names and classes of the model that was exported.

    Without `inputs` it runs on its example inputs; a program that has none raises ValueError. The other arguments are
    those of FlopCountAnalysis.
    """
    if inputs is None and kwargs is None:
        if program.example_inputs is None:
            raise ValueError("the exported program has no example inputs: pass inputs")
        inputs, kwargs = program.example_inputs
    module, classes = _unflatten(program)
    flops = FlopCountAnalysis(module, inputs, kwargs=kwargs, table=table, **options)
    trace = flops.trace()
    by_name = {
        name: replace(module_info, class_name=classes.get(name, module_info.class_name))
        for name, module_info in trace.modules.by_name.items()
    }
    return replace(trace, modules=ModuleTree(by_name))


def _unflatten(program: Any) -> tuple[nn.Module, dict[str, str]]:
    """Return a module that runs the program, and name → class of the original modules."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = torch.export.unflatten(program)
    except Exception:  # a program without module hierarchy runs as one module
        return program.module(), {}
    classes = {}
    for name, part in module.named_modules(remove_duplicate=False):
        kind = part.type_name() if hasattr(part, "type_name") else None
        if isinstance(kind, str):
            classes[name] = kind.rpartition(".")[2]
    return module, classes
