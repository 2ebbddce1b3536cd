"""The schemas of torchvision's operators, which its wheel brings only with a CUDA build of torch.

With them defined, torchvision's Python models import and run on a CPU build; the operators themselves stay without
kernels, so a model that calls `nms` or `roi_align` still raises.
"""

import importlib.util
from pathlib import Path

import torch
import yaml

_libraries: list[torch.library.Library] = []


def define_torchvision_schemas() -> None:
    """Define the schemas, once, unless torchvision's own library can be loaded."""
    if _libraries or _load_own_library():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")):
        library.define(schema)
    # A library that is collected takes its schemas with it.
    _libraries.append(library)


def _load_own_library() -> bool:
    spec = importlib.util.find_spec("torchvision")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    for path in folder.glob("_C*") if folder is not None else ():
        try:
            torch.ops.load_library(str(path))
        except OSError:  # it is linked against CUDA libraries that a CPU build of torch does not bring
            return False
        return True
    return False
