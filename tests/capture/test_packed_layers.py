"""Layers of quantised weights count as the layers that they were made of, in every format that libraries store."""

import inspect
import math
from functools import partial

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, Trace, parameter_summary, parameter_summary_table, record_call
from fvflops.capture.model.model_index import read_modules
from fvflops.plan.memory.predict_memory import predict_memory

IN, OUT = 256, 512
WEIGHTS = IN * OUT


class Layer(nn.Module):
    """A layer as a library declares it: attributes, buffers or parameters by shape and dtype, and their scales."""

    def __init__(self, sizes, tensors, *, bias=True, as_parameters=False, **attributes):
        super().__init__()
        for name, value in {**sizes, **attributes}.items():
            setattr(self, name, value)
        tensors = {**tensors, **({"bias": ((OUT,), torch.float16)} if bias else {})}
        for name, (shape, dtype) in tensors.items():
            tensor = torch.zeros(shape, dtype=dtype)
            if as_parameters:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)

    def forward(self, x):
        return x


FEATURES = {"in_features": IN, "out_features": OUT}
INT, HALF, BYTE, FP8 = torch.int32, torch.float16, torch.uint8, torch.float8_e4m3fn


def gptq(bits, group=128, sizes=FEATURES):
    groups = IN // group
    tensors = {
        "qweight": ((IN * bits // 32, OUT), INT),
        "qzeros": ((groups, OUT * bits // 32), INT),
        "scales": ((groups, OUT), HALF),
        "g_idx": ((IN,), INT),
    }
    return Layer(sizes, tensors, bits=bits, group_size=group)


def awq(shape, dtype=INT):
    tensors = {"qweight": (shape, dtype), "qzeros": ((2, OUT // 8), INT), "scales": ((2, OUT), HALF)}
    return Layer(FEATURES, tensors, w_bit=4, group_size=128)


def hqq(bits, rows, dtype=BYTE):
    """hqq.core.quantize.HQQLinear: its sizes are in a table, and its scales are tensors in that table."""
    scales = {"scale": torch.zeros(WEIGHTS // 64, 1), "zero": torch.zeros(WEIGHTS // 64, 1)}
    layer = Layer({}, {"W_q": ((rows, WEIGHTS // 64), dtype)}, as_parameters=True)
    layer.meta = {"shape": torch.Size((OUT, IN)), "nbits": bits, "group_size": 64, **scales}
    return layer


def compressed(tensors):
    """compressed-tensors: an nn.Linear whose weight is replaced by other parameters."""
    layer = nn.Linear(IN, OUT).half()
    del layer.weight
    for name, (shape, dtype) in tensors.items():
        layer.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
    return layer


def aqlm(codebooks, bits):
    dtype = torch.int8 if bits == 8 else torch.int16
    tensors = {
        "codebooks": ((codebooks, 2**bits, 1, 8), HALF),
        "codes": ((OUT, IN // 8, codebooks), dtype),
        "scales": ((OUT, 1, 1, 1), HALF),
    }
    return Layer(FEATURES, tensors, as_parameters=True, nbits_per_codebook=bits, num_codebooks=codebooks)


def spqr():
    tiles = (OUT // 16) * (IN // 16)
    tensors = {
        "dense_weights": ((16 * tiles,), torch.int64),
        "row_offsets": ((OUT + 1,), INT),
        "col_vals": ((OUT * 3,), INT),
        "in_perm": ((IN,), INT),
    }
    return Layer({"m": OUT, "n": IN}, tensors, bias=False, as_parameters=True, bits=3, beta1=16, beta2=16)


def vptq():
    """vptq.VQuantLinear of vectors of 8, with 65,536 centroids, 256 of residuals, a permutation and a norm."""
    tensors = {
        "indices": ((1, OUT // 8, IN * 24 // 32), INT),
        "perm": ((IN,), torch.int16),
        "weight_scale": ((IN,), HALF),
        "weight_bias": ((IN,), HALF),
    }
    layer = Layer(FEATURES, tensors, as_parameters=True, vector_len=8)
    layer.centroids, layer.res_centroids = nn.Embedding(1, 65536 * 8).half(), nn.Embedding(1, 256 * 8).half()
    return layer


def fp_quant(group):
    tensors = {
        "qweight": ((OUT, IN // 2), BYTE),
        "scales": ((OUT, IN // group), BYTE),
        "weight_global_scale": ((1,), HALF),
        "forward_hadamard_matrix": ((32, 32), HALF),
    }
    layer = Layer(FEATURES, tensors)
    layer.weight = layer.dqweight = None
    return layer


def of_transformers(module, name, *args, **kwargs):
    found = pytest.importorskip(f"transformers.integrations.{module}")
    return getattr(found, name)(*args, **kwargs)


def of_bitsandbytes(kind):
    library = pytest.importorskip("bitsandbytes")
    if kind == "int8":
        return library.nn.Linear8bitLt(IN, OUT, has_fp16_weights=False).to("cpu")
    return library.nn.Linear4bit(IN, OUT, quant_type=kind).to("cpu")


def of_torchao(name):
    library = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(IN, OUT).bfloat16()
    library.quantize_(layer, getattr(library, name)())
    return layer


class Wrapper(torch.Tensor):
    """A subclass of the kind of torchao and quanto: a floating-point tensor outside, codes and scales inside."""

    @staticmethod
    def __new__(cls, *inner):
        return torch.Tensor._make_wrapper_subclass(cls, (OUT, IN), dtype=torch.bfloat16, requires_grad=False)

    def __init__(self, *inner):
        self.codes, self.scale = inner

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapper(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def quanto(bits):
    """optimum.quanto.WeightQBitsTensor: packed uint8 along rows, a scale for each 128."""
    layer = nn.Linear(IN, OUT).bfloat16()
    codes = torch.zeros(OUT * bits // 8, IN, dtype=BYTE)
    layer.weight = nn.Parameter(Wrapper(codes, torch.zeros(WEIGHTS // 128, 1, dtype=torch.bfloat16)), False)
    return layer


PACKED, SCALES = "weight_packed", "weight_scale"
# Name → what makes a layer, the dtype of its weights, their bytes (computed from bits a weight), and its bias.
FORMATS = {
    "GPTQ 4": (partial(gptq, 4), "int4", 4),
    "GPTQ 3": (partial(gptq, 3), "int3", 3),
    "GPTQ 8": (partial(gptq, 8), "int8", 8),
    "GPTQ 2, old names": (partial(gptq, 2, sizes={"infeatures": IN, "outfeatures": OUT}), "int2", 2),
    "AWQ GEMM": (partial(awq, (IN, OUT // 8)), "int4", 4),
    "AWQ GEMV": (partial(awq, (OUT, IN // 8)), "int4", 4),
    "AWQ GEMV fast": (partial(awq, (OUT // 4, IN // 4 * 4), torch.int16), "int4", 4),
    "AWQ Marlin": (partial(awq, (IN // 16, OUT * 16 // 8)), "int4", 4),
    "HQQ 4": (partial(hqq, 4, 32), "int4", 4),
    "HQQ 3": (partial(hqq, 3, 7, INT), "int3", 3.5),  # ten in an int32, and the last row padded
    "HQQ 1": (partial(hqq, 1, 8), "int1", 1),
    "compressed-tensors int4": (
        partial(
            compressed, {PACKED: ((OUT, IN // 8), INT), SCALES: ((OUT, 2), HALF), "weight_shape": ((2,), torch.int64)}
        ),
        "int4",
        4,
    ),
    "compressed-tensors fp8": (
        partial(compressed, {"weight": ((OUT, IN), FP8), SCALES: ((OUT, 1), HALF)}),
        "float8_e4m3fn",
        8,
    ),
    "compressed-tensors nvfp4": (
        partial(
            compressed,
            {
                PACKED: ((OUT, IN // 2), BYTE),
                SCALES: ((OUT, IN // 16), FP8),
                "weight_global_scale": ((1,), torch.float32),
            },
        ),
        "float4_e2m1fn",
        4,
    ),
    "AQLM 1x16": (partial(aqlm, 1, 16), "int2", 2),
    "AQLM 2x8": (partial(aqlm, 2, 8), "int2", 2),
    "SpQR": (spqr, "int3", 4),  # 16 weights of 3 bits and their statistics in 64 bits
    "VPTQ": (vptq, "int3", 3),
    "FP-Quant MXFP4": (partial(fp_quant, 32), "float4_e2m1fn", 4),
    "FP-Quant NVFP4": (partial(fp_quant, 16), "float4_e2m1fn", 4),
    "BitNet": (partial(of_transformers, "bitnet", "BitLinear", IN, OUT, True), "int2", 2),
    "EETQ": (partial(of_transformers, "eetq", "EetqLinear", IN, OUT, bias=True), "int8", 8),
    "HIGGS": (partial(of_transformers, "higgs", "HiggsLinear", IN, OUT, 4, dtype=HALF), "int4", 4),
    "Metal": (partial(of_transformers, "metal_quantization", "MetalLinear", IN, OUT, bias=True), "int4", 4),
    "Gemma": (partial(of_transformers, "gemma_quant", "QuantizedLinear", IN, OUT, True, num_bits=2), "int2", 2),
    "FP8": (
        partial(of_transformers, "finegrained_fp8", "FP8Linear", IN, OUT, block_size=(128, 128), has_bias=True),
        "float8_e4m3fn",
        8,
    ),
    "FBGEMM": (partial(of_transformers, "fbgemm_fp8", "FbgemmFp8Linear", IN, OUT, True), "float8_e4m3fn", 8),
    "bitsandbytes nf4": (partial(of_bitsandbytes, "nf4"), "nf4", 4),
    "bitsandbytes int8": (partial(of_bitsandbytes, "int8"), "int8", 8),
    "torchao int8": (partial(of_torchao, "Int8WeightOnlyConfig"), "int8", 8 * (1 + 5 / IN)),
    "torchao fp8": (partial(of_torchao, "Float8WeightOnlyConfig"), "float8_e4m3fn", 8 * (1 + 4 / IN)),
    "quanto 4": (partial(quanto, 4), "int4", 4 + 16 / 128),
    "quanto 2": (partial(quanto, 2), "int2", 2 + 16 / 128),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_layer_counts_as_the_layer_that_it_was_made_of(name):
    make, dtype, bits = FORMATS[name]
    model = nn.Sequential(nn.Embedding(100, IN), make(), nn.LayerNorm(OUT))
    has_bias = name != "SpQR"
    plain = nn.Sequential(nn.Embedding(100, IN), nn.Linear(IN, OUT, bias=has_bias), nn.LayerNorm(OUT))
    summary = parameter_summary(model)
    assert summary[""].total == sum(parameter.numel() for parameter in plain.parameters())
    assert summary["1"].total == WEIGHTS + OUT * has_bias
    weights = summary["1"].by_dtype[dtype]
    assert weights.elements == WEIGHTS
    # Bits of padding and of scales inside a tensor subclass are in the bytes.
    assert weights.bits == pytest.approx(bits, abs=0.1 if name == "HQQ 3" else 1e-9)
    if "torchao" not in name and "quanto" not in name:
        tree = read_modules(model[1])
        stored = sum(tensor.nbytes for tensor in (*model[1].parameters(), *model[1].buffers()))
        assert sum(tensor.nbytes for tensor in (*tree.parameters(), *tree.buffers())) == stored


def test_the_layers_of_the_report():
    """A GPTQ layer 64 x 256 with embedding and norm, and an HQQ layer 64 x 128."""
    sizes = {"infeatures": 64, "outfeatures": 256}
    layer = Layer(sizes, {"qweight": ((8, 256), INT), "scales": ((1, 256), HALF)}, bias=False)
    model = nn.Sequential(nn.Embedding(100, 64), layer, nn.LayerNorm(64))
    assert parameter_summary(model)[""].total == 22_912
    table = parameter_summary_table(model)
    assert table.endswith("34.3 KB of parameters: 6.528K float32 (32 bits), 16.384K int4 (4 bits).")
    layer = Layer({}, {"W_q": ((32, 128), BYTE)}, as_parameters=True, bias=False)
    layer.meta = {"shape": (64, 128), "nbits": 4}
    assert parameter_summary(layer)[""].total == 8_192


@pytest.fixture
def transformers():
    library = pytest.importorskip("transformers")
    experts = pytest.importorskip("transformers.integrations.finegrained_fp8").FP8Experts
    if "expert_dtype" not in inspect.signature(experts).parameters:
        pytest.skip(f"transformers {library.__version__} has other classes of packed experts")
    return library


def test_the_experts_of_gpt_oss(transformers):
    """MXFP4: 4 bits a weight, hidden and intermediate size may be equal; biases are parameters."""
    for hidden, inner in ((64, 96), (64, 64)):
        config = transformers.GptOssConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=4)
        experts = of_transformers("mxfp4", "Mxfp4GptOssExperts", config)
        counts = parameter_summary(experts)[""].by_dtype
        assert counts["float4_e2m1fn"] == (3 * 4 * hidden * inner, 3 * 4 * hidden * inner // 2)
        assert counts["float32"].elements == 4 * (2 * inner + hidden)
        shapes = {item.name: item.spec.shape for item in read_modules(experts).parameters()}
        assert shapes["down_proj"] == (4, hidden, inner)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_experts_of_fp8(kind, transformers):
    config = transformers.Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=384, num_experts=4)
    experts = of_transformers("finegrained_fp8", "FP8Experts", config, block_size=(128, 128), expert_dtype=kind)
    dtype = "float8_e4m3fn" if kind == "fp8" else "float4_e2m1fn"
    assert {name: item.elements for name, item in parameter_summary(experts)[""].by_dtype.items()} == {
        dtype: 3 * 4 * 256 * 384
    }


def test_a_packed_embedding():
    table = of_transformers("gemma_quant", "QuantizedEmbedding", 1000, 64, torch.float32, num_bits=4)
    assert parameter_summary(table)[""].by_dtype == {"int4": (64_000, 32_000)}


def sparse(dtype, indices):
    """A sparse matrix of 4 % of the elements: indices beside values."""
    values = WEIGHTS // 25
    layer = Layer(FEATURES, {"indices": ((indices * values,), dtype), "rows": ((OUT + 1,), dtype)}, bias=False)
    layer.values = nn.Parameter(torch.zeros(values))
    return layer, values


def butterfly():
    layer = Layer({"in_features": 64, "out_features": 64}, {"permutation": ((64,), torch.int64)}, bias=False)
    layer.twiddles = nn.Parameter(torch.zeros(6, 32, 2, 2))
    return layer, 6 * 32 * 4


def low_rank():
    layer = Layer(FEATURES, {"mask": ((OUT, IN), torch.bool), "channels": ((IN,), INT)}, bias=False)
    layer.u, layer.v = nn.Parameter(torch.zeros(OUT, 4)), nn.Parameter(torch.zeros(4, IN))
    return layer, 4 * (OUT + IN)


def masked():
    layer = nn.Linear(IN, OUT)
    layer.register_buffer("mask", torch.zeros(OUT, IN, dtype=BYTE))
    return layer, WEIGHTS + OUT


def hashed():
    layer = Layer(FEATURES, {"buckets": ((OUT, IN), torch.int64)}, bias=False)
    layer.weights = nn.Parameter(torch.zeros(1000))
    return layer, 1000


def counters():
    layer = nn.BatchNorm2d(8)
    layer.register_buffer("steps", torch.zeros(8, dtype=INT))
    return layer, 16


@pytest.mark.parametrize(
    "make",
    [
        *(partial(sparse, INT, 1), partial(sparse, INT, 2), partial(sparse, torch.int64, 1)),
        *(butterfly, low_rank, masked, hashed, counters),
    ],
)
def test_integers_that_are_no_weights(make):
    layer, expected = make()
    assert parameter_summary(layer)[""].total == expected == sum(item.numel() for item in layer.parameters())


def test_low_rank_factors_in_a_packed_layer_are_parameters():
    layer = gptq(4)
    layer.lora_A, layer.lora_B = nn.Parameter(torch.zeros(IN, 8)), nn.Parameter(torch.zeros(8, OUT))
    root = parameter_summary(layer)[""]
    assert (root.total, root.trainable) == (WEIGHTS + OUT + 8 * (IN + OUT), 8 * (IN + OUT))


class Unpacking(nn.Module):
    """A layer of int4 in int32 buffers, unpacked by ops of torch, as GPTQ's torch kernel does."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features, self.bits = IN, OUT, 4
        self.register_buffer("qweight", torch.zeros(IN // 8, OUT, dtype=INT))
        self.register_buffer("scales", torch.ones(1, OUT))
        self.register_buffer("shifts", torch.arange(0, 32, 4).view(1, 8, 1))

    def forward(self, x):
        codes = (self.qweight.unsqueeze(1) >> self.shifts) & 15
        return x @ ((codes.reshape(IN, OUT) - 8).to(x.dtype) * self.scales)


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_run_of_a_packed_layer(execution):
    model = nn.Sequential(Unpacking(), nn.ReLU())
    analysis = FlopCountAnalysis(model, torch.rand(3, IN), execution=execution)
    assert analysis.total() == 3 * WEIGHTS
    root = parameter_summary(analysis)[""]
    assert (root.total, root.active, root.unused) == (WEIGHTS, WEIGHTS, 0)
    trace = Trace.from_json(analysis.trace().to_json())
    assert parameter_summary(trace)[""].by_dtype == {"int4": (WEIGHTS, WEIGHTS // 2)}
    kinds = predict_memory(trace).at_peak().by_kind
    assert kinds["parameter"] == WEIGHTS // 2
    assert math.isclose(kinds["buffer"], 4 * OUT + 8 * 8)


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_layer_that_states_no_sizes_has_those_of_its_operand(execution):
    layer = Unpacking()
    del layer.in_features, layer.out_features, layer.bits
    analysis = FlopCountAnalysis(nn.Sequential(layer, nn.ReLU()), torch.rand(3, IN), execution=execution)
    root = parameter_summary(analysis)[""]
    assert root.by_dtype == {"int4": (WEIGHTS, WEIGHTS // 2)} and root.buffers == OUT + 8
    assert (root.active, root.unused, root.trainable) == (WEIGHTS, 0, 0)


def on_meta(kind):
    library = pytest.importorskip("bitsandbytes")
    with torch.device("meta"):
        if kind == "int8":
            layer = library.nn.Linear8bitLt(IN, OUT, has_fp16_weights=False)
        else:
            layer = library.nn.Linear4bit(IN, OUT, quant_type=kind, compute_dtype=torch.bfloat16)
        return nn.Sequential(nn.Linear(64, IN), layer)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_a_layer_of_bitsandbytes_on_meta(kind, device):
    model = on_meta(kind)
    before = [(name, item, item.shape, item.dtype, item.device) for name, item in model.named_parameters()]
    attributes = {name: value for name, value in vars(model[1]).items() if not name.startswith("_")}
    analysis = FlopCountAnalysis(model, torch.empty(3, 64, device="meta"), device=device, warn=False)
    assert analysis.total() == 3 * (64 * IN + WEIGHTS)
    by_dtype = parameter_summary(analysis)[""].by_dtype
    assert by_dtype[kind] == (WEIGHTS, WEIGHTS if kind == "int8" else WEIGHTS // 2)
    after = [(name, item, item.shape, item.dtype, item.device) for name, item in model.named_parameters()]
    assert [item[0] for item in before] == [item[0] for item in after]
    assert all(old[1] is new[1] and old[2:] == new[2:] for old, new in zip(before, after, strict=True))
    assert {name: value for name, value in vars(model[1]).items() if not name.startswith("_")} == attributes


def test_a_training_step_beside_a_layer_of_4_bits_on_meta():
    """The gradient flows through the packed layer to the one before: QLoRA's case."""
    model = on_meta("nf4")
    model[1].requires_grad_(False)
    trace = record_call(model, (torch.empty(3, 64, device="meta"),), loss=torch.sum, device="cuda", execution="shapes")
    forward, backward = 3 * (64 * IN + WEIGHTS), 3 * (64 * IN + WEIGHTS)
    assert FlopCountAnalysis.from_trace(trace, warn=False).total() == forward + backward
    assert parameter_summary(trace)[""].trainable == 64 * IN + IN
