"""Twins of models built on the meta device: without initialisers, and by `torch.device("meta")` alone."""

import random
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

from fvflops.sources.load import load_model
from fvflops.sources.meta import build_on_meta, on_meta
from fvflops.sources.options import SourceOptions
from fvflops.zoo import ZOO
from tests.support.library_versions import is_older
from tests.support.random_cases import long_except

TIMM = (
    *("resnet18", "mobilenetv3_small_100", "efficientnet_b0", "vit_tiny_patch16_224", "convnext_atto", "regnetx_002"),
    *("swin_tiny_patch4_window7_224", "deit3_small_patch16_224", "beit_base_patch16_224", "cait_xxs24_224"),
    *("levit_128s", "mixer_s16_224", "gmlp_ti16_224", "poolformer_s12", "maxvit_tiny_rw_224", "coatnet_nano_rw_224"),
    *("densenet121", "dla34", "ghostnet_100", "hrnet_w18_small", "inception_v3", "mobilevit_xxs", "nfnet_l0"),
    *("pit_ti_224", "repvgg_a0", "res2net50_26w_4s", "tnt_s_legacy_patch16_224", "volo_d1_224", "xcit_nano_12_p16_224"),
    "eva02_tiny_patch14_224",
)
TRANSFORMERS = (
    *("albert", "bert", "bart", "bloom", "blip-2", "clip"),
    *("convbert", "convnextv2", "deberta-v2", "detr", "distilbert"),
    *("electra", "ernie", "flava", "mpnet", "gemma2", "gpt2", "gpt_neox", "hubert", "llama", "longformer", "mamba"),
    *("marian", "mobilevit", "opt", "roberta", "swin", "t5", "vit", "wav2vec2"),
)
# Convolutions, attention, relative positions, recurrences, tied and buffered tensors: each initialised in its own way.
TIMM_DEFAULT = ("resnet18", "efficientnet_b0", "swin_tiny_patch4_window7_224", "levit_128s", "volo_d1_224", "nfnet_l0")
DEFAULT = ("bert", "clip", "deberta-v2", "detr", "gemma2", "gpt2", "mamba", "marian", "t5", "wav2vec2")


def describe_tensors(model):
    """List the modules of a model with each tensor: what it is, what it shares, and its values where it has some."""
    identities = {}
    storages = {}

    def describe(tensor):
        storage = tensor.untyped_storage()
        return (
            *(type(tensor), tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device),
            *(tensor.requires_grad, tensor.is_leaf, storage.nbytes()),
            *(identities.setdefault(id(tensor), len(identities)), storages.setdefault(storage._cdata, len(storages))),
            None if tensor.is_meta else tensor.detach().tolist(),
        )

    described = []
    for path, module in model.named_modules(remove_duplicate=False):
        described.append((path, type(module).__qualname__, module.training, sorted(module._non_persistent_buffers_set)))
        for kind in (module._parameters, module._buffers, vars(module)):
            described += [(key, *describe(value)) for key, value in kind.items() if isinstance(value, torch.Tensor)]
    return described


def assert_twins(build):
    """Check that both ways build the same model, from the same random numbers, and leave the same ones."""
    states = []
    models = []
    for context in (partial(torch.device, "meta"), on_meta):
        torch.manual_seed(0)
        random.seed(0)
        with context():
            models.append(build())
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    twin, model = models
    assert repr(model) == repr(twin)
    assert describe_tensors(model) == describe_tensors(twin)
    assert states[0] == states[1]


@pytest.mark.parametrize("name", ["lenet5", "resnet50", "vit_b_16", "gpt2", "llama_tiny"])
def test_models_of_the_zoo_are_those_of_the_meta_device(name):
    assert_twins(ZOO[name].build)


@pytest.mark.parametrize("name", long_except(TIMM_DEFAULT, TIMM))
def test_models_of_timm_are_those_of_the_meta_device(name):
    timm = pytest.importorskip("timm")
    if name.startswith("regnet") and is_older("timm", "1.0.30"):
        pytest.skip("before timm 1.0.30, RegNets compute their widths with tensors: not on the meta device")
    assert_twins(partial(timm.create_model, name))


@pytest.mark.parametrize("name", long_except(DEFAULT, TRANSFORMERS))
def test_models_of_transformers_are_those_of_the_meta_device(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name)
    for key in ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"):
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, 2)
    assert_twins(partial(transformers.AutoModel.from_config, config))


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_initialisers_run_no_ops():
    with Ops() as ops:
        build_on_meta(ZOO["vit_b_16"].build)
    assert ops.names <= {"aten::empty.memory_format", "aten::detach", "aten::_to_copy", "aten::arange"}
    with Ops() as ops, torch.device("meta"):
        ZOO["vit_b_16"].build()
    assert "aten::uniform_" in ops.names


class Mixed(nn.Module):
    """Tensors on both devices, filled in the ways in which libraries do it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4))
        self.scale = nn.Parameter(torch.empty(8, 4, device="cpu"))
        self.register_buffer("steps", torch.arange(5, device="cpu"), persistent=False)
        self.register_buffer("mask", torch.ones(2, 3, dtype=torch.bool))
        self.register_buffer("zeros", torch.zeros((2, 3), dtype=torch.float16).t())
        self.view = self.weight[2:4]
        self.tied = self.weight
        self.plain = torch.full((3,), 2, dtype=torch.int32)
        with torch.device("cpu"):
            self.inner = nn.Linear(3, 2)
        for weight in (self.weight, self.scale):
            for initialise in (init.xavier_normal_, init.trunc_normal_, init.orthogonal_, init.ones_):
                initialise(weight)
            init.kaiming_uniform_(weight, a=2, nonlinearity="leaky_relu")
            init.normal_(weight, std=0.02)
            weight.data.normal_(mean=1.0, std=2.0).mul_(3).clamp_(min=-1, max=1).div_(weight.detach() + 2)
            with torch.no_grad():
                weight.uniform_(-1, 1)
                weight[1].fill_(3)
                weight[2].zero_()


def test_tensors_with_values_are_initialised():
    assert_twins(Mixed)
    torch.manual_seed(3)
    values = build_on_meta(Mixed).scale
    torch.manual_seed(3)
    assert torch.equal(values, Mixed().scale) is False  # there, the other weight draws random numbers too
    assert values.abs().sum() > 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Parameter(torch.empty(3)).normal_(), "leaf Variable that requires grad"),
        (lambda: init.kaiming_uniform_(torch.empty(3)), "fewer than 2 dimensions"),
        (lambda: torch.empty(3).add_(torch.empty(4)), "broadcast"),
        (lambda: torch.empty(3, dtype=torch.int64).normal_(), "not implemented for 'Long'|floating"),
    ],
)
def test_errors_are_those_of_the_meta_device(build, message):
    with torch.device("meta"), pytest.raises((RuntimeError, ValueError), match=message) as expected:
        build()
    with pytest.raises(type(expected.value), match=message):
        build_on_meta(build)
    assert torch.get_default_device() == torch.device("cpu")


def test_autograd_history_is_that_of_the_meta_device():
    def build():
        return (torch.ones(3, requires_grad=True) * 2).mul_(3).zero_()

    with torch.device("meta"):
        expected = build()
    assert build_on_meta(build).grad_fn.name() == expected.grad_fn.name() == "ZeroBackward0"


def test_the_default_device_is_meta_inside_and_unchanged_in_other_threads():
    found = []

    def build():
        thread = threading.Thread(target=lambda: found.append((torch.get_default_device(), torch.empty(2).device)))
        thread.start()
        thread.join()
        return torch.get_default_device(), torch.empty(2).fill_(1).device

    with torch.device("meta"):
        default = torch.get_default_device()  # torch 2.7 and older say cpu
    assert build_on_meta(build) == (default, torch.device("meta"))
    assert found == [(torch.device("cpu"), torch.device("cpu"))]
    assert torch.get_default_device() == torch.empty(2).device == torch.device("cpu")


def test_contexts_around_and_inside_are_restored():
    with torch.device("cpu"):
        assert build_on_meta(lambda: build_on_meta(lambda: torch.empty(2))).is_meta
        with on_meta():
            with torch.device("cpu"):
                weight = init.ones_(torch.empty(2))
            assert weight.tolist() == [1, 1]
            assert init.ones_(torch.empty(2)).is_meta
        assert torch.empty(2).device == torch.device("cpu")


def test_models_by_name_are_built_without_initialisers():
    with Ops() as ops:
        model = load_model("zoo:resnet50", SourceOptions(device="meta")).model
    assert next(model.parameters()).is_meta
    assert not [name for name in ops.names if name.endswith("_")]
