"""Models from files, recognised by their content."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch

from fvflops.analysis.files.archive_checks import recognise, require_trust
from fvflops.capture.model.read_module_tree import describe_inputs
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions

# Kinds of other files, and the remedy.
_REFUSED = {
    "trace": "is a saved Trace, and this command runs the model: name the model",
    "safetensors": "has weights (safetensors) and no architecture: name the model, such as transformers:CLASS",
    "gguf": "has weights (GGUF) and no architecture: name the model, such as transformers:CLASS",
    "damaged": "is not a program of torch.export: it is not a complete zip archive",
}
# Endings that belong to files: a name with one that does not exist is a missing file.
_ENDINGS = (
    *(".pt2", ".pt", ".pth", ".ts", ".onnx", ".bin", ".ckpt", ".pkl"),
    *(".safetensors", ".gguf", ".json", ".json.gz"),
)


def is_file(name: str) -> bool:
    """Return whether a MODEL argument names a file, existing or missing, and not `file.py:factory`.

    >>> is_file("model.pt2"), is_file("zoo:resnet50"), is_file("net.py:build")
    (True, False, False)
    """
    return os.path.isfile(name) or name.endswith(_ENDINGS)


def load_file(path: str, options: SourceOptions) -> BuiltModel:
    """Return the model in a file; one of another kind, a missing one, and code that is not trusted raise ValueError."""
    kind = recognise(path)
    if kind in _REFUSED:
        raise ValueError(f"{path} {_REFUSED[kind]}")
    if kind not in _LOADERS:
        known = "a program of torch.export (.pt2), TorchScript, ONNX, a pickled module or file.py:factory"
        raise ValueError(f"{path} is a file of no kind that contains a model: pass {known}")
    module, function = _LOADERS[kind]
    built: BuiltModel = getattr(importlib.import_module(module), function)(path, options)
    return built


def build_program(path: str, options: SourceOptions) -> BuiltModel:
    """Return the module that runs a program, which keeps the mode and the shapes for which it was exported."""
    # Programs and their classes take long to import.
    from fvflops.analysis.files.program_archive import load_program, program_module

    program = load_program(path, trust=options.trusts_file)
    if options.device not in (None, "meta"):
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, options.device)
    module = program_module(program)
    if options.device == "meta":
        module.to("meta")
    args, kwargs = program.example_inputs or (None, {})
    return BuiltModel(module, inputs=args, kwargs=kwargs, is_program=True, accepts=_describe_program(program))


def _describe_program(program: Any) -> str:
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
    limits = None if isinstance(size, int) else ranges.get(str(size))
    if limits is None:
        return str(size)
    upper = str(limits.upper)
    return f"{limits.lower}.." + (upper if upper.isdecimal() else "")


def build_script(path: str, options: SourceOptions) -> BuiltModel:
    """Return a TorchScript module; its file does not contain the shapes of its inputs."""
    from fvflops.analysis.files.archive_checks import check_script

    require_trust(path, "script", options.trusts_file)
    check_script(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            module = torch.jit.load(path, map_location=options.device or "cpu")
    except RuntimeError as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        raise ValueError(f"{path}: torch.jit.load cannot read it: {reason}") from error
    return BuiltModel(module)


# Kind of file → the module and function that return its model; a kind that can run code is loaded by way of
# `require_trust`.
_LOADERS = {
    "program": (__name__, "build_program"),
    "script": (__name__, "build_script"),
    "onnx": ("fvflops.sources.onnx", "build"),
    "pickle": ("fvflops.sources.weights.pickled", "build"),
}
