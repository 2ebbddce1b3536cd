"""Every file imports from its own part of the package or from lower layers."""

import subprocess
import sys

import pytest

import fvflops
from tests.support.checkout import ROOT, imported_names

PACKAGE = ROOT / "fvflops"
# The lowest first; parts in one layer do not import each other.
LAYERS = (
    ("units", "paths", "text", "garbage_collector", "torch_internals"),
    ("trace", "zoo"),
    ("formulas", "capture"),
    ("counting",),
    ("views",),
    ("reports",),
    ("analysis",),
    ("devices",),
    ("plan",),
    ("measure",),
    ("comparison",),
    ("compat", "integrations"),
    ("sources",),
    ("serve",),
    ("explain",),
    ("sweep",),
    ("cli",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def imported_modules(path, source):
    """Return the modules of fvflops, without its name, that a file imports anywhere, TYPE_CHECKING blocks included."""
    names = imported_names(source)
    assert not any(name.startswith(".") for name in names), f"{path} imports relatively: name the module in full"
    return {tuple(name.split(".")[1:]) for name in names if name.startswith("fvflops.")}


def forbidden_imports(path, source):
    """Return the imported parts that are in higher layers, or beside the file's own."""
    own = path.relative_to(PACKAGE).with_suffix("").parts
    found = set()
    for module in imported_modules(path, source):
        part = module[0]
        if part in LEVEL and part != own[0] and LEVEL[part] >= LEVEL[own[0]]:
            found.add(part)
    return found


FILES = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in LEVEL]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_imports_upward_or_sideways(path):
    assert path.relative_to(PACKAGE).parts[0].removesuffix(".py") in LEVEL
    assert not forbidden_imports(path, path.read_text())


def test_an_upward_and_a_sideways_import_are_found():
    trace = PACKAGE / "trace" / "trace.py"
    assert forbidden_imports(trace, "def f():\n    from fvflops.capture.run import record_call") == {"capture"}
    assert forbidden_imports(trace, "import fvflops.cli") == {"cli"}
    assert forbidden_imports(trace, "from fvflops import reports") == {"reports"}
    assert forbidden_imports(PACKAGE / "capture" / "run.py", "import fvflops.formulas.table") == {"formulas"}
    assert forbidden_imports(PACKAGE / "formulas" / "rows.py", "from fvflops.trace import Call") == set()
    assert forbidden_imports(PACKAGE / "plan" / "layout.py", "from fvflops.comparison.diff import x") == {"comparison"}


def test_help_does_not_import_torch():
    code = (
        "import sys, fvflops.cli\ntry:\n    fvflops.cli.main(['--help'])\nfinally:\n    print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("False")
    assert "count" in result.stdout


def import_graph():
    """Return module → the modules of fvflops that it imports anywhere, as dotted paths from the package."""
    modules = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
    modules = {parts[:-1] if parts[-1] == "__init__" else parts: path for parts, path in modules.items()}
    graph = {}
    for parts, path in modules.items():
        found = set()
        for name in imported_modules(path, path.read_text()):
            while name and name not in modules:
                name = name[:-1]
            # The `__init__` of each folder around a module runs before it.
            folders = {name[:depth] for depth in range(1, len(name))}
            found |= {".".join(part) for part in {name, *folders} if part != parts[: len(part)]}
        graph[".".join(parts)] = found - {".".join(parts), ""}
    return graph


def find_cycle(graph):
    """Return modules that import each other in a cycle, [] if there is no cycle."""
    remaining = dict(graph)
    while remaining:  # a module that imports none of these is in no cycle
        free = [module for module, imported in remaining.items() if not imported & remaining.keys()]
        if not free:
            path = [next(iter(remaining))]
            while path[-1] not in path[:-1]:
                path.append(next(iter(remaining[path[-1]] & remaining.keys())))
            return path[path.index(path[-1]) :]
        for module in free:
            del remaining[module]
    return []


def test_no_modules_import_each_other_in_a_cycle():
    graph = import_graph()
    assert len(graph) > 300 and graph["analysis.model_analysis"] >= {"trace.counts"}
    assert find_cycle(graph) == []


def test_a_cycle_is_found():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_folder_hides_a_public_name():
    """`fvflops.compare` is a function: a folder of that name would take its place once something imports it."""
    names = {path.stem for path in PACKAGE.iterdir()}
    assert not names & set(fvflops.__all__)
