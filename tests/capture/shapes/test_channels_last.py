"""Models in channels_last: shape execution takes the branches of real execution, with its layouts, totals and bytes."""

from typing import Any

import pytest
import torch
from torch import nn

from fvflops import ByteCountAnalysis, FlopCountAnalysis
from fvflops.capture.run import record_call
from tests.support.opinfo import STOPS, calls_noted, storage_table

timm = pytest.importorskip("timm")

QUICK = ("mobilenetv3_small_100", "mobilevit_xxs", "resnest14d")
MODELS = (
    *(
        "coatnet_nano_rw_224",
        "convnext_atto",
        "cspresnet50",
        "densenet121",
        "dla34",
        "eca_nfnet_l0",
        "edgenext_xx_small",
    ),
    *("efficientnet_b0", "fastvit_t8", "ghostnet_100", "hrnet_w18_small", "inception_v3", "levit_128s"),
    *("maxvit_rmlp_pico_rw_256", "nfnet_l0", "poolformer_s12", "regnetx_002", "res2net50_26w_4s", "resnet18"),
    *("resnetv2_50x1_bit", "skresnet18", "swin_tiny_patch4_window7_224", "volo_d1_224", "xception41"),
)
# Of other models a small image will do.
OWN_SIZE = frozenset({"coatnet_nano_rw_224", "levit_128s", "maxvit_rmlp_pico_rw_256", "volo_d1_224"})


def in_channels_last(name: str) -> tuple[nn.Module, torch.Tensor]:
    model = timm.create_model(name).eval()
    own = name in OWN_SIZE or model.default_cfg.get("fixed_input_size")
    size = model.default_cfg["input_size"][-1] if own else 96
    image = torch.rand(1, 3, size, size)
    return model.to(memory_format=torch.channels_last), image.to(memory_format=torch.channels_last)


def calls(model: nn.Module, image: torch.Tensor, execution: str) -> list[Any]:
    """Return each op call with the layouts of its results, the storages that it read and wrote, and their bytes."""
    with calls_noted() as notes:
        trace = record_call(model, (image,), execution=execution, stops_at=STOPS, quiet=True)
    return list(zip(storage_table(trace), notes, strict=True))


def assert_same(name: str) -> None:
    model, image = in_channels_last(name)
    real, shapes = calls(model, image, "real"), calls(model, image, "shapes")
    assert [call for call in zip(real, shapes, strict=False) if call[0] != call[1]][:1] == []
    assert len(real) == len(shapes)
    for analysis in (FlopCountAnalysis, ByteCountAnalysis):
        totals = [analysis(model, image, execution=execution).total() for execution in ("real", "shapes")]
        assert totals[0] == totals[1] > 0


@pytest.mark.parametrize("name", QUICK)
def test_a_model_in_channels_last_runs_by_shapes_as_for_real(name: str):
    assert_same(name)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_in_channels_last_runs_by_shapes_as_for_real(name: str):
    assert_same(name)


class Branching(nn.Module):
    """A model that asks how its images lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.pick = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        if x.is_contiguous(memory_format=torch.channels_last):
            return self.pick(x.permute(0, 2, 3, 1).view(-1, 8))
        return x.view(len(x), -1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_branch_on_the_memory_format_is_that_of_a_real_run(memory_format: torch.memory_format):
    model = Branching().to(memory_format=memory_format)
    x = torch.rand(2, 3, 6, 6).to(memory_format=memory_format)
    real, shapes = calls(model, x, "real"), calls(model, x, "shapes")
    assert real == shapes
    assert any(call[0] == "aten::linear" for call, _ in shapes) is (memory_format is torch.channels_last)
