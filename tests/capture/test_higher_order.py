"""The higher-order ops: what is in branches, bodies and subgraphs is counted as often as it runs."""

import logging
from collections import Counter

import pytest
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fvflops import FlopCountAnalysis, record_call
from fvflops.analysis.fvcore_text import summarise
from fvflops.formulas import load_table
from fvflops.reports.terminal.op_coverage import op_coverage_notes
from tests.support.models.parts import Applied
from tests.support.old_torch import VERSION

pytestmark = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="this torch shows higher-order ops to no dispatch mode",
)

TABLE = load_table("default")
WEIGHT = nn.Parameter(torch.randn(4, 4))
X = torch.randn(3, 4)
ONE = 3 * 4 * 4  # X @ WEIGHT
hop = torch.ops.higher_order


def count_macs(function, *inputs, execution="shapes", backward=False):
    """Return phase -> multiply-adds of a run; with `backward` the inputs want gradients and all results are summed."""
    if backward:
        inputs = tuple(item.clone().requires_grad_(item.is_floating_point()) for item in inputs)
    trace = record_call(
        function,
        inputs,
        execution=execution,
        loss=sum_all if backward else None,
        stops_at=TABLE.stops_at,
        estimate_cost=lambda signature: TABLE.price(signature).macs,
    )
    macs = Counter()
    for (index, _, phase), calls in trace.calls.items():
        price = TABLE.price(trace.signatures[index])
        assert price.status.value != "unsupported", trace.signatures[index].op
        macs[phase] += calls * price.macs
    return dict(+macs)


def sum_all(results):
    leaves = torch.utils._pytree.tree_leaves(results)
    return sum(item.sum() for item in leaves if item.is_floating_point())


def check(function, plain, forward, x, *, backward=None):
    """Compare a model with what it is in plain Python: counts in both executions, forward and in training, and results.

    The backward of a product is two like it, unless `backward` says otherwise.
    """
    backward = 2 * forward if backward is None else backward
    for execution in ("real", "shapes"):
        for model in (function, plain):
            assert count_macs(model, x, execution=execution) == {"forward": forward}
            counts = count_macs(model, x, execution=execution, backward=True)
            assert counts == {"forward": forward, "backward": backward}
    check_results(function, plain, x)


def check_results(function, plain, x):
    """Compare what a model gets from its ops while it is recorded with what it gets in plain Python."""
    expected = plain(x)
    record_call(lambda x: torch.testing.assert_close(function(x), expected), (x,), execution="real")


def two(x):
    return x @ WEIGHT @ WEIGHT


def one(x):
    return x @ WEIGHT


@pytest.mark.parametrize(("truth", "products"), [(True, 2), (False, 1)])
def test_a_known_condition_takes_its_branch(truth, products):
    def model(x):
        return torch.cond(torch.tensor(truth), two, one, (x,))

    check(model, two if truth else one, products * ONE, X)


@pytest.mark.parametrize("branches", [(two, one), (one, two)])
def test_of_an_unknown_condition_the_larger_branch_counts(branches):
    def model(x):
        return torch.cond(x.sum() > 0, *branches, (x,))

    assert count_macs(model, X) == {"forward": 2 * ONE}
    assert count_macs(model, X, backward=True) == {"forward": 2 * ONE, "backward": 4 * ONE}


@pytest.mark.parametrize(("value", "products"), [(1.0, 2), (-1.0, 1)])
def test_a_real_run_takes_one_branch(value, products):
    def model(x):
        return torch.cond(x.sum() > 0, two, one, (x,))

    x = torch.full((3, 4), value)
    assert count_macs(model, x, execution="real") == {"forward": products * ONE}
    check_results(model, two if value > 0 else one, x)


class Choice(nn.Module):
    """A model that goes through one module or another, by its input's numbers."""

    def __init__(self):
        super().__init__()
        self.many = nn.Sequential(*(nn.ReLU() for _ in range(500)), nn.Linear(4, 4))
        self.wide = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.many, self.wide, (x,))


def test_the_larger_branch_is_the_one_that_costs_more_and_the_report_says_so(caplog):
    with caplog.at_level(logging.WARNING, "fvflops"):
        analysis = FlopCountAnalysis(Choice(), X)
        assert analysis.total() == 3 * 2 * 4 * 64
    assert "higher_order::cond: the costlier branch" in caplog.text
    assert analysis.by_module()["wide"] == analysis.total() and analysis.by_module()["many"] == 0
    assert not analysis.uncalled_modules()  # both were tried
    assert analysis.trace().about["execution"] == "shapes"
    sentences = op_coverage_notes(summarise(analysis))
    assert any(line.startswith("ASSUMED (data-dependent): ") and "higher_order::cond" in line for line in sentences)
    # Without a table the branch that reads and makes more elements is the larger one.
    bare = record_call(Choice(), (X,), execution="shapes")
    assert sum(calls for (index, _, _), calls in bare.calls.items() if "relu" in bare.signatures[index].op) == 500


def test_what_the_other_branch_did_leaves_no_event():
    def model(x):
        return torch.cond(x.sum() > 0, lambda x: (x @ WEIGHT).relu(), lambda x: x @ WEIGHT @ WEIGHT, (x,))

    trace = record_call(model, (X,), execution="shapes", estimate_cost=lambda signature: TABLE.price(signature).macs)
    ops = [trace.signatures[event.item].op for event in trace.events if event.kind == "op"]
    assert "aten::relu" not in ops and sum("mm" in op for op in ops) == 2
    made = {index for event in trace.events if event.kind == "op" for index in event.writes}
    freed = [event.item for event in trace.events if event.kind == "free"]
    assert set(freed) <= made and len(freed) == len(set(freed))


@pytest.mark.parametrize("start", [torch.tensor(0), 0])
def test_a_loop_counts_each_turn(start):
    loop = torch._higher_order_ops.while_loop

    def model(x):
        return loop(lambda turn, x: turn < 5, lambda turn, x: (turn + 1, x @ WEIGHT), (start, x))[1]

    check(model, lambda x: x @ WEIGHT @ WEIGHT @ WEIGHT @ WEIGHT @ WEIGHT, 5 * ONE, X)


def test_a_loop_may_not_turn_at_all_and_may_carry_what_is_nested():
    loop = torch._higher_order_ops.while_loop

    def never(x):
        return loop(lambda x: x.sum() != x.sum(), lambda x: (x @ WEIGHT,), (x,))[0]

    def nested(x):
        carried = (torch.tensor(0), {"x": x, "y": x})
        turn = lambda turn, xy: (turn + 1, {"x": xy["y"] @ WEIGHT, "y": xy["x"].clone()})  # noqa: E731
        return loop(lambda turn, xy: turn < 3, turn, carried)[1]["x"]

    def written_out(x):
        return x @ WEIGHT @ WEIGHT, x @ WEIGHT  # what was x at last comes of one product, and of one more

    assert count_macs(never, X, execution="real") == {}
    check_results(never, lambda x: x, X)
    # Of the three products two lead to the result that the loss sees.
    check(nested, lambda x: written_out(x)[0], 3 * ONE, X, backward=4 * ONE)


def shrink(x):
    return torch._higher_order_ops.while_loop(lambda x: x.norm() > 1, lambda x: (x @ (torch.eye(4) / 2),), (x,))[0]


def test_a_loop_whose_end_is_not_known_turns_once_by_shapes_and_is_run_for_real_by_default():
    x = torch.full((1, 4), 8.0)  # of norm 16: four halvings and the test that ends it
    assert count_macs(shrink, x, execution="real") == count_macs(shrink, x, execution="auto") == {"forward": 4 * 16}
    assert count_macs(shrink, x, execution="shapes") == {"forward": 16}
    trace = record_call(shrink, (x,), execution="shapes")
    assert trace.about["supposed"] == "higher_order::while_loop: one iteration"
    assert "supposed" not in record_call(shrink, (x,), execution="real").about


def test_a_loop_keeps_the_turns_that_are_known():
    def model(x):
        def goes_on(turn, x):
            return turn < 2 if turn < 2 else x.sum() > 0

        return torch._higher_order_ops.while_loop(goes_on, lambda turn, x: (turn + 1, x @ WEIGHT), (0, x))[1]

    assert count_macs(model, X) == {"forward": 2 * ONE}
    assert "known" in record_call(model, (X,), execution="shapes").about["supposed"]


def test_scan_counts_its_body_for_each_slice():
    scan = pytest.importorskip("torch._higher_order_ops").scan

    def step(carry, row):
        return carry @ WEIGHT + row, (carry * row).clone()

    def plain(x):
        carry, rows = x[0] * 2, []
        for row in x:
            carry, out = step(carry, row)
            rows.append(out)
        return carry, torch.stack(rows)

    check(lambda x: scan(step, x[0] * 2, x), plain, 3 * 16, X)


def test_scan_may_be_nested_and_go_backwards():
    scan = pytest.importorskip("torch._higher_order_ops").scan

    def body(carry, rows):
        return {"a": carry["a"] @ WEIGHT + rows[0]}, (rows[1] @ WEIGHT, carry["a"].clone())

    def model(x):
        return scan(body, {"a": x[:, 0] * 2}, (x, x * 2), dim=1, reverse=True)

    def plain(x):
        carry, first, second = {"a": x[:, 0] * 2}, [], []
        for column in (2, 1, 0):
            carry, out = body(carry, (x[:, column], x[:, column] * 2))
            first.insert(0, out[0])
            second.insert(0, out[1])
        dim = int(VERSION >= (2, 13))  # torch 2.12 and older stack along the first
        return carry, (torch.stack(first, dim), torch.stack(second, dim))

    check(model, plain, 2 * 3 * 16, torch.randn(4, 3))  # three slices of four


def test_map_counts_its_body_for_each_slice():
    from functorch.experimental.control_flow import map as map_over

    def model(x):
        return map_over(lambda row, weight: row @ weight @ WEIGHT, x, WEIGHT)

    check(model, lambda x: torch.stack([row @ WEIGHT @ WEIGHT for row in x]), 2 * 3 * 16, X)


def test_an_associative_scan_counts_what_it_combines():
    # Of five matrices, 2 x 2, two pairs, then the pair of these; and for what the pairs leave out two products more.
    def model(x):
        return hop.associative_scan(lambda a, b: a @ b, [x], ())[0]

    def plain(x):
        first, second = x[0] @ x[1], x[2] @ x[3]
        both = first @ second
        return torch.stack([x[0], first, first @ x[2], both, both @ x[4]])

    check(model, plain, 5 * 8, torch.randn(5, 2, 2))


def test_control_flow_within_control_flow():
    def body(turn, x):
        return turn + 1, torch.cond(turn % 2 == 0, two, one, (x,))

    def model(x):
        return torch._higher_order_ops.while_loop(lambda turn, x: turn < 3, body, (torch.tensor(0), x))[1]

    check(model, lambda x: two(one(two(x))), (2 + 1 + 2) * ONE, X)


def test_vmap_of_a_condition_runs_both_branches():
    def model(x):
        return torch.vmap(lambda row: torch.cond(row.sum() > 0, two, one, (row,)))(x)

    for execution in ("real", "shapes"):
        assert count_macs(model, X, execution=execution) == {"forward": 3 * ONE}
    check_results(model, lambda x: torch.where(x.sum(1, keepdim=True) > 0, two(x), one(x)), X)


def test_an_exported_program_counts_as_the_model_does():
    model = Applied(
        lambda self, x: torch.cond(x.sum() > 0, lambda x: self.second(self.first(x)), self.first, (x,)),
        first=nn.Linear(4, 4),
        second=nn.Linear(4, 4),
    )
    exported = torch.export.export(model, (X,)).module()
    for execution in ("shapes", "real"):
        expected = FlopCountAnalysis(model, X, execution=execution)
        analysis = FlopCountAnalysis(exported, X, execution=execution)
        assert analysis.total() == expected.total() > 0 and not analysis.unsupported_ops() - expected.unsupported_ops()


def graph(function):
    return torch.fx.symbolic_trace(function)


def product(x):
    return (x @ x.T,)


OPENED = {
    "invoke_subgraph": lambda x: hop.invoke_subgraph(graph(product), "name", x),
    "strict_mode": lambda x: hop.strict_mode(product, (x,)),
    "hints_wrapper": lambda x: hop.hints_wrapper(product, (x,), {}, {}),
    "run_const_graph": lambda x: hop.run_const_graph(graph(product), (x,)),
    "wrap": lambda x: hop.wrap(product, x),
    "wrap_with_set_grad_enabled": lambda x: hop.wrap_with_set_grad_enabled(True, product, x),
    "wrap_with_autocast": lambda x: hop.wrap_with_autocast("cpu", None, False, None, product, x),
    "tag_activation_checkpoint": lambda x: hop.tag_activation_checkpoint(graph(product), x, use_reentrant=False),
    "out_dtype": lambda x: hop.out_dtype(torch.ops.aten.mm.default, torch.float32, x, x.T),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_wrapper_is_looked_into(name):
    if not hasattr(hop, name):
        pytest.skip(f"this torch has no {name}")
    for execution in ("real", "shapes"):
        assert count_macs(OPENED[name], X, execution=execution) == {"forward": 3 * 3 * 4}


def test_a_functionalised_op_is_seen():
    @torch.library.custom_op("fvflops_test::add_product", mutates_args=("out",))
    def add_product(out: torch.Tensor, x: torch.Tensor) -> None:
        out += x @ x.T

    def forward(self, x):
        out = torch.zeros(3, 3)
        torch.ops.fvflops_test.add_product(out, x)
        return out * 2

    program = torch.export.export(Applied(forward), (X,)).run_decompositions({}).module()
    unknown = FlopCountAnalysis(program, X, execution="real").unsupported_ops()
    assert unknown["fvflops_test::add_product"] == 1
    assert not any(name.startswith("higher_order") for name in unknown)


def test_a_row_for_the_op_itself_keeps_it_whole():
    analysis = FlopCountAnalysis(lambda x: torch.cond(x.sum() > 0, two, one, (x,)), X, execution="real")
    assert analysis.total() in (ONE, 2 * ONE)
    assert analysis.set_op_handle("higher_order::cond", lambda call: 7).by_operator() == {"cond": 7}


class Kernel:
    """What torch takes for a kernel in Triton; launched, it doubles."""

    arg_names = ("x", "out", "n", "BLOCK")

    def __init__(self):
        self.fn = saxpy

    def __getitem__(self, grid):
        return lambda x, out, n, BLOCK: out.copy_(x * 2)


def saxpy():
    """Stand for the Python function of a kernel."""


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_kernel_in_triton_is_unknown_by_its_name(execution):
    side_table = pytest.importorskip("torch._higher_order_ops.triton_kernel_wrap").kernel_side_table
    kernel = side_table.add_kernel(Kernel())
    constants = side_table.add_constant_args({"n": 12, "BLOCK": 128})
    kept = torch.zeros(3, 4)

    def model(x):
        made = torch.empty_like(x)
        for out in (made, kept):
            hop.triton_kernel_wrapper_mutation(
                kernel_idx=kernel,
                constant_args_idx=constants,
                grid=[(1,)],
                tma_descriptor_metadata={},
                kwargs={"x": x, "out": out},
            )
        if execution == "real":
            torch.testing.assert_close((made, kept), (2 * X, 2 * X))
        return made @ WEIGHT

    analysis = FlopCountAnalysis(model, X, execution=execution)
    assert analysis.total() == ONE
    assert analysis.unsupported_ops()["triton::saxpy"] == 2
    assert not kept.any()  # put back
    analysis.set_op_handle("triton::saxpy", lambda call: call.tensor("x").numel * call.arguments["n"])
    assert analysis.by_operator()["saxpy"] == 2 * 12 * 12


def test_torch_is_left_as_it_was():
    from torch._higher_order_ops import utils

    def methods():
        return HigherOrderOperator.__call__, getattr(utils, "_hop_compile_and_call", None)

    before = methods()

    def fails(x):
        raise KeyError(x.shape)

    for model in (fails, lambda x: torch.cond(torch.tensor(True), fails, one, (x,))):
        with pytest.raises(KeyError):
            record_call(model, (X,))
        assert methods() == before
    record_call(lambda x: torch.cond(torch.tensor(True), one, two, (x,)), (X,))
    assert methods() == before
