"""TorchScript modules that torch.jit.save wrote, traced or scripted."""

from __future__ import annotations

import warnings

import torch

from fvflops.analysis.files.archive_checks import check_script
from fvflops.analysis.files.file_kinds import require_trust
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions


def build(path: str, options: SourceOptions) -> BuiltModel:
    """Return a TorchScript module; its file does not contain the shapes of its inputs."""
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
