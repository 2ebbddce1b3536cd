"""Record a model factory in a subprocess, of the files of a git revision or with its own `sys.path`."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, NamedTuple

from fvflops.analysis.trace_file import load_trace
from fvflops.cli.progress import activity
from fvflops.paths import PACKAGE
from fvflops.sources.options import SourceOptions
from fvflops.text import list_nearest
from fvflops.trace import Trace

_SETTINGS = (
    "core.hooksPath=" + os.devnull,
    "core.fsmonitor=false",
    "protocol.allow=never",  # a partial clone would fetch missing objects, by a program named in its settings
)
_PATHS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")
_PROGRAM, _LINK, _SUBMODULE = "100755", "120000", "160000"
# Files by which the processes exchange the request and the Trace.
REQUEST, RESULT = "request.pickle", "trace.json"


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
        text = " ".join(message.decode(errors="surrogateescape").split())
        raise GitError(f"git {command[0]}: {text or f'exited with status {process.returncode}'}")
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
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as errors:
        names.write("".join(f"{entry.name}\n" for entry in files).encode())
        names.seek(0)
        process = _start(folder, ("cat-file", "--batch"), stdin=names, stderr=errors)
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
                chunk = objects.read(min(size, 1 << 20))
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


@dataclass(frozen=True, slots=True)
class Revision:
    """A factory in a revision: the repository's folder, the full commit, the path in it, and the function's name."""

    text: str
    repository: str
    commit: str
    path: str
    factory: str


def find_revision(text: str) -> Revision | None:
    """Return the Revision that `REV:file.py:factory` names, None for another text; unknown ones raise ValueError."""
    source, _, factory = text.rpartition(":")
    revision, separator, path = source.partition(":")
    if not separator or not revision or not factory or not path.endswith(".py") or os.path.isfile(source):
        return None
    folder = os.path.dirname(os.path.abspath(path)) if os.path.isabs(path) else os.getcwd()
    try:
        repository = run_git(folder, "rev-parse", "--show-toplevel")
        try:
            commit = run_git(folder, "rev-parse", "--verify", "--end-of-options", revision + "^{commit}")
        except GitError:
            raise GitError(f"this git repository has no revision {revision}") from None
        files = [entry.path for entry in list_files(folder, commit)]
    except GitError as error:
        raise ValueError(f"{text}: {error}") from None
    absolute = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    relative = os.path.relpath(os.path.realpath(absolute), os.path.realpath(repository))
    for candidate in (relative.replace(os.sep, "/"), os.path.normpath(path).replace(os.sep, "/")):
        if candidate in files:
            return Revision(text, repository, commit, candidate, factory)
    raise ValueError(f"{text}: the revision {revision} has no file {path!r}{list_nearest(relative, files)}")


def record_revision(revision: Revision, options: SourceOptions, arguments: argparse.Namespace) -> Trace:
    """Return the Trace of a revision's factory, recorded in a subprocess; stderr names its file and commit."""
    with tempfile.TemporaryDirectory(prefix="fvflops-") as folder:
        tree = os.path.join(os.path.realpath(folder), "tree")
        os.mkdir(tree)
        try:
            write_files(revision.repository, list_files(revision.repository, revision.commit), tree)
        except GitError as error:
            raise ValueError(f"{revision.text}: {error}") from None
        print(
            f"{revision.text}: runs {revision.path} of commit {revision.commit[:12]} and what it imports, "
            "without the repository's hooks and filters",
            file=sys.stderr,
        )
        # Entries of sys.path inside the working tree are mapped to the revision's files.
        map_path = partial(_map_path, repository=os.path.realpath(revision.repository), tree=tree)
        working_folder = map_path(os.getcwd())
        model = f"{os.path.join(tree, *revision.path.split('/'))}:{revision.factory}"
        try:
            return record_in_subprocess(
                revision.text,
                model,
                replace(options, paths=tuple(map(map_path, options.paths))),
                arguments,
                folder=working_folder if working_folder.startswith(tree) else tree,
                map_path=map_path,
            )
        except ValueError as error:
            raise ValueError(str(error).replace(tree + os.sep, "")) from None


def _map_path(entry: str, *, repository: str, tree: str) -> str:
    real = os.path.realpath(entry)
    if real != repository and not real.startswith(repository + os.sep):
        return entry
    mapped = os.path.normpath(os.path.join(tree, os.path.relpath(real, repository)))
    # A virtual environment inside the repository's folder is not part of the revision.
    return mapped if os.path.isdir(mapped) else entry


def record_in_subprocess(
    subject: str,
    model: str,
    options: SourceOptions,
    arguments: argparse.Namespace,
    *,
    folder: str = ".",
    map_path: Callable[[str], str] = str,
) -> Trace:
    """Record a model, `file.py:factory`, in a subprocess whose working directory is `folder`, and return its Trace.

    `subject` names the model in error messages, such as its git revision. `map_path` maps each entry of this process's
    `sys.path` to the subprocess's. A failure raises ValueError.
    """
    package_folder = str(PACKAGE.parent)
    code = f"import sys; sys.path[:1] = [{package_folder!r}]; from fvflops.cli.open_analysis import answer; answer()"
    table = os.path.abspath(arguments.table) if os.path.isfile(arguments.table) else arguments.table
    path = [map_path(entry) for entry in sys.path if entry]
    with tempfile.TemporaryDirectory(prefix="fvflops-") as exchange:
        result = os.path.join(exchange, RESULT)
        with open(os.path.join(exchange, REQUEST), "wb") as file:
            pickle.dump((path, model, arguments, table, options), file)
        with activity(f"recording {subject}"):
            process = subprocess.run(
                [sys.executable, "-c", code, exchange],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="backslashreplace",
            )
        if process.returncode or not os.path.isfile(result):
            last_line = process.stderr[-2000:].strip().splitlines()[-1:]
            reason = last_line[0] if last_line else f"the subprocess exited with status {process.returncode}"
            raise ValueError(f"{subject}: {reason}")
        return load_trace(result)
