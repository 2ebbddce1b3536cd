"""Command lines: what each writes to the terminal and to files, and its exit code."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from pathlib import Path

from goldens import inner
from goldens.jobs import Folder, captured, file_name

NETS = "nets.py"


class Commands:
    """Runs command lines in a folder of its own, and writes a file for each."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._main = inner.command_line()
        self._kept: set[str] = set()
        self._names: set[str] = set()
        shutil.copyfile(Path(__file__).with_name(NETS), NETS)
        self.keep()

    def keep(self) -> None:
        """Take the files that there are now for inputs: they are not told of as outputs."""
        self._kept = set(self._files())

    def run(self, *words: str, name: str | None = None, terminal: bool = False) -> None:
        """Run one command line and write down what came out; the files that it wrote are told, and taken away."""
        code, out, err = captured(lambda: self._main(list(words)), terminal=terminal)
        parts = [f"$ fvflops {' '.join(words)}", f"exit code {code}", "--- stdout", out.rstrip("\n")]
        if err:
            parts += ["--- stderr", err.rstrip("\n")]
        for path in self._files():
            if path not in self._kept:
                parts += [f"--- file {path}", _read(Path(path)).rstrip("\n")]
                os.remove(path)
        name = name or file_name(words)
        if name in self._names:  # words that differ only in what a file's name cannot hold
            name += "_" + hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
        self._names.add(name)
        self._folder.write(f"{name}.txt", "\n".join(parts))

    def _files(self) -> list[str]:
        paths = (path for path in Path(".").rglob("*") if path.is_file())
        return sorted(str(path) for path in paths if "__pycache__" not in path.parts and ".git" not in path.parts)


def _read(path: Path) -> str:
    """Return the text of a file; of a picture made of pixels its size and a digest."""
    data = path.read_bytes()
    if data.startswith(b"\x89PNG"):
        width, height = struct.unpack(">II", data[16:24])
        return f"PNG, {width} x {height}, sha256 {hashlib.sha256(data).hexdigest()}"
    return data.decode("utf-8", errors="backslashreplace")


def write_help(folder: Folder) -> None:
    """Write the help of the program and of each command."""
    commands = Commands(folder)
    commands.run("--help", name="fvflops")
    commands.run("--version", name="version")
    for name in inner.commands():
        commands.run(name, "--help", name=name)
