"""What a release consists of: metadata, extras, changelog, citation, deprecated names, schemas of files."""

import configparser
import datetime
import importlib.metadata
import re
import subprocess
import sys
import warnings

import pytest
import yaml

import fvflops
from fvflops.formulas import loading
from fvflops.reports import count_json, html
from fvflops.reports.formats import json as document_json
from fvflops.trace import codec
from tests.support.checkout import ROOT, TOOLS
from tests.support.documentation.pages import links, target
from tests.support.tools import load_tool

RUNTIME = ["iopath", "pyyaml", "tabulate", "torch"]
IMPORTED = ("fvflops", "iopath", "portalocker", "tabulate", "torch", "torchgen", "functorch", "yaml")
OTHER_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SCHEMAS = {
    "Trace": codec.SCHEMA,
    "summary (`fvflops count --format json`)": count_json.SCHEMA,
    "JSON of the other commands": document_json.SCHEMA,
    "page (`--format html`)": html.SCHEMA,
    "formula table": loading.SCHEMA,
}


def read_setup():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config


SETUP = read_setup()


def items(text):
    return [line for line in text.splitlines() if line]


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower()


def test_four_packages_are_needed_and_each_has_a_lower_bound():
    required = items(SETUP["options"]["install_requires"])
    assert sorted(map(name_of, required)) == RUNTIME
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+(a0)?", requirement) for requirement in required)


def test_the_package_imports_nothing_else_that_is_not_an_extra():
    """Without NumPy and other packages a model is counted, the public names import and ranks are planned."""
    code = f"""
import builtins, sys, warnings
sys.modules["numpy"] = None
allowed = {{*sys.stdlib_module_names, *{IMPORTED!r}}}
original = builtins.__import__
def guarded(name, globals=None, *rest, **options):
    if (globals or {{}}).get("__name__", "").startswith("fvflops") and name.partition(".")[0] not in allowed:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return original(name, globals, *rest, **options)
builtins.__import__ = guarded
from fvflops.cli import main
assert main(["count", "zoo:lenet5"]) == 0
warnings.simplefilter("ignore")  # torch's, of NumPy
import fvflops, torch
for name in fvflops.__all__:
    getattr(fvflops, name)
model, tokens = fvflops.zoo.build("llama_tiny", device="meta"), torch.ones(1, 16, dtype=torch.int64)
mesh = {{"pp": 2, "fsdp": 2, "tp": 2}}
print(len(fvflops.plan_step(model, tokens, mesh=mesh, microbatches=2).ranks))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "417K" in done.stdout and done.stdout.endswith("\n2\n")


def test_the_version_is_written_once_and_imports_nothing():
    assert SETUP["metadata"]["version"] == "attr: fvflops.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", fvflops.__version__)
    code = "import sys, fvflops; print(fvflops.__version__, 'torch' in sys.modules, 'yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == [fvflops.__version__, "False", "False"]


def test_the_lowest_python_is_the_first_classifier():
    versions = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert SETUP["options"]["python_requires"] == f">={versions[0]}"
    assert [version for version in versions if int(version[2:]) < int(versions[0][2:])] == []
    assert versions == sorted(versions, key=lambda version: int(version[2:]))


def test_each_extra_that_a_message_names_exists():
    extras = set(SETUP["options.extras_require"])
    sources = "".join(path.read_text() for path in (ROOT / "fvflops").rglob("*.py"))
    named = set(re.findall(r"""extra=["']([\w-]+)["']""", sources)) | set(re.findall(r"fvflops\[([\w-]+)\]", sources))
    assert named and named <= extras, named - extras


def test_the_tested_versions_satisfy_the_lower_bounds():
    packaging = pytest.importorskip("packaging.requirements", reason="reads requirements")
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (TOOLS / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    texts = [SETUP["options"]["install_requires"], *SETUP["options.extras_require"].values()]
    for line in {line for text in texts for line in items(text) if not line.startswith("#")}:
        requirement = packaging.Requirement(line)
        version = pinned.get(requirement.name.lower().replace("_", "-"))
        assert version is None or requirement.specifier.contains(version, prereleases=True), line


def test_an_extra_for_users_has_lower_bounds():
    extras = SETUP["options.extras_require"]
    for extra in extras.keys() - {"test", "peers", "kernels", "export", "docs"}:
        assert all(">=" in line for line in items(extras[extra]) if not line.startswith("#")), extra
    bounds = {}
    for line in {line for extra in extras.values() for line in items(extra) if ">=" in line}:
        name, _, bound = line.partition(">=")
        assert bounds.setdefault(name, bound) == bound, f"{name} has two bounds"


def test_each_file_of_the_package_is_packaged():
    patterns = {package: items(text.replace(", ", "\n")) for package, text in SETUP["options.package_data"].items()}
    matched = set()
    for package, globs in patterns.items():
        folder = ROOT / package.replace("fvflops.configs", "configs").replace(".", "/")
        matched |= {path for pattern in globs for path in folder.glob(pattern)}
    files = {path for name in ("fvflops", "configs") for path in (ROOT / name).rglob("*") if path.is_file()}
    unpackaged = {path for path in files - matched if path.suffix not in (".py", ".pyc") and path.name != ".DS_Store"}
    assert not unpackaged
    assert all((path / "__init__.py").exists() for path in {file.parent for file in files if file.suffix == ".py"})


def test_the_page_names_no_version_below_the_lower_bounds():
    rows = load_tool("matrix_table.py").read_rows((ROOT / "docs" / "reference" / "versions.md").read_text())
    lowest = next(line for line in items(SETUP["options"]["install_requires"]) if line.startswith("torch>="))
    lowest = tuple(map(int, lowest.removeprefix("torch>=").removesuffix("a0").split(".")))
    assert rows
    for (_, torch), numbers in rows.items():
        version, failed = tuple(map(int, re.findall(r"\d+", torch)))[: len(lowest)], numbers.rpartition(" | ")[2]
        assert version < lowest or failed == "0", f"torch {torch} is supported, and {failed} tests failed"


def test_the_changelog_has_this_release_with_date_and_link():
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[(\d[^\]]*)\] - (\S+)$", text, re.MULTILINE)
    assert releases[0][0] == fvflops.__version__
    dates = [datetime.date.fromisoformat(date) for _, date in releases]
    assert dates == sorted(dates, reverse=True)
    assert [name for name, _ in releases] == re.findall(r"^\[(\d[^\]]*)\]: https://", text, re.MULTILINE)
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Counts"}


def test_the_citation_is_of_this_release():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    required = {"cff-version", "message", "title", "authors"}
    assert required <= set(citation) and citation["cff-version"] == "1.2.0"
    released = re.search(rf"\[{re.escape(fvflops.__version__)}\] - (\S+)", (ROOT / "CHANGELOG.md").read_text())[1]
    assert (citation["version"], citation["date-released"]) == (fvflops.__version__, released)
    assert citation["license"] == SETUP["metadata"]["license_expression"]
    assert citation["repository-code"] == SETUP["metadata"]["url"]


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_links_of_the_other_pages_lead_to_files(page):
    found = [target(page, link) for link in links((ROOT / page).read_text())]
    assert all(file.exists() for file, _ in filter(None, found)), page


def test_a_deprecated_name_warns_with_its_new_name_and_still_works(monkeypatch):
    monkeypatch.setitem(fvflops._SOURCES, "count_flops", fvflops._SOURCES["flop_count"])
    monkeypatch.setitem(fvflops._DEPRECATED, "count_flops", "2.0")
    with pytest.warns(DeprecationWarning) as caught:
        found = fvflops.count_flops
    assert found is fvflops.flop_count
    (warning,) = caught
    assert (
        str(warning.message) == "fvflops.count_flops is deprecated and will be removed in 2.0: use fvflops.flop_count"
    )
    assert warning.filename == __file__


def test_no_other_name_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in fvflops.__all__:
            getattr(fvflops, name)
    assert fvflops._DEPRECATED.keys() <= fvflops._SOURCES.keys()
    assert not fvflops._DEPRECATED.keys() & set(fvflops.__all__)


def test_the_page_of_versions_has_the_schemas():
    text = (ROOT / "docs" / "reference" / "versions.md").read_text()
    rows = re.findall(r"^\| (.*) \| (\d+) \|$", text, re.MULTILINE)
    assert {name: int(schema) for name, schema in rows if name in SCHEMAS} == SCHEMAS


def test_the_installed_metadata_are_those_of_the_checkout():
    try:
        found = importlib.metadata.distribution("fvflops")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fvflops is not installed")
    scripts = {point.name for point in found.entry_points}
    assert scripts == {"fvflops"}
