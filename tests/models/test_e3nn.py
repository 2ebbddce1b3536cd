"""e3nn's modules: each is counted by shapes as in a real run, by op, forward and backward; a few also by hand.

The modules are those that e3nn's own tests build, and the models that it ships. With torch 2.10 and later e3nn runs the
code that it generates as `torch.fx` graphs; it can compile it to TorchScript instead, whose ops are seen all the same.
"""

import functools
import importlib
import pkgutil

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record
from fvflops.capture.run import ExecutionError
from tests.support.random_cases import long_except

e3nn = pytest.importorskip("e3nn")

from e3nn import o3  # noqa: E402
from e3nn.io import CartesianTensor, SphericalTensor  # noqa: E402
from e3nn.math import normalize2mom  # noqa: E402
from e3nn.nn import (  # noqa: E402
    Activation,
    BatchNorm,
    Dropout,
    Extract,
    ExtractIr,
    FullyConnectedNet,
    Gate,
    Identity,
    NormActivation,
    S2Activation,
    SO3Activation,
)
from e3nn.nn.models import gate_points_2101, gate_points_2102  # noqa: E402
from e3nn.nn.models.v2103 import voxel_convolution as voxels_2103  # noqa: E402
from e3nn.nn.models.v2104 import voxel_convolution as voxels_2104  # noqa: E402
from e3nn.nn.models.v2106.gate_points_message_passing import MessagePassing  # noqa: E402
from e3nn.nn.models.v2106.gate_points_networks import NetworkForAGraphWithAttributes, SimpleNetwork  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

MIXED = "1e + 2e + 3x3o"
LATTICE = o3.Irreps.spherical_harmonics(2)


def rand(*irreps, batch=4):
    return tuple(o3.Irreps(item).randn(batch, -1) for item in irreps)


def graph():
    node_input, node_attr, edge_attr = rand("3x0e + 2x1o", "4x0e + 1x1o", "1e", batch=3)
    attributes = {"node_input": node_input, "node_attr": node_attr, "edge_attr": edge_attr}
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return ({"pos": torch.randn(3, 3), "edge_index": edges, "batch": torch.zeros(3, dtype=torch.int64), **attributes},)


def messages():
    source, target = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
    nodes, attributes = rand("0e", "0e + 1e")
    (edges,) = rand("0e + 1e", batch=5)
    return nodes, attributes, source, target, edges, torch.randn(5, 2)


def second_of(mode):
    return "3x0e + 3x1o" if mode in ("uuw", "uuu", "uvu<v", "u<vw") else "2x0e + 2x1o"


def tensor_product(mode, weighted):
    out = {"uvw": 5, "uvu": 3, "uvv": 2, "uuw": 5, "uuu": 3, "uvuv": 6, "uvu<v": 3, "u<vw": 5}[mode]
    instructions = [(0, 0, 0, mode, weighted), (1, 1, 0, mode, weighted), (0, 1, 1, mode, weighted)]
    return o3.TensorProduct("3x0e + 3x1o", second_of(mode), f"{out}x0e + {out}x1o", instructions)


NEIGHBOURS = {"max_radius": 2.0, "num_neighbors": 3.0, "num_nodes": 5.0, "mul": 3, "layers": 1, "lmax": 1}
# A name → what makes the module, and its inputs: a text is irreps of four rows, a tuple a shape, else what makes all.
CASES = {
    "Linear": (lambda: o3.Linear(MIXED, MIXED), MIXED),
    "Linear, biases": (lambda: o3.Linear("0e + 0o + 1e", "10x0e + 0o + 1e", biases=True), "0e + 0o + 1e"),
    "Linear, weights given": (
        lambda: o3.Linear("4x0e + 3x1o", "2x1o + 8x0e", shared_weights=False),
        (7, 13),
        (7, 4 * 8 + 3 * 2),
    ),
    "Linear, channels": (lambda: o3.Linear("0e + 1e", "0e + 2x1e", f_in=44, f_out=25), (10, 44, 4)),
    "Linear, nothing connected": (lambda: o3.Linear("1e", "1e", instructions=[]), "1e"),
    **{
        f"TensorProduct {mode}{', weighted' * weighted}": (
            lambda mode=mode, weighted=weighted: tensor_product(mode, weighted),
            *("3x0e + 3x1o", second_of(mode)),
        )
        for mode in ("uvw", "uvu", "uvv", "uuw", "uuu", "uvuv", "uvu<v", "u<vw")
        for weighted in (True, False)
        if weighted or mode not in ("uvw", "u<vw", "uuw")
    },
    "FullyConnectedTensorProduct": (lambda: o3.FullyConnectedTensorProduct(MIXED, MIXED, MIXED), MIXED, MIXED),
    "FullyConnectedTensorProduct, weights given": (
        lambda: o3.FullyConnectedTensorProduct("2x0e + 1o", "0e + 1o", "3x0e + 1o", shared_weights=False),
        "2x0e + 1o",
        "0e + 1o",
        (4, 12),
    ),
    "FullTensorProduct": (lambda: o3.FullTensorProduct(MIXED, "1e + 2x2e + 2x3o"), MIXED, "1e + 2x2e + 2x3o"),
    "FullTensorProductv2": (lambda: o3.FullTensorProductv2("0e + 1e", "2x0e + 3x1e"), "0e + 1e", "2x0e + 3x1e"),
    "ElementwiseTensorProduct": (
        lambda: o3.ElementwiseTensorProduct("15x0e", "5x0e + 5x1o + 5x1e"),
        "15x0e",
        "5x0e + 5x1o + 5x1e",
    ),
    "ElementwiseTensorProductv2": (
        lambda: o3.experimental.ElementwiseTensorProductv2(*map(o3.Irreps, ("15x0e", "5x0e + 5x1o + 5x1e"))),
        "15x0e",
        "5x0e + 5x1o + 5x1e",
    ),
    "TensorSquare": (lambda: o3.TensorSquare("0e + 3x1e + 3e"), "0e + 3x1e + 3e"),
    "TensorSquare, weighted": (lambda: o3.TensorSquare("0e + 1e + 2e", "0e + 1e + 2e"), "0e + 1e + 2e", (9,)),
    "ReducedTensorProducts": (lambda: o3.ReducedTensorProducts("ij=-ji", i="5x0e + 1e"), "5x0e + 1e", "5x0e + 1e"),
    "Norm": (lambda: o3.Norm("3x0e + 5x1o"), "3x0e + 5x1o"),
    "Norm, squared": (lambda: o3.Norm(MIXED, squared=True), MIXED),
    "SphericalHarmonics": (lambda: o3.SphericalHarmonics("0e + 1o + 3o", normalize=True), (7, 3)),
    "SphericalHarmonics, as given": (
        lambda: o3.SphericalHarmonics(list(range(7)), normalize=False, normalization="norm"),
        (2, 5, 3),
    ),
    "SphericalHarmonicsAlphaBeta": (lambda: o3.SphericalHarmonicsAlphaBeta([0, 1, 2]), (5, 4), (5, 4)),
    "Legendre": (lambda: o3.Legendre([0, 1, 2]), lambda: (torch.randn(5), torch.rand(5))),
    "ToS2Grid": (lambda: o3.ToS2Grid(5, (12, 13)), (2, 36)),
    "FromS2Grid": (lambda: o3.FromS2Grid((12, 13), 5), (2, 12, 13)),
    "FromS2Grid, a power of two": (lambda: o3.FromS2Grid((16, 16), 5), (2, 16, 16)),
    "Activation": (lambda: Activation("4x0e + 3x0o", [nn.functional.silu, torch.abs]), (13, 7)),
    "BatchNorm": (lambda: BatchNorm("3x0e + 3x0o + 4x1e"), (16, 18)),
    "BatchNorm, evaluated": (lambda: BatchNorm("10x0e + 5x1e").eval(), (20, 20, 25)),
    "BatchNorm, of instances": (
        lambda: BatchNorm("10x0e + 5x1e", reduce="max", normalization="norm", instance=True, affine=False),
        (20, 20, 25),
    ),
    "Dropout": (lambda: Dropout("10x1e + 10x0e", p=0.75), (5, 2, 40)),
    "Extract": (lambda: Extract("1e + 0e + 0e", ["0e", "0e"], [(1,), (2,)]), (3, 5)),
    "ExtractIr": (lambda: ExtractIr("1e + 0e + 0e", "0e"), (3, 5)),
    "FullyConnectedNet": (lambda: FullyConnectedNet((10, 20, 15, 4), torch.tanh, 1, 10.0, True), (20, 10)),
    "Gate": (lambda: Gate("16x0o", [torch.tanh], "32x0o", [torch.tanh], "16x1e+16x1o"), "16x0o+32x0o+16x1e+16x1o"),
    "Identity": (lambda: Identity(MIXED, MIXED), MIXED),
    "NormActivation": (
        lambda: NormActivation(o3.Irreps("4x0e + 5x1o"), torch.sigmoid, normalize=True, bias=True),
        (3, 19),
    ),
    "S2Activation": (
        lambda: S2Activation(SphericalTensor(3, 1, -1), torch.tanh, 20, lmax_out=6),
        SphericalTensor(3, 1, -1),
    ),
    "S2Activation, rotated": (
        lambda: S2Activation(SphericalTensor(2, 1, 1), torch.tanh, 10, lmax_out=3, random_rot=True),
        SphericalTensor(2, 1, 1),
    ),
    "SO3Activation": (lambda: SO3Activation(2, 2, torch.tanh, 4), (3, 35)),
    "normalize2mom": (lambda: normalize2mom(torch.tanh), (10,)),
    "CartesianTensor": (lambda: CartesianTensor("ij=ji").reduced_tensor_products(), (3,), (3,)),
    "MessagePassing": (
        lambda: MessagePassing(["0e", "0e + 1e", "0e + 1e", "1e"], "0e + 1e", "0e + 1e", [2, 100], 3.0),
        messages,
    ),
    "NetworkForAGraphWithAttributes": (
        lambda: NetworkForAGraphWithAttributes("3x0e + 2x1o", "4x0e + 1x1o", "1e", "3x0o + 1e", **NEIGHBOURS),
        graph,
    ),
    "Convolution of voxels, 2103": (
        lambda: voxels_2103.Convolution("0e + 1e", "0e + 1o + 2e", LATTICE, 5),
        (2, 4, 8, 8, 8),
    ),
    "Convolution of voxels 2104": (
        lambda: voxels_2104.Convolution("0e + 1e", "0e + 1o + 2e", LATTICE, diameter=5, num_radial_basis=5),
        (2, 4, 8, 8, 8),
    ),
    "LowPassFilter 2103": (lambda: voxels_2103.LowPassFilter(2.0), (2, 4, 8, 8, 8)),
    "LowPassFilter, 2104, transposed": (
        lambda: voxels_2104.LowPassFilter(2.0, stride=2, transposed=True),
        (2, 4, 8, 8, 8),
    ),
}


def network(kind):
    irreps = "2x0e + 1o", "2x0e + 2x0o + 2x1e", "0o + 2e", "3x0e", LATTICE
    radial = {"number_of_basis": 4, "radial_layers": 1, "radial_neurons": 10}
    return kind.Network(*irreps, layers=1, max_radius=2.0, num_neighbors=4.0, num_nodes=5, **radial)


def simple_network():
    return SimpleNetwork("2x0e + 1o", "4x0e + 1x1o", **NEIGHBOURS)


# Networks that find out by the positions which nodes are near each other.
NETWORKS = {
    "gate points, 2101": lambda: network(gate_points_2101),
    "gate points, 2102": lambda: network(gate_points_2102),
    "SimpleNetwork": simple_network,
}
# Modules that do no arithmetic.
FREE = {"Extract", "ExtractIr", "Identity", "Linear, nothing connected"}
# One of each class: what runs by default, and every third compiled.
CLASSES = [name for name in CASES if "," not in name]
# What e3nn's modules of other people's packages ask for, which are not among those that the tests install.
PEERS = {"torch_scatter", "torch_cluster", "MinkowskiEngine"}


def points():
    x, z = rand("2x0e + 1o", "3x0e", batch=5)
    # All within reach of each other but the last.
    positions = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [9, 9, 9]])
    return ({"pos": positions, "x": x, "z": z, "batch": torch.zeros(5, dtype=torch.int64)},)


EDGES = 4 * 3


@functools.cache
def build(name, mode):
    before = e3nn.get_optimization_defaults()["jit_mode"]
    e3nn.set_optimization_defaults(jit_mode=mode)
    torch.manual_seed(0)
    try:
        return CASES[name][0]() if name in CASES else NETWORKS[name]()
    finally:
        e3nn.set_optimization_defaults(jit_mode=before)


def make(name, mode="eager"):
    """Return a module without gradients, which is built once since that takes longest, and its inputs."""
    model = build(name, mode)
    model.zero_grad()
    torch.manual_seed(0)
    _, *inputs = CASES.get(name, (None, points))
    if callable(inputs[0]):
        return model, inputs[0]()
    return model, tuple(torch.randn(item) if type(item) is tuple else rand(item)[0] for item in inputs)


def count(model, inputs, execution, **options):
    run = FlopCountAnalysis(model, inputs, execution=execution, table="exact", **options)
    return run.uncalled_modules_warnings(False)


def recorded(model, inputs):
    with torch.no_grad(), record(model, table="exact") as run:
        model(*inputs)
    return run.uncalled_modules_warnings(False)


def total_of(result):
    return sum(item.sum() for item in result) if isinstance(result, (list, tuple)) else result.sum()


@pytest.mark.parametrize("name", long_except(CLASSES, CASES))
def test_a_module_counts_by_shapes_as_for_real(name):
    model, inputs = make(name)
    by_shapes, for_real = (count(model, inputs, execution) for execution in ("shapes", "real"))
    assert by_shapes.by_module_and_operator() == for_real.by_module_and_operator()
    assert not by_shapes.unsupported_ops()
    assert by_shapes.total() == recorded(model, inputs).total()
    assert bool(by_shapes.total()) == (name not in FREE)


@pytest.mark.parametrize(
    "name", long_except(*([name for name in names if name not in FREE] for names in (CLASSES, CASES)))
)
def test_a_modules_step_counts_by_shapes_as_for_real(name):
    model, inputs = make(name)
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    step = TrainingStepAnalysis(model, inputs, loss=total_of, table="exact").uncalled_modules_warnings(False)
    phases = step.by_phase()  # it is counted now, as long as no gradients are there to be added to
    with record(model, table="exact") as run:
        total_of(model(*inputs)).backward()
    assert phases == run.uncalled_modules_warnings(False).by_phase()
    assert phases["backward"]


@pytest.mark.parametrize("name", long_except(CLASSES[1::3], CASES))
def test_of_torchscript_what_runs_is_counted(name):
    """TorchScript computes once what a graph computes twice, and not at all what nobody reads."""
    model, inputs = make(name, "script")
    by_shapes = count(model, inputs, "shapes")
    assert not by_shapes.unsupported_ops()
    graphs = count(make(name)[0], inputs, "shapes")
    assert by_shapes.total() <= graphs.total()
    assert bool(by_shapes.total()) == (name not in FREE)
    for _ in range(3):
        model(*inputs)  # TorchScript optimises what it has seen run
    assert by_shapes.by_operator() == count(model, inputs, "real").by_operator()


@pytest.mark.parametrize("name", long_except(["gate points, 2102"], NETWORKS))
def test_a_network_that_finds_neighbours_is_run_for_real_or_told_how_many(name):
    model, inputs = make(name)
    real = count(model, inputs, "real")
    assert count(model, inputs, "auto").by_module_and_operator() == real.by_module_and_operator()
    assert recorded(model, inputs).total() == real.total() > 0
    with pytest.raises(ExecutionError, match=r"aten::nonzero.*use execution=\"auto\", or assume its output size"):
        count(model, inputs, "shapes").total()
    told = count(model, inputs, "shapes", assume={"aten::nonzero": EDGES, "aten::index": EDGES})
    assert told.by_module_and_operator() == real.by_module_and_operator()


def test_no_module_of_e3nn_is_without_a_case():
    seen = {type(module) for name in (*CASES, *NETWORKS) for module in make(name)[0].modules()}
    # A torch.fx graph is of a class of its own, derived from the one that it was made by.
    seen = {kind for item in seen for kind in item.__mro__}
    assert [kind.__qualname__ for kind in classes() if kind not in seen] == []


def classes():
    """Yield the classes of e3nn's modules, except in a file that needs another package."""
    for found in pkgutil.walk_packages(e3nn.__path__, "e3nn."):
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert error.name in PEERS
            continue
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == found.name:
                yield value


def test_a_linear_layer_multiplies_by_its_paths():
    # 4x0e and 2x0e go to 8x0e, of one number each, and 3x1o to 2x1o, of three.
    model = o3.Linear("4x0e + 3x1o + 2x0e", "2x1o + 8x0e")
    (x,) = rand("4x0e + 3x1o + 2x0e", batch=7)
    assert count(model, (x,), "shapes").macs() == 7 * (4 * 8 + 2 * 8 + 3 * 2 * 3)


def test_a_fully_connected_product_multiplies_by_paths_and_multiplicities():
    model = o3.FullyConnectedTensorProduct("3x0e + 3x1o", "2x0e + 2x1o", "5x0e")
    x, y = rand("3x0e + 3x1o", "2x0e + 2x1o", batch=7)
    # Each of two paths multiplies each pair by 5 weights. The pairs of vectors are inner products of three numbers; the
    # product of two scalars adds nothing up.
    pairs = 7 * 3 * 2
    assert model.weight_numel == 2 * (3 * 2 * 5)
    assert count(model, (x, y), "shapes").macs() == 2 * pairs * 5 + pairs * 3


def test_a_network_of_layers_multiplies_by_its_weights():
    model = FullyConnectedNet((10, 20, 15, 4), torch.tanh)
    assert count(model, (torch.ones(6, 10),), "shapes").macs() == 6 * (10 * 20 + 20 * 15 + 15 * 4)


def test_a_norm_multiplies_each_number_by_itself():
    (x,) = rand("1e + 2e + 3x3o", batch=7)
    numbers = 3 + 5 + 3 * 7
    compiled, _ = make("Norm, squared", "script")
    assert count(compiled, (x,), "shapes").macs() == 7 * numbers
    # The graph multiplies each number by all numbers of its vector too, and drops the products.
    model, _ = make("Norm, squared")
    run = count(model, (x,), "shapes")
    assert run.macs() == 7 * numbers
    assert run.total() == 2 * 7 * numbers + 7 * (3 * 3 + 5 * 5 + 3 * 7 * 7)
