"""All jobs, in the order in which they are started, and the libraries that they need."""

from __future__ import annotations

from collections.abc import Sequence

from goldens import api, command_cases, counts, features, inner, mistakes, programs, timed
from goldens.jobs import Job

# What these write is the same whatever libraries are loaded.
_WITHOUT_LIBRARIES = ("cli/help", "counts/zoo/lenet5/train", "features/utilisation")


def find_jobs() -> list[Job]:
    """Return all jobs, those that take long first."""
    return [
        *programs.jobs(),
        *command_cases.jobs(),
        *features.jobs(),
        *timed.jobs(),
        *mistakes.jobs(),
        *counts.jobs(),
        *api.jobs(),
    ]


def import_libraries(jobs: Sequence[Job]) -> None:
    """Import what jobs share, the same for all: which ops are registered depends on it, and messages on that."""
    import torch

    import fvflops

    # What torch and fvflops import when they are first used, and the tables.
    for table in inner.conventions():
        fvflops.FlopCountAnalysis(torch.nn.Linear(2, 2), torch.ones(1, 2), table=table).total()
    if any(job.name not in _WITHOUT_LIBRARIES for job in jobs):
        import timm  # noqa: F401
        import torchvision  # noqa: F401
        import transformers

        # Its package imports the rest when a model is first named.
        transformers.BertModel, transformers.GPT2LMHeadModel, transformers.LlamaModel  # noqa: B018
