"""Compare two traces call by call."""

from collections import Counter
from typing import Any

import torch

from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.counting import TableCostModel, count
from fvflops.formulas import load_table
from fvflops.plan.communication import Volume
from fvflops.trace import Signature, TensorSpec, Trace, Value

PRICER = TableCostModel(load_table("default"), "flops")

Calls = Counter[tuple[Signature, tuple[tuple[str, str], ...], str]]

# What the two executions describe differently: op → names of its inputs, and indexes of its outputs. None is priced.
OPEN = {
    # The workspace: oneDNN alone knows its size, and below autograd it returns none at all.
    "aten::mkldnn_rnn_layer": (frozenset(), frozenset({3})),
    "aten::mkldnn_rnn_layer_backward": (frozenset({"workspace"}), frozenset()),
    # Statistics kept for backward: the CPU's kernel leaves them empty in eval mode, torch's shape rule does not.
    "aten::_native_batch_norm_legit_no_training": (frozenset(), frozenset({1, 2})),
    "aten::native_batch_norm": (frozenset(), frozenset({1, 2})),
    "aten::native_batch_norm_backward": (frozenset({"save_mean", "save_invstd"}), frozenset()),
    # Indexes kept for backward, of which each device keeps others.
    "aten::embedding_bag.padding_idx": (frozenset(), frozenset({1, 2, 3})),
    "aten::_embedding_bag": (frozenset(), frozenset({1, 2, 3})),
    "aten::_embedding_bag_backward": (frozenset({"offset2bag", "bag_size", "maximum_indices"}), frozenset()),
    "aten::_embedding_bag_dense_backward": (frozenset({"offset2bag", "bag_size", "maximum_indices"}), frozenset()),
}


# Autograd remakes views of what was written to through a view: of a subclass with as_strided, else by the calls that
# made them. All of these ops are free.
WAYS_OF_VIEWS = frozenset(
    f"aten::{op}"
    for op in (
        *("as_strided", "new_empty_strided", "new_zeros", "copy_", "clone", "slice"),
        *("select", "view", "squeeze", "select_backward", "slice_backward"),
    )
)


def add_up(out):
    """Return a loss on which every floating-point tensor of a result bears."""
    parts = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors_of(out)]
    return torch.stack([part.sum().to(torch.float64) for part in parts if part.is_floating_point()]).sum()


def totals_of(trace: Trace) -> dict[str, Counter[str]]:
    """Return module → operator → flops."""
    return count(trace, PRICER, "flops").by_module_and_operator()


def calls_of(trace: Trace) -> Calls:
    """Return (signature without what is OPEN, names of the regions around, phase) → number of calls."""
    calls = Counter()
    for (index, stack, phase), number in trace.calls.items():
        around = tuple(tuple(trace.regions[region]) for region in trace.stacks[stack])
        calls[_closed(trace.signatures[index]), around, phase] += number
    return calls


def _closed(signature: Signature) -> Signature:
    inputs, outputs = OPEN.get(signature.op, (frozenset(), frozenset()))
    if not inputs and not outputs:
        return signature
    return Signature(
        signature.op,
        signature.names,
        tuple(None if name in inputs else value for name, value in zip(signature.names, signature.inputs, strict=True)),
        tuple(None if index in outputs else value for index, value in enumerate(signature.outputs)),
        signature.schema,
    )


def regions_of(trace: Trace) -> Counter[Any]:
    """Return (region, specs in, specs out, names of the regions around, phase) → number of calls."""
    calls = Counter()
    for (index, stack, phase), number in trace.region_calls.items():
        signature = trace.region_signatures[index]
        around = tuple(trace.regions[region] for region in trace.stacks[stack])
        calls[trace.regions[signature.region], signature.inputs, signature.outputs, around, phase] += number
    return calls


def text_of(value: Value) -> str:
    """Return a value of a signature in few characters."""
    if isinstance(value, TensorSpec):
        return f"{value.dtype}{list(value.shape)}@{value.device}"
    return f"({', '.join(map(text_of, value))})" if isinstance(value, tuple) else str(value)


def differences(shapes, real, *, other_ways=frozenset(), about=("vocabulary", "torch", "inputs")):
    """Return one line for each thing that two traces do not agree in; calls of `other_ways` need only be free."""
    lines = []
    for name, one, other in (("shapes", shapes, real), ("real", real, shapes)):
        for (signature, around, phase), number in (calls_of(one) - calls_of(other)).items():
            free = not any(amount.value for amount in PRICER.op_cost(signature))
            if not (signature.packet in other_ways and free):
                where = around[-1][1] if around else None
                call = f"{signature.op} {text_of(signature.inputs)} -> {text_of(signature.outputs)}"
                lines.append(f"only {name}: {number}× {call} in {where!r}, {phase}")
        lines += [f"only {name}: {number}× {item}" for item, number in (regions_of(one) - regions_of(other)).items()]
    for part in about:
        if shapes.about[part] != real.about[part]:
            lines.append(f"{part}: {shapes.about[part]} and {real.about[part]}")
    if not other_ways and shapes.decomposed != real.decomposed:
        lines.append(f"looked into in one run only: {sorted(shapes.decomposed ^ real.decomposed)}")
    if totals_of(shapes) != totals_of(real):
        lines.append(f"totals: {totals_of(shapes)} and {totals_of(real)}")
    return lines


def volumes(communication):
    """Return (collective, ranks, dtype) → calls and bytes, without metadata of tensors and masks (int32)."""
    found = {}
    for key, volume in communication.by_collective_and_group().items():
        if key.dtype != "int32":
            short = key.collective, key.size, key.dtype
            found[short] = found.get(short, Volume()).plus(volume)
    return found


def transfers(communication):
    """Return the calls and the payload of `volumes`."""
    return {key: volume[:2] for key, volume in volumes(communication).items()}
