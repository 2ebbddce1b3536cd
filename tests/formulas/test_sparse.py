"""Products of sparse matrices, in every layout, against the products of the stored elements one by one."""

import pytest
import torch

from fvflops import FlopCountAnalysis
from fvflops.trace import Status

ROWS, INNER, COLUMNS = 8, 10, 6
LAYOUTS = ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr"]  # for sparse_bsc the CPU has no products


def dense():
    """Return a matrix of which a third is not zero."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(ROWS, INNER, generator=generator).mul(torch.rand(ROWS, INNER, generator=generator) < 0.3)


def sparse(layout):
    blocks = {"blocksize": (2, 2)} if layout == "sparse_bsr" else {}
    return dense().to_sparse(layout=getattr(torch, layout), **blocks)


def stored(layout):
    """Return how many elements a layout stores: of a block all."""
    if layout == "sparse_bsr":
        blocks = dense().reshape(ROWS // 2, 2, INNER // 2, 2).transpose(1, 2)
        return 4 * int(blocks.abs().sum((2, 3)).count_nonzero())
    return int(dense().count_nonzero())


def right():
    return torch.rand(INNER, COLUMNS)


# Each with the columns of what the stored elements are multiplied with, and the layouts that torch has kernels for.
COMPRESSED = [layout for layout in LAYOUTS if layout != "sparse_coo"]
CASES = {
    "mm": (lambda a: torch.mm(a, right()), COLUMNS, LAYOUTS),
    "matmul": (lambda a: a @ right(), COLUMNS, LAYOUTS),
    "sparse.mm": (lambda a: torch.sparse.mm(a, right()), COLUMNS, LAYOUTS),
    "addmm": (lambda a: torch.addmm(torch.rand(ROWS, COLUMNS), a, right()), COLUMNS, LAYOUTS),
    "sparse.addmm": (lambda a: torch.sparse.addmm(torch.rand(ROWS, COLUMNS), a, right()), COLUMNS, ["sparse_coo"]),
    "mv": (lambda a: torch.mv(a, torch.rand(INNER)), 1, LAYOUTS),
    "addmv": (lambda a: torch.addmv(torch.rand(ROWS), a, torch.rand(INNER)), 1, COMPRESSED[:2]),
    "linear": (lambda a: torch.nn.functional.linear(right().t(), a), COLUMNS, LAYOUTS),
    "biased": (lambda a: torch.nn.functional.linear(right().t(), a, torch.rand(ROWS)), COLUMNS, COMPRESSED[:2]),
    "from the right": (lambda a: right().t().mm(a.t()), COLUMNS, LAYOUTS),
    "smm": (lambda a: torch.smm(a, right()), COLUMNS, ["sparse_coo"]),
    "hspmm": (lambda a: torch.hspmm(a, right()), COLUMNS, ["sparse_coo"]),
    "sspaddmm": (
        lambda a: torch.sspaddmm(torch.rand(ROWS, COLUMNS).to_sparse(), a, right()),
        COLUMNS,
        ["sparse_coo"],
    ),
    "sampled": (
        lambda a: torch.sparse.sampled_addmm(a, torch.rand(ROWS, 5), torch.rand(5, INNER)),
        5,
        ["sparse_csr"],
    ),
    "reduced": (lambda a: torch.sparse.mm(a, right(), "sum"), COLUMNS, ["sparse_csr"]),
    "batch": (
        lambda a: torch.bmm(torch.stack([a, a]), torch.stack([right(), right()])),
        2 * COLUMNS,
        ["sparse_coo"],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in CASES for layout in CASES[name][2]])
def test_stored_elements_times_columns(name, layout):
    function, columns, _ = CASES[name]
    analysis = FlopCountAnalysis(function, sparse(layout))
    assert analysis.total() == stored(layout) * columns
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]


def test_a_matrix_exponential_is_five_products():
    """An estimate that does not look at the norm: a polynomial of degree 18, nothing squared; by shapes as for real."""
    x = torch.rand(3, 4, 4)
    for execution in ("shapes", "real"):
        analysis = FlopCountAnalysis(torch.linalg.matrix_exp, x, execution=execution)
        assert analysis.by_operator() == {"matrix_exp": 3 * 5 * 4**3}
        exact = FlopCountAnalysis(torch.linalg.matrix_exp, x, execution=execution, table="exact")
        assert exact.total() == 3 * (2 * 5 * 4**3 + 25 * 2 * 16 + 3 * 16)
        assert exact.macs() == analysis.macs()


def test_five_products_compute_the_exponential():
    """torch's polynomial of degree 18, with the coefficients of Bader, Blanes and Casas, in the products counted."""
    rows = [
        [0, -1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04, 0],
        [
            0,
            3.97849749499645077844e-01,
            1.36783778460411720168e00,
            4.98289622525382669416e-01,
            -6.37898194594723280150e-04,
        ],
        [
            -1.09676396052962061844e01,
            1.68015813878906206114e00,
            5.71779846478865511061e-02,
            -6.98210122488052056106e-03,
            3.34975017086070470649e-05,
        ],
        [
            -9.04316832390810593223e-02,
            -6.76404519071381882256e-02,
            6.75961301770459654925e-02,
            2.95552570429315521194e-02,
            -1.39180257516060693404e-05,
        ],
        [0, 0, -9.23364619367118555360e-02, -1.69364939002081722752e-02, -1.40086798182036094347e-05],
    ]
    products = 0

    def multiply(a, b):
        nonlocal products
        products += 1
        return a @ b

    x = torch.rand(4, 4, dtype=torch.float64) / 8
    square = multiply(x, x)
    cube = multiply(square, x)
    powers = [torch.eye(4, dtype=torch.float64), x, square, cube, multiply(cube, cube)]
    one, two, three, four, five = (sum(c * power for c, power in zip(row, powers, strict=True)) for row in rows)
    nine = multiply(one, five) + four
    result = two + multiply(three + nine, nine)
    torch.testing.assert_close(result, torch.linalg.matrix_exp(x))
    assert products == 5
