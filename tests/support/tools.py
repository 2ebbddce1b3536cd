"""Load the programs of tools/ as modules, for the tests of them: no test has an import statement for one."""

import importlib
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

from tests.support.checkout import TOOLS


def load_tool(name: str) -> ModuleType:
    """Run a program ("sweep.py") as a new module, or import a module of a package there ("sweeping.timm")."""
    path = sys.path[:]
    sys.path.insert(0, str(TOOLS))
    try:
        if not (TOOLS / name).is_file():
            return importlib.import_module(name)
        loader = SourceFileLoader(f"tool_{name.removesuffix('.py')}", str(TOOLS / name))
        spec = spec_from_loader(loader.name, loader)
        assert spec is not None
        module = module_from_spec(spec)
        sys.modules[loader.name] = module  # dataclasses look their module up
        loader.exec_module(module)
        return module
    finally:
        sys.path[:] = path  # a program extends it
