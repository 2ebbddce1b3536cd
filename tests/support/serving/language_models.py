"""Small language models of transformers with random weights, of every kind of cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

transformers = pytest.importorskip("transformers", minversion="5.23")

# Tokens of a sliding window, and of a chunk of Llama 4, of all that have one.
WINDOW = 80
_OPTIONS = yaml.safe_load((Path(__file__).parent / "language_models.yaml").read_text())
_SMALL = _OPTIONS.pop("small")
NAMES = tuple(_OPTIONS)


def _complete(options):
    options = {name: _complete(value) if isinstance(value, dict) else value for name, value in options.items()}
    if not options.pop("small", False):
        return options
    return {name: value for name, value in {**_SMALL, **options}.items() if value is not None}


def build(name: str, **options: Any) -> nn.Module:
    """Return a small model of a class of transformers; options change its file's."""
    define_torchvision_schemas()
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**_complete({**_OPTIONS[name], **options})))
    return model.eval()
