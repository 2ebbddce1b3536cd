"""Rows of other libraries' functions and ops, against loops that count each multiply-add of what they compute."""

from itertools import product

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, load_table
from fvflops.formulas import shipped_tables
from fvflops.formulas.loading import PARTS
from fvflops.trace import Status
from tests.support.schemas.library_schemas import define_library_schemas


class Applied(nn.Module):
    def __init__(self, name, result):
        super().__init__()

        def forward(ctx, *tensors):
            return torch.empty(result)

        self.function = type(name, (torch.autograd.Function,), {"forward": staticmethod(forward)})

    def forward(self, *tensors):
        return self.function.apply(*tensors)


def rand(*sizes):
    return torch.rand(sizes)


def macs_of(name, result, *tensors, execution="real"):
    analysis = FlopCountAnalysis(Applied(name, result), tensors, execution=execution)
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]
    return analysis.macs(), analysis.total()


# Reads and updates of a state of K * V numbers for each token and head.
STATE_USES = {
    "ChunkGLAFunction": ("update", "read"),
    "ChunkSimpleGLAFunction": ("update", "read"),
    "ChunkDeltaRuleFunction": ("predict", "update", "read"),
    "ChunkGatedDeltaRuleFunction": ("predict", "update", "read"),
    "ChunkKDAFunction": ("predict", "update", "read"),
}


@pytest.mark.parametrize("name", STATE_USES)
@pytest.mark.parametrize(("heads", "value_heads"), [(2, 2), (1, 3)])
def test_linear_attention_is_counted_as_its_recurrence(name, heads, value_heads):
    B, T, K, V = 2, 5, 3, 4
    done = sum(1 for _ in product(range(B), range(T), range(value_heads), STATE_USES[name], range(K), range(V)))
    query, value, gate = rand(B, T, heads, K), rand(B, T, value_heads, V), rand(B, T, value_heads)
    assert macs_of(name, (B, T, value_heads, V), query, query, value, gate) == (done, done)


@pytest.mark.parametrize("sizes", [(6,), (5, 6), (3, 4, 5)])
def test_neighbourhood_attention(sizes):
    B, H, D, window = 2, 3, 4, 3 ** len(sizes)
    done = sum(1 for _ in product(range(B), range(H), *map(range, sizes), range(window), range(D)))
    name = f"NeighborhoodAttention{len(sizes)}D%sAutogradFunction"
    x, weights = rand(B, H, *sizes, D), rand(B, H, *sizes, window)
    assert macs_of(name % "QK", weights.shape, x, x)[0] == done
    assert macs_of(name % "QK", weights.shape, x, x, rand(H, 5))[0] == done  # with a bias
    assert macs_of(name % "AV", x.shape, weights, x)[0] == done


@pytest.mark.parametrize("name", ["MSDeformAttnFunction", "MultiScaleDeformableAttnFunction"])
def test_deformable_attention(name):
    B, Q, H, L, P, D = 2, 5, 3, 2, 4, 6
    shapes, starts = torch.tensor([[4, 4], [2, 2]]), torch.tensor([0, 16])
    tensors = rand(B, 20, H, D), shapes, starts, rand(B, Q, H, L, P, 2), rand(B, Q, H, L, P)
    corners = sums = 0
    for _ in product(range(B), range(Q), range(H), range(L), range(P), range(D)):
        corners += 4
        sums += 1
    assert macs_of(name, (B, Q, H * D), *tensors) == (sums, corners + sums)


@pytest.mark.parametrize("name", ["SparseConvFunction", "SparseInverseConvFunction"])
@pytest.mark.parametrize("weights", [(3, 3, 4, 8), (8, 3, 3, 4)])
def test_a_sparse_convolution_counts_its_pairs(name, weights):
    """A product of a row of 4 and a matrix of 4 by 8 for each pair, in the layouts of spconv 1 and 2."""
    counts = [2, 0, 7, 1, 9, 3, 0, 0, 4]
    done = sum(1 for _ in product(range(sum(counts)), range(4), range(8)))
    tensors = rand(9, 4), rand(*weights), torch.zeros(2, 9, 9, dtype=torch.int32), torch.tensor(counts)
    for execution in ("real", "shapes"):
        assert macs_of(name, (6, 8), *tensors, execution=execution)[0] == done
    analysis = FlopCountAnalysis(Applied(name, (6, 8)), (*tensors[:3], tensors[3].to("meta")), execution="shapes")
    assert analysis.macs() == 0 and analysis.unsupported_ops()  # the pairs are unknown, and not taken for zero


def test_masked_products_of_deep_gemm():
    define_library_schemas()
    library = torch.library.Library("deep_gemm", "IMPL")
    library.impl("m_grouped_fp8_gemm_nt_masked", lambda *args, **kwargs: None, "CPU")
    op = torch.ops.deep_gemm.m_grouped_fp8_gemm_nt_masked
    rows = [3, 0, 5]
    tensors = rand(3, 8, 64), rand(3, 8, 1), rand(3, 16, 64), rand(3, 1, 1), rand(3, 8, 16), torch.tensor(rows)

    class Masked(nn.Module):
        def forward(self, *tensors):
            op(*tensors, 4)
            return tensors[4]

    assert FlopCountAnalysis(Masked(), tensors, execution="real").macs() == sum(rows) * 64 * 16


def test_each_row_has_a_source():
    assert not {*PARTS} & {*shipped_tables()}
    for part in PARTS:
        rows = load_table(part).rows.values()
        assert not [row.name for row in rows if row.kind == "counted" and not (row.source and row.example)]
