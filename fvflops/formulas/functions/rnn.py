"""Matrix products of fused LSTM, GRU and plain RNN ops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

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

    `_cudnn_rnn_backward` always computes the gradients of the inputs, and those of the weights where
    the last item of `output_mask` is set.
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
