"""Add PEFT adapters, such as LoRA, to a model."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import nn

from fvflops.sources.imports import import_library
from fvflops.sources.options import read_settings

ADAPTER_CONFIG = "adapter_config.json"


def check_adapter(folder: str) -> None:
    if not os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)):
        raise ValueError(f"--adapter {folder}: there is no {ADAPTER_CONFIG}: name the folder of a PEFT adapter")


def add_adapter(model: nn.Module, folder: str) -> nn.Module:
    """Return a model with the adapter that a folder's adapter_config.json describes; its weights are not read.

    The model's modules keep their names where the adapter is part of them (LoRA and most others); an adapter of virtual
    tokens (prompt and prefix tuning) wraps the model. A missing or broken configuration, or one that does not fit the
    model, raises ValueError.
    """
    check_adapter(folder)
    peft = import_library("peft")
    settings = read_settings(os.path.join(folder, ADAPTER_CONFIG), "--adapter")
    # PEFT would import the module that megatron_core names.
    if settings.get("megatron_config"):
        raise ValueError(f"--adapter {folder}: adapters of Megatron layers are not supported: omit megatron_config")
    try:
        config: Any = peft.PeftConfig.from_pretrained(folder)
        # Saved adapters are marked for inference, without gradients; count them as trainable.
        config.inference_mode = False
        if config.is_prompt_learning:
            wrapped: nn.Module = peft.get_peft_model(model, config)
            return wrapped
        peft.inject_adapter_in_model(config, model)
    except json.JSONDecodeError as error:
        raise ValueError(f"--adapter {folder}: {ADAPTER_CONFIG}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"--adapter {folder}: {' '.join(str(error).split())}") from error
    return model
