"""Read the objects of a git repository without running its hooks, filters or fsmonitor, and without fetching.

Only commands that read objects are called, and git's hooks and helper programs are disabled too.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

_SETTINGS = (
    "core.hooksPath=" + os.devnull,
    "core.fsmonitor=false",
    "protocol.allow=never",  # a partial clone would fetch missing objects, by a program named in its settings
)
_PATHS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")
_PROGRAM, _LINK, _SUBMODULE = "100755", "120000", "160000"
_CHUNK = 1 << 20


class GitError(ValueError):
    """A git command that failed, with git's message."""


class Entry(NamedTuple):
    """A path of a commit: its mode, the object's name, and the path from the repository's folder."""

    mode: str
    name: str
    path: str


def run_git(folder: str, *command: str) -> str:
    """Return the output of a git command in a folder; a failure raises GitError."""
    process = _start(folder, command, stdin=subprocess.DEVNULL)
    output, message = process.communicate()
    if process.returncode:
        raise GitError(_format_error(command, message, process.returncode))
    return os.fsdecode(output).removesuffix("\n")


def list_files(folder: str, commit: str) -> list[Entry]:
    """Return all paths of a commit, including submodules (without content)."""
    lines = run_git(folder, "ls-tree", "-r", "-z", "--full-tree", commit).split("\0")
    columns = [line.partition("\t") for line in lines if line]
    return [Entry(mode, name, path) for (mode, _, name), path in ((head.split(), path) for head, _, path in columns)]


def write_files(folder: str, entries: Sequence[Entry], tree: str) -> None:
    """Write the files of a commit into an empty folder, byte for byte.

    Symbolic links are written last, so that no file is written through one. A path outside the folder raises GitError,
    and so does a file that a partial clone does not have.
    """
    for entry in entries:
        parts = entry.path.split("/")
        if {"", ".", ".."} & set(parts) or parts[0].lower() == ".git":
            raise GitError(f"the revision has the invalid path {entry.path!r}, which is not written")
        directory = os.path.join(tree, *parts)
        os.makedirs(directory if entry.mode == _SUBMODULE else os.path.dirname(directory), exist_ok=True)
    files = sorted((entry for entry in entries if entry.mode != _SUBMODULE), key=lambda entry: entry.mode == _LINK)
    command = ("cat-file", "--batch")
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as errors:
        names.write("".join(f"{entry.name}\n" for entry in files).encode())
        names.seek(0)
        process = _start(folder, command, stdin=names, stderr=errors)
        assert process.stdout is not None
        with process, process.stdout as objects:
            for entry in files:
                header = objects.readline().decode().split()
                if header[1:2] != ["blob"]:
                    process.kill()
                    errors.seek(0)
                    message = " ".join(errors.read().decode(errors="replace").split())
                    raise GitError(
                        f"{entry.path} is missing from this clone, and nothing is fetched: fetch it with git first"
                        + (f" ({message})" if message else "")
                    )
                _write(objects, int(header[2]), os.path.join(tree, *entry.path.split("/")), entry.mode)


def _write(objects: IO[bytes], size: int, path: str, mode: str) -> None:
    if mode == _LINK:
        os.symlink(objects.read(size), os.fsencode(path))
    else:
        with open(path, "xb") as file:
            while size:
                chunk = objects.read(min(size, _CHUNK))
                if not chunk:
                    raise GitError(f"git ended before all of {path} was read")
                file.write(chunk)
                size -= len(chunk)
        if mode == _PROGRAM:
            os.chmod(path, 0o755)
    objects.read(1)  # the newline after the object


def _start(
    folder: str, command: Sequence[str], *, stdin: int | IO[bytes], stderr: int | IO[bytes] = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    environment = git_environment(os.environ)
    # With GIT_DIR set git takes the current directory for the working tree: do not change it.
    directory = None if "GIT_DIR" in environment else folder
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    try:
        return subprocess.Popen(
            ["git", "--no-pager", *settings, *command],
            cwd=directory,
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    except FileNotFoundError:
        raise GitError("a revision needs git, which is not installed") from None


def git_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for git: with absolute paths, and without the index, which is not read.

    >>> git_environment({"GIT_DIR": os.curdir})["GIT_DIR"] == os.getcwd()
    True
    """
    changed = {name: os.path.abspath(environment[name]) for name in _PATHS if environment.get(name)}
    disabled = {"GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    inherited = {name: value for name, value in environment.items() if name != "GIT_INDEX_FILE"}
    return {**inherited, **changed, **disabled}


def _format_error(command: Sequence[str], message: bytes, code: int) -> str:
    text = " ".join(message.decode(errors="surrogateescape").split())
    return f"git {command[0]}: {text or f'exited with status {code}'}"
