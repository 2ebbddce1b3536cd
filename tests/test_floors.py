"""The floors: a file imports from its own floor's part or from below, never upward."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "fvflops"
FLOORS = (
    {"units", "paths", "collector", "trace", "zoo"},
    {"formulas", "capture"},
    {"metrics", "reports"},
    {"analysis"},
    {"integrations"},
    {"cli"},
)
LEVEL = {part: level for level, parts in enumerate(FLOORS) for part in parts}


def imported_parts(path: Path, source: str) -> set[str]:
    """Return the parts of fvflops that a file imports anywhere in it, TYPE_CHECKING blocks included."""
    parts = set()
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path} imports relatively: name the module in full")
            modules = [node.module] if node.module != "fvflops" else [f"fvflops.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in modules if name.startswith("fvflops.")}
    return parts


def upward_imports(path: Path, source: str) -> set[str]:
    """Return the parts on the same floor, or above it, that a file of another part imports."""
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return {
        part for part in imported_parts(path, source) if part in LEVEL and part != own and LEVEL[part] >= LEVEL[own]
    }


FILES = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in LEVEL]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_imports_upward(path):
    assert path.relative_to(PACKAGE).parts[0].removesuffix(".py") in LEVEL
    # units, paths, collector and trace are one floor, on which trace may not need the others and they not each other.
    assert not upward_imports(path, path.read_text())


def test_the_reader_sees_an_upward_import():
    path = PACKAGE / "trace" / "trace.py"
    assert upward_imports(path, "def f():\n    from fvflops.capture.record import record_call") == {"capture"}
    assert upward_imports(path, "import fvflops.cli") == {"cli"}
    assert upward_imports(PACKAGE / "formulas" / "row.py", "from fvflops.trace import Call") == set()


def test_help_does_not_import_torch():
    code = (
        "import sys, fvflops.cli\ntry:\n    fvflops.cli.main(['--help'])\nfinally:\n    print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("False")
    assert "count" in result.stdout
