"""A pytest plugin: a fixture and a marker that fail a test whose model exceeds its budget.

    @pytest.mark.flops_budget(flops="4.1G", parameters={"exact": 25_557_032}, tolerance="1%")
    def test_cost(flops_budget):
        flops_budget(resnet50(), torch.ones(1, 3, 224, 224))

A marker without limits, or the fixture without a marker, uses a budget file: `file="budget.yaml", name="resnet50"`, by
default the ini option `flops_budget_file` and the test's name. `pytest --flops-budget-update` rewrites that file. Only
pytest is imported until a test requests the fixture.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fvflops.comparison.budget_file import Budget
    from fvflops.comparison.model_budget import BudgetReport

_FILE = "flops_budget.yaml"
_OPTIONS = ("file", "name", "table", "tolerance")
_MARKER = (
    "flops_budget(flops=, macs=, activations=, parameters=, memory=, unsupported=, tolerance=, table=, file=, name=): "
    "limits for the model that the test passes to the fixture flops_budget"
)
_USED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command line option and the ini option."""
    text = "rewrite the budget files of flops_budget with the current counts"
    parser.getgroup("fvflops").addoption("--flops-budget-update", action="store_true", help=text)
    parser.addini("flops_budget_file", "the budget file of the fixture flops_budget", default=_FILE)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    workers = getattr(config.option, "numprocesses", None)
    if config.getoption("--flops-budget-update") and workers:
        raise pytest.UsageError("--flops-budget-update needs a single process: run without -n")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a marked test that does not request the fixture: nothing would be compared."""
    if item.get_closest_marker("flops_budget") and "flops_budget" not in getattr(item, "fixturenames", ()):
        pytest.fail("marked flops_budget without using the fixture: def test_cost(flops_budget)", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a marked test that passes without calling the fixture with a model."""
    result = yield
    if item.get_closest_marker("flops_budget") and not item.stash.get(_USED, False):
        pytest.fail("marked flops_budget without calling it: flops_budget(model, inputs)", pytrace=False)
    return result


@pytest.fixture
def flops_budget(request: pytest.FixtureRequest) -> FlopsBudget:
    """Compare a model with its budget: `flops_budget(model, inputs)` fails the test if it costs more."""
    return FlopsBudget(request)


class FlopsBudget:
    """The budget of one test; call it with a model and its inputs, or with an analysis."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._node = request.node
        self._config = request.config
        marker = request.node.get_closest_marker("flops_budget")
        self._marker_options: dict[str, Any] = {} if marker is None else dict(marker.kwargs)
        if marker is not None and marker.args:
            expected = "the arguments of flops_budget must be keywords, such as flops='4.1G'"
            raise pytest.UsageError(f"{expected}; got {marker.args!r}")

    def __call__(self, model: Any, inputs: Any = None, *, kwargs: Any = None, **overrides: Any) -> BudgetReport:
        """Count a model, or use an analysis, and fail the test if it exceeds the budget; return the report.

        `overrides` are limits and options that replace the marker's; invalid ones raise ValueError.
        """
        __tracebackhide__ = True
        from fvflops.analysis.model_counts import FlopCountAnalysis
        from fvflops.comparison.model_budget import check_budget, render, rewrite_budget

        self._node.stash[_USED] = True
        options = {**self._marker_options, **overrides}
        file = os.path.join(self._config.rootpath, options.get("file") or self._config.getini("flops_budget_file"))
        name = options.get("name") or self._node.name
        limits = {key: value for key, value in options.items() if key not in _OPTIONS}
        update = bool(self._config.getoption("--flops-budget-update")) and not limits
        budget = self._make_budget(name, limits, options) if limits else self._read_budget(name, file, update)
        table = options.get("table") or (budget.table if budget else None) or "default"
        analysis = model
        if not isinstance(model, FlopCountAnalysis):
            analysis = FlopCountAnalysis(model, inputs, kwargs=kwargs, table=table, warn=False)
        if update:
            rewrite_budget(file, analysis, budget, name=name, table=options.get("table"))
            budget = self._read_budget(name, file, False)
        assert budget is not None  # None only with --flops-budget-update
        result = check_budget(analysis, budget, table=table)
        if not result.passed:
            pytest.fail(render(result), pytrace=False)
        return result

    def _make_budget(self, name: str, limits: dict[str, Any], options: dict[str, Any]) -> Budget:
        from fvflops.comparison.budget_file import Budget, make_limit
        from fvflops.units import parse_share

        tolerance = parse_share(str(options.get("tolerance", "0")))
        made = [make_limit(metric, limit, tolerance) for metric, limit in limits.items()]
        return Budget(name, {limit.metric: limit for limit in made})

    def _read_budget(self, name: str, file: str, update: bool) -> Budget | None:
        from fvflops import paths
        from fvflops.comparison.budget_file import find_budget, load_budgets

        if update:
            paths.check_writable(file)
            return load_budgets(file).get(name) if paths.exists(file) else None
        if not paths.exists(file):
            raise ValueError(
                f"{name} has no limits and there is no budget file {file}: write @pytest.mark.flops_budget(flops=...), "
                "or create the file by --flops-budget-update"
            )
        return find_budget(load_budgets(file), name, file)
