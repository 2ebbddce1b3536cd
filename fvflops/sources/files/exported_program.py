"""Programs that torch.export saved (.pt2), on their example inputs."""

from __future__ import annotations

from typing import Any

import torch

from fvflops.analysis.files.run_exported import load_program, program_module
from fvflops.capture.model.read_module_tree import describe_inputs
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions


def build(path: str, options: SourceOptions) -> BuiltModel:
    """Return the module that runs a program, which keeps the mode and the shapes for which it was exported."""
    program = load_program(path, trust=options.trusts_file)
    if options.device not in (None, "meta"):
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, options.device)
    module = program_module(program)
    if options.device == "meta":
        module.to("meta")
    args, kwargs = program.example_inputs or (None, {})
    return BuiltModel(module, inputs=args, kwargs=kwargs, is_program=True, accepts=_describe(program))


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
