"""The utilisation: published figures from their published inputs, laws and errors."""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fvflops import (
    Device,
    FlopCountAnalysis,
    StepFigures,
    StepMeter,
    StopsAt,
    TrainingStepAnalysis,
    UtilisationError,
    hfu,
    mfu,
    record,
    record_call,
)
from fvflops.devices.utilisation import model_flops
from fvflops.trace import Counts, Entry, ModuleTree, Status
from fvflops.zoo import build
from fvflops.zoo.llama import Llama, LlamaConfig

T, P = 10**12, 10**15
CHIP = Device(
    "chip", matrix={"bf16": 100 * T, "tf32": 50 * T, "fp8": 200 * T}, sparse={"bf16": 200 * T}, vector={"fp32": 10 * T}
)
NVIDIA = Device("chip", matrix=CHIP.matrix, vector=CHIP.vector, vendor="NVIDIA")


def entry(dtype, macs=0, flops=0, *, phase="forward", op="aten::mm"):
    value = 7 * macs + flops  # of some convention, which must not matter
    return Entry(("",), phase, op, op, Status.COUNTED, 1, value, macs, flops, elements=1, dtype=dtype)


def counts(*entries, metric="flops"):
    return Counts(metric, ModuleTree({}), entries)


PALM = {"layers": 118, "heads": 48, "width": 256, "tokens": 2048}  # of a head, and of a sequence
# The parameters of the 530B model: 105 layers 20,480 wide, 51,200 words and 2,048 positions; norms and biases aside.
MT_NLG_PARAMETERS = 105 * 12 * 20480**2 + (51200 + 2048) * 20480


def flops_of_a_token(parameters, layers, heads, width, tokens):
    """PaLM, appendix B: 6N + 12LHQT."""
    return 6 * parameters + 12 * layers * heads * width * tokens


def test_palm():
    # Chowdhery et al. 2022, appendix B: 238.3 thousand tokens/s on 6,144 TPU v4 chips; 45.7 % without attention.
    run = {"device": "TPU v4", "dtype": "bfloat16", "devices": 6144}
    whole = flops_of_a_token(540_350_000_000, **PALM)
    assert mfu(whole * 238_300, 1.0, **run) == pytest.approx(0.462, abs=0.0005)
    assert mfu(6 * 540_350_000_000 * 238_300, 1.0, **run) == pytest.approx(0.457, abs=0.0005)


def test_megatron_turing():
    # Smith et al. 2022: a batch of 1,920 sequences of 2,048 tokens takes 60.1 s on 280 DGX A100, which is 126 TFLOP/s a
    # GPU with the forward pass run again. PaLM, table 3, makes that a model FLOPs utilisation of 30.2 %.
    tokens = 1920 * 2048
    run = {"device": "A100 80GB", "devices": 2240}
    layers = {"layers": 105, "heads": 128, "width": 160, "tokens": 2048}
    model = {"bf16": tokens * flops_of_a_token(MT_NLG_PARAMETERS, **layers)}
    assert mfu(model, 60.1, **run) == pytest.approx(0.302, abs=0.001)
    # Narayanan et al. 2021, equation 3: 96 B s l h² (1 + s/6h + V/16lh).
    hardware = 96 * tokens * 105 * 20480**2 * (1 + Fraction(2048, 6 * 20480) + Fraction(51200, 16 * 105 * 20480))
    assert hfu({"bf16": hardware}, 60.1, **run) == pytest.approx(126 / 312, abs=0.002)


@pytest.mark.parametrize(
    ("heads", "width", "layers", "gpus", "batch", "seconds", "model", "hardware"),
    [
        (64, 6144, 48, 8, 4, 1.10, 0.415, 0.437),
        (96, 12288, 96, 64, 64, 13.75, 0.514, 0.528),
        (128, 20480, 105, 280, 280, 37.83, 0.560, 0.570),
        (160, 25600, 128, 512, 512, 71.49, 0.563, 0.570),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_reducing_activation_recomputation(heads, width, layers, gpus, batch, seconds, model, hardware):
    # Korthikanti et al. 2022, tables 3 and 5, A100 80GB; equations 7 and 8, whose recomputation is attention's core.
    tokens, words = 2048, 51200
    products = 72 * batch * layers * tokens * width**2
    head = Fraction(words, 12 * width * layers)
    once, again = Fraction(tokens, 6 * width), Fraction(tokens, 3 * width)
    run = {"device": "A100-SXM4-80GB", "dtype": "fp16", "devices": gpus}
    # The times are told to a hundredth of a second, which matters where it is one.
    tolerance = 0.0006 + 0.005 / seconds / 2
    assert mfu(products * (1 + once + head), seconds, **run) == pytest.approx(model, abs=tolerance)
    assert hfu(products * (1 + again + head), seconds, **run) == pytest.approx(hardware, abs=tolerance)


@pytest.mark.parametrize(("tera", "percent"), [(137, 44), (142, 46), (148, 47), (155, 50), (163, 52)])
def test_efficient_training_on_clusters(tera, percent):
    # Narayanan et al. 2021, table 1: achieved TFLOP/s of a GPU beside the percentage of the A100's peak.
    assert round(100 * hfu(tera * T, 1.0, device="A100", dtype="fp16")) == percent


def test_twice_the_time_or_devices_is_half():
    once = mfu(50 * T, 1.0, device=CHIP, dtype="bf16")
    assert once == 0.5
    assert mfu(50 * T, 2.0, device=CHIP, dtype="bf16") == once / 2
    assert mfu(50 * T, 1.0, device=CHIP, dtype="bf16", devices=2) == once / 2
    assert mfu(100 * T, 2, device=CHIP, dtype=torch.bfloat16) == once
    assert mfu(100 * T, 1, device=CHIP, dtype="bf16") == 1.0


def test_the_times_of_several_dtypes_add_up():
    # 0.2 s at 100 TFLOP/s and 0.3 s at 10.
    assert mfu({"bf16": 20 * T, torch.float32: 3 * T}, 1, device=CHIP) == 0.5
    assert mfu({"bf16": 20 * T, "bfloat16": 20 * T}, 1, device=CHIP) == 0.4
    parts = mfu({"bf16": 20 * T}, 1, device=CHIP) + mfu({"fp32": 3 * T}, 1, device=CHIP)
    assert parts == 0.5


def test_sparse_takes_the_peak_for_two_of_four():
    assert mfu(50 * T, 1, device=CHIP, dtype="bf16", sparse=True) == 0.25
    assert mfu({"bf16": 50 * T, "fp32": T}, 1, device=CHIP, sparse=True) == 0.35
    with pytest.raises(ValueError, match="sparse: chip has a 2:4 peak for bf16, and the counts are in fp32"):
        mfu(T, 1, device=CHIP, dtype="fp32", sparse=True)


def test_counts_are_macs_twice_and_flops_in_their_dtypes():
    work = counts(
        entry("bfloat16", macs=10 * T, flops=5 * T),
        entry("float32", flops=T, op="aten::add"),
        entry("", op="aten::view"),
    )
    assert mfu(work, 1, device=CHIP) == pytest.approx(0.25 + 0.1)
    assert mfu(work, 1, device=CHIP, dtype="bf16") == pytest.approx(0.26)
    assert hfu(work, 1, device=CHIP) == mfu(work, 1, device=CHIP)


def test_mfu_leaves_out_what_is_recomputed_and_the_optimizer():
    phases = [entry("bf16", macs=5 * T), entry("bf16", macs=10 * T, phase="backward")]
    assert mfu(counts(*phases), 1, device=CHIP) == hfu(counts(*phases), 1, device=CHIP) == 0.3
    again = entry("bf16", macs=5 * T, phase="recompute")
    update = entry("bf16", macs=T, phase="optimizer")
    assert mfu(counts(*phases, again, update), 1, device=CHIP) == 0.3
    assert hfu(counts(*phases, again, update), 1, device=CHIP) == 0.42
    fused = entry("bf16", macs=10 * T, phase="backward")._replace(recomputed=2 * T)
    assert mfu(counts(fused), 1, device=CHIP) == 0.16 and hfu(counts(fused), 1, device=CHIP) == 0.2


class Attention(nn.Module):
    """Attention of four heads, by torch's function or by its three steps."""

    def __init__(self, eager):
        super().__init__()
        self.eager = eager
        self.project = nn.Linear(64, 192)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        if self.eager:
            return (torch.softmax(query @ key.transpose(-1, -2) / 4, -1) @ value).sum()
        return functional.scaled_dot_product_attention(query, key, value).sum()


def count_attention_step(backend, device, eager=False):
    x = torch.ones(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    with sdpa_kernel(backend):
        step = TrainingStepAnalysis(Attention(eager).bfloat16(), x, device=device)
        step.trace()
    return step


KERNELS = [
    *((backend, device) for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION) for device in ("cpu", "cuda")),
    *((backend, "cuda") for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)),
]


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_mfu_is_the_same_for_every_kernel_of_attention(backend, device):
    step, eager = count_attention_step(backend, device), count_attention_step(SDPBackend.MATH, "cpu", eager=True)
    # A linear layer of 64 x 192 on 64 tokens, and two products of 32 x 32 x 16 in each of 8 heads: three times each.
    macs = 3 * (64 * 64 * 192 + 2 * 8 * 32 * 32 * 16)
    assert eager.macs() == macs
    # The kernel "math" computes in float32: `dtype` is the one whose peak a training is compared with.
    expected = 2 * macs / (100 * T)
    assert mfu(step, 1, device=CHIP, dtype="bf16") == mfu(eager, 1, device=CHIP, dtype="bf16") == expected
    fused = backend is not SDPBackend.MATH
    assert step.macs() == macs + fused * 8 * 32 * 32 * 16  # the scores again
    assert hfu(step, 1, device=CHIP, dtype="bf16") == 2 * step.macs() / (100 * T)


def test_the_products_of_an_optimizer_are_no_work_of_the_model():
    model = nn.Linear(64, 64, bias=False)
    muon = partial(torch.optim.Muon, lr=0.1)
    step = TrainingStepAnalysis(model, torch.ones(4, 64), loss=lambda y: y.sum(), optimizer=muon)
    plain = TrainingStepAnalysis(model, torch.ones(4, 64), loss=lambda y: y.sum())
    assert step.macs(phase="optimizer") > 10 * plain.macs()
    assert mfu(step, 1e-3, device=CHIP) == mfu(plain, 1e-3, device=CHIP)
    assert hfu(step, 1e-3, device=CHIP) > 10 * mfu(step, 1e-3, device=CHIP)


IEEE = ("aten::mm", "aten::linear", "aten::scaled_dot_product_attention", "aten::lstm_cell", "mylib::conv2d")
TF32 = (
    *("aten::convolution", "aten::convolution_backward", "aten::_convolution", "aten::conv2d", "aten::conv2d.padding"),
    *("aten::conv_transpose3d.input", "aten::lstm.input", "aten::_cudnn_rnn", "torch.nn.Conv1d"),
)


@pytest.mark.parametrize("op", [*IEEE, *TF32])
def test_float32_products_run_as_torch_does_by_default(op):
    # 0.5 s at the 10 TFLOP/s of float32, or 0.1 s at the 50 of tf32, and 0.1 s of other ops.
    work = counts(entry("float32", macs=5 * T // 2, flops=T, op=op))
    ieee, tf32 = pytest.approx(0.6), pytest.approx(0.2)
    assert mfu(work, 1, device=NVIDIA) == (tf32 if op in TF32 else ieee)
    assert mfu(work, 1, device=NVIDIA, float32_matmul="ieee") == ieee
    assert mfu(work, 1, device=NVIDIA, float32_matmul="tf32") == tf32
    # Others have no cuDNN, and some NVIDIA GPUs no tf32.
    assert mfu(work, 1, device=CHIP) == ieee
    assert mfu(work, 1, device=Device("old", vector={"fp32": 10 * T}, vendor="NVIDIA")) == ieee


def test_tf32_is_for_a_device_that_has_it():
    assert mfu(5 * T, 1, device=CHIP, dtype="fp32", float32_matmul="tf32") == 0.1
    assert mfu(5 * T, 1, device=NVIDIA, dtype="fp32") == 0.5
    with pytest.raises(ValueError, match="T4 has no peak for tf32: it has fp32, fp16, int8"):
        mfu(T, 1, device="T4", dtype="fp32", float32_matmul="tf32")
    with pytest.raises(ValueError, match="float32_matmul must be 'ieee', 'tf32' or None; got 'high'"):
        mfu(T, 1, device="A100", dtype="fp32", float32_matmul="high")


class Stack(nn.Module):
    """Two layers of 8 × 8, the second of which may be checkpointed."""

    def __init__(self, checkpointed):
        super().__init__()
        self.first, self.second, self.checkpointed = nn.Linear(8, 8), nn.Linear(8, 8), checkpointed

    def forward(self, x):
        x = self.first(x).relu()
        return checkpoint(self.run, x, use_reentrant=False, early_stop=False) if self.checkpointed else self.run(x)

    def run(self, x):
        return self.second(x).relu()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_recorded_step(checkpointed):
    x = torch.ones(4, 8)
    trace = record_call(Stack(checkpointed), (x,), loss=lambda y: y.sum(), stops_at=StopsAt(frozenset()))
    analysis = FlopCountAnalysis.from_trace(trace)
    product = 2 * 4 * 8 * 8
    # The input requires no gradient: two products forward, three backward, and one again under checkpointing.
    step = {"device": Device("tiny", vector={"fp32": 100 * product}), "dtype": "fp32"}
    assert mfu(analysis, 1, **step) == mfu(analysis.counts(), 1, **step) == 0.05
    assert hfu(analysis, 1, **step) == (0.06 if checkpointed else 0.05)


def test_a_recorded_step_and_figures_have_the_utilisation_of_their_flops():
    layer, chip = nn.Linear(8, 8, bias=False), Device("tiny", vector={"fp32": 10**6})
    with record(layer) as run:
        for rows in (1, 3):
            layer(torch.ones(rows, 8)).sum().backward()
            run.step()
    flops = [2 * 2 * rows * 8 * 8 for rows in (1, 3)]  # of two products: no gradient of the input
    assert [mfu(step, 1, device=chip) for step in run.steps] == [one / 10**6 for one in flops]
    assert [step.flops for step in run.per_step().each] == flops and run.per_step().flops.mean == sum(flops) / 2
    for utilisation in (mfu, hfu):
        with pytest.raises(ValueError, match=r"this recording has 2 steps, and seconds is one time: pass run.steps"):
            utilisation(run, 1, device=chip)
    assert mfu(run.counts(), 1, device=chip) == sum(flops) / 10**6
    figures = StepFigures(1, 0.5, model_flops=6 * T, hardware_flops=8 * T)
    assert (mfu(figures, device=CHIP, dtype="bf16"), hfu(figures, device=CHIP, dtype="bf16")) == (0.12, 0.16)
    assert mfu(figures, 1, device=CHIP, dtype="bf16") == 0.06
    assert mfu(replace(figures, devices=2), device=CHIP, dtype="bf16") == 0.06


def test_the_result_of_a_handle_is_work():
    analysis = FlopCountAnalysis(nn.Linear(8, 8), torch.ones(4, 8))
    analysis.set_op_handle("aten::linear", lambda call: 5 * T)
    assert mfu(analysis, 1, device=CHIP, dtype="bf16") == hfu(analysis, 1, device=CHIP, dtype="bf16") == 0.05


def test_more_than_all_is_refused_with_what_to_check():
    with pytest.raises(UtilisationError) as caught:
        mfu(100 * T, 0.5, device="NVIDIA H100 80GB HBM3", dtype="fp32")
    # 100 / 66.9 is 1.49 s, three times 0.5; 100 / 494.7 s is 40.4 %, and 100 / 989.4 s is 20.2 %.
    assert str(caught.value) == (
        "MFU would be 299.0%: 100T FLOPs in fp32 take 1 × H100 SXM at least 1.49 s, and seconds is 500 ms; check "
        "seconds, device, dtype (assumed fp32: 40.4% at tf32, 20.2% at fp16, 20.2% at bf16), "
        "devices (at least 3), counts (a kernel may skip counted work, such as the masked half of causal "
        "attention)"
    )


def test_a_sparse_or_narrower_dtype_is_suspected_where_it_would_do():
    message = r"^HFU would be 150.0%: 0.15P FLOPs in bf16 take 1 × chip .* 1.5 s"
    with pytest.raises(UtilisationError, match=message) as caught:
        hfu(150 * T, 1, device=CHIP, dtype="bf16")
    assert "(assumed bf16: 75.0% at fp8), devices (at least 2), sparse (75.0% at the 2:4 peak)" in str(caught.value)
    with pytest.raises(UtilisationError, match=r"dtype, devices \(at least 3\), sparse, counts"):
        mfu(250 * T, 1, device=CHIP, dtype="bf16")
    with pytest.raises(UtilisationError, match=r"take 2 × chip .* dtype, devices \(at least 3\), counts"):
        mfu(500 * T, 1, device=CHIP, dtype="bf16", sparse=True, devices=2)


def test_of_mixed_work_the_slowest_part_is_suspected():
    # 1.2 s of float32, and 0.1 s: with tf32 for the first, 0.24 s and 0.1.
    with pytest.raises(UtilisationError, match=r"assumed fp32: 34.0% at tf32, 22.0% at bf16, 16.0% at fp8\)"):
        mfu({"fp32": 12 * T, "bf16": 10 * T}, 1, device=CHIP)


def test_the_least_time_itself_may_be_rounded():
    for flops in range(1, 200):
        assert mfu(flops, flops / (3 * 100 * T), device=CHIP, dtype="bf16", devices=3) == pytest.approx(1, abs=1e-15)


def test_a_little_more_than_all_is_too_much():
    assert mfu(100 * T, 1, device=CHIP, dtype="bf16") == 1
    with pytest.raises(UtilisationError, match=r"MFU would be 100\.0%"):
        mfu(100 * T + 1, 1, device=CHIP, dtype="bf16")
    assert issubclass(UtilisationError, ValueError)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "must be more than 0: pass the measured time"),
        (-1, "must be a finite number of at least 0; got -1"),
        (float("nan"), "must be .*; got nan"),
        (float("inf"), "must be .*; got inf"),
        (True, "must be .*; got True"),
        ("1", "must be .*; got '1'"),
        (torch.tensor(1.0), r"must be .*; got tensor\(1.\)"),
    ],
    ids=["zero", "negative", "nan", "infinite", "bool", "text", "tensor"],
)
def test_seconds_are_a_time(value, text):
    with pytest.raises(ValueError, match=f"^seconds {text}"):
        mfu(T, value, device=CHIP, dtype="bf16")


@pytest.mark.parametrize("value", [5e-324, numpy.float32(1e-30)], ids=["least", "numpy"])
def test_no_time_is_too_small_to_be_refused_in_a_line(value):
    message = r"^MFU would be over 100000000.0%: .* dtype, devices, sparse, counts"
    with pytest.raises(UtilisationError, match=message) as caught:
        mfu(10**299, value, device=CHIP, dtype="bf16")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", None], ids=str)
def test_devices_are_a_number(value):
    with pytest.raises(ValueError, match=r"^devices must be the number of devices, at least 1; got "):
        mfu(T, 1, device=CHIP, dtype="bf16", devices=value)


@pytest.mark.parametrize(
    ("work", "dtype", "text"),
    [
        (T, None, "counts is a number of FLOPs: pass their dtype, such as dtype='bf16'"),
        (0, "bf16", "the counts are zero"),
        ({"bf16": 0}, None, "the counts are zero"),
        (-1, "bf16", "counts must be .*; got -1"),
        ([T], "bf16", "counts must be .*; got .1000000000000."),
        ("many", "bf16", "counts must be .*; got 'many'"),
        ({"bf16": T}, "bf16", "counts is a mapping of dtypes: omit dtype"),
        ({"bf61": T}, None, "no device has a peak for the dtype 'bf61': did you mean 'bf16'"),
        (T, "fp64", "chip has no peak for fp64: it has fp32, tf32, bf16, fp8"),
        (T, "int64", "no device has a peak for the dtype 'int64'"),
        (counts(), None, "the counts are zero"),
        (counts(entry("", macs=T)), None, "the counts have no dtype for the 2T FLOPs of aten::mm: pass dtype"),
        (counts(entry("int64", macs=T)), None, "no device has a peak for the dtype 'int64'"),
        (counts(entry("bf16", macs=T, phase="recompute")), None, "the counts are zero"),
        (counts(entry("bf16", macs=T), metric="activations"), None, "counts of activations: pass counts of flops"),
    ],
    ids=range(15),
)
def test_counts_are_flops_in_a_dtype(work, dtype, text):
    with pytest.raises(ValueError, match=text):
        mfu(work, 1, device=CHIP, dtype=dtype)


def test_numbers_of_numpy_are_exact():
    large = numpy.int64(2**62)
    assert mfu({"bf16": large, "bfloat16": large}, 2**63 / (100 * T), device=CHIP) == pytest.approx(1)
    assert mfu(numpy.float64(50 * T), numpy.float32(1), device=CHIP, dtype="bf16", devices=numpy.int32(1)) == 0.5


LLAMA = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=176, layers=3, heads=4, kv_heads=2)


def count_llama_step(tokens, **options):
    with torch.device("meta"):
        model = Llama(LLAMA)
    ids = torch.zeros(2, tokens, dtype=torch.long)
    return model, TrainingStepAnalysis(model, ids, loss=torch.sum, **options)


def palm(parameters, tokens):
    """Chowdhery et al. 2022, appendix B, a token: N are the parameters of matrix products."""
    return 6 * parameters["products"] + 12 * LLAMA.layers * LLAMA.hidden_size * tokens


def megatron_dense(parameters, tokens):
    """Megatron-LM's training.py until 2024, a token: 12 L h^2 times the parts of a layer, and the logits."""
    width, layers = LLAMA.hidden_size, LLAMA.layers
    groups = LLAMA.kv_heads / LLAMA.heads
    parts = 1 + groups + tokens / width + 3 / 2 * LLAMA.intermediate_size / width
    return 12 * layers * width**2 * (parts + LLAMA.vocab_size / (2 * layers * width))


def torchtitan(parameters, tokens):
    """torchtitan's 6 (N - N_emb) + 12 L H Q T."""
    return 6 * (parameters["all"] - parameters["embedding"]) + 12 * LLAMA.layers * LLAMA.hidden_size * tokens


def nanogpt(parameters, tokens):
    """nanoGPT's estimate_mfu: N are all parameters but positions, here with an embedding that is not tied."""
    return 6 * parameters["all"] + 12 * LLAMA.layers * LLAMA.hidden_size * tokens


def litgpt(parameters, tokens):
    """litgpt's estimate_flops, a token: three times 2 N and four products of n_embd * T."""
    return 3 * (2 * parameters["all"] + LLAMA.layers * 4 * LLAMA.hidden_size * tokens)


def megatron_causal(parameters, tokens):
    """Megatron-LM's training.py of 2025: half of the pairs."""
    return palm(parameters, tokens) - 6 * LLAMA.layers * LLAMA.hidden_size * tokens


# Formula, attention, and what it counts more than the products that run, a token.
FORMULAS = [
    (palm, "dense", lambda parameters, tokens: 0),
    (megatron_dense, "dense", lambda parameters, tokens: 0),
    (torchtitan, "dense", lambda parameters, tokens: 6 * parameters["norms"]),
    (nanogpt, "dense", lambda parameters, tokens: 6 * (parameters["norms"] + parameters["embedding"])),
    (litgpt, "dense", lambda parameters, tokens: 6 * (parameters["norms"] + parameters["embedding"])),
    # Half of the square is half of the diagonal less than the pairs of a causal mask.
    (megatron_causal, "causal", lambda parameters, tokens: -6 * LLAMA.layers * LLAMA.hidden_size),
]


@pytest.mark.parametrize(("formula", "attention", "residual"), FORMULAS, ids=[row[0].__name__ for row in FORMULAS])
@pytest.mark.parametrize("tokens", [32, 200])
def test_formulas_of_others_are_settings(formula, attention, residual, tokens):
    model, step = count_llama_step(tokens)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    embedding = sizes["embed_tokens.weight"]
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    parameters = {"all": sum(sizes.values()), "embedding": embedding, "norms": norms}
    parameters["products"] = parameters["all"] - embedding - norms
    counted = model_flops(step, attention=attention, matmul_only=True)
    assert 2 * tokens * (formula(parameters, tokens) - residual(parameters, tokens)) == counted


def test_model_flops_leave_out_recomputation_and_the_optimizer():
    from fvflops.zoo.llama import Block

    plain = model_flops(count_llama_step(16)[1])
    assert model_flops(count_llama_step(16, checkpoint=[Block], optimizer=torch.optim.AdamW)[1]) == plain


def test_attention_is_counted_in_full_or_within_its_mask_by_choice():
    model = build("llama_tiny")
    step = TrainingStepAnalysis(model, torch.zeros(1, 32, dtype=torch.long), loss=torch.sum)
    device = Device("mine", matrix={"fp32": 10**12})
    shares = {kind: mfu(step, seconds=1.0, device=device, attention=kind) for kind in (None, "dense", "causal")}
    assert shares["dense"] == shares[None] > shares["causal"]
    for attention in ("dense", "causal"):
        assert shares[attention] == pytest.approx(model_flops(step, attention=attention) / 1e12)
        assert mfu(step.trace(), seconds=1.0, device=device, attention=attention) == shares[attention]
    assert hfu(step, seconds=1.0, device=device, attention="causal") < hfu(step, seconds=1.0, device=device)


@pytest.mark.parametrize(
    ("work", "message"),
    [(1e12, "requires an analysis"), ({"bf16": 1e12}, "requires an analysis"), ("handle", "has handles")],
)
def test_attention_by_choice_needs_an_analysis_by_a_table(work, message):
    if work == "handle":
        work = FlopCountAnalysis(torch.nn.Linear(3, 2), torch.ones(4, 3)).set_op_handle("aten::linear", lambda i, o: 1)
    with pytest.raises(ValueError, match=message):
        mfu(work, seconds=1.0, device="H100", attention="causal")
    with pytest.raises(ValueError, match="must be 'dense' or 'causal'; got 'half'"):
        mfu(FlopCountAnalysis(torch.nn.Linear(3, 2), torch.ones(4, 3)), 1.0, device="H100", attention="half")


def test_a_meter_counts_attention_by_choice():
    model, tokens = build("llama_tiny"), torch.zeros(1, 32, dtype=torch.long)
    figures = {}
    for attention in ("dense", "causal"):
        meter = StepMeter(model, device=Device("mine", matrix={"fp32": 10**12}), attention=attention)
        with meter.step():
            model(tokens).sum().backward()
        meter.close()
        figures[attention] = meter.last.model_flops
        step = TrainingStepAnalysis(model, tokens, loss=torch.sum)
        assert figures[attention] == model_flops(step, attention=attention)
    assert figures["causal"] < figures["dense"]


def test_a_float32_model_on_a_gpu_is_told_what_autocast_would_be(recwarn):
    step = TrainingStepAnalysis(nn.Linear(512, 512), torch.ones(64, 512), loss=lambda y: y.sum())
    share = mfu(step, 1e-5, device="H100")
    (warning,) = recwarn
    assert warning.filename == __file__
    other = mfu(step, 1e-5, device="H100", dtype="bf16")
    assert f"{share:.1%}" in str(warning.message) and f"pass dtype='bf16' ({other:.1%})" in str(warning.message)
    assert mfu(step, 1e-5, device="H100", dtype="fp32") == share and len(recwarn) == 1
    mfu({"fp32": 10**6}, 1e-5, device="H100")
    half = nn.Linear(8, 8).bfloat16(), torch.ones(4, 8).bfloat16()
    mfu(TrainingStepAnalysis(*half, loss=lambda y: y.sum()), 1.0, device="H100")
    assert len(recwarn) == 1
