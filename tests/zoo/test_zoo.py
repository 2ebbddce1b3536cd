"""The zoo against published figures, hand counts and the libraries that it mirrors."""

import dataclasses
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fvflops import FlopCountAnalysis
from fvflops.zoo import ZOO, build, megatron_gpt, mpt
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from fvflops.zoo.llama import CONFIGS, Llama, LlamaConfig
from fvflops.zoo.mixtral import CONFIGS as MIXTRAL_CONFIGS
from fvflops.zoo.mixtral import Mixture


class Figures(NamedTuple):
    """Parameters, multiply-adds on the inputs that ZOO names with attention counted in full, and the result's shape."""

    parameters: int
    macs: int
    output: tuple[int, ...]


def of_llama(parameters, weights, layers, hidden, output):
    """Return figures by the published parameters: tokens times the linears' weights, and two products of attention."""
    tokens = output[1]
    return Figures(parameters, tokens * weights + layers * 2 * tokens**2 * hidden, output)


def of_gpt(name, parameters, weights):
    config = {**megatron_gpt.CONFIGS, **mpt.CONFIGS}[name]
    shape = 1, config.positions, config.vocab_size
    return of_llama(parameters, weights, config.layers, config.hidden_size, shape)


# The head shares the embedding.
TINY_GPT = (256 + 16) * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64, 256 * 64 + 2 * 12 * 64 * 64
GPTS = {
    "megatron_gpt_1_7b": (1_652_230_656, 1_646_788_608),
    "megatron_gpt_3_6b": (3_562_168_320, 3_554_672_640),
    "megatron_gpt_7_5b": (7_467_786_240, 7_457_472_512),
    "megatron_gpt_18b": (18_449_756_160, 18_433_966_080),
    "megatron_gpt_39b": (39_096_041_472, 39_074_136_064),
    "megatron_gpt_146b": (145_622_261_760, 145_584_291_840),
    "megatron_gpt_175b": (174_615_846_912, 174_575_321_088),
    "megatron_gpt_530b": (529_600_819_200, 529_530_880_000),
    "megatron_gpt_tiny": TINY_GPT,
    "mpt_125m": (125_311_488, 123_617_280),
    "mpt_350m": (355_985_408, 353_566_720),
    "mpt_760m": (760_470_528, 756_842_496),
    "mpt_1b": (1_315_950_592, 1_311_113_216),
    "mpt_3b": (2_651_837_440, 2_645_524_480),
    "mpt_7b": (6_658_859_008, 6_648_758_272),
    "mpt_13b": (12_853_954_560, 12_840_796_160),
    "mpt_30b": (29_975_214_080, 29_956_046_848),
    "mpt_70b": (64_862_437_376, 64_837_124_096),
    "mpt_tiny": TINY_GPT,
}
# A layer's q and o, k and v.
TINY_ATTENTION = 2 * 64 * 64 + 2 * 64 * 32
FIGURES = {
    "lenet5": Figures(61_706, 416_520, (1, 10)),
    "resnet50": Figures(25_557_032, 4_089_184_256, (1, 1000)),
    "vit_b_16": Figures(86_567_656, 17_563_828_224, (1, 1000)),
    "gpt2": Figures(124_439_808, 291_648_307_200 // 2, (1, 1024, 50_257)),
    "llama2_7b": of_llama(6_738_415_616, 6_607_077_376, 32, 4096, (1, 4096, 32_000)),
    "llama3_8b": of_llama(8_030_261_248, 7_504_658_432, 32, 4096, (1, 8192, 128_256)),
    "llama3_70b": of_llama(70_553_706_496, 69_501_714_432, 80, 8192, (1, 8192, 128_256)),
    "llama3_405b": of_llama(405_853_388_800, 403_747_897_344, 126, 16_384, (1, 8192, 128_256)),
    "llama_tiny": of_llama(
        2 * 256 * 64 + 2 * (TINY_ATTENTION + 3 * 64 * 176 + 2 * 64) + 64,  # with embedding, head and norms
        256 * 64 + 2 * (TINY_ATTENTION + 3 * 64 * 176),
        layers=2,
        hidden=64,
        output=(1, 16, 256),
    ),
    **{name: of_gpt(name, *figures) for name, figures in GPTS.items()},
    "mixtral_8x7b": of_llama(46_702_792_704, 12_748_587_008, 32, 4096, (1, 4096, 32_000)),
    "mixtral_tiny": of_llama(
        2 * 256 * 64 + 2 * (TINY_ATTENTION + 4 * 64 + 4 * 3 * 64 * 96 + 2 * 64) + 64,
        256 * 64 + 2 * (TINY_ATTENTION + 4 * 64 + 2 * 3 * 64 * 96),  # of four experts a token is sent to two
        layers=2,
        hidden=64,
        output=(1, 16, 256),
    ),
}

# torch's kernel of grouped_mm for meta tensors takes bfloat16 only, and torch's counter ignores the op.
MIXTURES = {"mixtral_8x7b", "mixtral_tiny"}
ONE_OF_EACH = {entry.model_class: name for name, entry in ZOO.items()}  # the last of each class: a tiny one, if any
TINY_GPT2 = GPT2Config(vocab_size=100, positions=16, width=48, layers=2, heads=4)


def count_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def make_inputs(name, device, dtype=torch.float32):
    """Zeros as ZOO describes them, the floating-point ones in `dtype`."""
    made = [torch.zeros(shape, dtype=getattr(torch, kind), device=device) for _, shape, kind in ZOO[name].inputs]
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in made]


def list_shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def is_causal(model, tokens, position):
    """Whether another token at `position` changes logits from there on, and none before."""
    other = tokens.clone()
    other[:, position] += 1
    before, after = model(tokens), model(other)
    kept = torch.equal(before[:, :position], after[:, :position])
    return kept and not torch.allclose(before[:, position:], after[:, position:])


@torch.no_grad()
def scatter(model):
    """Move the parameters far from their start, where norms are one and activations too small to differ."""
    for parameter in model.parameters():
        parameter.normal_(std=0.3)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="module")
def torchvision():
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:  # RuntimeError: its compiled half does not fit this torch
        pytest.skip(f"torchvision, the reference of this test, does not import: {error}")
    return torchvision


@pytest.fixture(scope="module")
def transformers():
    try:
        import transformers

        _ = transformers.LlamaForCausalLM  # imports lazily, and with it torchvision where that is installed
    except (ImportError, RuntimeError) as error:
        cause = error.__cause__ or error
        pytest.skip(f"transformers, the reference of this test, does not import: {cause}")
    return transformers


def test_the_table_above_names_every_model():
    assert list(FIGURES) == list(ZOO)


@pytest.mark.parametrize("name", ZOO)
def test_parameters_macs_and_shape_are_as_published(name):
    model = build(name, device="meta").eval()
    shapes = []
    model.register_forward_hook(lambda *call: shapes.append(call[-1].shape))
    assert count_parameters(model) == FIGURES[name].parameters
    assert FlopCountAnalysis(model, tuple(make_inputs(name, "meta"))).macs() == FIGURES[name].macs
    assert shapes == [FIGURES[name].output]


def test_a_mixture_computes_what_its_experts_compute_for_each_token():
    config = dataclasses.replace(MIXTRAL_CONFIGS["mixtral_tiny"], hidden_size=16, intermediate_size=24)
    mixture = Mixture(config)
    scatter(mixture)
    x = torch.randn(2, 5, config.hidden_size)
    weights, chosen = mixture.router(x.flatten(0, 1))
    experts = mixture.experts

    def run(token, number):
        inner = nn.functional.silu(experts.gate_proj[number] @ token) * (experts.up_proj[number] @ token)
        return experts.down_proj[number] @ inner

    expected = torch.stack(
        [
            sum((weight * run(token, int(number)) for weight, number in zip(*pair, strict=True)), torch.zeros(1))
            for token, *pair in zip(x.flatten(0, 1), weights, chosen, strict=True)
        ]
    )
    torch.testing.assert_close(mixture(x).flatten(0, 1), expected, atol=1e-5, rtol=1e-4)


def test_lenet5_by_hand():
    convolutions = 28 * 28 * 6 * (1 * 5 * 5) + 10 * 10 * 16 * (6 * 5 * 5)
    linears = 400 * 120 + 120 * 84 + 84 * 10
    assert convolutions + linears == FIGURES["lenet5"].macs
    weights = 6 * 25 + 16 * 150 + linears
    biases = 6 + 16 + 120 + 84 + 10
    assert weights + biases == FIGURES["lenet5"].parameters


def test_vit_b_16_by_hand():
    patches, tokens = 14 * 14, 14 * 14 + 1
    linears = 12 * tokens * (3 * 768 * 768 + 768 * 768 + 2 * 768 * 3072)
    attention = 12 * 2 * tokens**2 * 768
    assert attention == 715_327_488  # as ViTB16 says
    assert patches * 768 * (3 * 16 * 16) + linears + attention + 768 * 1000 == FIGURES["vit_b_16"].macs


def test_gpt2_by_hand():
    linears = 1024 * (12 * 12 * 768 * 768 + 50_257 * 768)
    attention = 12 * 2 * 1024**2 * 768
    assert attention == 19_327_352_832  # as GPT2 says
    assert linears + attention == FIGURES["gpt2"].macs


@pytest.mark.parametrize("name", GPTS)
def test_gpts_have_the_parameters_of_megatrons_paper(name):
    c = {**megatron_gpt.CONFIGS, **mpt.CONFIGS}[name]
    layers, h, embeddings = c.layers, c.hidden_size, c.vocab_size + c.positions
    # Equation 2 of arXiv:2104.04473, without the last norm.
    paper = Fraction(12 * layers * h**2) * (1 + Fraction(13, 12 * h) + Fraction(embeddings, 12 * layers * h))
    assert paper + 2 * h == FIGURES[name].parameters


@pytest.mark.parametrize(("dtype", "training"), [(torch.float32, False), (torch.bfloat16, True)], ids=["eval", "train"])
@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_runs_on_meta_in_each_dtype_and_mode(name, dtype, training):
    if name in MIXTURES:
        dtype = torch.bfloat16
    model = build(name, device="meta").to(dtype).train(training)
    out = model(*make_inputs(name, "meta", dtype))
    assert (out.shape, out.dtype) == (FIGURES[name].output, dtype)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_build_takes_meta_for_the_large_and_the_default_device_for_the_rest():
    assert next(build("llama2_7b").parameters()).is_meta
    assert next(build("llama_tiny").parameters()).device == torch.get_default_device()
    assert next(build("llama_tiny", device="meta").parameters()).is_meta
    with torch.device("meta"):
        assert next(build("llama_tiny").parameters()).is_meta


def test_meta_marks_the_models_of_more_than_a_billion_parameters():
    assert all(entry.meta == (FIGURES[name].parameters > 10**9) for name, entry in ZOO.items())


@pytest.mark.parametrize(
    ("name", "advice"),
    [("resnet-50", "did you mean 'resnet50'?"), ("llama3_400b", "did you mean 'llama3_405b'?"), ("?", "lenet5, ")],
)
def test_an_unknown_name_is_answered_in_one_line_with_the_nearest(name, advice):
    with pytest.raises(ValueError) as caught:
        build(name)
    message = str(caught.value)
    assert repr(name) in message and advice in message and "\n" not in message


@torch.no_grad()
def test_resnet50_computes_what_torchvision_computes(torchvision):
    theirs = torchvision.models.resnet50().eval()
    ours = build("resnet50", device="meta").eval()
    ours.load_state_dict(theirs.state_dict(), assign=True)
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_vit_b_16_computes_what_torchvision_computes(torchvision):
    with torch.device("meta"):
        theirs, ours = torchvision.models.vit_b_16().eval(), build("vit_b_16").eval()
    del theirs.encoder.layers[2:], ours.layers[2:]
    scatter(theirs.to_empty(device="cpu"))
    renamed = {}
    for name, tensor in theirs.state_dict().items():
        name = name.removeprefix("encoder.").replace("encoder_layer_", "").replace("heads.head", "head")
        name = name.replace("in_proj_", "qkv.").replace("mlp.3", "mlp.2")
        renamed[name] = tensor
    ours.load_state_dict(renamed, assign=True)
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_vit_b_16_refuses_another_image_size():
    with pytest.raises(ValueError, match=r"\(1, 3, 256, 256\)"):
        build("vit_b_16", device="meta")(torch.zeros(1, 3, 256, 256, device="meta"))


@torch.no_grad()
def test_gpt2_computes_what_transformers_computes(transformers):
    c = TINY_GPT2
    sizes = {"n_positions": c.positions, "n_embd": c.width, "n_layer": c.layers, "n_head": c.heads}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=c.vocab_size, **sizes)).eval()
    scatter(theirs)
    # transformers keeps these as (in, out)
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {
        name.removeprefix("transformer."): tensor.T if name.endswith(transposed) else tensor
        for name, tensor in theirs.state_dict().items()
    }
    ours = GPT2(c).eval()
    ours.load_state_dict(weights)
    tokens = torch.randint(c.vocab_size, (2, c.positions))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama_tiny", "mixtral_tiny", "gpt2"])
def test_decoding_with_a_cache_computes_what_the_whole_sequence_does(name):
    model = (build(name, device="cpu") if name != "gpt2" else GPT2(TINY_GPT2)).eval()
    ids = torch.randint(0, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids)
        step = model(ids[:, :4], use_cache=True, logits_to_keep=1)
        torch.testing.assert_close(step.logits, whole[:, 3:4])
        for position in range(4, 7):
            step = model(ids[:, position : position + 1], past_key_values=step.past_key_values, use_cache=True)
            torch.testing.assert_close(step.logits, whole[:, position : position + 1])
    assert step.past_key_values.length == 7


def build_llama_of_transformers(transformers, config):
    """A LlamaForCausalLM of the same sizes."""
    c, same = config, ("vocab_size", "hidden_size", "intermediate_size")
    sizes = {name: getattr(c, name) for name in same} | {"num_hidden_layers": c.layers, "num_attention_heads": c.heads}
    sizes |= {"num_key_value_heads": c.kv_heads, "rms_norm_eps": c.norm_eps, "tie_word_embeddings": c.tie_embeddings}
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope))


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_has_the_parameters_of_transformers(transformers, name):
    with torch.device("meta"):
        theirs = build_llama_of_transformers(transformers, CONFIGS[name])
    assert count_parameters(theirs) == FIGURES[name].parameters
    shapes = {parameter.removeprefix("model."): shape for parameter, shape in list_shapes(theirs).items()}
    assert list_shapes(build(name, device="meta")) == shapes


@pytest.mark.parametrize(("kv_heads", "tied", "theta"), [(1, False, 10_000.0), (2, True, 500_000.0), (4, False, 100.0)])
@torch.no_grad()
def test_llama_computes_what_transformers_computes(transformers, kv_heads, tied, theta):
    options = {"kv_heads": kv_heads, "rope_theta": theta, "tie_embeddings": tied}
    config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=96, layers=2, heads=4, **options)
    theirs = build_llama_of_transformers(transformers, config).eval()
    scatter(theirs)
    ours = Llama(config).eval()
    ours.load_state_dict({name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()})
    assert count_parameters(ours) == count_parameters(theirs)
    tokens = torch.randint(100, (2, 33))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_llama_caches_nothing_on_its_modules():
    model = build("llama_tiny")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    model(torch.zeros(1, 16, dtype=torch.int64))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not list(model.buffers())


@pytest.mark.parametrize("sizes", [{"heads": 3}, {"heads": 64}, {"kv_heads": 3}])
def test_llama_config_refuses_sizes_that_do_not_divide(sizes):
    with pytest.raises(ValueError, match=r"LlamaConfig.*heads"):
        dataclasses.replace(CONFIGS["llama_tiny"], **sizes)


TINY = ("llama_tiny", "megatron_gpt_tiny", "mpt_tiny")
DROPOUTS = {"megatron_gpt_tiny": {"hidden_dropout": 0.0, "attention_dropout": 0.0}, "mpt_tiny": {}}


@pytest.mark.parametrize("build_model", [partial(GPT2, TINY_GPT2), *(partial(build, name) for name in TINY)])
def test_decoders_are_causal(build_model):
    assert is_causal(build_model().eval(), torch.arange(16).reshape(2, 8), position=5)


@pytest.mark.parametrize("name", DROPOUTS)
def test_the_loss_and_its_gradients_are_those_of_cross_entropy(name):
    model = build(name, **DROPOUTS[name]).double()
    scatter(model)
    tokens, labels = torch.randint(256, (2, 3, 16))
    loss = model(tokens, labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected.float(), atol=0, rtol=1e-6)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-5)
    assert model.half()(tokens, labels).dtype == torch.float32


@torch.no_grad()
def test_attention_of_megatron_gpt_is_scaled_dot_product_attention():
    q, k, v = torch.randn(3, 7, 2, 4, 16)
    config = dataclasses.replace(megatron_gpt.CONFIGS["megatron_gpt_tiny"], attention_dropout=0.0)
    expected = F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True)
    out = megatron_gpt.CoreAttention(config)(q, k, v)
    torch.testing.assert_close(out, expected.permute(2, 0, 1, 3).flatten(2))


@torch.no_grad()
def test_megatron_gpt_and_mpt_compute_what_gpt2_computes():
    width, layers, heads = TINY_GPT2.width, TINY_GPT2.layers, TINY_GPT2.heads
    theirs = GPT2(TINY_GPT2).eval()
    scatter(theirs)
    sizes = {"vocab_size": 100, "positions": 16, "hidden_size": width, "layers": layers, "heads": heads}
    ours = megatron_gpt.MegatronGPT(megatron_gpt.MegatronGPTConfig(**sizes)).eval()
    ours.load_state_dict(rename_gpt2(theirs, GPT2_TO_MEGATRON, heads))
    tokens = torch.randint(100, (2, 16))
    torch.testing.assert_close(ours(tokens), theirs(tokens), atol=1e-4, rtol=1e-4)
    mosaic = mpt.MPT(mpt.MPTConfig(**sizes)).eval()
    mosaic.load_state_dict(rename_gpt2(theirs, GPT2_TO_MPT))
    for block in theirs.h:
        block.mlp.act = nn.GELU()
    torch.testing.assert_close(mosaic(tokens), theirs(tokens), atol=1e-4, rtol=1e-4)


GPT2_TO_MEGATRON = {
    "wte": "embedding.word_embeddings",
    "wpe": "embedding.position_embeddings",
    "lm_head": "head.lm_head",
    "ln_f": "head.final_layernorm",
    "h.": "layers.",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attention.query_key_value",
    "attn.c_proj.weight": "self_attention.dense.weight",
    "attn.c_proj.bias": "attention_residual.bias",
    "mlp.c_fc.weight": "mlp.dense_h_to_4h.weight",
    "mlp.c_fc.bias": "mlp.bias_gelu.bias",
    "mlp.c_proj.weight": "mlp.dense_4h_to_h.weight",
    "mlp.c_proj.bias": "mlp_residual.bias",
}
GPT2_TO_MPT = {
    "wte": "embedding.wte",
    "wpe": "embedding.wpe",
    "lm_head": "head.lm_head",
    "ln_f": "head.norm_f",
    "h.": "blocks.",
    "ln_1": "norm_1",
    "ln_2": "norm_2",
    "attn.c_attn": "attn.Wqkv",
    "attn.c_proj": "attn.out_proj",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}


def rename_gpt2(model, names, heads=0):
    """Return the weights of a GPT-2 by other names; with `heads` the rows of c_attn go head after head."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        if heads and "c_attn" in name:
            tensor = tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
        for old, new in names.items():
            name = name.replace(old, new, 1)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("build_model", [partial(GPT2, TINY_GPT2), *(partial(build, name) for name in DROPOUTS)])
def test_gpt_refuses_more_tokens_than_positions(build_model):
    with pytest.raises(ValueError, match=r"\(1, 17\).*16"):
        build_model()(torch.zeros(1, 17, dtype=torch.int64))


@torch.no_grad()
def test_low_precision_layer_norm_stays_in_the_dtype_of_autocast():
    norm = mpt.LowPrecisionLayerNorm(8)
    assert norm(torch.randn(2, 8)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.randn(2, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize(("ranks", "rows"), [(1, 50_304), (2, 50_432), (4, 50_688), (8, 51_200)])
def test_megatron_pads_its_vocabulary(ranks, rows):
    model = build("megatron_gpt_tiny", device="meta", vocab_size=50_257, vocab_multiple=128 * ranks)
    assert model.embedding.word_embeddings.num_embeddings == rows


@pytest.mark.parametrize("sizes", [{"heads": 3}, {"vocab_multiple": 0}])
def test_megatron_config_refuses_sizes_that_do_not_divide(sizes):
    with pytest.raises(ValueError, match=rf"MegatronGPTConfig.*{next(iter(sizes))}"):
        build("megatron_gpt_tiny", **sizes)
