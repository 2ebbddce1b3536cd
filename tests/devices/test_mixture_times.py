"""Times of fused mixtures of experts: relations that hold for all shapes, and measured kernels."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvflops.devices.kernel_models.mixtures import Mixture, MixtureFigures, mixture_seconds
from fvflops.devices.kernel_models.products import Processor, Product, group_seconds, product_seconds
from tests.support.tools import load_tool

expert_rows = load_tool("kernel_fitting.expert_rows").expert_rows

H100 = Processor(132, 989.4e12, 3.35e12)
# Of vLLM 0.24 in bf16 on an H100: tools/kernel_times.py, from NVIDIA's AIConfigurator 0.12.
FIGURES = MixtureFigures(
    large=0.552, medium=1.28, small=0.208, start=37e-6, tile=0.493e-6, split=0, bandwidth=0.96, feed=81.4e9,
    whole_waves=0.891, overlap=2.09, moves=1.33, elsewhere=1.84, cache=40e6,
)  # fmt: skip
WITHOUT_MOVES = MixtureFigures(
    **{name: getattr(FIGURES, name) for name in FIGURES.__dataclass_fields__ if name not in ("moves", "elsewhere")},
    moves=0,
    elsewhere=0,
)
token_counts = st.integers(1, 20_000)
experts = st.sampled_from([8, 16, 64, 128, 256])
skews = st.sampled_from([0.0, 1.01, 1.2])


def mixture(tokens, count=128, topk=8, ranks=1, skew=0.0, hidden=4096, inner=1536, **options):
    return Mixture(tokens, topk, expert_rows(tokens, count, topk, ranks, skew), hidden, inner, **options)


def rows_of(pairs):
    return [height for height, count in pairs for _ in range(count)]


@given(tokens=token_counts, count=experts, topk=st.integers(1, 8), skew=skews)
def test_without_other_ranks_the_experts_get_all_rows(tokens, count, topk, skew):
    rows = rows_of(expert_rows(tokens, count, topk, 1, skew))
    assert len(rows) == count
    assert sum(rows) == tokens * topk
    assert max(rows) <= tokens + 1
    if not skew:
        assert max(rows) - min(rows) <= 1


@given(tokens=st.integers(64, 20_000), count=experts, ranks=st.sampled_from([2, 4, 8]))
def test_the_busiest_rank_has_its_experts_and_at_least_its_share(tokens, count, ranks):
    balanced, mild, strong = (rows_of(expert_rows(tokens, count, 4, ranks, skew)) for skew in (0.0, 1.01, 1.2))
    assert len(balanced) == len(mild) == len(strong) == count // ranks
    assert sum(balanced) == pytest.approx(tokens * 4 / ranks, abs=1)
    assert sum(balanced) - 1 <= sum(mild)
    assert sum(balanced) - 1 <= sum(strong)


def test_a_power_law_of_one_is_the_limit_of_its_neighbours():
    one, near = (rows_of(expert_rows(4096, 64, 4, 8, skew)) for skew in (1.0, 1 + 1e-4))
    assert one == pytest.approx(near, rel=0.01, abs=1)


@given(rows=st.integers(1, 9000), columns=st.integers(1, 9000), inner=st.integers(1, 9000))
def test_one_group_is_a_plain_product(rows, columns, inner):
    one = Product(rows, columns, inner)
    plain = product_seconds(one, H100, FIGURES)
    assert FIGURES.start + group_seconds(((rows, 1),), one, H100, FIGURES) == pytest.approx(plain)


@given(tokens=token_counts)
def test_one_expert_takes_its_products(tokens):
    one = mixture(tokens, count=1, topk=1)
    up, down = Product(tokens, 2 * 1536, 4096), Product(tokens, 4096, 1536)
    both = product_seconds(up, H100, WITHOUT_MOVES) + product_seconds(down, H100, WITHOUT_MOVES)
    assert mixture_seconds(one, H100, WITHOUT_MOVES) == pytest.approx(both - FIGURES.start)


@given(tokens=token_counts, count=experts, skew=skews, gated=st.booleans())
def test_a_mixture_takes_longer_than_its_flops_at_peak_and_its_weights_at_the_bandwidth(tokens, count, skew, gated):
    shape = mixture(tokens, count, 4, skew=skew, gated=gated)
    rows = rows_of(shape.rows)
    matrices = 3 if gated else 2
    flops = 2 * sum(rows) * matrices * 4096 * 1536
    weights = 2.0 * sum(map(bool, rows)) * matrices * 4096 * 1536
    assert mixture_seconds(shape, H100, FIGURES) > max(flops / H100.peak, weights / H100.bandwidth)


@given(tokens=token_counts, factor=st.integers(2, 8), skew=skews)
def test_more_work_is_not_faster(tokens, factor, skew):
    base = mixture_seconds(mixture(tokens, skew=skew), H100, FIGURES)
    for larger in (mixture(tokens, skew=skew, hidden=factor * 4096), mixture(tokens, skew=skew, inner=factor * 1536)):
        assert mixture_seconds(larger, H100, FIGURES) > base
    more = mixture_seconds(mixture(factor * tokens), H100, FIGURES)
    assert more >= 0.999 * mixture_seconds(mixture(tokens), H100, FIGURES)


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_a_skew_costs_more_than_balance_where_experts_are_on_several_ranks(tokens, ranks):
    balanced, skewed = (mixture_seconds(mixture(tokens, 128, 8, ranks, skew), H100, FIGURES) for skew in (0, 1.2))
    assert skewed > 1.05 * balanced


def test_more_ranks_leave_each_less_to_do():
    times = [mixture_seconds(mixture(4096, ranks=ranks), H100, WITHOUT_MOVES) for ranks in (1, 2, 4, 8, 16)]
    assert times == sorted(times, reverse=True)


def test_weights_of_fewer_bytes_are_read_faster():
    times = [mixture_seconds(mixture(32, weight_bytes=size), H100, FIGURES) for size in (2.0, 1.0, 0.5)]
    assert times == sorted(times, reverse=True)
    assert times[0] - times[1] == pytest.approx(2 * (times[1] - times[2]), rel=0.3)


def test_weights_that_were_used_just_before_are_in_the_cache_if_they_fit():
    small, large = ({"count": 8, "topk": 1, "hidden": 1024, "inner": size} for size in (256, 16384))
    once, again = (mixture_seconds(mixture(8, **small, is_repeated=each), H100, FIGURES) for each in (False, True))
    assert again < once
    once, again = (mixture_seconds(mixture(8, **large, is_repeated=each), H100, FIGURES) for each in (False, True))
    assert again == pytest.approx(once, rel=1e-3)


def test_no_tokens_take_the_start_of_the_kernels():
    assert mixture_seconds(Mixture(0, 2, ((0, 8),), 4096, 1536), H100, FIGURES) == FIGURES.start


# Of vLLM 0.24 in bf16 on an H100, in microseconds, from NVIDIA's AIConfigurator 0.12.
MEASURED = [
    ((8, 6144, 128, 8, 256, 1, 0.0), 141.3),
    ((384, 2048, 768, 8, 128, 8, 1.01), 112.6),
    ((3072, 3072, 1024, 8, 256, 1, 1.2), 2286.9),
    ((8192, 3072, 1024, 8, 256, 8, 1.2), 1171.6),
    ((6144, 6144, 2048, 8, 256, 1, 1.2), 12735.2),
    ((320, 4096, 1536, 8, 128, 64, 1.01), 116.4),
]


@pytest.mark.parametrize(("shape", "measured"), MEASURED)
def test_measured_mixtures(shape, measured):
    tokens, hidden, inner, topk, count, ranks, skew = shape
    computed = mixture_seconds(mixture(tokens, count, topk, ranks, skew, hidden, inner), H100, FIGURES) * 1e6
    assert math.log(computed / measured) == pytest.approx(0, abs=0.25)
