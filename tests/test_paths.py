"""The paths: what opens, what is refused, and that nothing outside the shipped files is reached by `fvflops://`."""

import subprocess
import sys

import pytest

from fvflops import paths


def test_a_local_file_is_written_and_read(tmp_path):
    path = str(tmp_path / "a.txt")
    with paths.open_text(path, "w") as file:
        file.write("ä\n")
    with paths.open_text(path) as file:
        assert file.read() == "ä\n"
    assert paths.exists(path)
    assert not paths.exists(str(tmp_path))
    assert paths.read_text(path, 2) == "ä\n"
    assert paths.read_text(path, 1) is None


def test_a_folder_is_made_with_those_that_it_lies_in(tmp_path):
    for _ in range(2):
        paths.make_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        paths.make_folder(str(tmp_path / "file"))
    with pytest.raises(PermissionError, match="choose a path of your own"):
        paths.make_folder("fvflops://runs")


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "fvflops://" + "x" * 300, "fvflops://a\0b", "", "\ud800"])
def test_a_name_that_no_file_can_have_does_not_exist(path):
    assert not paths.exists(path)


def test_a_shipped_file_is_not_written():
    with pytest.raises(PermissionError, match="choose a path of your own"):
        paths.open_text("fvflops://default.yaml", "w")


@pytest.mark.parametrize("name", ["", ".", "..", "../setup.cfg", "/etc/passwd", "no.yaml", "./default.yaml"])
def test_a_name_that_is_not_shipped_is_refused(name):
    assert not paths.exists(f"fvflops://{name}")
    with pytest.raises(FileNotFoundError, match="fvflops ships no file"):
        paths.open_text(f"fvflops://{name}")


def test_iopath_knows_shipped_files():
    manager = paths.path_manager()
    assert manager.isfile("fvflops://fvcore.yaml")
    assert manager.exists("fvflops://fvcore.yaml")
    assert not manager.exists("fvflops://nothing.yaml")
    with open(manager.get_local_path("fvflops://fvcore.yaml"), encoding="utf-8") as file:
        assert file.read() == paths.read_text("fvflops://fvcore.yaml", 1 << 20)


def test_iopath_is_imported_for_uris_alone():
    code = (
        "import sys\nfrom fvflops import paths\nfrom fvflops.formulas import load_table\n"
        "load_table('default')\nprint('iopath' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("base", "relative", "joined"),
    [
        ("a/b.yaml", "c.yaml", "a/c.yaml"),
        ("b.yaml", "c.yaml", "c.yaml"),
        ("a/b.yaml", "/c.yaml", "/c.yaml"),
        ("s3://a/b.yaml", "c.yaml", "s3://a/c.yaml"),
        ("a/b.yaml", "fvflops://c.yaml", "fvflops://c.yaml"),
    ],
)
def test_a_name_in_a_file_is_beside_it(base, relative, joined):
    assert paths.join(base, relative) == joined
