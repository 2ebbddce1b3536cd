"""The cache of shape execution: an outcome is reused only if everything it depends on is equal."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv3d, scaled_dot_product_attention

from fvflops.capture.shapes import concrete_tensors
from fvflops.capture.shapes.shape_cache import clear_cache, outcome_count
from fvflops.trace import StopsAt
from tests.support.opinfo import STOPS, difference, run


@pytest.fixture(autouse=True)
def default_dtype_restored():
    """Start with an empty cache, and restore the default dtype."""
    default = torch.get_default_dtype()
    clear_cache()
    yield
    torch.set_default_dtype(default)
    clear_cache()


def assert_as_real(model, *args, stops_at=STOPS):
    """Compare shape execution with real execution, and return what it shows."""
    real, shapes = (run(model, args, {}, execution, stops_at=stops_at) for execution in ("real", "shapes"))
    assert difference(real, shapes) == ""
    return shapes


FACTORIES = {
    "arange": lambda: torch.arange(0, 1, 0.25),
    "empty": lambda: torch.empty(3),
    "eye": lambda: torch.eye(3),
    "full": lambda: torch.full((3,), 1.5),
    "linspace": lambda: torch.linspace(0, 1, 3),
    "logspace": lambda: torch.logspace(0, 1, 3),
    "ones": lambda: torch.ones(3),
    "rand": lambda: torch.rand(3),
    "tensor": lambda: torch.tensor([1.5, 2.0]),
    "hann_window": lambda: torch.hann_window(4),
    "complex": lambda: torch.zeros(3) * 1j if torch.get_default_dtype() is not torch.bfloat16 else torch.zeros(3),
}

PROMOTIONS = {
    "true division": lambda ids: ids / 2,
    "product with a float": lambda ids: ids * 0.5,
    "power": lambda ids: ids**-0.5,
    "sqrt": torch.sqrt,
    "sigmoid": lambda ids: ids.sigmoid(),
    "two integers": lambda ids: torch.div(ids, ids + 1),
    "where": lambda ids: torch.where(ids > 1, 0.5, ids),
    "a bool": lambda ids: (ids > 1) * 2.5,
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_results_have_the_current_default_dtype(name):
    outcomes = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        outcomes.append(assert_as_real(FACTORIES[name]))
    assert outcomes[0] != outcomes[1] != outcomes[2]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", PROMOTIONS)
def test_integers_are_promoted_to_the_current_default_dtype(name, known, monkeypatch):
    if not known:
        monkeypatch.setattr(concrete_tensors, "CONCRETE_LIMIT", -1)
    ids = torch.arange(1, 4)
    outcomes = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        outcomes.append(assert_as_real(PROMOTIONS[name], ids))
    assert outcomes[0] == outcomes[2] != outcomes[1]


def change_halfway(ids):
    """Change the default dtype between equal calls."""
    before = torch.ones(3), ids / 2
    torch.set_default_dtype(torch.bfloat16)
    after = torch.ones(3), ids / 2
    torch.set_default_dtype(torch.float32)
    return *before, *after, torch.ones(3), ids / 2


@pytest.mark.parametrize("known", [True, False])
def test_model_may_change_the_default_dtype_while_it_runs(known, monkeypatch):
    if not known:
        monkeypatch.setattr(concrete_tensors, "CONCRETE_LIMIT", -1)
    for _ in range(2):
        results = assert_as_real(change_halfway, torch.arange(3)).results
        assert [item[2] for item in results] == ["torch.float32"] * 2 + ["torch.bfloat16"] * 2 + ["torch.float32"] * 2


def attend_twice(query):
    """Call the math kernel and the fused kernel, whose results have different layouts."""
    with sdpa_kernel(SDPBackend.MATH):
        unfused = scaled_dot_product_attention(query, query, query)
    return scaled_dot_product_attention(query, query, query), unfused


def test_outcomes_of_attention_differ_by_enabled_kernels():
    query = torch.rand(2, 5, 3, 8).transpose(1, 2)
    for _ in range(2):
        results = assert_as_real(attend_twice, query).results
        assert results != results[1]


def convolve_twice(x, weight):
    """Convolve with oneDNN, which preserves channels_last_3d, and without."""
    with torch.backends.mkldnn.flags(enabled=False):
        without_onednn = conv3d(x, weight)
    return conv3d(x, weight), without_onednn


@pytest.mark.parametrize("stops_at", [STOPS, StopsAt()], ids=["default", "none"])
def test_outcomes_of_convolution_differ_with_and_without_onednn(stops_at):
    x = torch.rand(2, 4, 6, 6, 6).to(memory_format=torch.channels_last_3d)
    for _ in range(2):
        results = assert_as_real(convolve_twice, x, torch.rand(8, 4, 3, 3, 3), stops_at=stops_at).results
        assert results != results[1]


def contract(x):
    """Call a composite op without an autocast rule that decomposes into an op with one."""
    return torch.tensordot(x, x, dims=([1], [0]))


def contract_under_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.chain_matmul(x, x), contract(x)


def test_expansions_of_composite_ops_differ_with_and_without_autocast():
    x = torch.rand(4, 4)
    for _ in range(2):
        uncast = assert_as_real(contract, x, stops_at=StopsAt())
        cast = assert_as_real(contract_under_autocast, x, stops_at=StopsAt())
        assert uncast.storages != cast.storages


STATE = {"width": 1}


@torch.library.custom_op("fvflops_test_cache::widen", mutates_args=())
def widen(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(len(x), STATE["width"])


@widen.register_fake
def _(x):
    return x.new_empty(len(x), STATE["width"])


def widen_twice(x):
    STATE["width"] = 1
    first = widen(x)
    STATE["width"] += 2
    return first, widen(x), x * 2


def test_outcomes_of_an_op_with_state_are_not_cached():
    x = torch.rand(2)
    for _ in range(2):
        results = assert_as_real(widen_twice, x).results
        assert [item[0] for item in results] == [(2, 1), (2, 3), (2,)]


def test_outcomes_are_cached_per_settings():
    model, x = nn.Linear(3, 2), torch.rand(4, 3)
    assert_as_real(model, x)
    cached = outcome_count()
    for _ in range(2):
        torch.use_deterministic_algorithms(True)
        try:
            assert_as_real(model, x)
        finally:
            torch.use_deterministic_algorithms(False)
        assert outcome_count() == 2 * cached
        assert_as_real(model, x)
        assert outcome_count() == 2 * cached
