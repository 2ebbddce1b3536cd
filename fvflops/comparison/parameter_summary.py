"""Parameter counts of a model: trainable and frozen, and with a run the active ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from fvflops.capture.errors.model_check import Recorded, trace_of
from fvflops.capture.model.model_index import read_modules
from fvflops.comparison.active_parameters import Routing, read_routing
from fvflops.reports.escaping import printable_short
from fvflops.reports.fvcore_format import pipe_table
from fvflops.text import explaining_arguments, record_repr, require_int, short_repr
from fvflops.trace import ModuleInfo, ModuleTree, ParameterInfo, TensorSpec, Trace, tensors_in
from fvflops.trace.module_tree import add_up
from fvflops.units import format_bytes, format_size
from fvflops.views.summary_rows import depth_of


class StoredParameters(NamedTuple):
    """Parameters of one dtype: their elements, and their bytes in memory.

    >>> StoredParameters(elements=64, nbytes=32).bits
    4.0
    """

    elements: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits in memory for each element, with padding, and with scales where a tensor subclass contains them."""
        return 8 * self.nbytes / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class ParameterCount:
    """The elements of one parameter, or of all parameters of a module; a tied parameter counts once.

    `total` are all, `trainable` the ones that require a gradient, `buffers` the elements of buffers, which `total`
    lacks. The others need a run, and are None without one: `active` are the elements used for an average token,
    `looked_up` the active ones in embedding tables, which multiply nothing (the whole table is active), and `unused`
    the elements of parameters that no op read.

    Packed weights of a quantised layer count as the elements that the layer multiplies by, its bias as a parameter, and
    its scales, zero points and codebooks as buffers. `by_dtype` has dtype → its elements, bytes and bits: codes of 4
    bits are int4, whatever dtype they are stored in.

    >>> ParameterCount(total=10, trainable=4).frozen
    6
    """

    total: int = 0
    trainable: int = 0
    active: int | None = None
    looked_up: int | None = None
    unused: int | None = None
    buffers: int = 0
    by_dtype: Mapping[str, StoredParameters] = field(default_factory=dict, compare=False, repr=False)

    def __repr__(self) -> str:
        return record_repr(self)

    @property
    def frozen(self) -> int:
        """The elements that require no gradient."""
        return self.total - self.trainable

    @property
    def nbytes(self) -> int:
        """Bytes in memory of the parameters, without buffers."""
        return sum(stored.nbytes for stored in self.by_dtype.values())


class ParameterSummary(dict[str, ParameterCount]):
    """Module or parameter name → its count; `print` writes a table."""

    def __repr__(self) -> str:
        return short_repr(self, "", f"{self[''].total:,} parameters" if "" in self else "", f"{len(self):,} names")

    def __str__(self) -> str:
        return render(self) if "" in self else repr(self)


_HEADINGS = ("total", "trainable", "frozen", "active", "unused", "buffers")


def render(counts: Mapping[str, ParameterCount], *, depth: int = 3, digits: int = 3) -> str:
    """Return a row for each module or parameter with any elements, `depth` levels of names below the root.

    Fields that need a run have no column without one. Sentences below say how many active elements are in embedding
    tables, and how many bits the elements of each dtype take, if there are several.

    >>> print(render({"": ParameterCount(6, 2, active=6, unused=0, looked_up=4), "fc": ParameterCount(6, 2, 6, 4, 0)}))
    | name   |   total |   trainable |   frozen |   active |   unused |   buffers |
    |:-------|--------:|------------:|---------:|---------:|---------:|----------:|
    | model  |       6 |           2 |        4 |        6 |        0 |         0 |
    |  fc    |       6 |           2 |        4 |        6 |        0 |         0 |
    <BLANKLINE>
    4 of the active are in embedding tables.
    """
    root = counts[""]
    headings = [heading for heading in _HEADINGS if getattr(root, heading) is not None]
    rows = [
        [_indent(name), *(format_size(getattr(count, heading), digits=digits) for heading in headings)]
        for name, count in counts.items()
        if depth_of(name) <= depth and (not name or count.total or count.buffers)
    ]
    notes = []
    if root.looked_up:
        notes.append(f"{format_size(root.looked_up, digits=digits)} of the active are in embedding tables.")
    if len(root.by_dtype) > 1:
        dtypes = [
            f"{format_size(stored.elements, digits=digits)} {dtype} ({stored.bits:.3g} bits)"
            for dtype, stored in root.by_dtype.items()
        ]
        notes.append(f"{format_bytes(root.nbytes)} of parameters: {', '.join(dtypes)}.")
    return "\n\n".join([pipe_table(["name", *headings], rows), *notes])


def _indent(name: str) -> str:
    return " " * depth_of(name) + printable_short(name.rpartition(".")[2]) if name else "model"


@explaining_arguments
def parameter_summary(of: nn.Module | Trace | Recorded) -> ParameterSummary:
    """Return module or parameter name → its ParameterCount, "" being the model.

    A model has `total`, `trainable`, `frozen` and `buffers`. A Trace or an analysis, which records if it has not yet,
    has `active`, `looked_up` and `unused` too: an expert is active in proportion to the tokens routed to it.
    A tied parameter and a shared module count once, under their first names. An aggregated Trace raises TraceError.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3).requires_grad_(False))
    >>> parameter_summary(model)[""].trainable, parameter_summary(model)["1"].frozen
    (40, 15)
    >>> root = parameter_summary(FlopCountAnalysis(model, torch.tensor([1])))[""]
    >>> root.active, root.looked_up, root.unused
    (55, 40, 0)
    """
    if isinstance(of, nn.Module):
        return count_parameters(read_modules(of))
    trace = trace_of(of)
    return count_parameters(trace.modules, trace)


@explaining_arguments
def parameter_summary_table(of: nn.Module | Trace | Recorded, max_depth: int = 3) -> str:
    """Return a Markdown table of `parameter_summary`, down to `max_depth` levels of names; 0 is the model alone.

    >>> print(parameter_summary_table(nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30)), max_depth=1))
    | name   | total   | trainable   |   frozen |   buffers |
    |:-------|:--------|:------------|---------:|----------:|
    | model  | 1.29K   | 1.29K       |        0 |        61 |
    |  0     | 1.23K   | 1.23K       |        0 |         0 |
    |  1     | 60      | 60          |        0 |        61 |
    """
    require_int("max_depth", max_depth, least=0)
    return render(parameter_summary(of), depth=max_depth)


def count_parameters(modules: ModuleTree, trace: Trace | None = None) -> ParameterSummary:
    """Return module or parameter name → its count, "" being the model; with a Trace, its active elements too.

    Every module has an entry under its canonical name, followed by its direct parameters. A tied parameter counts once,
    at its first name. Active elements are summed exactly, and the sum at each name is rounded down. Errors are as for
    `read_routing`.

    >>> from fvflops.trace import ModuleInfo, ParameterInfo, TensorSpec
    >>> weight = ParameterInfo("weight", TensorSpec((2, 3)), identity=0, trainable=False)
    >>> count_parameters(ModuleTree({"": ModuleInfo("", "", "Linear", parameters=(weight,))}))[""].frozen
    6
    """
    if trace is not None and trace.events is not None:
        modules = with_operands(modules, trace)
        trace = replace(trace, modules=modules)
    routing = None if trace is None else read_routing(trace)
    tensors = list(modules.parameters())
    total = modules.count_parameters()
    trainable = add_up(tensors, lambda tensor: tensor.spec.numel if tensor.trainable else 0)
    buffers = add_up(modules.buffers(), lambda tensor: tensor.spec.numel)
    used = {} if routing is None else _sum_used(modules, routing)
    dtypes = _sum_dtypes(tensors)
    return ParameterSummary(
        {
            name: ParameterCount(
                total=total[name],
                trainable=trainable[name],
                buffers=buffers[name],
                by_dtype={
                    dtype: StoredParameters(elements[name], nbytes[name])
                    for dtype, (elements, nbytes) in dtypes.items()
                    if name in elements
                },
                **{field: int(sums[name]) for field, sums in used.items()},
            )
            for module in modules.modules()
            for name in (module.name, *(parameter.name for parameter in module.parameters))
            if name == module.name or name in total
        }
    )


def _sum_dtypes(tensors: Sequence[ParameterInfo]) -> dict[str, tuple[Mapping[str, int], Mapping[str, int]]]:
    """Return dtype → elements and bytes by name."""
    groups: dict[str, list[ParameterInfo]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.spec.dtype, []).append(tensor)
    return {
        dtype: (add_up(group, lambda tensor: tensor.spec.numel), add_up(group, lambda tensor: tensor.nbytes))
        for dtype, group in groups.items()
    }


def _sum_used(modules: ModuleTree, routing: Routing) -> dict[str, Mapping[str, Any]]:
    """Return field → name → elements, for the fields that need a run."""
    tensors = list(modules.parameters())
    embeddings = [tensor for tensor in tensors if tensor.name in routing.looked_up]
    unused = [tensor for tensor in tensors if tensor.name in routing.unused]
    return {
        "active": add_up(tensors, lambda tensor: tensor.spec.numel * routing.shares[tensor.name]),
        "looked_up": add_up(embeddings, lambda tensor: tensor.spec.numel),
        "unused": add_up(unused, lambda tensor: tensor.spec.numel),
    }


_CODES = frozenset({"int8", "uint8", "int16", "uint16", "int32", "uint32"})
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear"))
# Bits for each element of a packed weight.
_LEAST, _MOST = 0.5, 8


def with_operands(modules: ModuleTree, trace: Trace) -> ModuleTree:
    """Return a tree in which integers that a module unpacks, and multiplies its input by, are packed weights.

    Such an operand is computed from tensors of the module alone, of which none of floating-point numbers has as many
    elements, and the largest of integers has up to 8 bits for each.
    """
    found = _find_operands(modules, trace)
    if not found:
        return modules
    return ModuleTree({name: _with_weight(module, found) for name, module in modules.by_name.items()})


def _with_weight(module: ModuleInfo, found: Mapping[str, ParameterInfo]) -> ModuleInfo:
    weights = [found[item.name] for item in (*module.parameters, *module.buffers) if item.name in found]
    if not weights:
        return module
    rest = [tuple(item for item in items if item.name not in found) for items in (module.parameters, module.buffers)]
    return replace(module, parameters=(*rest[0], *weights), buffers=rest[1])


def _find_operands(modules: ModuleTree, trace: Trace) -> dict[str, ParameterInfo]:
    """Return the name of a tensor → its packed weight."""
    owned = {
        item.name: (module.name, item) for module in modules.modules() for item in (*module.parameters, *module.buffers)
    }
    if not any(item.spec.dtype in _CODES and item.stored is None for _, item in owned.values()):
        return {}
    # Storage → the tensors of one module that it is computed from.
    sources: dict[int, frozenset[str]] = {
        index: frozenset({row.name}) for index, row in enumerate(trace.storages) if row.name in owned
    }
    found: dict[str, ParameterInfo] = {}
    for event in trace.events or ():
        if event.kind != "op" or event.phase != "forward":
            continue
        signature = trace.signatures[event.item]
        origins = [sources.get(index) for index in event.reads]
        if signature.packet in _PRODUCTS:
            specs = list(tensors_in(signature.inputs))
            for origin, spec in zip(origins, specs, strict=False) if len(specs) == len(origins) else ():
                weight = None if origin is None else _packed_weight([owned[name][1] for name in origin], spec)
                if weight is not None and None in origins:
                    found[weight.name] = weight
        names = frozenset(name for origin in origins if origin is not None for name in origin)
        is_own = bool(names) and None not in origins and len({owned[name][0] for name in names}) == 1
        for index in event.writes:
            if is_own:
                sources[index] = names
            elif index in sources and index not in event.reads:
                del sources[index]
    return found


def _packed_weight(tensors: list[ParameterInfo], operand: TensorSpec) -> ParameterInfo | None:
    codes = [item for item in tensors if item.spec.dtype in _CODES and item.stored is None]
    others = [item for item in tensors if item not in codes]
    if operand.ndim < 2 or not codes or any(item.spec.numel >= operand.numel for item in others):
        return None
    largest = max(codes, key=lambda item: item.spec.nbytes)
    nbytes = largest.spec.nbytes
    bits = 8 * nbytes / operand.numel
    if not _LEAST <= bits <= _MOST:
        return None
    dtype = largest.spec.dtype if largest.spec.numel == operand.numel else f"int{max(1, round(bits))}"
    return replace(largest, spec=TensorSpec(operand.shape, dtype, operand.device), stored=nbytes)
