"""Revisions of a git repository: the files are the commit's, and nothing of the repository runs but the factory."""

import json
import os
import stat
import subprocess
import sys

import pytest

from fvflops.cli import main
from fvflops.cli.revisions import Entry, GitError, find_revision, list_files, write_files
from tests.support.git_repository import git, state_of
from tests.support.git_repository import repository as repository

HOOKS = (
    *("post-checkout", "post-index-change", "pre-commit", "reference-transaction"),
    *("fsmonitor-watchman", "post-rewrite", "update"),
)


def write_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def hostile(repository, tmp_path):
    """A repository that runs a program wherever git lets it; each leaves its name in a file."""
    ran = tmp_path / "ran"
    ran.write_text("")

    def program(name, then=""):
        return write_script(tmp_path / "programs" / name, f"echo {name} >> {ran}\n{then}")

    for path in (".gitattributes", ".git/info/attributes"):
        (repository / path).parent.mkdir(exist_ok=True)
        (repository / path).write_text("*.py filter=evil diff=evil ident eol=crlf\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "two")
    for folder in (repository / ".git" / "hooks", repository / "hooks"):
        for name in HOOKS:
            write_script(folder / name, f"echo {name} >> {ran}")
    settings = {
        "core.hooksPath": str(repository / "hooks"),
        "core.fsmonitor": program("fsmonitor"),
        "filter.evil.smudge": program("smudge", "cat"),
        "filter.evil.clean": program("clean", "cat"),
        "filter.evil.required": "true",
        "diff.evil.textconv": program("textconv", 'cat "$1"'),
        "core.pager": program("pager", "cat"),
        "core.sshCommand": program("ssh", "exit 1"),
        "core.alternateRefsCommand": program("alternates"),
        "credential.helper": program("helper"),
    }
    for name, value in settings.items():
        git(repository, "config", name, value)
    ran.write_text("")
    return repository, ran


def export(folder, revision, tree):
    tree.mkdir()
    write_files(str(folder), list_files(str(folder), revision), str(tree))
    return tree


def test_no_program_of_a_repository_runs(hostile, tmp_path):
    folder, ran = hostile
    before = state_of(folder)
    assert find_revision("HEAD:models/net.py:build").path == "models/net.py"
    tree = export(folder, "HEAD~1", tmp_path / "tree")
    assert ran.read_text() == ""
    assert state_of(folder) == before
    # Without the filter, and with the line ends, that the commit has.
    assert (tree / "models" / "width.py").read_bytes() == b"WIDTH = 8"
    git(folder, "checkout", "--quiet", "--force", "HEAD~1")
    assert {"smudge", "post-checkout", "fsmonitor"} <= set(ran.read_text().split())


def test_a_revision_of_a_hostile_repository_is_compared_with_the_working_tree(hostile, capsys):
    folder, ran = hostile
    before = state_of(folder)
    assert main(["diff", "HEAD~1:models/net.py:build", "models/net.py:build", "--format", "json"]) == 0
    told = capsys.readouterr()
    written = json.loads(told.out)
    assert written["total"]["flops"] == {"before": 144, "after": 288, "difference": 144, "ratio": 2.0}
    assert [(module["after_name"], module["flops"]["difference"]) for module in written["modules"]] == [
        ("0", 96),
        ("2", 48),
    ]
    commit = git(folder, "rev-parse", "HEAD~1")[:12]
    assert f"HEAD~1:models/net.py:build: runs models/net.py of commit {commit} and what it imports" in told.err
    assert ran.read_text() == "" and state_of(folder) == before
    for name in ("net", "width"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "named",
    [
        {"GIT_DIR": ".git"},
        {"GIT_DIR": ".git", "GIT_WORK_TREE": "."},
        {"GIT_DIR": "../elsewhere.git", "GIT_WORK_TREE": "."},
        {"GIT_INDEX_FILE": "no/such/index"},
        {"GIT_DIR": ".git", "GIT_INDEX_FILE": ".git/other", "GIT_OBJECT_DIRECTORY": ".git/objects"},
    ],
    ids=str,
)
def test_gits_own_variables_may_be_relative(repository, tmp_path, monkeypatch, named):
    if "elsewhere" in named.get("GIT_DIR", ""):
        (repository / ".git").rename(tmp_path / "elsewhere.git")
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    for path in ("models/net.py", str(repository / "models" / "net.py")):
        revision = find_revision(f"HEAD:{path}:build")
        assert (revision.path, os.path.realpath(revision.repository)) == ("models/net.py", str(repository))
    tree = export(revision.repository, revision.commit, tmp_path / "tree")
    assert (tree / "models" / "width.py").read_text() == "WIDTH = 8"
    assert not (repository / ".git" / "other").exists()


def test_all_kinds_of_entries_are_written_as_the_commit_has_them(repository, tmp_path):
    write_script(repository / "run.sh", "true")
    (repository / "link.py").symlink_to("models/net.py")
    (repository / "folder").symlink_to("models")
    (repository / "dangling").symlink_to("/nowhere/at all")
    (repository / "spaced name é.bin").write_bytes(b"\r\n\0\xff" * 1000)
    (repository / "empty").write_text("")
    (repository / "deep" / "er").mkdir(parents=True)
    (repository / "deep" / "er" / "big").write_bytes(os.urandom(3 << 20))
    git(repository, "add", ".")
    commit = git(repository, "rev-parse", "HEAD").strip()
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{commit},module")
    git(repository, "commit", "--quiet", "--message", "kinds")
    tree = export(repository, "HEAD", tmp_path / "tree")
    for name in ("run.sh", "spaced name é.bin", "empty", "deep/er/big"):
        assert (tree / name).read_bytes() == (repository / name).read_bytes()
    for name in ("link.py", "folder", "dangling"):
        assert os.readlink(tree / name) == os.readlink(repository / name)
    assert (tree / "run.sh").stat().st_mode & stat.S_IXUSR
    assert not (tree / "empty").stat().st_mode & stat.S_IXUSR
    assert list((tree / "module").iterdir()) == []


@pytest.mark.parametrize("path", ["../out.py", "a/../../out.py", ".git/hooks/x", "a//b", "/out.py"])
def test_a_path_that_leads_out_is_refused(repository, tmp_path, path):
    name = git(repository, "rev-parse", "HEAD:models/net.py").strip()
    (tmp_path / "tree").mkdir()
    with pytest.raises(GitError, match="invalid path"):
        write_files(str(repository), [Entry("100644", name, path)], str(tmp_path / "tree"))


def test_no_file_is_written_through_a_link(repository, tmp_path):
    name = git(repository, "rev-parse", "HEAD:models/net.py").strip()
    link = subprocess.run(
        ["git", "hash-object", "-w", "--stdin"], cwd=repository, input=str(tmp_path), capture_output=True, text=True
    ).stdout.strip()
    (tmp_path / "tree").mkdir()
    with pytest.raises(OSError):
        write_files(
            str(repository), [Entry("120000", link, "a"), Entry("100644", name, "a/out.py")], str(tmp_path / "tree")
        )
    assert not (tmp_path / "out.py").exists()


def test_a_partial_clone_fetches_nothing(hostile, tmp_path):
    folder, ran = hostile
    git(folder, "config", "uploadpack.allowFilter", "true")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--filter=blob:none", "--no-checkout", f"file://{folder}", str(clone))
    for url in (f"file://{folder}", "ssh://example.invalid/x"):
        git(clone, "remote", "set-url", "origin", url)
        git(clone, "config", "core.sshCommand", str(tmp_path / "programs" / "ssh"))
        ran.write_text("")
        (tmp_path / "tree").mkdir(exist_ok=True)
        with pytest.raises(GitError, match="is missing from this clone, and nothing is fetched"):
            write_files(str(clone), list_files(str(clone), "HEAD"), str(tmp_path / "tree"))
        assert ran.read_text() == ""


def test_a_machine_without_git_is_told(repository, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    with pytest.raises(ValueError, match=r"HEAD:models/net.py:build: a revision needs git, which is not installed"):
        find_revision("HEAD:models/net.py:build")
