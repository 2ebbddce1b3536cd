"""Errors that reports show beside estimated times: which rows they are of, and that all figures have rows."""

import pytest

from fvflops import find_device, paths
from fvflops.devices import measured_errors
from fvflops.devices.kernel_models.figures import load_figures
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
from tests.support.tools import load_tool

COMMON = {"device": "A100 SXM 80GB", "bias": 0.0, "percentile_95": 9.0}
OF_RUNS = {**COMMON, "software": "Old 2022", "fitted": True}
RUNS = [
    RunErrors(**OF_RUNS, source="lab", nodes="one node", runs=30, mean=6.0),
    RunErrors(**OF_RUNS, source="other", nodes="one node", runs=10, mean=2.0, held_out=9.0),
    RunErrors(**OF_RUNS, source="lab", nodes="several nodes", runs=4, mean=8.0, held_out=16.0),
]
OF_PRODUCTS = {**COMMON, "kind": "product", "dtype": "bf16"}
KERNELS = [
    KernelErrors(**OF_PRODUCTS, kernels=10, mean=5.0, borrowed=10.0),
    KernelErrors(**{**OF_PRODUCTS, "device": "H100 SXM"}, kernels=30, mean=7.0, borrowed=14.0),
]


@pytest.fixture
def errors(monkeypatch):
    verdicts = [VerdictErrors(source="study", fit=10, fit_right=9, unfit=5, unfit_right=5)]
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
    assert describe_verdicts() == "Said to fit: 9 of 10 measured runs did (study)."


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
    assert all(row.fit_right <= row.fit and row.unfit_right <= row.unfit for row in errors.memory) and errors.memory


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
