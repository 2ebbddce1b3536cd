"""The paths: what opens, what is refused, and that nothing outside the shipped files is reached by `fvflops://`."""

import os
import subprocess
import sys
import threading

import pytest

from fvflops import paths


def test_a_local_file_is_written_and_read(tmp_path):
    path = str(tmp_path / "a.txt")
    with paths.open_text(path, "w") as file:
        file.write("ä\n")
    with paths.open_text(path) as file:
        assert file.read() == "ä\n"
    assert paths.exists(path)
    assert paths.exists(str(tmp_path)) and not paths.exists(str(tmp_path / "none"))
    assert paths.read_text(path, 2) == "ä\n"
    assert paths.read_text(path, 1) is None


def test_a_folder_is_made_with_those_that_it_lies_in(tmp_path):
    for _ in range(2):
        paths.make_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        paths.make_folder(str(tmp_path / "file"))
    with pytest.raises(PermissionError, match="choose another path"):
        paths.make_folder("fvflops://runs")


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "fvflops://" + "x" * 300, "fvflops://a\0b", "", "\ud800"])
def test_a_name_that_no_file_can_have_does_not_exist(path):
    assert not paths.exists(path)


def test_a_shipped_file_is_not_written():
    with pytest.raises(PermissionError, match="choose another path"):
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


def list_paths_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("old")
    long, link = tmp_path / ("x" * 300), tmp_path / "link"
    link.symlink_to(link)
    return [
        *(tmp_path, tmp_path / "file" / "new", long, link),
        *(f"{tmp_path}/a\0b", f"{tmp_path}/\ud800", "/dev/null/x", ""),
    ]


def test_what_cannot_be_written_is_told_in_a_line_and_leaves_nothing(tmp_path):
    for path in map(str, list_paths_that_cannot_be_written(tmp_path)):
        with pytest.raises(OSError, match="cannot be written: ") as caught:
            paths.check_writable(path)
        assert str(caught.value).startswith(path) and "\n" not in str(caught.value)
    paths.check_writable(str(tmp_path / "new" / "folder" / "a.txt"))
    paths.check_writable(str(tmp_path / "file"))
    assert sorted(os.listdir(tmp_path)) == ["file", "link"] and (tmp_path / "file").read_text() == "old"


def test_what_was_there_stays_where_the_writing_fails(tmp_path):
    def write_half():
        yield "new" * 100_000
        raise KeyboardInterrupt

    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o640)
    with pytest.raises(KeyboardInterrupt):
        paths.write_text(str(path), write_half())
    assert path.read_text() == "old"
    paths.write_text(str(path), ["a", "\ud800"])
    assert path.read_text() == "a\\ud800" and path.stat().st_mode & 0o777 == 0o640
    link = tmp_path / "new" / "link"
    paths.append_text(str(tmp_path / "new" / "b.txt"), "c")
    link.symlink_to(path)
    paths.write_text(str(link), "d")
    assert link.is_symlink() and path.read_text() == "d"
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        paths.write_text("/dev/full", "x")
    with pytest.raises(IsADirectoryError) as caught:  # what may not be opened for writing is not replaced either
        paths.write_text(str(tmp_path / "new"), "x")
    assert caught.value.filename == str(tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "new"]


def test_a_pipe_is_neither_waited_for_nor_replaced(tmp_path):
    place = tmp_path / "pipe"
    os.mkfifo(place)
    pipe = str(place)
    paths.check_writable(pipe)
    with pytest.raises(OSError, match="it is a pipe or a device: save it as a file"):
        paths.read_text(pipe, 10)
    with pytest.raises(OSError, match="it is a folder"):
        paths.read_text(str(tmp_path), 10)
    got = []
    reader = threading.Thread(target=lambda: got.append(place.read_text()))
    reader.start()
    paths.write_text(pipe, "text")
    reader.join(10)
    assert got == ["text"]


def test_a_large_file_is_not_read(tmp_path):
    (tmp_path / "a.txt").touch()
    os.truncate(tmp_path / "a.txt", 1 << 30)
    assert paths.read_text(str(tmp_path / "a.txt"), 1 << 20) is None
