"""Times of kernels: relations that hold on all GPUs, and measured kernels."""

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvflops import find_device
from fvflops.devices.kernel_models.figures import find_figures, load_figures
from fvflops.devices.kernel_models.memory_bound import memory_seconds
from fvflops.devices.kernel_models.products import Processor, Product, combine, product_seconds
from fvflops.formulas import TableError

GPUS = list(load_figures())
sizes = st.integers(1, 20_000)


def gpu_of(name, dtype="bf16"):
    device = find_device(name)
    return Processor(device.multiprocessors, device.peak(dtype), device.bandwidth)


def product_figures(name, dtype="bf16"):
    return find_figures(find_device(name)).of("product", dtype)


@pytest.mark.parametrize("name", GPUS)
@given(rows=sizes, columns=sizes, inner=sizes)
def test_a_product_takes_longer_than_its_flops_at_peak_and_its_bytes_at_the_bandwidth(name, rows, columns, inner):
    gpu, figures = gpu_of(name), product_figures(name)
    seconds = product_seconds(Product(rows, columns, inner), gpu, figures)
    written = 2 * rows * columns
    moved = 2 * (rows + columns) * inner + written * (written > 1.3 * figures.held)
    assert seconds > max(2 * rows * columns * inner / gpu.peak / 1.1, moved / gpu.bandwidth / 1.1)


@pytest.mark.parametrize("name", GPUS)
@given(rows=sizes, columns=sizes, inner=sizes, factor=st.integers(2, 5))
def test_a_larger_product_is_not_faster(name, rows, columns, inner, factor):
    gpu, figures = gpu_of(name), product_figures(name)
    base = product_seconds(Product(rows, columns, inner), gpu, figures)
    larger = [Product(factor * rows, columns, inner), Product(rows, factor * columns, inner)]
    larger += [Product(rows, columns, factor * inner), Product(rows, columns, inner, batch=factor)]
    for product in larger:
        assert product_seconds(product, gpu, figures) >= 0.999 * base
    assert product_seconds(Product(columns, rows, inner), gpu, figures) == pytest.approx(base, rel=0.35)


def test_benchmarks_find_small_operands_in_the_cache_and_leave_results_there():
    gpu, figures = gpu_of("L40S"), product_figures("L40S")
    for columns, factor in ((1024, 0.6), (65536, 1)):  # 8 and 512 MiB of weights
        once, again = (Product(16, columns, 4096, is_repeated=each) for each in (False, True))
        assert product_seconds(again, gpu, figures) == pytest.approx(
            factor * product_seconds(once, gpu, figures), rel=0.2
        )
    # 64 MB of a result are in the cache of 96 MB, and 512 MB are not.
    assert product_seconds(Product(4096, 8192, 16), gpu, figures) < 0.8 * 2 * 4096 * 8192 / gpu.bandwidth
    assert product_seconds(Product(32768, 8192, 16), gpu, figures) > 2 * 32768 * 8192 / gpu.bandwidth


def test_an_empty_product_takes_the_start_of_a_kernel():
    figures = product_figures("H100")
    assert product_seconds(Product(0, 4, 4), gpu_of("H100"), figures) == figures.start


@pytest.mark.parametrize(("overlap", "expected"), [(1, 7.0), (2, 5.0), (200, 4.0)])
def test_overlap_goes_from_one_after_the_other_to_the_longer_of_both(overlap, expected):
    assert combine(4, 3, overlap) == pytest.approx(expected) == combine(3, 4, overlap)


@pytest.mark.parametrize("name", [name for name in GPUS if "memory" in load_figures()[name].by_class])
def test_small_kernels_bound_by_memory_run_from_the_cache_and_take_at_least_a_start(name):
    device = find_device(name)
    figures = find_figures(device).of("memory", "bf16")
    times = [memory_seconds(10**power, device.bandwidth, figures) for power in range(11)]
    assert times == sorted(times)
    assert times[0] == pytest.approx(figures.start, rel=0.01)
    assert times[-1] == pytest.approx(1e10 / (device.bandwidth * figures.bandwidth), rel=0.01)


@pytest.mark.parametrize("name, ratio", [("RTX 4090", 16 / 15), ("L4", 1), ("A10", 1), ("RTX 3090", 16 / 15)])
def test_ecc_in_the_memory_takes_its_part_of_the_bandwidth(name, ratio):
    """The L40S, whose kernels stand in for others' with GDDR6, was measured with ECC."""
    found, measured = (find_figures(find_device(device)).by_class for device in (name, "L40S"))
    for kind in ("product", "decode"):
        assert found[kind]["bf16"].bandwidth == pytest.approx(ratio * measured[kind]["bf16"].bandwidth)


def test_a_gpu_without_figures_gets_those_of_the_nearest_generation_and_says_so():
    figures = find_figures(find_device("H100 PCIe"))
    assert figures.devices["product"] == "H100 SXM and H200"
    measured = "kernels measured by NVIDIA's AIConfigurator 0.12"
    assert figures.source == f"not measured for H100 PCIe: of H100 SXM and H200, {measured}"
    both = [load_figures()[name].of("product", "bf16").tile for name in ("H100 SXM", "H200")]
    assert figures.of("product", "bf16").tile == pytest.approx(math.sqrt(both[0] * both[1]))
    assert figures.of("attention", "bf16").rows == 128  # chosen, not a mean
    mean = "the mean of 6 GPUs (products, attention) and the mean of 5 GPUs (memory-bound kernels)"
    assert find_figures(find_device("MI300X")).source == f"not measured for MI300X: of {mean}, {measured}"


@pytest.mark.parametrize(
    ("device", "left", "attention", "mixture"),
    [
        ("H100", ("H100 SXM", "H200"), "A100 SXM 80GB and B200", "the mean of 4 GPUs"),
        ("A100", ("A100 SXM 80GB",), "H100 SXM and H200", "the mean of 5 GPUs"),
        ("V100", (), "A100 SXM 80GB", "the mean of 6 GPUs"),
        ("B300", (), "B200", "B200"),
        ("RTX 3090", (), "L40S", "L40S"),
        ("T4", (), "L40S", "the mean of 6 GPUs"),
        ("RTX 5090", (), *["RTX PRO 6000 Blackwell Server Edition"] * 2),
    ],
)
def test_kernels_of_a_chip_are_as_on_chips_of_its_family(device, left, attention, mixture):
    devices = find_figures(find_device(device), without=left).devices
    assert (devices["attention"], devices["mixture"]) == (attention, mixture)


@pytest.mark.parametrize("name", ["RTX 4090", "RTX 3090", "RTX 5090", "L40", "L20"])
def test_slower_matrix_units_are_busier_and_never_faster_than_the_measured_ones(name):
    device = find_device(name)
    figures = find_figures(device)
    measured = find_device(figures.devices["product"])
    before = find_figures(measured)
    for kind, factors in (("product", ("large", "medium", "small")), ("attention", ("peak", "narrow"))):
        own, other = 1.0, 1.0
        for factor in factors:
            own, other = (x * getattr(y.of(kind, "bf16"), factor) for x, y in ((own, figures), (other, before)))
            assert other <= own <= 0.9701, (kind, factor)
            rate = own * device.matrix["bf16"] / device.vector["fp32"]
            assert rate <= other * measured.matrix["bf16"] / measured.vector["fp32"] * 1.001, (kind, factor)
    assert find_figures(find_device("H20")).of("product", "bf16").large == pytest.approx(0.97)  # of two GPUs' mean
    same = find_figures(find_device("A40")).of("product", "bf16")  # as much per clock cycle as an L40S
    assert same == find_figures(find_device("L40S")).of("product", "bf16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: 1", "product of G: .* missing 9 required"),
        ("star: 1", "did you mean 'start'"),
        ("start: fast", "start of G is 'fast': write a number"),
    ],
)
def test_a_mistake_in_a_file_of_figures_names_its_line(tmp_path, text, message):
    file = tmp_path / "figures.yaml"
    lines = [
        *("description: x", "figures:", "  G:", "    capability: 9.0"),
        *("    source: me", "    product:", "      bf16:"),
    ]
    file.write_text("\n".join([*lines, f"        {text}"]) + "\n")
    with pytest.raises(TableError, match=message) as caught:
        load_figures(str(file))
    assert f"{file}:8" in str(caught.value) or f"{file}:7" in str(caught.value)


def test_measured_products_are_within_the_published_error():
    """Rows that no figure was fitted to; NVIDIA's AIConfigurator 0.12 (Apache-2.0), gemm, bf16, H100 SXM, TRT-LLM."""
    rows = csv.DictReader((Path(__file__).parent.parent / "data" / "kernels" / "h100_products.csv").open())
    gpu, figures = gpu_of("H100"), product_figures("H100")
    errors = [
        product_seconds(Product(int(row["m"]), int(row["n"]), int(row["k"])), gpu, figures) / float(row["seconds"]) - 1
        for row in rows
    ]
    assert len(errors) == 60
    assert sum(map(abs, errors)) / len(errors) < 0.08
    assert math.fabs(sum(errors) / len(errors)) < 0.04
