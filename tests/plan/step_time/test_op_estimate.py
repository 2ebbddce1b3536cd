"""`estimate_op` and `fvflops ops --time`: the time of one call."""

import json
from dataclasses import replace

import pytest
import torch

from fvflops import Device, estimate_op, estimate_step, find_device, find_efficiency, plan_step
from fvflops.cli import main
from fvflops.devices.kernel_models.figures import find_figures, load_figures
from fvflops.plan.step_time.calibration import Efficiency, KernelTimer
from fvflops.plan.step_time.step_program import read_step


def test_linear_and_mm_of_the_same_product_take_the_same_time_as_a_plans_kernel():
    linear = estimate_op("aten::linear", [(16, 512, 1024), (2048, 1024)], device="H100")
    assert linear.seconds == estimate_op("mm", [(16 * 512, 1024), (1024, 2048)], device="H100").seconds
    model = torch.nn.Linear(1024, 2048, bias=False, device="meta", dtype=torch.bfloat16)
    step = plan_step(model, torch.ones(16 * 512, 1024, dtype=torch.bfloat16, device="meta"), mesh={"dp": 1})
    timer = KernelTimer(find_device("H100"), Efficiency(kernels=find_figures(find_device("H100"))))
    launches = [launch for program in read_step(step.ranks).programs for launch in program.launches]
    assert linear.seconds in [timer.alone(launch.kernel) for launch in launches if launch.phase == "forward"]


@pytest.mark.parametrize("device", [*load_figures(), "RTX 4090", "MI300X"])
def test_float16_takes_as_long_as_bfloat16(device):
    prompt, token = (1, 32, 4096, 128), (1, 32, 1, 128)
    calls = [
        ("aten::mm", [(4096, 4096)] * 2, {}),
        ("aten::_scaled_dot_product_flash_attention", [prompt] * 3, {"is_causal": True}),
        ("aten::_scaled_dot_product_flash_attention", [prompt] * 3, {}),
        ("aten::_scaled_dot_product_flash_attention", [token, prompt, prompt], {}),
    ]
    for op, inputs, arguments in calls:
        half, bfloat = (estimate_op(op, inputs, device=device, dtype=t, **arguments) for t in ("float16", "bfloat16"))
        assert half.seconds == bfloat.seconds


@pytest.mark.parametrize(
    ("device", "convolution", "product"), [("H100", "tf32", "tf32"), ("V100", "fp32", None), ("MI300X", "fp32", "tf32")]
)
def test_float32_runs_in_tf32_where_the_device_has_it_convolutions_by_default(device, convolution, product):
    gpu = find_device(device)
    shape = [(64, 256, 64, 64), (256, 256, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    convolved = estimate_op("aten::convolution", shape, device=gpu, dtype="float32")
    assert convolved.bound_seconds == 2 * convolved.kernel.macs / gpu.peak(convolution)
    step = plan_step(torch.nn.Linear(8192, 8192, bias=False, device="meta"), torch.ones(8192, 8192), mesh={"dp": 1})
    plain = estimate_step(step, device=gpu)
    with_tf32 = replace(find_efficiency(gpu), float32_matmul="tf32")
    if product is None:
        with pytest.raises(ValueError, match="no peak for tf32"):
            estimate_step(step, device=gpu, efficiency=with_tf32)
        return
    rounded = estimate_step(step, device=gpu, efficiency=with_tf32)
    assert rounded.seconds < 0.5 * plain.seconds
    assert rounded.bound == pytest.approx(rounded.model_flops / gpu.peak(product), rel=0.02)
    assert rounded.mfu * rounded.seconds == pytest.approx(rounded.model_flops / gpu.peak(product))
    assert rounded.settings["float32_products"] == "tf32" and "float32_products" not in plain.settings


def test_attention_by_mask_window_and_new_tokens():
    shape = (2, 32, 8192, 128)
    full = estimate_op("aten::scaled_dot_product_attention", [shape] * 3, device="H100")
    causal = estimate_op("aten::scaled_dot_product_attention", [shape] * 3, device="H100", is_causal=True)
    assert full.kind == causal.kind == "attention"
    assert 0.45 < causal.seconds / full.seconds < 0.7
    cached = [(2, 32, 1, 128), shape, shape]
    decoded = estimate_op("aten::scaled_dot_product_attention", cached, device="H100")
    assert decoded.bound_seconds < decoded.seconds < causal.seconds / 5


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_products_of_experts_read_the_weights_of_those_that_have_tokens():
    weights, ends = (64, 2048, 1024), meta(64, dtype=torch.int32)
    times = [
        estimate_op("aten::_grouped_mm", [(tokens, 2048), weights, ends], device="H100")
        for tokens in (8, 64, 4096, 65536)
    ]
    assert [time.kernel.figures_class for time in times] == ["mixture"] * 4
    assert all(time.seconds > time.bound_seconds for time in times)
    assert times[1].bound_seconds > 7.9 * times[0].bound_seconds  # each token has an expert of its own
    assert times[2].seconds < 1.4 * times[1].seconds  # the weights of all experts in both
    assert times[3].seconds > 4 * times[2].seconds
    rest = [(meta(2048, 4096), meta(4096, 1024), ends), (meta(64, 128, 256), meta(256, 4096), ends)]
    by_inner, by_columns = (estimate_op("aten::_grouped_mm", each, device="H100").kernel.shape for each in rest)
    assert (by_inner.batch, by_inner.rows, by_inner.columns, by_inner.inner) == (64, 2048, 1024, 64)
    assert (by_columns.batch, by_columns.rows, by_columns.columns, by_columns.inner) == (64, 128, 64, 256)


def test_products_with_weights_in_int8_read_half_of_the_bytes():
    stored = [(16, 8192), meta(16384, 8192, dtype=torch.int8), (16384,)]
    one = estimate_op("aten::_weight_int8pack_mm", stored, device="H100")
    plain = estimate_op("aten::mm", [(16, 8192), (8192, 16384)], device="H100")
    assert one.kernel.dtype == "bfloat16"
    assert one.seconds == pytest.approx(plain.seconds / 2, rel=0.1)
    many = [(16384, 8192), *stored[1:]]
    one = estimate_op("aten::_weight_int8pack_mm", many, device="H100")
    plain = estimate_op("aten::mm", [(16384, 8192), (8192, 16384)], device="H100")
    assert one.seconds == pytest.approx(plain.seconds, rel=0.05)


def test_an_op_whose_shapes_torch_finds_with_fake_tensors_only():
    """Products with weights in int4: each is half a byte, with a scale and a zero for 32 of them."""
    packed = torch.empty(512, 32, 32, 4, dtype=torch.int32, device="meta")
    found = estimate_op("aten::_weight_int4pack_mm", [(8, 4096), packed, 32, (128, 4096, 2)], device="H100")
    weights = 4096 * 4096 // 2 + 128 * 4096 * 2 * 2
    assert found.kernel.macs == 8 * 4096 * 4096
    assert found.kernel.nbytes == weights + 2 * 8 * 4096 * 2


def test_operands_in_a_list_are_those_of_a_product():
    operands = [meta(8, 512, 512), meta(8, 512, 512)]
    assert estimate_op("aten::einsum", ["bij,bjk->bik", operands], device="H100").kernel.macs == 8 * 512**3


def test_latent_attention_of_a_new_token_is_decoding():
    cached = [(8, 128, 1, 576), (8, 1, 8192, 576), (8, 1, 8192, 512)]
    latent = estimate_op("aten::scaled_dot_product_attention", cached, device="H100", enable_gqa=True)
    assert latent.kernel.figures_class == "latent decode"
    assert latent.bound_seconds < latent.seconds < 2 * latent.bound_seconds


def test_convolutions_move_their_input_once():
    rest = [None, [1, 1], [1, 1], [1, 1], False, [0, 0]]
    image = (32, 256, 56, 56)
    full = estimate_op("aten::convolution", [image, (256, 256, 3, 3), *rest, 1], device="H100")
    one = estimate_op("aten::mm", [(32 * 56 * 56, 9 * 256), (9 * 256, 256)], device="H100")
    assert full.kind == "matmul"
    assert full.bound_seconds < full.seconds <= one.seconds
    each = estimate_op("aten::convolution", [image, (256, 1, 3, 3), *rest, 256], device="H100")
    assert each.kind == "memory"
    patches = [(4, 3, 224, 224), (768, 3, 16, 16), None, [16, 16], [0, 0], [1, 1], False, [0, 0], 1]
    padded = estimate_op("aten::convolution", patches, device="H100").kernel
    assert (padded.macs, padded.shape.inner) == (784 * 768 * 3 * 256, 32 * 256)  # 3 channels take a step of 32
    backward = [image, image, (256, 256, 3, 3), [0], *rest[1:], 1, [True, True, False]]
    both = estimate_op("aten::convolution_backward", backward, device="H100")
    assert both.seconds == pytest.approx(2 * full.seconds, rel=0.15)


def test_a_device_without_figures_takes_the_bound():
    mine = Device("mine", matrix={"bf16": 100e12}, bandwidth=1e12)
    estimate = estimate_op("aten::mm", [(4096, 4096), (4096, 4096)], device=mine)
    assert estimate.seconds == estimate.bound_seconds == 2 * 4096**3 / 100e12
    assert "bound" in estimate.source
    assert estimate.figures is None


def test_a_tensor_has_its_own_dtype_and_other_values_are_passed_on():
    table, indexes = torch.empty(1000, 64, device="meta"), torch.empty(512, dtype=torch.int64, device="meta")
    assert estimate_op("aten::embedding", [table, indexes], device="H100").kind == "memory"
    wide = estimate_op("aten::softmax", [(4096, 8192), -1], dtype=torch.float32, device="H100")
    assert wide.seconds > 1.9 * estimate_op("aten::softmax", [(4096, 8192), -1], device="H100").seconds


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        ("aten::mmm", [(2, 2)], "no op 'aten::mmm' in torch: did you mean aten::mm?"),
        ("aten::mm", [(2, 3), (2, 3)], "aten::mm refuses these arguments: a and b must have same reduction dim"),
        ("aten::view", [(4, 4), [16]], "aten::view launches no kernel, as a view or an allocation"),
    ],
)
def test_what_has_no_time(op, inputs, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        estimate_op(op, inputs, device="H100")


def test_the_command_times_a_call(capsys):
    call = ["ops", "mm", "--time", "8192 4096 bfloat16, 4096 4096 bfloat16", "--device", "H100"]
    assert main([*call, "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tables"]["times"]["rows"]
    assert row["seconds"] == estimate_op("mm", [(8192, 4096), (4096, 4096)], device="H100").seconds
    assert main(call[:4]) == 2
    assert "--time and --device are for one op" in capsys.readouterr().err
