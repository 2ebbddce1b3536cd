"""`estimate_op` and `fvflops ops --time`: the time of one call."""

import json

import pytest
import torch

from fvflops import Device, estimate_op, find_device, plan_step
from fvflops.cli import main
from fvflops.devices.kernel_models.figures import find_figures
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


def test_attention_by_mask_window_and_new_tokens():
    shape = (2, 32, 8192, 128)
    full = estimate_op("aten::scaled_dot_product_attention", [shape] * 3, device="H100")
    causal = estimate_op("aten::scaled_dot_product_attention", [shape] * 3, device="H100", is_causal=True)
    assert full.kind == causal.kind == "attention"
    assert 0.45 < causal.seconds / full.seconds < 0.7
    cached = [(2, 32, 1, 128), shape, shape]
    decoded = estimate_op("aten::scaled_dot_product_attention", cached, device="H100")
    assert decoded.bound_seconds < decoded.seconds < causal.seconds / 5


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
