"""Time the kernels of training on this GPU, and the host's launches of small ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
# An op, its positional and keyword arguments.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def time_kernels(share: int, shares: int) -> dict[str, Any]:
    """Return "rows": op, arguments, median and minimum milliseconds of calls that are queued back to back.

    "host" has, for a function of small tensors, the microseconds of a call with and without autograd, and of its
    backward pass.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for family in (_attention, _normalisation, _losses, _optimizers, _products, _pointwise, _convolutions):
        for op, args, kwargs in family():
            row = {"op": op._schema.name, "args": _describe(args), "kwargs": _describe(kwargs)}
            try:
                row["ms"], row["min_ms"] = _time(lambda op=op, args=args, kwargs=kwargs: op(*args, **kwargs))  # type: ignore[misc]
            except RuntimeError as error:
                row["error"] = str(error).splitlines()[0][:200]
            rows.append(row)
            del args
            torch.cuda.empty_cache()
    return {"rows": rows, "host": {name: _time_host(call) for name, call in _list_small_calls().items()}}


def _time_host(call: Callable[[], torch.Tensor]) -> dict[str, float]:
    found = {}
    for name, enabled in (("no_grad", False), ("grad", True)):
        with torch.set_grad_enabled(enabled):
            found[name] = statistics.median(_time_loop(lambda: [call() for _ in range(200)]) for _ in range(5)) / 200
    backward = []
    for _ in range(5):
        results = [call() for _ in range(100)]
        gradients = [torch.ones_like(result) for result in results]
        backward.append(_time_loop(lambda pair=(results, gradients): torch.autograd.backward(*pair)))  # type: ignore[misc]
    return {**found, "backward": statistics.median(backward) / 100}


def _time_loop(run: Callable[[], Any]) -> float:
    """Return the microseconds that the host takes."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    taken = time.perf_counter() - begun
    torch.cuda.synchronize()
    return taken * 1e6


def _list_small_calls() -> dict[str, Callable[[], torch.Tensor]]:
    x, index = torch.ones(16, 64, device="cuda", requires_grad=True), torch.zeros(16, dtype=torch.long, device="cuda")
    q = torch.ones(1, 4, 16, 64, dtype=BF16, device="cuda", requires_grad=True)
    image = torch.ones(1, 8, 8, 8, device="cuda", requires_grad=True)
    linear, norm, rms, conv, table = (
        module.to("cuda")
        for module in (nn.Linear(64, 64), nn.LayerNorm(64), nn.RMSNorm(64), nn.Conv2d(8, 8, 3), nn.Embedding(64, 64))
    )
    return {
        "add": lambda: x + x,
        "mul": lambda: x * 2,
        "matmul": lambda: x @ x.t(),
        "view": lambda: x.view(-1),
        "cat": lambda: torch.cat([x, x]),
        "to bfloat16": lambda: x.bfloat16(),
        "linear": lambda: linear(x),
        "layer_norm": lambda: norm(x),
        "rms_norm": lambda: rms(x),
        "conv2d": lambda: conv(image),
        "embedding": lambda: table(index),
        "gelu": lambda: F.gelu(x),
        "softmax": lambda: x.softmax(-1),
        "dropout": lambda: F.dropout(x),
        "cross_entropy": lambda: F.cross_entropy(x, index),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, q, q),
    }


def _time(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the median and the minimum of five groups of calls; the GPU sleeps while the host queues a group."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def group(calls: int) -> float:
        torch.cuda._sleep(int(min(calls * 60e3, 3e7)) + 200_000)  # cycles
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls

    call()
    calls = max(1, min(100, int(4 / max(group(1), 1e-3))))
    times = [group(calls) for _ in range(5)]
    return statistics.median(times), min(times)


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = {} if value.is_contiguous() else {"stride": list(value.stride())}
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), **strides}
    if isinstance(value, dict):
        return {key: _describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)


def _floats(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(0.5).to(dtype)


def _attention() -> Iterator[Call]:
    ops = torch.ops.aten
    shapes = [
        *((1, 32, 4096, 128), (4, 16, 2048, 64), (8, 12, 1024, 64), (1, 8, 8192, 128), (2, 64, 2048, 128)),
        *((16, 16, 512, 64), (1, 32, 16384, 128), (32, 12, 197, 64), (2, 20, 4096, 80), (2, 16, 1024, 256)),
        *((1, 4, 1024, 128), (4, 40, 2048, 128)),
    ]
    for (batch, heads, tokens, size), causal in product(shapes, (True, False)):
        q, k, v = (_floats(batch, tokens, heads, size).transpose(1, 2) for _ in range(3))
        flash = ops._scaled_dot_product_flash_attention.default
        yield flash, (q, k, v, 0.0, causal), {}
        out, lse, *lengths, seed, offset, _ = flash(q, k, v, 0.0, causal)
        gradient = torch.randn_like(out)
        saved = (gradient, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset)
        yield ops._scaled_dot_product_flash_attention_backward.default, saved, {}
        cudnn = ops._scaled_dot_product_cudnn_attention.default
        yield cudnn, (q, k, v, None, True, 0.0, causal), {}
        out, lse, *lengths, seed, offset, _ = cudnn(q, k, v, None, True, 0.0, causal)
        saved = (gradient, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, causal)
        yield ops._scaled_dot_product_cudnn_attention_backward.default, saved, {}
        if tokens <= 4096:
            efficient = ops._scaled_dot_product_efficient_attention.default
            yield efficient, (q, k, v, None, True, 0.0, causal), {}
            saved = (gradient, q, k, v, None, *efficient(q, k, v, None, True, 0.0, causal), 0.0, [True] * 3 + [False])
            yield ops._scaled_dot_product_efficient_attention_backward.default, (*saved, causal), {}


def _normalisation() -> Iterator[Call]:
    ops = torch.ops.aten
    widths = [(4096, 4096), (8192, 8192), (2048, 768), (16384, 1024), (65536, 2048), (32768, 5120), (12608, 768)]
    for rows, width in (*widths, (1024, 12288), (512, 512)):
        x, weight, gradient = _floats(rows, width), _floats(width), _floats(rows, width)
        yield ops.native_layer_norm.default, (x, [width], weight, weight, 1e-5), {}
        _, mean, rstd = ops.native_layer_norm(x, [width], weight, weight, 1e-5)
        saved = (gradient, x, [width], mean, rstd, weight, weight, [True] * 3)
        yield ops.native_layer_norm_backward.default, saved, {}
        yield ops._fused_rms_norm.default, (x, [width], weight, 1e-5), {}
        _, rstd = ops._fused_rms_norm(x, [width], weight, 1e-5)
        yield ops._fused_rms_norm_backward.default, (gradient, x, [width], rstd, weight, [True, True]), {}
    for batch, channels, side in ((64, 64, 112), (64, 256, 56), (32, 512, 28), (128, 2048, 7)):
        for form in (torch.contiguous_format, torch.channels_last):
            x = _floats(batch, channels, side, side, dtype=HALF).contiguous(memory_format=form)
            weight, bias, mean, variance = (torch.ones(channels, device="cuda") for _ in range(4))
            given = (x, weight, bias, mean, variance, True, 0.1, 1e-5)
            yield ops.cudnn_batch_norm.default, given, {}
            _, saved_mean, saved_variance, reserve = ops.cudnn_batch_norm(*given)
            statistics_ = (mean, variance, saved_mean, saved_variance, 1e-5, reserve)
            yield ops.cudnn_batch_norm_backward.default, (x, torch.randn_like(x), weight, *statistics_), {}
            half = weight.half()
            yield ops.native_group_norm.default, (x, half, half, batch, channels, side * side, 32, 1e-5), {}


def _losses() -> Iterator[Call]:
    ops = torch.ops.aten
    sizes = [(8192, 32000), (4096, 50257), (4096, 50304), (8192, 128256), (2048, 151936), (16384, 1000)]
    for (rows, width), dtype in product(sizes, (BF16, FULL)):
        x, target = _floats(rows, width, dtype=dtype), torch.randint(0, width, (rows,), device="cuda")
        yield ops._log_softmax.default, (x, 1, False), {}
        yield ops._log_softmax_backward_data.default, (x, x, 1, dtype), {}
        yield ops.nll_loss_forward.default, (x, target, None, 1, -100), {}
        loss, weight = ops.nll_loss_forward(x, target, None, 1, -100)
        yield ops.nll_loss_backward.default, (torch.ones_like(loss), x, target, None, 1, -100, weight), {}
    scores = [(8, 12, 1024), (2, 32, 2048), (4, 16, 512), (32, 12, 197), (1, 16, 4096), (1, 4, 3137), (1, 4, 5185)]
    for (batch, heads, tokens), dtype in product(scores, (BF16, FULL)):
        x = _floats(batch, heads, tokens, tokens, dtype=dtype)
        yield ops._softmax.default, (x, -1, False), {}
        yield ops._softmax_backward_data.default, (x, x, -1, dtype), {}
    for words, width, tokens in ((32000, 4096, 8192), (50304, 768, 8192), (128256, 4096, 8192), (50304, 2048, 32768)):
        weight, index = _floats(words, width), torch.randint(0, words, (tokens,), device="cuda")
        yield ops.embedding.default, (weight, index), {}
        yield ops.embedding_dense_backward.default, (_floats(tokens, width), index, words, -1, False), {}


def _optimizers() -> Iterator[Call]:
    ops = torch.ops.aten
    options: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    sizes = [(14, 1), (20, 1), (24, 1), (26, 8), (28, 32), (28, 300), (22, 200)]
    for (exponent, parts), dtype in product(sizes, (FULL, BF16)):
        numel = (1 << exponent) // parts
        lists = [[torch.ones(numel, dtype=dtype, device="cuda") for _ in range(parts)] for _ in range(4)]
        steps = [torch.ones((), device="cuda") for _ in range(parts)]
        yield ops._fused_adamw_.default, (*lists, [], steps), options
        yield ops._foreach_mul_.Scalar, (lists[0], 1.0), {}
        yield ops._foreach_norm.Scalar, (lists[0],), {}
        yield ops._foreach_add_.List, (lists[0], lists[1]), {}


def _products() -> Iterator[Call]:
    mm = torch.ops.aten.mm.default
    sizes = [
        *((8192, 4096, 4096), (8192, 4096, 11008), (8192, 11008, 4096), (4096, 8192, 8192), (8192, 8192, 28672)),
        *((16384, 2048, 2048), (2048, 5120, 5120), (8192, 768, 3072), (8192, 768, 50304), (8192, 768, 50257)),
        *((4096, 4096, 128256), (12608, 768, 768), (2048, 12288, 1536), (1024, 1024, 4096), (512, 4096, 4096)),
        (8944, 1024, 2816),
    ]
    for (tokens, inputs, outputs), dtype in product(sizes, (BF16, FULL)):
        if dtype is FULL and tokens * inputs * outputs > 2**38:
            continue
        x, weight, gradient = (
            _floats(*shape, dtype=dtype) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        yield mm, (x, weight.t()), {}
        yield mm, (gradient, weight), {}
        yield mm, (gradient.t(), x), {}
    for batch, tokens, size in ((96, 1024, 64), (64, 2048, 128), (384, 197, 64), (4, 3137, 64), (4, 5185, 64)):
        q, k = _floats(batch, tokens, size), _floats(batch, tokens, size)
        yield torch.ops.aten.bmm.default, (q, k.transpose(1, 2)), {}
        yield torch.ops.aten.bmm.default, (_floats(batch, tokens, tokens), k), {}


def _pointwise() -> Iterator[Call]:
    ops = torch.ops.aten
    for exponent in range(8, 30):
        x, wide = _floats(1 << exponent), _floats(1 << exponent, dtype=FULL)
        for op in (ops.add.Tensor, ops.gelu_backward.default, ops.silu_backward.default, ops.copy_.default):
            yield op, (x, x), {}
        yield ops.gelu.default, (x,), {}
        yield ops.native_dropout.default, (x, 0.1, True), {}
        yield ops.fill_.Scalar, (x, 0.0), {}
        yield ops.add.Tensor, (wide, wide), {}
        yield ops.add_.Tensor, (wide, x), {}
        yield ops._to_copy.default, (wide,), {"dtype": BF16}
        yield ops.sum.default, (wide,), {}
    for rows, width in ((4096, 4096), (16384, 1024), (8192, 11008), (32768, 2048), (2048, 8192)):
        x = _floats(rows, width)
        yield ops.clone.default, (x.t(),), {"memory_format": torch.contiguous_format}
        yield ops.sum.dim_IntList, (x, [0], True), {}
        yield ops.cat.default, ([x, x], 1), {}
        yield ops.mean.dim, (x, [-1], True), {}


def _convolutions() -> Iterator[Call]:
    ops = torch.ops.aten
    # batch, channels, side, output channels, kernel, stride, padding, groups
    cases = [
        *((64, 3, 224, 64, 7, 2, 3, 1), (64, 64, 56, 64, 3, 1, 1, 1), (64, 256, 56, 64, 1, 1, 0, 1)),
        *((64, 128, 28, 128, 3, 1, 1, 1), (64, 512, 28, 128, 1, 1, 0, 1), (64, 256, 14, 256, 3, 1, 1, 1)),
        *((64, 512, 7, 512, 3, 1, 1, 1), (64, 3, 224, 768, 16, 16, 0, 1), (64, 96, 56, 96, 7, 1, 3, 96)),
        *((64, 384, 14, 384, 3, 1, 1, 384), (8, 320, 64, 320, 3, 1, 1, 1), (8, 640, 32, 640, 3, 1, 1, 1)),
    ]
    forms = [(HALF, torch.channels_last), (BF16, torch.contiguous_format), (FULL, torch.contiguous_format)]
    for (batch, channels, side, outputs, kernel, stride, padding, groups), (dtype, form) in product(cases, forms):
        x = _floats(batch, channels, side, side, dtype=dtype).contiguous(memory_format=form)
        weight = _floats(outputs, channels // groups, kernel, kernel, dtype=dtype).contiguous(memory_format=form)
        options = (None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
        yield ops.convolution.default, (x, weight, *options), {}
        gradient = torch.randn_like(ops.convolution(x, weight, *options))
        for wanted in ([True, True, False], [False, True, False]):
            yield ops.convolution_backward.default, (gradient, x, weight, *options, wanted), {}
