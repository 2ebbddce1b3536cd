"""Programs that torch.export saved (.pt2), on their example inputs."""

from __future__ import annotations

import zipfile
from typing import Any

import torch

from fvflops.analysis.exported_program import load_program, program_module
from fvflops.capture.model.model import describe_inputs
from fvflops.sources.files.pickled import read_unsafe_globals, refusal
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions

# Beginnings of a pickle, and of the zip archive in which torch.save writes one.
_PICKLES = (b"\x80", b"PK")


def build(path: str, options: SourceOptions) -> BuiltModel:
    """Return the module that runs a program, which keeps the mode and the shapes for which it was exported."""
    if not options.unpickle:
        _check_pickles(path)
    program = load_program(path)
    if options.device not in (None, "meta"):
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, options.device)
    module = program_module(program)
    if options.device == "meta":
        module.to("meta")
    args, kwargs = program.example_inputs or (None, {})
    return BuiltModel(module, inputs=args, kwargs=kwargs, is_program=True, accepts=_describe(program))


def _check_pickles(path: str) -> None:
    """Raise ValueError where a program's example inputs or constants are pickles that torch.export would run."""
    if not zipfile.is_zipfile(path):
        return  # load_program says so
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                if not file.read(2).startswith(_PICKLES):
                    continue
            if names := read_unsafe_globals(archive.read(name)):
                raise ValueError(refusal(path, f"contains a pickle, {name.rpartition('/')[2]}", names))


def _describe(program: Any) -> str:
    """Return the inputs that a program accepts, such as "x: float32[2..16, 3]"."""
    ranges = {str(symbol): limits for symbol, limits in program.range_constraints.items()}
    shown = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs:
            if isinstance(value, torch.Tensor):
                sizes = ", ".join(_describe_size(size, ranges) for size in value.shape)
                shown.append(f"{node.name}: {str(value.dtype).removeprefix('torch.')}[{sizes}]")
            else:
                shown += [f"{node.name}: {text}" for text in describe_inputs((value,), {})]
    return ", ".join(shown)


def _describe_size(size: int | torch.SymInt, ranges: dict[str, Any]) -> str:
    if isinstance(size, int):
        return str(size)
    limits = ranges.get(str(size))
    if limits is None:
        return str(size)
    upper = str(limits.upper)
    return f"{limits.lower}.." + (upper if upper.isdecimal() else "")
