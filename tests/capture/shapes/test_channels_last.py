"""Models in channels_last: shape execution has the op calls, layouts, totals and bytes of real execution."""

import pytest
import torch
from torch import nn

from fvflops import ByteCountAnalysis, FlopCountAnalysis
from tests.support.models.parts import Applied
from tests.support.opinfo import compare, run
from tests.support.random_cases import long_except

timm = pytest.importorskip("timm")

MODELS = (
    *("coatnet_nano_rw_224", "convnext_atto", "cspresnet50", "densenet121"),
    *("dla34", "eca_nfnet_l0", "edgenext_xx_small", "mobilenetv3_small_100", "mobilevit_xxs", "resnest14d"),
    *("efficientnet_b0", "fastvit_t8", "ghostnet_100", "hrnet_w18_small", "inception_v3", "levit_128s"),
    *("maxvit_rmlp_pico_rw_256", "nfnet_l0", "poolformer_s12", "regnetx_002", "res2net50_26w_4s", "resnet18"),
    *("resnetv2_50x1_bit", "skresnet18", "swin_tiny_patch4_window7_224", "volo_d1_224", "xception41"),
)
# Models that need their default image size.
DEFAULT_SIZE_ONLY = frozenset({"coatnet_nano_rw_224", "levit_128s", "maxvit_rmlp_pico_rw_256", "volo_d1_224"})


def in_channels_last(name):
    model = timm.create_model(name).eval()
    needs_default_size = name in DEFAULT_SIZE_ONLY or model.default_cfg.get("fixed_input_size")
    size = model.default_cfg["input_size"][-1] if needs_default_size else 96
    image = torch.rand(1, 3, size, size)
    return model.to(memory_format=torch.channels_last), image.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", long_except(["mobilenetv3_small_100", "resnest14d"], MODELS))
def test_model_in_channels_last_is_recorded_as_in_real_execution(name):
    model, image = in_channels_last(name)
    assert compare(model, (image,)) == ""
    for analysis in (FlopCountAnalysis, ByteCountAnalysis):
        totals = [analysis(model, image, execution=execution).total() for execution in ("real", "shapes")]
        assert totals[0] == totals[1] > 0


def branching(self, x):
    """A model that branches on the memory format of its images."""
    x = self.conv(x)
    if x.is_contiguous(memory_format=torch.channels_last):
        return self.head(x.permute(0, 2, 3, 1).view(-1, 8))
    return x.view(len(x), -1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_branch_on_the_memory_format_is_that_of_real_execution(memory_format):
    model = Applied(branching, conv=nn.Conv2d(3, 8, 3, padding=1), head=nn.Linear(8, 8)).to(memory_format=memory_format)
    x = torch.rand(2, 3, 6, 6).to(memory_format=memory_format)
    assert compare(model, (x,)) == ""
    calls = [call[0] for call in run(model, (x,), {}, "shapes").storages]
    assert ("aten::linear" in calls) is (memory_format is torch.channels_last)
