"""Record a model factory from the files of a git revision, in a subprocess.

The commit's objects are written to a temporary directory: the working tree, the index and the refs are neither read nor
changed, and no code of the repository runs except the factory's file and its imports.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial

from fvflops.cli.git_objects import GitError, list_files, run_git, write_files
from fvflops.cli.subprocess_recording import record_in_subprocess
from fvflops.sources.options import SourceOptions
from fvflops.text import list_nearest
from fvflops.trace import Trace


@dataclass(frozen=True, slots=True)
class Revision:
    """A factory in a revision: the repository's folder, the full commit, the path in it, and the function's name."""

    text: str
    repository: str
    commit: str
    path: str
    factory: str


def find_revision(text: str) -> Revision | None:
    """Return the Revision that `REV:file.py:factory` names, or None for a text of another form.

    The path is relative to the current folder, or else to the repository's. An unknown revision or file raises
    ValueError.
    """
    source, _, factory = text.rpartition(":")
    revision, separator, path = source.partition(":")
    if not separator or not revision or not factory or not path.endswith(".py") or os.path.isfile(source):
        return None
    folder = os.path.dirname(os.path.abspath(path)) if os.path.isabs(path) else os.getcwd()
    try:
        repository = run_git(folder, "rev-parse", "--show-toplevel")
        commit = _find_commit(folder, revision)
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
    """Return the Trace of a revision's factory, recorded in a subprocess; a failure raises ValueError.

    A line on standard error names the file and the commit whose code runs.
    """
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
        repository = os.path.realpath(revision.repository)
        # Entries of sys.path inside the working tree are mapped to the revision's files.
        map_path = partial(_map_path, repository=repository, tree=tree)
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


def _find_commit(folder: str, revision: str) -> str:
    try:
        return run_git(folder, "rev-parse", "--verify", "--end-of-options", revision + "^{commit}")
    except GitError:
        raise GitError(f"this git repository has no revision {revision}") from None
