"""The cache of shape execution: an outcome is used again only where all that it depends on is the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv3d, scaled_dot_product_attention

from fvflops import load_table
from fvflops.capture.run import record_call
from fvflops.capture.shapes import concrete_tensors
from fvflops.capture.shapes.shape_cache import clear_cache, outcome_count
from fvflops.trace import StopsAt, Trace
from tests.support.opinfo import layouts

STOPS = load_table("default").stops_at


@pytest.fixture(autouse=True)
def settings_kept() -> Iterator[None]:
    """Start with an empty cache and put the default dtype back."""
    default = torch.get_default_dtype()
    clear_cache()
    yield
    torch.set_default_dtype(default)
    clear_cache()


def shown(model: Callable[..., Any], *args: Any, execution: str, stops_at: StopsAt = STOPS) -> Any:
    """Return the op calls of a run with their results and new storages, and the layout of what the model returns."""
    results: list[Any] = []

    def noting(*args: Any) -> Any:
        result = model(*args)
        results.append(layouts(result))
        return result

    trace = record_call(noting, args, execution=execution, stops_at=stops_at, quiet=True)
    return _calls(trace), results


def _calls(trace: Trace) -> list[Any]:
    ops = [event for event in trace.events if event.kind == "op"]
    return [
        (
            trace.signatures[event.item].op,
            trace.signatures[event.item].outputs,
            [trace.storages[index].nbytes for index in event.writes],
        )
        for event in ops
    ]


def assert_as_real(model: Callable[..., Any], *args: Any, stops_at: StopsAt = STOPS) -> Any:
    """Compare a run by shapes with a real one, and return what both show."""
    shapes = shown(model, *args, execution="shapes", stops_at=stops_at)
    assert shapes == shown(model, *args, execution="real", stops_at=stops_at)
    return shapes


FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
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

PROMOTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "true division": lambda ids: ids / 2,
    "times a fraction": lambda ids: ids * 0.5,
    "power": lambda ids: ids**-0.5,
    "sqrt": torch.sqrt,
    "sigmoid": lambda ids: ids.sigmoid(),
    "two of them": lambda ids: torch.div(ids, ids + 1),
    "where": lambda ids: torch.where(ids > 1, 0.5, ids),
    "a bool": lambda ids: (ids > 1) * 2.5,
}


@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_made_of_nothing_has_the_default_dtype_of_the_run(name: str):
    seen = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        seen.append(assert_as_real(FACTORIES[name]))
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", PROMOTIONS)
def test_whole_numbers_become_fractions_in_the_default_dtype(name: str, known: bool, monkeypatch):
    if not known:
        monkeypatch.setattr(concrete_tensors, "CONCRETE_LIMIT", -1)
    ids = torch.arange(1, 4)
    seen = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        seen.append(assert_as_real(PROMOTIONS[name], ids))
    assert seen[0] == seen[2] != seen[1]


def change_halfway(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Change the default dtype between calls that look the same."""
    before = torch.ones(3), ids / 2
    torch.set_default_dtype(torch.bfloat16)
    after = torch.ones(3), ids / 2
    torch.set_default_dtype(torch.float32)
    return *before, *after, torch.ones(3), ids / 2


@pytest.mark.parametrize("known", [True, False])
def test_a_model_may_change_the_default_dtype_as_it_runs(known: bool, monkeypatch):
    if not known:
        monkeypatch.setattr(concrete_tensors, "CONCRETE_LIMIT", -1)
    for _ in range(2):
        _, results = assert_as_real(change_halfway, torch.arange(3))
        assert [item[2] for item in results[0]] == ["torch.float32"] * 2 + ["torch.bfloat16"] * 2 + [
            "torch.float32"
        ] * 2


def attend_twice(query: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Attend by the fused kernel, then by the plain one: their results lie otherwise."""
    with sdpa_kernel(SDPBackend.MATH):
        plain = scaled_dot_product_attention(query, query, query)
    return scaled_dot_product_attention(query, query, query), plain


def test_the_kernels_that_attention_may_use_are_told_apart():
    query = torch.rand(2, 5, 3, 8).transpose(1, 2)
    for _ in range(2):
        _, results = assert_as_real(attend_twice, query)
        assert results[0][0] != results[0][1]


def convolve_twice(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convolve with oneDNN, which keeps channels_last_3d, and without."""
    with torch.backends.mkldnn.flags(enabled=False):
        plain = conv3d(x, weight)
    return conv3d(x, weight), plain


@pytest.mark.parametrize("stops_at", [STOPS, StopsAt()], ids=["default", "none"])
def test_a_convolution_with_and_without_its_library_is_not_the_same(stops_at: StopsAt):
    x = torch.rand(2, 4, 6, 6, 6).to(memory_format=torch.channels_last_3d)
    for _ in range(2):
        _, results = assert_as_real(convolve_twice, x, torch.rand(8, 4, 3, 3, 3), stops_at=stops_at)
        assert results[0][0] != results[0][1]


def contract(x: torch.Tensor) -> torch.Tensor:
    """Call a composite op that autocast leaves alone, and that comes down to one that it casts for."""
    return torch.tensordot(x, x, dims=([1], [0]))


def contract_under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.chain_matmul(x, x), contract(x)


def test_what_an_op_comes_down_to_without_autocast_is_not_what_it_does_under_it():
    x = torch.rand(4, 4)
    for _ in range(2):
        plain = assert_as_real(contract, x, stops_at=StopsAt())
        cast = assert_as_real(contract_under_autocast, x, stops_at=StopsAt())
        assert plain[0] != cast[0]


STATE = {"width": 1}


@torch.library.custom_op("fvflops_test_memo::widen", mutates_args=())
def widen(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(len(x), STATE["width"])


@widen.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(x), STATE["width"])


def widen_twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    STATE["width"] = 1
    first = widen(x)
    STATE["width"] += 2
    return first, widen(x), x * 2


def test_an_op_with_state_of_its_own_is_asked_every_time():
    x = torch.rand(2)
    for _ in range(2):
        _, results = assert_as_real(widen_twice, x)
        assert [item[0] for item in results[0]] == [(2, 1), (2, 3), (2,)]


def test_settings_are_told_apart_and_their_outcomes_kept():
    model, x = nn.Linear(3, 2), torch.rand(4, 3)
    assert_as_real(model, x)
    known = outcome_count()
    for _ in range(2):
        torch.use_deterministic_algorithms(True)
        try:
            assert_as_real(model, x)
        finally:
            torch.use_deterministic_algorithms(False)
        assert outcome_count() == 2 * known
        assert_as_real(model, x)
        assert outcome_count() == 2 * known
