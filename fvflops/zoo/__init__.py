"""A zoo of reference models whose cost is published, in plain torch.nn."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fvflops.text import suggest
from fvflops.zoo import megatron_gpt, mpt
from fvflops.zoo.gpt2 import GPT2, GPT2_124M
from fvflops.zoo.lenet5 import LeNet5
from fvflops.zoo.llama import CONFIGS, Llama
from fvflops.zoo.mixtral import CONFIGS as MIXTRAL_CONFIGS
from fvflops.zoo.mixtral import Mixtral
from fvflops.zoo.resnet50 import ResNet50
from fvflops.zoo.vit_b_16 import ViTB16

__all__ = ["ZOO", "ZooEntry", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """One model of the zoo: how to build it, and its inputs.

    `inputs` has (name, shape, dtype) for each argument of forward, in order, dtype as torch names it. Sizes are fields
    of `config` where there is one, and else arguments of `model_class`.
    With `meta` the model is too large for memory, and `build` puts it on the meta device.
    """

    model_class: Callable[..., nn.Module]
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    note: str
    config: Any = None
    meta: bool = False

    def build(self, **sizes: Any) -> nn.Module:
        """Return the model, with other sizes than its own where some are passed."""
        if self.config is None:
            return self.model_class(**sizes)
        return self.model_class(replace(self.config, **sizes))


def _decoders(
    model_class: Callable[..., nn.Module], configs: Mapping[str, Any], notes: Mapping[str, tuple[int, str]]
) -> dict[str, ZooEntry]:
    """Return the entries of a decoder's sizes: name → number of tokens and note."""
    return {
        name: ZooEntry(
            model_class=model_class,
            config=configs[name],
            inputs=(("tokens", (1, tokens), "int64"),),
            note=note,
            meta=" G parameters" in note,
        )
        for name, (tokens, note) in notes.items()
    }


def _images(model_class: Callable[..., nn.Module], shape: tuple[int, ...], note: str) -> ZooEntry:
    return ZooEntry(model_class=model_class, inputs=(("x", shape, "float32"),), note=note)


ZOO: dict[str, ZooEntry] = {
    "lenet5": _images(LeNet5, (1, 1, 28, 28), "LeNet-5: 61,706 parameters, LeCun et al. 1998"),
    "resnet50": _images(ResNet50, (1, 3, 224, 224), "ResNet-50 v1.5: 25.6 M parameters, arXiv:1512.03385"),
    "vit_b_16": _images(ViTB16, (1, 3, 224, 224), "ViT-B/16: 86.6 M parameters, arXiv:2010.11929"),
    **_decoders(GPT2, {"gpt2": GPT2_124M}, {"gpt2": (1024, "GPT-2: 124 M parameters, Radford et al. 2019")}),
    **_decoders(
        Llama,
        CONFIGS,
        {
            "llama2_7b": (4_096, "Llama-2-7B: 6.74 G parameters, arXiv:2307.09288"),
            "llama3_8b": (8_192, "Llama-3-8B: 8.03 G parameters, arXiv:2407.21783"),
            "llama3_70b": (8_192, "Llama-3-70B: 70.6 G parameters, arXiv:2407.21783"),
            "llama3_405b": (8_192, "Llama-3.1-405B: 406 G parameters, arXiv:2407.21783"),
            "llama_tiny": (16, "a Llama of 125,248 parameters, for tests; not published"),
        },
    ),
    **_decoders(
        megatron_gpt.MegatronGPT,
        megatron_gpt.CONFIGS,
        {
            "megatron_gpt_1_7b": (2_048, "Megatron GPT: 1.65 G parameters, arXiv:2104.04473"),
            "megatron_gpt_3_6b": (2_048, "Megatron GPT: 3.56 G parameters, arXiv:2104.04473"),
            "megatron_gpt_7_5b": (2_048, "Megatron GPT: 7.47 G parameters, arXiv:2104.04473"),
            "megatron_gpt_18b": (2_048, "Megatron GPT: 18.4 G parameters, arXiv:2104.04473"),
            "megatron_gpt_39b": (2_048, "Megatron GPT: 39.1 G parameters, arXiv:2104.04473"),
            "megatron_gpt_146b": (2_048, "Megatron GPT: 146 G parameters, arXiv:2104.04473"),
            "megatron_gpt_175b": (2_048, "Megatron GPT: 175 G parameters, sizes of GPT-3, arXiv:2005.14165"),
            "megatron_gpt_530b": (2_048, "Megatron GPT: 530 G parameters, arXiv:2104.04473"),
            "megatron_gpt_tiny": (16, "a Megatron GPT of 117,504 parameters, for tests; not published"),
        },
    ),
    **_decoders(
        mpt.MPT,
        mpt.CONFIGS,
        {
            "mpt_125m": (2_048, "MPT: 125 M parameters, llm-foundry"),
            "mpt_350m": (2_048, "MPT: 356 M parameters, llm-foundry"),
            "mpt_760m": (2_048, "MPT: 760 M parameters, llm-foundry"),
            "mpt_1b": (2_048, "MPT: 1.32 G parameters, llm-foundry"),
            "mpt_3b": (2_048, "MPT: 2.65 G parameters, llm-foundry"),
            "mpt_7b": (2_048, "MPT: 6.66 G parameters, llm-foundry"),
            "mpt_13b": (2_048, "MPT: 12.9 G parameters, llm-foundry"),
            "mpt_30b": (2_048, "MPT: 30.0 G parameters, llm-foundry"),
            "mpt_70b": (2_048, "MPT: 64.9 G parameters, llm-foundry"),
            "mpt_tiny": (16, "an MPT of 117,504 parameters, for tests; not published"),
        },
    ),
    **_decoders(
        Mixtral,
        MIXTRAL_CONFIGS,
        {
            "mixtral_8x7b": (4_096, "Mixtral-8x7B: 46.7 G parameters, arXiv:2401.04088"),
            "mixtral_tiny": (16, "a Mixtral of 205,632 parameters, for tests; not published"),
        },
    ),
}


def build(name: str, *, device: torch.device | str | None = None, **sizes: Any) -> nn.Module:
    """Build the model called `name`, with random weights, in training mode as torch builds every module.

    `sizes` are arguments of its constructor or fields of its config, such as `classes=10` and `layers=2`.

    Without a `device`, a model too large for memory goes to the meta device and any other to torch's default.
    A name that is not in `ZOO` raises ValueError.

    >>> next(build("llama3_405b").parameters()).device
    device(type='meta')
    >>> build("resnet5")
    Traceback (most recent call last):
    ValueError: no model 'resnet5' in the zoo: did you mean 'resnet50'?
    """
    entry = ZOO.get(name)
    if entry is None:
        # Above the similarity of two sizes of one family, such as resnet18 and resnet50.
        hint = suggest(name, ZOO, cutoff=0.8) or f": use one of {', '.join(ZOO)}"
        raise ValueError(f"no model {name!r} in the zoo{hint}")
    if device is None and entry.meta:
        device = "meta"
    with nullcontext() if device is None else torch.device(device):
        return entry.build(**sizes)
