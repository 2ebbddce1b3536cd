"""Matrix products and exact cost of fused LSTM, GRU and plain RNN ops: biases, gates and dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.trace import TensorSpec, tensors_in

# Rows of a weight per hidden unit, by cuDNN's and MIOpen's number of a cell type: ReLU, tanh, LSTM, GRU.
GATES = (1, 1, 4, 3)


def count_recurrence(call: Call) -> Cost:
    """Return the cost of a recurrent op: steps * batch * elements of all weight matrices.

    These are the matrices of the input, the hidden state and the projection, of every layer and direction. Gates and
    biases are not counted; activations are the outputs of the products. The input is [T, B, I], [B, T, I] or packed
    [total, I]. For lstm, gru, rnn_tanh and rnn_relu (`.input` and `.data`),
    mkldnn_rnn_layer, _cudnn_rnn, miopen_rnn and _lstm_mps. Source: the equations of torch.nn.LSTM, GRU and RNN.

    >>> weights = (TensorSpec((12, 2)), TensorSpec((12, 3)), TensorSpec((12,)), TensorSpec((12,)))
    >>> call = Call("aten::lstm.input", {"input": TensorSpec((5, 1, 2)), "params": weights}, ())
    >>> count_recurrence(call)
    Cost(macs=300, flops=0, activations=120)
    """
    rows = find_rows(call)
    matrices = list(find_matrices(call))
    return Cost(
        macs=rows * sum(matrix.numel for matrix in matrices),
        activations=rows * sum(matrix.shape[0] for matrix in matrices),
    )


def count_recurrence_backward(call: Call) -> Cost:
    """Return the cost of the backward of a recurrent op: the forward's for the inputs, and once more for the weights.

    `_cudnn_rnn_backward` always computes the gradients of the inputs; the last item of `output_mask` switches
    the weights' on.
    """
    return Cost(macs=find_rows(call) * sum(matrix.numel for matrix in find_matrices(call)) * (1 + wants_weights(call)))


def wants_weights(call: Call) -> bool:
    """Return whether a backward of a recurrent op computes the gradients of the weights and biases."""
    mask = call.arguments.get("output_mask")
    return not isinstance(mask, tuple) or bool(mask[-1])


def find_rows(call: Call) -> int:
    """Return steps * batch of a recurrent op: the rows of each matrix product."""
    return math.prod(call.shape("data" if "data" in call.arguments else "input")[:-1])


def integer(call: Call, name: str) -> int:
    """Return an integer argument, 0 if the op has none of this name."""
    value = call.arguments.get(name, 0)
    assert isinstance(value, int)
    return value


def find_matrices(call: Call) -> Iterator[TensorSpec]:
    """Yield the weight matrices of a recurrent op: of input, hidden state and optional projection, layer by layer."""
    names = [name for name in call.arguments if name == "params" or name.startswith("weight")]
    if call.op.startswith("aten::mkldnn_rnn_layer"):
        # One argument for each weight; without biases the last two are zeros of the matrices' shapes.
        names = names[:2]
    of_cudnn = "weight_stride0" in call.arguments
    if of_cudnn:
        names = ["weight"]
    specs = [spec for name in names for spec in tensors_in(call.arguments[name])]
    if of_cudnn and all(spec.shape[1:] == (1,) for spec in specs):
        yield from _unflatten(call, specs, integer(call, "weight_stride0"))
    else:
        yield from (spec for spec in specs if spec.ndim == 2)


def _unflatten(call: Call, specs: Sequence[TensorSpec], per_layer: int) -> Iterator[TensorSpec]:
    """Yield the matrices among cuDNN's weights and biases that autocast flattened to columns.

    `specs` has `per_layer` items for each layer and direction: two matrices, two biases or none, a projection or none.
    """
    hidden, projected = integer(call, "hidden_size"), integer(call, "proj_size")
    for index, spec in enumerate(specs):
        place = index % per_layer
        if place < 2:
            rows = GATES[integer(call, "mode")] * hidden
        elif place == per_layer - 1 and projected:
            rows = projected
        else:
            continue
        yield replace(spec, shape=(rows, spec.numel // rows))


# Cell types by their number in cuDNN, MIOpen and oneDNN.
_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")


@dataclass(frozen=True, slots=True)
class Cell:
    """Cost of one hidden unit of a cell in one step, without the products.

    `gates` is the number of rows of its weight matrices, each with two biases or none; `sums` the number of these that
    add the contributions of the input and the hidden state. `sigmoids` and `tanhs` are calls of these functions,
    `other_ops` all other operations; names with `_backward` are for the backward pass.
    """

    gates: int
    sums: int
    other_ops: int
    sigmoids: int
    tanhs: int
    other_ops_backward: int
    tanhs_backward: int

    def forward(self, biases: int, constants: Mapping[str, int]) -> int:
        """Return the FLOPs of one unit in one step, with `biases` per gate."""
        functions = self.sigmoids * (constants["exp"] + 3) + self.tanhs * constants["tanh"]
        return self.gates * biases + self.sums + self.other_ops + functions

    def backward(self, biases: int, constants: Mapping[str, int]) -> int:
        """Return the FLOPs of one unit in one step of the backward pass; the gradient of a bias is a sum."""
        return self.gates * biases + self.other_ops_backward + self.tanhs_backward * constants["tanh"]


# LSTM: i, f, o are sigmoids and g a tanh; f*c + i*g, o*tanh(c). GRU: r, z are sigmoids, n = tanh(x + r*h), and
# (h - n)*z + n. Backward: 3 operations for each sigmoid or tanh, and the products around them, as
# _thnn_differentiable_lstm_cell_backward and _thnn_differentiable_gru_cell_backward in ATen's RNN.cpp; and the sum of
# the gradients of the hidden state, from the output and from the next step (two in a GRU).
_CELLS = {
    "lstm": Cell(4, 4, 4, 3, 2, 23, 1),
    "gru": Cell(3, 3, 4, 2, 1, 18, 0),
    "rnn_tanh": Cell(1, 1, 0, 0, 1, 4, 0),
    "rnn_relu": Cell(1, 1, 1, 0, 0, 1, 0),
}


def count_exact_recurrence(call: Call) -> Cost:
    """Return the cost of a recurrent op: its products, and biases, gates and dropout between layers.

    Each hidden unit of each step, layer and direction costs one cell: for an LSTM 4 sums of gates, 3 sigmoids (3 and an
    exponential), 2 tanh and 4 more operations. Constants: `exp` and `tanh`. For the ops of `count_recurrence`.

    >>> from fvflops.trace import TensorSpec
    >>> weights = (TensorSpec((12, 2)), TensorSpec((12, 3)), TensorSpec((12,)), TensorSpec((12,)))
    >>> arguments = {"input": TensorSpec((5, 1, 2)), "params": weights, "has_biases": True}
    >>> count_exact_recurrence(Call("aten::lstm.input", arguments, (), constants={"exp": 8, "tanh": 8}))
    Cost(macs=300, flops=975, activations=120)
    """
    products, units = count_recurrence(call), _units(call)
    flops = find_rows(call) * units * _cell(call).forward(_biases(call), call.constants) + _dropout(call)
    return replace(products, flops=flops)


def count_exact_recurrence_backward(call: Call) -> Cost:
    """Return the cost of the backward of a recurrent op: its products, and the derivatives of the gates.

    If one op runs all layers, this includes two operations of dropout between layers, and the sum of an input's
    gradients from both directions. Gradients of the biases are computed only with the weights'.
    """
    products = count_recurrence_backward(call)
    biases = _biases(call) if wants_weights(call) else 0
    per_row = _units(call) * _cell(call).backward(biases, call.constants) - _projection_saving(call)
    if call.arguments.get("bidirectional"):
        per_row += sum(_inputs(call))
    return replace(products, flops=find_rows(call) * per_row + _dropout(call))


def _cell(call: Call) -> Cell:
    mode = call.arguments.get("mode")
    if isinstance(mode, int):
        return _CELLS[_MODES[mode]]
    return next(cell for name, cell in _CELLS.items() if name in call.op)


def _units(call: Call) -> int:
    """Return the hidden units of all layers and directions: the rows of the input's weights, divided by the gates."""
    gates = _cell(call).gates
    matrices = [matrix.shape[0] for matrix in find_matrices(call)]
    # Each layer and direction has a matrix of the input, one of the hidden state, and optionally a projection.
    projected = _projected(call)
    return sum(matrices[:: 3 if projected else 2]) // gates


def _projected(call: Call) -> bool:
    if "proj_size" in call.arguments:
        return bool(call.arguments["proj_size"])
    shapes = [matrix.shape for matrix in find_matrices(call)]
    return len(shapes) > 2 and shapes[2][0] != shapes[0][0]


def _biases(call: Call) -> int:
    """Return the number of biases per gate: two, or none."""
    if "has_biases" in call.arguments:
        return 2 * bool(call.arguments["has_biases"])
    if "weight_stride0" in call.arguments:
        return 2 * (integer(call, "weight_stride0") > 3)
    weights = call.arguments.get("params") or call.arguments.get("weight")
    return 2 * any(spec.ndim == 1 for spec in tensors_in(weights))


def _dropout(call: Call) -> int:
    """Return the FLOPs of dropout between layers: a mask and a scale per output of all layers but the last."""
    if not call.arguments.get("train") or call.arguments.get("dropout") in (None, 0, 0.0):
        return 0
    # The outputs with dropout are the inputs of the next layers.
    return 2 * find_rows(call) * sum(_inputs(call)[1:])


def _inputs(call: Call) -> list[int]:
    """Return the size of each layer's input, of an op that runs whole layers."""
    directions = 2 if call.arguments.get("bidirectional") else 1
    step = directions * (3 if _projected(call) else 2)
    matrices = list(find_matrices(call))
    return [matrices[first].shape[1] for first in range(0, len(matrices) - step + 1, step)]


def _projection_saving(call: Call) -> int:
    """Return the additions saved by projections: gradients of the hidden state are summed per projected element.

    `Cell.backward` counts such a sum for each unit.
    """
    if not _projected(call):
        return 0
    matrices, gates = list(find_matrices(call)), _cell(call).gates
    return sum(matrix.shape[0] // gates - matrix.shape[1] for matrix in matrices[1::3])
