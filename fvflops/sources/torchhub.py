"""Models of a local folder with hubconf.py, as torch.hub loads it: `torchhub:FOLDER:ENTRYPOINT`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace

from fvflops.sources.call_arguments import call_factory, takes
from fvflops.sources.imports import import_attribute, import_file
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions

FILE = "hubconf.py"


def list_names() -> Sequence[str]:
    """Raise ValueError: the names are in a folder."""
    raise ValueError("the entry points of torchhub:FOLDER:ENTRYPOINT are the functions of the folder's hubconf.py")


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return the model of an entry point, called with `options.args`, and `pretrained=False` where it takes that.

    A folder without hubconf.py, an unknown entry point and a missing package raise ValueError.
    """
    folder, separator, entry_point = name.rpartition(":")
    path = os.path.join(folder, FILE)
    if not separator or not entry_point:
        raise ValueError(f"torchhub:{name} names no entry point: write torchhub:FOLDER:ENTRYPOINT")
    if not os.path.isfile(path):
        raise ValueError(f"torchhub:{name}: there is no file {path!r}; only local folders are loaded, not repositories")
    dependencies: Sequence[str] = vars(import_file(path)).get("dependencies", ())
    missing = [package for package in dependencies if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(f"torchhub:{folder} needs {', '.join(missing)}: pip install {' '.join(missing)}")
    factory, arguments = import_attribute(path, entry_point), options.args
    if takes(factory, "pretrained"):
        if any(text.startswith("pretrained=") for text in arguments):
            raise ValueError(f"--arg pretrained: torchhub:{name} is built with pretrained=False: omit it")
        arguments = (*arguments, "pretrained=False")
    return call_factory(factory, f"{path}:{entry_point}", replace(options, args=arguments))
