"""A zoo of reference models whose cost is published, in plain torch.nn."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fvflops.text import suggest
from fvflops.zoo import megatron_gpt, mpt
from fvflops.zoo.gpt2 import GPT2, GPT2_124M, GPT2Config
from fvflops.zoo.lenet5 import LeNet5
from fvflops.zoo.llama import CONFIGS, Llama, LlamaConfig
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
    config: GPT2Config | LlamaConfig | megatron_gpt.MegatronGPTConfig | mpt.MPTConfig | None = None
    meta: bool = False

    def build(self, **sizes: Any) -> nn.Module:
        """Return the model, with other sizes than its own where some are passed."""
        if self.config is None:
            return self.model_class(**sizes)
        return self.model_class(replace(self.config, **sizes))


ZOO: dict[str, ZooEntry] = {
    "lenet5": ZooEntry(
        model_class=LeNet5,
        inputs=(("x", (1, 1, 28, 28), "float32"),),
        note="LeNet-5: 61,706 parameters, LeCun et al. 1998",
    ),
    "resnet50": ZooEntry(
        model_class=ResNet50,
        inputs=(("x", (1, 3, 224, 224), "float32"),),
        note="ResNet-50 v1.5: 25.6 M parameters, arXiv:1512.03385",
    ),
    "vit_b_16": ZooEntry(
        model_class=ViTB16,
        inputs=(("x", (1, 3, 224, 224), "float32"),),
        note="ViT-B/16: 86.6 M parameters, arXiv:2010.11929",
    ),
    "gpt2": ZooEntry(
        model_class=GPT2,
        config=GPT2_124M,
        inputs=(("tokens", (1, 1024), "int64"),),
        note="GPT-2: 124 M parameters, Radford et al. 2019",
    ),
    "llama2_7b": ZooEntry(
        model_class=Llama,
        config=CONFIGS["llama2_7b"],
        inputs=(("tokens", (1, 4096), "int64"),),
        note="Llama-2-7B: 6.74 G parameters, arXiv:2307.09288",
        meta=True,
    ),
    "llama3_8b": ZooEntry(
        model_class=Llama,
        config=CONFIGS["llama3_8b"],
        inputs=(("tokens", (1, 8192), "int64"),),
        note="Llama-3-8B: 8.03 G parameters, arXiv:2407.21783",
        meta=True,
    ),
    "llama3_70b": ZooEntry(
        model_class=Llama,
        config=CONFIGS["llama3_70b"],
        inputs=(("tokens", (1, 8192), "int64"),),
        note="Llama-3-70B: 70.6 G parameters, arXiv:2407.21783",
        meta=True,
    ),
    "llama3_405b": ZooEntry(
        model_class=Llama,
        config=CONFIGS["llama3_405b"],
        inputs=(("tokens", (1, 8192), "int64"),),
        note="Llama-3.1-405B: 406 G parameters, arXiv:2407.21783",
        meta=True,
    ),
    "llama_tiny": ZooEntry(
        model_class=Llama,
        config=CONFIGS["llama_tiny"],
        inputs=(("tokens", (1, 16), "int64"),),
        note="a Llama of 125,248 parameters, for tests; not published",
    ),
    "megatron_gpt_1_7b": ZooEntry(
        model_class=megatron_gpt.MegatronGPT,
        config=megatron_gpt.CONFIGS["megatron_gpt_1_7b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="Megatron GPT: 1.65 G parameters, arXiv:2104.04473",
        meta=True,
    ),
    "megatron_gpt_3_6b": ZooEntry(
        model_class=megatron_gpt.MegatronGPT,
        config=megatron_gpt.CONFIGS["megatron_gpt_3_6b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="Megatron GPT: 3.56 G parameters, arXiv:2104.04473",
        meta=True,
    ),
    "megatron_gpt_7_5b": ZooEntry(
        model_class=megatron_gpt.MegatronGPT,
        config=megatron_gpt.CONFIGS["megatron_gpt_7_5b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="Megatron GPT: 7.47 G parameters, arXiv:2104.04473",
        meta=True,
    ),
    "megatron_gpt_18b": ZooEntry(
        model_class=megatron_gpt.MegatronGPT,
        config=megatron_gpt.CONFIGS["megatron_gpt_18b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="Megatron GPT: 18.4 G parameters, arXiv:2104.04473",
        meta=True,
    ),
    "megatron_gpt_39b": ZooEntry(
        model_class=megatron_gpt.MegatronGPT,
        config=megatron_gpt.CONFIGS["megatron_gpt_39b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="Megatron GPT: 39.1 G parameters, arXiv:2104.04473",
        meta=True,
    ),
    "megatron_gpt_146b": ZooEntry(
        model_class=megatron_gpt.MegatronGPT,
        config=megatron_gpt.CONFIGS["megatron_gpt_146b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="Megatron GPT: 146 G parameters, arXiv:2104.04473",
        meta=True,
    ),
    "megatron_gpt_175b": ZooEntry(
        model_class=megatron_gpt.MegatronGPT,
        config=megatron_gpt.CONFIGS["megatron_gpt_175b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="Megatron GPT: 175 G parameters, sizes of GPT-3, arXiv:2005.14165",
        meta=True,
    ),
    "megatron_gpt_530b": ZooEntry(
        model_class=megatron_gpt.MegatronGPT,
        config=megatron_gpt.CONFIGS["megatron_gpt_530b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="Megatron GPT: 530 G parameters, arXiv:2104.04473",
        meta=True,
    ),
    "megatron_gpt_tiny": ZooEntry(
        model_class=megatron_gpt.MegatronGPT,
        config=megatron_gpt.CONFIGS["megatron_gpt_tiny"],
        inputs=(("tokens", (1, 16), "int64"),),
        note="a Megatron GPT of 117,504 parameters, for tests; not published",
    ),
    "mpt_125m": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_125m"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="MPT: 125 M parameters, llm-foundry",
    ),
    "mpt_350m": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_350m"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="MPT: 356 M parameters, llm-foundry",
    ),
    "mpt_760m": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_760m"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="MPT: 760 M parameters, llm-foundry",
    ),
    "mpt_1b": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_1b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="MPT: 1.32 G parameters, llm-foundry",
        meta=True,
    ),
    "mpt_3b": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_3b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="MPT: 2.65 G parameters, llm-foundry",
        meta=True,
    ),
    "mpt_7b": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_7b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="MPT: 6.66 G parameters, llm-foundry",
        meta=True,
    ),
    "mpt_13b": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_13b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="MPT: 12.9 G parameters, llm-foundry",
        meta=True,
    ),
    "mpt_30b": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_30b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="MPT: 30.0 G parameters, llm-foundry",
        meta=True,
    ),
    "mpt_70b": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_70b"],
        inputs=(("tokens", (1, 2048), "int64"),),
        note="MPT: 64.9 G parameters, llm-foundry",
        meta=True,
    ),
    "mpt_tiny": ZooEntry(
        model_class=mpt.MPT,
        config=mpt.CONFIGS["mpt_tiny"],
        inputs=(("tokens", (1, 16), "int64"),),
        note="an MPT of 117,504 parameters, for tests; not published",
    ),
    "mixtral_8x7b": ZooEntry(
        model_class=Mixtral,
        config=MIXTRAL_CONFIGS["mixtral_8x7b"],
        inputs=(("tokens", (1, 4096), "int64"),),
        note="Mixtral-8x7B: 46.7 G parameters, arXiv:2401.04088",
        meta=True,
    ),
    "mixtral_tiny": ZooEntry(
        model_class=Mixtral,
        config=MIXTRAL_CONFIGS["mixtral_tiny"],
        inputs=(("tokens", (1, 16), "int64"),),
        note="a Mixtral of 205,632 parameters, for tests; not published",
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
