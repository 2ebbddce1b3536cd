"""Times of kernels: relations that hold on all GPUs, measured kernels, and the errors beside times in reports."""

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvflops import find_device, paths
from fvflops.devices import measured_errors
from fvflops.devices.kernel_models.figures import find_figures, load_figures
from fvflops.devices.kernel_models.memory_bound import memory_seconds
from fvflops.devices.kernel_models.products import Processor, Product, combine, product_seconds
from fvflops.devices.measured_errors import (
    Errors,
    KernelErrors,
    RunErrors,
    VerdictErrors,
    describe_verdicts,
    expect_kernel_error,
    expect_serving_error,
    expect_step_error,
    load_errors,
)
from fvflops.formulas import TableError
from fvflops.plan.step_time.calibration import load_efficiencies
from fvflops.serve.engine_kernels import load_engines
from tests.support.checkout import ROOT
from tests.support.random_cases import random_cases
from tests.support.tools import load_tool

GPUS = list(load_figures())
sizes = st.integers(1, 20_000)


def gpu_of(name, dtype="bf16"):
    device = find_device(name)
    return Processor(device.multiprocessors, device.peak(dtype), device.bandwidth)


def product_figures(name, dtype="bf16"):
    return find_figures(find_device(name)).of("product", dtype)


@pytest.mark.parametrize("name", GPUS)
@random_cases(25)
@given(rows=sizes, columns=sizes, inner=sizes)
def test_a_product_takes_longer_than_its_flops_at_peak_and_its_bytes_at_the_bandwidth(name, rows, columns, inner):
    gpu, figures = gpu_of(name), product_figures(name)
    seconds = product_seconds(Product(rows, columns, inner), gpu, figures)
    written = 2 * rows * columns
    moved = 2 * (rows + columns) * inner + written * (written > 1.3 * figures.result_cache)
    assert seconds > max(2 * rows * columns * inner / gpu.peak / 1.1, moved / gpu.bandwidth / 1.1)


@pytest.mark.parametrize("name", GPUS)
@random_cases(25)
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
    devices = find_figures(find_device(device), exclude=left).devices
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


COMMON = {"device": "A100 SXM 80GB", "bias": 0.0, "percentile_95": 9.0}
OF_RUNS = {**COMMON, "software": "Old 2022", "fitted": True}
RUNS = [
    RunErrors(**OF_RUNS, source="lab", nodes="one node", runs=30, mean=6.0),
    RunErrors(**OF_RUNS, source="other", nodes="one node", runs=10, mean=2.0, held_out=9.0),
    RunErrors(**OF_RUNS, source="lab", nodes="several nodes", runs=4, mean=8.0, held_out=16.0),
]
OF_PRODUCTS = {**COMMON, "kind": "product", "dtype": "bf16"}
KERNELS = [
    KernelErrors(**OF_PRODUCTS, kernels=10, mean=5.0, held_out_gpu=10.0),
    KernelErrors(**{**OF_PRODUCTS, "device": "H100 SXM"}, kernels=30, mean=7.0, held_out_gpu=14.0),
]


@pytest.fixture
def errors(monkeypatch):
    verdicts = [VerdictErrors(source="study", fit=10, fit_right=9, too_large=5, too_large_right=5)]
    found = Errors(RUNS, KERNELS, verdicts, [])
    monkeypatch.setattr(measured_errors, "load_errors", lambda: found)


UNSEEN = "11.0% on average in 14 runs of sources left out of the fit."  # (10 * 9 + 4 * 16) / 14


@pytest.mark.parametrize(
    ("software", "device", "is_one_node", "text"),
    [
        # (30 * 6 + 10 * 2) / 40
        ("Old 2022", "A100", True, "Error: 5.0% on average in 40 runs of Old 2022 on A100 SXM 80GB, one node; "),
        ("Old 2022", "A100", False, "Error: 8.0% on average in 4 runs of Old 2022 on A100 SXM 80GB, several nodes; "),
        (
            *("Old 2022", "A100 PCIe 40GB", True),
            "Error: not measured on A100 PCIe 40GB; of its generation 5.0% on average in 40 runs of Old 2022 on A100 "
            "SXM 80GB, one node; ",
        ),
        ("Old 2022", "B200", False, "Error: not measured for Old 2022 on B200; "),
        ("New 2026", "A100", True, "Error: not measured for New 2026 on A100 SXM 80GB; "),
    ],
)
def test_the_error_of_a_step_is_of_the_runs_that_are_most_like_it(errors, software, device, is_one_node, text):
    found = expect_step_error(software, find_device(device), is_one_node=is_one_node)
    assert found.text == text + UNSEEN


def test_figures_of_a_user_have_no_measured_error(errors):
    found = expect_step_error("", find_device("A100"), is_one_node=True)
    assert found.text.startswith("Error unknown") and found.mean is found.measured is None


def test_the_error_of_a_kernel_is_its_own_gpus_or_that_without_own_figures(errors):
    assert expect_kernel_error("product", "bf16", find_device("H100"))[1:] == (7.0, 30)
    assert expect_kernel_error("product", "fp8", find_device("H100"))[1:] == (7.0, 30)  # by the figures of bf16
    assert expect_kernel_error("product", "bf16", find_device("MI300X"))[1:] == (13.0, 40)
    assert expect_kernel_error("decode", "bf16", find_device("H100")).mean is None
    assert describe_verdicts() == "Should fit: 9 of 10 measured runs did (study)."


def test_all_shipped_figures_have_their_errors():
    errors = load_errors()
    of_kernels = {name for name, (_, is_of_kernels) in load_efficiencies().items() if is_of_kernels}
    assert {row.software for row in errors.runs} == of_kernels
    assert {row.software for row in errors.runs if row.fitted} == of_kernels
    fitted = {(name, kind) for name, item in load_figures().items() for kind in item.by_class}
    measured = {(row.device, row.kind) for row in errors.kernels}
    assert measured <= fitted
    # Too few of their kernels take more than 10 us.
    assert {kind for _, kind in fitted - measured} <= {"memory", "peers", "trtllm decode"}
    assert {row.fit_right <= row.fit and row.too_large_right <= row.too_large for row in errors.memory} == {True}


def test_the_page_has_the_errors_of_the_file():
    page = (ROOT / "docs" / "concepts" / "step_time.md").read_text()
    assert page == load_tool("error_figures.py").write_tables(page)
    assert "| A100 SXM 80GB |" in page


def test_a_mistake_in_a_file_is_reported_with_its_line(tmp_path):
    file = tmp_path / "errors.yaml"
    text = (ROOT / "configs" / "measured_errors.yaml").read_text()
    assert paths.SCHEME in measured_errors.ERRORS and text.count("mean: ") > 9
    file.write_text(text.replace("mean: ", "mean: a", 1))
    with pytest.raises(TableError, match=r"errors.yaml:\d+: a row of errors: could not convert"):
        load_errors(str(file))


def test_engines_have_the_errors_of_their_figures():
    assert {row.engine for row in load_errors().serving} == set(load_engines())
    own, other = (expect_serving_error("vllm", find_device(name)) for name in ("H200", "A100"))
    assert own.startswith("Error: time per output token") and "not measured on A100" in other
    assert expect_serving_error("mine", find_device("H200")).startswith("Error unknown")
