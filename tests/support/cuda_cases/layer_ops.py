"""Cases of attention, recurrence, convolution and normalisation, for which CUDA has kernels of its own."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.support.cuda_cases.case import BF16, FULL, HALF, Case, floats, image, of, to_format
from tests.support.models.parts import Applied


def _attend(dtype: torch.dtype, backend: Any = None, *, dim: int = 64, wide: int = 0, **options: Any) -> Case:
    heads = options.pop("heads", 4)
    shapes = [(2, 4, 128, dim), (2, heads, 128, dim), (2, heads, 128, wide or dim)]
    return of(
        partial(F.scaled_dot_product_attention, **options),
        *(floats(*shape, dtype=dtype) for shape in shapes),
        context=nullcontext if backend is None else partial(sdpa_kernel, backend),
    )


def _masked(dtype: torch.dtype, backend: Any = None) -> Case:
    case = _attend(dtype, backend)
    mask = torch.ones(128, 128, dtype=torch.bool).tril()
    return Case(
        Applied(lambda _, q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m)),
        (*case.args, mask),
        context=case.context,
    )


def attention() -> dict[str, Callable[[], Case]]:
    """Return cases of scaled_dot_product_attention, by backend."""
    cases: dict[str, Callable[[], Case]] = {}
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        for causal in (False, True):
            name = f"sdpa {backend} bf16{' causal' if causal else ''}"
            cases[name] = partial(_attend, BF16, getattr(SDPBackend, backend), is_causal=causal)
    cases |= {f"sdpa chosen {str(dtype)[6:]}": partial(_attend, dtype, is_causal=True) for dtype in (BF16, HALF, FULL)}
    cases |= {
        "sdpa dropout bf16": partial(_attend, BF16, dropout_p=0.1),
        "sdpa head 80 bf16": partial(_attend, BF16, dim=80),
        "sdpa head 36 bf16": partial(_attend, BF16, dim=36),
        "sdpa head 20 fp32": partial(_attend, FULL, dim=20),
        "sdpa values wider bf16": partial(_attend, BF16, wide=128),
        "sdpa grouped queries bf16": partial(_attend, BF16, heads=2, enable_gqa=True),
        "sdpa mask bf16": partial(_masked, BF16),
        "sdpa mask fp32": partial(_masked, FULL),
        "sdpa mask EFFICIENT bf16": partial(_masked, BF16, SDPBackend.EFFICIENT_ATTENTION),
        "sdpa fp64": partial(_attend, torch.float64),
        "flex_attention eager": _flex,
        "flex_attention compiled": partial(_flex, compiled=True),
        "MultiheadAttention": lambda: Case(
            Applied(lambda self, x: self.m(x, x, x)[0], m=nn.MultiheadAttention(64, 4, batch_first=True)),
            (floats(2, 16, 64),),
        ),
        "TransformerEncoderLayer eval": lambda: Case(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval(), (floats(2, 16, 64, grad=False),), (False,)
        ),
        "TransformerEncoderLayer train": lambda: Case(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (floats(2, 16, 64),)
        ),
        "TransformerEncoder bf16 eval": lambda: Case(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).bfloat16().eval(),
            (floats(2, 16, 64, dtype=BF16, grad=False),),
            (False,),
        ),
    }
    return cases


def _flex(compiled: bool = False) -> Case:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    call = torch.compile(flex_attention) if compiled else flex_attention

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    def run(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(causal, None, None, 128, 128, device=q.device)
        return call(q, k, v, block_mask=mask)

    return Case(Applied(run), tuple(floats(2, 4, 128, 64, dtype=BF16) for _ in range(3)))


def recurrence() -> dict[str, Callable[[], Case]]:
    """Return cases of recurrent layers, which cuDNN runs."""

    def layer(kind: str, *, half: bool = False, train: bool = True, **options: Any) -> Case:
        dtype = HALF if half else FULL
        module = getattr(nn, kind)(16, 32, **options).to(dtype).train(train)
        return Case(module, (floats(8, 4, 16, dtype=dtype),), (False, True) if train else (False,))

    def packed() -> Case:
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            data = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([8, 6, 5, 2]))
            return nn.utils.rnn.pad_packed_sequence(self.m(data)[0])[0]

        return Case(Applied(run, m=nn.LSTM(16, 32, 2, bidirectional=True)), (floats(8, 4, 16),))

    cases: dict[str, Callable[[], Case]] = {kind: partial(layer, kind) for kind in ("LSTM", "GRU", "RNN")}
    return cases | {
        "LSTM bidirectional": partial(layer, "LSTM", num_layers=2, bidirectional=True, batch_first=True),
        "LSTM projected": partial(layer, "LSTM", proj_size=8),
        "LSTM dropout": partial(layer, "LSTM", num_layers=2, dropout=0.5),
        "LSTM half": partial(layer, "LSTM", half=True),
        "GRU no bias": partial(layer, "GRU", bias=False),
        "LSTM eval": partial(layer, "LSTM", train=False),
        "LSTM packed": packed,
        "LSTMCell": lambda: Case(
            Applied(lambda self, x, h, c: self.m(x, (h, c)), m=nn.LSTMCell(16, 32)),
            (floats(4, 16), floats(4, 32), floats(4, 32)),
        ),
        "GRUCell": lambda: Case(nn.GRUCell(16, 32), (floats(4, 16), floats(4, 32))),
    }


def convolution() -> dict[str, Callable[[], Case]]:
    x, inside = (2, 16, 12, 12), torch.channels_last

    def net(*layers: nn.Module, inner: bool = False, dtype: torch.dtype = FULL, train: bool = True) -> Case:
        model = nn.Sequential(*layers).to(dtype).train(train)
        if inner:
            return Case(to_format(model, inside), (image(*x, dtype=dtype),))
        return Case(model, (floats(*x, dtype=dtype),))

    return {
        "conv2d": lambda: net(nn.Conv2d(16, 32, 3)),
        "conv2d no bias": lambda: net(nn.Conv2d(16, 32, 3, bias=False)),
        "conv2d bf16 channels_last": lambda: net(nn.Conv2d(16, 32, 3, 2, 1), inner=True, dtype=BF16),
        "conv2d fp32 channels_last": lambda: net(nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), inner=True),
        "conv2d grouped": lambda: net(nn.Conv2d(16, 32, 3, groups=4)),
        "conv2d depthwise": lambda: net(nn.Conv2d(16, 16, 3, groups=16)),
        "conv2d depthwise half": lambda: net(nn.Conv2d(16, 16, 3, groups=16), dtype=HALF),
        "conv2d dilated": lambda: net(nn.Conv2d(16, 32, 3, dilation=2)),
        "conv2d same": lambda: net(nn.Conv2d(16, 32, 4, padding="same")),
        "conv2d reflect": lambda: net(nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect")),
        "conv_transpose2d": lambda: net(nn.ConvTranspose2d(16, 8, 3, 2, output_padding=1)),
        "conv1d": lambda: Case(nn.Conv1d(16, 32, 3), (floats(2, 16, 20),)),
        "conv3d": lambda: Case(nn.Conv3d(4, 8, 3), (floats(2, 4, 6, 6, 6),)),
        "conv3d depthwise": lambda: Case(nn.Conv3d(4, 4, 3, groups=4), (floats(2, 4, 6, 6, 6),)),
        "conv2d unbatched": lambda: Case(nn.Conv2d(16, 32, 3), (floats(16, 12, 12),)),
        "batch_norm train": lambda: net(nn.BatchNorm2d(16)),
        "batch_norm eval": lambda: net(nn.BatchNorm2d(16), train=False),
        "batch_norm half with float32 weights": lambda: Case(nn.BatchNorm2d(16), (floats(*x, dtype=HALF),)),
        "batch_norm bf16 with float32 weights": lambda: Case(nn.BatchNorm2d(16), (floats(*x, dtype=BF16),)),
        "batch_norm bf16": lambda: net(nn.BatchNorm2d(16), dtype=BF16),
        "batch_norm channels_last half": lambda: Case(nn.BatchNorm2d(16), (image(*x, dtype=HALF),)),
        "batch_norm channels_last": lambda: net(nn.BatchNorm2d(16), inner=True),
        "batch_norm no affine": lambda: net(nn.BatchNorm2d(16, affine=False)),
        "batch_norm no statistics": lambda: net(nn.BatchNorm2d(16, track_running_stats=False)),
        "batch_norm 1d": lambda: Case(nn.BatchNorm1d(16), (floats(8, 16),)),
        "batch_norm 3d": lambda: Case(nn.BatchNorm3d(4), (floats(2, 4, 6, 6, 6),)),
        "instance_norm": lambda: net(nn.InstanceNorm2d(16, affine=True)),
        "group_norm": lambda: net(nn.GroupNorm(4, 16)),
        "group_norm channels_last": lambda: net(nn.GroupNorm(4, 16), inner=True),
        "layer_norm": lambda: Case(nn.LayerNorm(32), (floats(4, 32),)),
        "layer_norm bf16": lambda: Case(nn.LayerNorm(32).bfloat16(), (floats(4, 32, dtype=BF16),)),
        "rms_norm": lambda: Case(nn.RMSNorm(32), (floats(4, 32),)),
        "rms_norm bf16": lambda: Case(nn.RMSNorm(32).bfloat16(), (floats(4, 32, dtype=BF16),)),
        "weight_norm": lambda: Case(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (floats(4, 8),)),
        "spectral_norm": lambda: Case(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), (floats(4, 8),)),
        "checkpoint": lambda: Case(
            Applied(
                lambda self, x: checkpoint(self.m, x, use_reentrant=False),
                m=nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)),
            ),
            (floats(*x),),
        ),
    }
