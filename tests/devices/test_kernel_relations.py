"""Times of kernels on GPUs that were measured and on others, by their sizes: more work never takes less time."""

from itertools import pairwise

import pytest

from fvflops import find_device
from fvflops.devices.kernel_models.figures import find_figures, load_figures
from fvflops.devices.kernel_models.fused_attention import Attention, attention_seconds, decode_seconds
from fvflops.devices.kernel_models.memory_bound import memory_seconds
from fvflops.devices.kernel_models.mixtures import Mixture, drawn_rows, mixture_seconds
from fvflops.devices.kernel_models.products import Processor, Product, product_seconds
from fvflops.devices.kernel_models.recurrent import Recurrence, recurrent_seconds, recurrent_step_seconds
from tests.support.tools import load_tool

expert_rows = load_tool("kernel_fitting.expert_rows").expert_rows
GPUS = [*load_figures(), "B300", "GB200", "MI300X", "L4", "RTX 4090", "A10", "V100"]
# Each is 1.15 times the one before it.
SIZES = sorted({round(1.15**power) for power in range(72)})
BATCHES = [size for size in SIZES if size <= 1024]
# Of a size, the seconds of a kernel; int4 and mxfp4 have scales.
KERNELS = {
    "rows": ("product", SIZES, lambda n: Product(n, 8192, 4096)),
    "columns": ("product", SIZES, lambda n: Product(48, n, 4096)),
    "inner dimension": ("product", SIZES, lambda n: Product(48, 4096, n)),
    "rows by int8": ("product", SIZES, lambda n: Product(n, 8192, 4096, column_bytes=1.0)),
    "rows by int4": ("product", SIZES, lambda n: Product(n, 8192, 4096, column_bytes=0.515625)),
    "rows by mxfp4": ("product", SIZES, lambda n: Product(n, 8192, 4096, column_bytes=0.53125)),
    "experts' rows": ("product", SIZES, lambda n: Product(n, 1536, 4096, batch=16, is_grouped=True)),
    "new tokens": ("attention", SIZES, lambda n: Attention(1, n, n + 4096, 32, 8, 128)),
    "cached tokens": ("attention", SIZES, lambda n: Attention(1, 512, n + 512, 32, 8, 128)),
    "cached tokens, window": ("attention", SIZES, lambda n: Attention(1, 512, n + 512, 32, 8, 128, window=1024)),
    "latent prompts": ("latent", SIZES, lambda n: Attention(1, n, n, 16, 16, 192, value_size=128)),
    "contexts": ("decode", SIZES, lambda n: Attention(32, 1, n + 1, 32, 8, 128)),
    "contexts, window": ("decode", SIZES, lambda n: Attention(32, 1, n + 1, 32, 8, 128, window=512)),
    "decoding": ("decode", BATCHES, lambda n: Attention(n, 1, 4096, 32, 8, 128)),
    "latent decoding": (
        "latent decode",
        BATCHES,
        lambda n: Attention(n, 1, 4096, 16, 1, 576, value_size=512, latent=True),
    ),
    "tokens of a mixture": ("mixture", SIZES, lambda n: Mixture(n, 8, expert_rows(n, 128, 8), 4096, 1536)),
    "tokens at random": ("mixture", BATCHES, lambda n: Mixture(n, 8, drawn_rows(n, 128, 8), 4096, 1536)),
    "scanned tokens": ("recurrent", SIZES, lambda n: Recurrence(1, n, 16, 32)),
    "scanned sequences": ("recurrent", BATCHES, lambda n: Recurrence(n, 512, 16, 32)),
    "states": ("memory", BATCHES, lambda n: Recurrence(n, 1, 16, 32)),
    "bytes": ("memory", [1e4 * size for size in SIZES], float),
}
SECONDS = {
    "product": product_seconds,
    "attention": attention_seconds,
    "latent": attention_seconds,
    "decode": decode_seconds,
    "latent decode": decode_seconds,
    "mixture": mixture_seconds,
    "recurrent": recurrent_seconds,
}


def times_of(gpu, kind, shapes):
    """Return the start of a kernel, and the seconds of some."""
    device = find_device(gpu)
    dtype = "bf16" if "bf16" in device.dtypes() else "fp16"
    figures = find_figures(device).of(kind, dtype)
    processor = Processor(device.multiprocessors, device.peak(dtype), device.bandwidth)
    seconds = SECONDS.get(kind)
    if seconds is None and isinstance(shapes[0], Recurrence):
        seconds = recurrent_step_seconds
    if seconds is None:
        return figures.start, [memory_seconds(nbytes, device.bandwidth, figures) for nbytes in shapes]
    return figures.start, [seconds(shape, processor, figures) for shape in shapes]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("gpu", GPUS)
def test_more_work_takes_longer_by_no_more_than_it_is_and_a_start(gpu, name):
    kind, sizes, shape = KERNELS[name]
    start, times = times_of(gpu, kind, [shape(size) for size in sizes])
    assert times[0] >= start > 0
    for before, after in pairwise(times):
        assert after >= 0.995 * before
    assert times[-1] > 1.5 * times[0] or "window" in name


# Halves that fit into the cache may be faster than the whole, and a mixture's halves have experts of their own.
@pytest.mark.parametrize("name", ["rows", "columns", "inner dimension", "contexts", "decoding", "experts' rows"])
@pytest.mark.parametrize("gpu", GPUS)
def test_two_halves_take_no_less_than_the_whole_but_for_its_last_wave(gpu, name):
    kind, sizes, shape = KERNELS[name]
    sizes = [size for size in sizes if size % 2 == 0]
    start, whole = times_of(gpu, kind, [shape(size) for size in sizes])
    _, half = times_of(gpu, kind, [shape(size // 2) for size in sizes])
    for one, two in zip(whole, half, strict=True):
        assert one - start <= 1.25 * 2 * two
