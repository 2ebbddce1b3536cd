"""Times of attention and of recurrent layers: relations that hold on all GPUs, and measured kernels."""

import csv
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvflops import find_device
from fvflops.devices.kernel_models.figures import find_figures, load_figures
from fvflops.devices.kernel_models.fused_attention import (
    Attention,
    attention_backward_seconds,
    attention_seconds,
    decode_seconds,
)
from fvflops.devices.kernel_models.memory_bound import moving_seconds
from fvflops.devices.kernel_models.products import Processor
from fvflops.devices.kernel_models.recurrent import Recurrence, recurrent_seconds, recurrent_step_seconds
from tests.support.random_cases import random_cases

GPUS = list(load_figures())
# A GPU's clock may be above its datasheet's, and benchmarks may find keys in its cache.
SLACK = 1.25
batches, tokens, groups, key_heads = st.integers(1, 64), st.integers(1, 16384), st.integers(1, 16), st.integers(1, 16)
sizes = st.sampled_from([64, 72, 80, 96, 128, 192, 256])
per_gpu = pytest.mark.parametrize("name", GPUS)


def gpu_of(name, dtype="bf16"):
    device = find_device(name)
    return Processor(device.multiprocessors, device.peak(dtype), device.bandwidth)


def prompt_seconds(name, shape, kind="attention"):
    return attention_seconds(shape, gpu_of(name), find_figures(find_device(name)).of(kind, "bf16"))


def step_seconds(name, shape, kind="decode"):
    return decode_seconds(shape, gpu_of(name), find_figures(find_device(name)).of(kind, "bf16"))


def of_prompt(batch, queries, group, heads, size, **rest):
    return Attention(batch, queries, queries, group * heads, heads, size, **rest)


def of_step(batch, keys, group, heads, size, **rest):
    return Attention(batch, 1, keys, group * heads, heads, size, **rest)


@per_gpu
@random_cases(25)
@given(batches, tokens, groups, key_heads, sizes, st.sampled_from([inf, 128, 4096]))
def test_a_prompt_takes_longer_than_its_flops_at_peak_and_its_bytes_at_the_bandwidth(
    name, b, t, group, k, size, window
):
    gpu, heads = gpu_of(name), group * k
    pairs = sum(min(i + 1, window) for i in range(t))
    moved = 2 * b * t * size * (2 * heads + 2 * k)
    seconds = prompt_seconds(name, of_prompt(b, t, group, k, size, window=window))
    cached = find_figures(find_device(name)).of("attention", "bf16").cached
    assert seconds > 4 * b * heads * size * pairs / gpu.peak / SLACK
    assert seconds > moved / (gpu.bandwidth * cached) / SLACK


@per_gpu
@random_cases(25)
@given(batches, st.integers(64, 8192), groups, key_heads, sizes)
def test_more_work_in_a_prompt_is_not_faster(name, b, t, group, k, size):
    base = 0.999 * prompt_seconds(name, of_prompt(b, t, group, k, size))
    assert prompt_seconds(name, of_prompt(b + 1, t, group, k, size)) >= base
    assert prompt_seconds(name, of_prompt(b, 2 * t, group, k, size)) >= base
    assert prompt_seconds(name, of_prompt(b, t, group, 2 * k, size)) >= base
    assert prompt_seconds(name, of_prompt(b, t, group, k, size, causal=False)) >= base
    assert prompt_seconds(name, of_prompt(b, t, group, k, size, appends=True)) > base
    assert prompt_seconds(name, of_prompt(b, t, group, k, size, window=t // 4)) <= 1.002 * base
    cached = of_prompt(b, t, group, k, size)._replace(keys=2 * t)  # after t tokens in the cache
    assert prompt_seconds(name, cached) >= base


@per_gpu
def test_a_causal_mask_saves_half_of_long_prompts_and_a_window_all_but_its_keys(name):
    full = prompt_seconds(name, of_prompt(1, 65536, 1, 32, 128, causal=False))
    assert prompt_seconds(name, of_prompt(1, 65536, 1, 32, 128)) == pytest.approx(full / 2, rel=0.05)
    windowed = prompt_seconds(name, of_prompt(1, 65536, 1, 32, 128, window=1024))
    assert full / 64 < windowed < full / 20


@per_gpu
def test_the_backward_of_a_long_prompt_is_five_products_at_four_fifths_of_the_efficiency(name):
    figures = find_figures(find_device(name)).of("attention", "bf16")
    shape = of_prompt(4, 8192, 1, 32, 128)
    forward = attention_seconds(shape, gpu_of(name), figures)
    backward = attention_backward_seconds(shape, gpu_of(name), figures)
    assert backward == pytest.approx(2.5 / 0.8 * forward, rel=0.01)
    appending = attention_backward_seconds(shape._replace(appends=True), gpu_of(name), figures)
    assert appending == backward
    small = of_prompt(1, 16, 1, 1, 64)
    assert attention_backward_seconds(small, gpu_of(name), figures) > 3 * figures.start


@per_gpu
@random_cases(25)
@given(batches, st.integers(2, 131072), groups, key_heads, sizes)
def test_a_decoded_token_takes_longer_than_reading_its_keys(name, b, keys, group, k, size):
    shape = of_step(b, keys, group, k, size)
    seconds = step_seconds(name, shape)
    assert seconds > 4 * b * keys * k * size / gpu_of(name).bandwidth / SLACK
    assert step_seconds(name, shape._replace(batch=b + 1)) >= seconds
    assert step_seconds(name, shape._replace(window=keys // 2)) <= seconds
    assert step_seconds(name, shape._replace(repeated=True)) <= seconds
    assert step_seconds(name, shape._replace(key_bytes=1.0)) <= seconds


@per_gpu
def test_one_long_sequence_is_split_along_the_cache(name):
    one, all_multiprocessors = (step_seconds(name, of_step(b, 131072, 8, 1, 128)) for b in (1, 128))
    assert one < all_multiprocessors / 8


@per_gpu
def test_latent_values_are_read_with_their_keys(name):
    latent = Attention(256, 1, 8192, 16, 1, 576, value_size=512, latent=True)
    apart = latent._replace(latent=False)
    assert latent.token_bytes * (576 + 512) == apart.token_bytes * 576
    assert step_seconds(name, latent, "latent decode") <= step_seconds(name, apart, "latent decode")


@per_gpu
@random_cases(25)
@given(batches, st.integers(1, 65536), st.integers(1, 16), st.integers(1, 4))
def test_a_scan_goes_by_chunks_and_waves_of_heads(name, b, t, heads, group):
    gpu, figures = gpu_of(name), find_figures(find_device(name)).of("recurrent", "bf16")
    shape = Recurrence(b, t, heads, group * heads)
    seconds = recurrent_seconds(shape, gpu, figures)
    assert seconds > figures.start + figures.step * t / 64
    assert seconds > shape.token_bytes / gpu.bandwidth / figures.cached / SLACK
    assert recurrent_seconds(shape._replace(tokens=2 * t), gpu, figures) >= seconds
    assert recurrent_seconds(shape._replace(batch=2 * b), gpu, figures) >= seconds


def test_a_recurrent_step_is_bound_by_its_states():
    figures = find_figures(find_device("H100")).of("memory", "")
    shape = Recurrence(256, 1, 8, 32)
    assert shape.state_bytes == 2 * 4 * 256 * 32 * 128 * 128
    seconds = recurrent_step_seconds(shape, gpu_of("H100"), figures)
    assert seconds == pytest.approx(363.19e-6, rel=0.05)  # vLLM's on an H100, AIConfigurator 0.12


def test_bytes_in_the_cache_are_moved_faster():
    assert moving_seconds(0, 1e12, 2, 1e6) == 0
    assert moving_seconds(1e3, 1e12, 2, 1e6) == pytest.approx(0.5e-9)
    assert moving_seconds(1e9, 1e12, 2, 1e6) == pytest.approx(1e-3)


KERNELS = {
    "attention": (attention_seconds, "attention"),
    "encoder": (attention_seconds, "encoder"),
    "decode": (decode_seconds, "decode"),
    "latent": (attention_seconds, "latent"),
    "latent decode": (decode_seconds, "latent decode"),
    "recurrent": (recurrent_seconds, "recurrent"),
}


@pytest.mark.parametrize("kind", KERNELS)
def test_measured_kernels_are_within_the_published_error(kind):
    """Rows that no figure was fitted to; NVIDIA's AIConfigurator 0.12 (Apache-2.0), bf16, H100 SXM."""
    rows = csv.DictReader((Path(__file__).parent.parent / "data" / "kernels" / "h100_attention.csv").open())
    seconds, figures = KERNELS[kind][0], find_figures(find_device("H100")).of(KERNELS[kind][1], "bf16")
    errors = []
    for row in rows:
        if row["kind"] == kind:
            numbers = [float(value) for value in row["shape"].split()]
            shape = (Recurrence if kind == "recurrent" else Attention)(*numbers)
            errors.append(seconds(shape, gpu_of("H100"), figures) / float(row["seconds"]) - 1)
    assert len(errors) == 20
    assert sum(map(abs, errors)) / len(errors) < 0.16
    assert abs(sum(errors) / len(errors)) < 0.11
