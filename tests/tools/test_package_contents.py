"""tools/package_contents.py: what is missing in an sdist or a wheel, or too many."""

import io
import tarfile
import zipfile

import pytest

from tests.support.tools import load_tool


@pytest.fixture(scope="module")
def contents():
    return load_tool("package_contents.py")


def write_dists(folder, source, *, without=(), extra=()):
    """Write the files of a source, an sdist and a wheel of it."""
    names = [*(name for name in source if name not in without), *extra]
    for name in source:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_text(name)
    with tarfile.open(folder / "p-1.tar.gz", "w:gz") as archive:
        for name in (*names, "PKG-INFO", "p.egg-info/SOURCES.txt"):
            archive.addfile(tarfile.TarInfo(f"p-1/{name}"), io.BytesIO())
    with zipfile.ZipFile(folder / "p-1.whl", "w") as archive:
        for name in names:
            if name.startswith(("fvflops/", "configs/")):
                archive.writestr(name if name.startswith("fvflops/") else f"fvflops/{name}", "")
        archive.writestr("p-1.dist-info/METADATA", "")
    return [str(folder / name) for name in ("source", "p-1.tar.gz", "p-1.whl")]


SOURCE = ("setup.cfg", "README.md", "fvflops/__init__.py", "fvflops/reports/a.js", "configs/a.yaml", "tests/test_a.py")


def test_complete_packages_are_accepted(contents, tmp_path, capsys):
    assert contents.main(write_dists(tmp_path, SOURCE)) == 0
    printed = capsys.readouterr()
    assert printed.out == "p-1.tar.gz: 5 files, 0.0 MB\np-1.whl: 3 files, 0.0 MB\n" and printed.err == ""


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"without": ["tests/test_a.py"]}, ["p-1.tar.gz lacks 1 files: tests/test_a.py"]),
        (
            {"without": ["fvflops/reports/a.js"]},
            [f"{name} lacks 1 files: fvflops/reports/a.js" for name in ("p-1.tar.gz", "p-1.whl")],
        ),
        (
            {"extra": ["fvflops/old.py"]},
            [f"{name} has 1 files too many: fvflops/old.py" for name in ("p-1.tar.gz", "p-1.whl")],
        ),
    ],
)
def test_a_file_too_few_or_too_many_is_named(contents, tmp_path, capsys, changes, problems):
    assert contents.main(write_dists(tmp_path, SOURCE, **changes)) == 1
    assert capsys.readouterr().err.splitlines() == problems
