"""Products of sparse matrices, in every layout, against the products of the stored elements one by one."""

import pytest
import torch

from fvflops import FlopCountAnalysis
from fvflops.trace import Status

ROWS, INNER, COLUMNS = 8, 10, 6
LAYOUTS = ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr"]  # for sparse_bsc the CPU has no products


def dense():
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
    "sspaddmm": (lambda a: torch.sspaddmm(torch.rand(ROWS, COLUMNS).to_sparse(), a, right()), COLUMNS, ["sparse_coo"]),
    "sampled": (lambda a: torch.sparse.sampled_addmm(a, torch.rand(ROWS, 5), torch.rand(5, INNER)), 5, ["sparse_csr"]),
    "reduced": (lambda a: torch.sparse.mm(a, right(), "sum"), COLUMNS, ["sparse_csr"]),
    "batch": (lambda a: torch.bmm(torch.stack([a, a]), torch.stack([right(), right()])), 2 * COLUMNS, ["sparse_coo"]),
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
    text = """
        0 -0.10036558103014462 -0.00802924648241157 -0.00089213849804573 0
        0 0.3978497494996451 1.3678377846041172 0.49828962252538267 -0.0006378981945947233
        -10.967639605296206 1.680158138789062 0.05717798464788655 -0.0069821012248805206 3.349750170860705e-05
        -0.09043168323908106 -0.06764045190713819 0.06759613017704597 0.029555257042931552 -1.391802575160607e-05
        0 0 -0.09233646193671186 -0.016936493900208172 -1.400867981820361e-05
    """
    rows = [list(map(float, line.split())) for line in text.strip().splitlines()]
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
