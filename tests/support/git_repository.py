"""A git repository with a model whose width differs between the commit and the working tree."""

import subprocess
import sys

import pytest

FACTORY = """
import torch
from torch import nn
from width import WIDTH

def build():
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)), torch.ones(3, 4)
"""


def git(folder, *command):
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *settings, *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "net.py").write_text(FACTORY)
    (folder / "models" / "width.py").write_text("WIDTH = 8")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "one")
    (folder / "models" / "width.py").write_text("WIDTH = 16")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("net", "width"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def state_of(repository):
    files = sorted(path for path in repository.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
