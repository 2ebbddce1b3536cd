"""Models that tests count: real ones, with random weights, on inputs small enough for two cores."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.zoo import build
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from tests.support.models.parts import Parts
from tests.support.models.quick_weights import quick_weights
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()

Case = tuple[nn.Module, tuple[Any, ...]]


class Toy(nn.Module):
    """The network of fvcore's documentation; its page gives 274,656 flops on a 32×32 image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2 = nn.Conv2d(6, 16, 3)
        self.fc1 = nn.Linear(16 * 6 * 6, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


class Unused(Parts):
    """A model that computes something and drops it, as a model without its last head does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        self.head(x)
        return x


class SmallEinsum(Parts):
    """An einsum of fewer than 100 flops, which are printed as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,jk->ik", x, self.weight)


class Tensors(nn.Module):
    """A model whose outputs are a mapping or a dataclass, for peers that trace only tensors: all its tensors."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensors_of(self.model(*args, **self.options)))


def _image(size: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(1, channels, size, size)


def _zoo(name: str, *inputs: torch.Tensor) -> Case:
    return build(name), inputs


def _torchvision(name: str, size: int = 64, **options: Any) -> Case:
    import torchvision

    return torchvision.models.get_model(name, weights=None, **options), (_image(size),)


def _segmentation(name: str, size: int = 64) -> Case:
    import torchvision

    model = torchvision.models.get_model(name, weights=None, weights_backbone=None)
    return Tensors(model), (_image(size),)


def _timm(name: str, size: int | None = None, **options: Any) -> Case:
    import timm

    model: Any = timm.create_model(name, pretrained=False, **options)
    return model, (_image(size or model.pretrained_cfg["input_size"][-1]),)


def _transformers(name: str, inputs: tuple[torch.Tensor, ...], **config: Any) -> Case:
    import transformers

    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**config))
    return Tensors(model, return_dict=True), inputs


_IDS = torch.ones(2, 12, dtype=torch.int64)
_TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}

_TORCHVISION = (
    *("resnet18", "alexnet", "vgg11_bn", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "densenet121"),
    *("squeezenet1_0", "shufflenet_v2_x0_5", "mnasnet0_5", "regnet_y_400mf", "convnext_tiny"),
)
_TIMM = (
    *("vit_tiny_patch16_224", "mixer_s32_224", "convit_tiny", "coat_lite_tiny", "levit_128s", "mobilevit_xxs"),
    *("poolformer_s12", "xcit_nano_12_p16_224", "botnet26t_256", "efficientformer_l1", "gmlp_ti16_224"),
    "visformer_tiny",
)

# Name → how to build it; each returns the model and its positional inputs.
MODELS: dict[str, Callable[[], Case]] = {
    "toy": lambda: (Toy(), (_image(32, 1),)),
    "small_einsum": lambda: (SmallEinsum(weight=nn.Parameter(torch.ones(3, 4))), (torch.ones(2, 3),)),
    "unused": lambda: (Unused(fc=nn.Linear(4, 4), head=nn.Linear(4, 8)), (torch.ones(1, 4),)),
    "zoo:lenet5": lambda: _zoo("lenet5", _image(28, 1)),
    "zoo:resnet50": lambda: _zoo("resnet50", _image(64)),
    "zoo:vit_b_16": lambda: _zoo("vit_b_16", _image(224)),
    "zoo:gpt2": lambda: (GPT2(GPT2Config(layers=2)), (_IDS,)),
    "zoo:llama_tiny": lambda: _zoo("llama_tiny", _IDS),
    **{f"torchvision:{name}": partial(_torchvision, name) for name in _TORCHVISION},
    "torchvision:googlenet": partial(_torchvision, "googlenet", init_weights=False, aux_logits=False),
    "torchvision:swin_t": partial(_torchvision, "swin_t", 224),
    "torchvision:vit_b_16": partial(_torchvision, "vit_b_16", 224),
    **{f"torchvision:{name}": partial(_segmentation, name) for name in ("fcn_resnet50", "lraspp_mobilenet_v3_large")},
    **{f"timm:{name}": partial(_timm, name) for name in _TIMM},
    **{f"timm:{name}": partial(_timm, name, 64) for name in ("resnest14d", "nf_resnet26", "hrnet_w18_small")},
    "transformers:BertModel": partial(_transformers, "BertModel", (_IDS,), **_TEXT),
    "transformers:GPT2Model": partial(
        _transformers, "GPT2Model", (_IDS,), n_embd=32, n_layer=2, n_head=4, vocab_size=50, use_cache=False
    ),
    "transformers:DistilBertModel": partial(
        _transformers, "DistilBertModel", (_IDS,), dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=50
    ),
    "transformers:ViTModel": partial(
        _transformers, "ViTModel", (_image(32),), **{**_TEXT, "image_size": 32, "patch_size": 8}
    ),
    "transformers:LlamaModel": partial(
        _transformers, "LlamaModel", (_IDS,), **_TEXT, num_key_value_heads=2, use_cache=False
    ),
    "transformers:MobileNetV1Model": partial(_transformers, "MobileNetV1Model", (_image(64),), image_size=64),
    "transformers:ResNetModel": partial(
        _transformers, "ResNetModel", (_image(64),), embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
}

# Models that sweeps count by default: of each library and each kind of layer one of the quickest.
USUAL = (
    *("toy", "small_einsum", "unused", "zoo:lenet5", "zoo:llama_tiny", "torchvision:resnet18"),
    *("torchvision:mobilenet_v3_small", "torchvision:shufflenet_v2_x0_5", "torchvision:lraspp_mobilenet_v3_large"),
    *("timm:vit_tiny_patch16_224", "timm:coat_lite_tiny", "timm:resnest14d"),
    *(name for name in MODELS if name.startswith("transformers:")),
)


def build_case(name: str, cases: Mapping[str, Callable[[], Case]] = MODELS) -> Case:
    """Return the case of a name with fixed random weights, made quickly, its model in eval mode, and its inputs."""
    torch.manual_seed(0)
    with quick_weights():
        model, inputs = cases[name]()
    return model.eval(), inputs
