"""Programs that `torch.export` exported: load them, and run them as modules."""

from __future__ import annotations

import os
import warnings
import zipfile
from typing import Any

from torch import nn

from fvflops.analysis.files.file_kinds import require_trust
from fvflops.analysis.files.program_archive import check_program


def is_program(source: object) -> bool:
    """Return whether `source` is a `torch.export.ExportedProgram`, without importing torch.export (which takes 1 s)."""
    return any(kind.__name__ == "ExportedProgram" for kind in type(source).__mro__)


def load_program(path: str | os.PathLike[str], *, trust: bool) -> Any:
    """Return the program that `torch.export.save` wrote, if the user trusts the file.

    Any other file raises ValueError that names it.
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise ValueError(f"{name}: there is no such file")
    if not zipfile.is_zipfile(name):  # torch would log a long warning
        raise ValueError(f"{name}: not a program of torch.export: it is not a complete zip archive")
    require_trust(name, "program", trust)
    check_program(name)
    from fvflops.torch_internals import load_archive

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export itself calls deprecated functions of torch
            # torch.export.load would try an archive that this cannot load as one of an old format, which is pickled.
            return load_archive(name).exported_programs["model"]
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")
        raise ValueError(f"{name}: not a program of torch.export: {reason}") from error


def program_module(program: Any) -> nn.Module:
    """Return the module that runs a program; it has the modules' names and classes of the model that was exported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: nn.Module = program.module()
    return module
