"""Read the work of an inference engine for a model from a recorded prompt and a recorded token."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fvflops.devices.kernel_models.fused_attention import Attention
from fvflops.plan.step_time.kernel_times import kernel_of
from fvflops.serve.cache_size import CacheLayer
from fvflops.serve.serving_model import AttentionLayer, ExpertLayer, Projection, ServingError, ServingModel
from fvflops.trace import Signature, TensorSpec, Trace

# The number of a layer in a module's name.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# A layer's child: "model.layers.3.mlp" of "model.layers.3.mlp.experts", "block.3.layer.0" of "block.3.layer.0.wi".
_LAYER_PART = re.compile(r".*?\.\d+\.[^.]+(?:\.\d+(?=\.|$))?")
_GROUPED = "aten::_grouped_mm"
# Ops of which a normalisation, and an activation function, has one.
NORMS = ("aten::rsqrt", "aten::native_layer_norm", "aten::_fused_rms_norm")
ACTIVATIONS = ("aten::silu", "aten::gelu", "aten::relu", "aten::sigmoid", "aten::tanh")


def read_serving_model(
    name: str,
    prefill: Trace,
    decode: Trace,
    cache: Sequence[CacheLayer],
    *,
    prompt: int,
    parameters: int,
    topk: int = 1,
    layer_types: Sequence[str] = (),
) -> ServingModel:
    """Return the work of an engine for a model, from a recorded prompt of `prompt` tokens and the next token's step.

    `cache` are the layers of its cache, `topk` the experts of a token where the model runs all of them, and
    `layer_types` the kind of each layer, by which later layers find an earlier one's cache that they share. A model
    without products of weights raises ServingError.
    """
    calls = _without_scans(_list_products(prefill), prompt)
    steps = _without_scans(_list_products(decode), prompt)
    head = next((call for call in reversed(calls) if call.is_weight), None)
    if head is None:
        raise ServingError(f"{name} has no product of tokens with a weight, so there is nothing to serve")
    calls = [_as_one_weight(call, head.inner) for call in calls]
    weights = [call for call in calls if call.is_weight]
    projections, reductions = _read_projections(calls, weights, steps, prompt + 1)
    mixed = {call.module for call in calls if call.experts}
    mixed |= {f"{module}.act_fn" for module in mixed}
    layers, by_module = _read_attention(steps, cache, prompt + 1, layer_types)
    decoded = {call.module for call in steps}
    crossing = [layer for layer in cache if layer.kind == "cross attention"]
    once = [call for call in calls if crossing and call.module not in decoded]
    ran = {_NUMBER.sub("*", module) for module in decoded} | {"logits"}
    limited = [_limit_division(module, item, by_module) for module, item in projections]
    activations = _count_ops(decode, ACTIVATIONS)
    norms = sum(_count_ops(decode, NORMS).values())
    once_run = sum(_count_ops(prefill, (*NORMS, *ACTIVATIONS)).values()) - norms - sum(activations.values())
    return ServingModel(
        name=name,
        layers=max(len(cache) - len(crossing), len(by_module)),
        hidden=head.inner,
        vocabulary=head.columns,
        parameters=parameters,
        projections=Counter(item for item in limited if item.name in ran),
        encoder=Counter(item for item in limited if item.name not in ran),
        encoder_attention=Counter(_read_encoder(once)),
        cross_attention=Counter(_read_cross_attention(steps, by_module, crossing)),
        attention=Counter(by_module.values()),
        experts=Counter(_read_experts(calls, prompt, topk)),
        states=Counter(layer for layer in layers if layer.state),
        cache=layers,
        reductions=reductions,
        norms=norms,
        divided_norms=_count_divided_norms(decode, projections),
        activations=sum(number for module, number in activations.items() if module not in mixed),
        encoder_kernels=once_run if crossing else 0,
    )


def _count_ops(trace: Trace, packets: Collection[str]) -> Counter[str]:
    ops = ((signature.packet, module) for signature, module in list_op_calls(trace))
    return Counter(module for packet, module in ops if packet in packets)


def list_op_calls(trace: Trace) -> Iterator[tuple[Signature, str]]:
    """Yield the signature of each op call, and the innermost module around it."""
    modules = [scope[-1] if scope else "" for scope in trace.scopes()]
    return ((trace.signatures[event.item], modules[event.stack]) for event in trace.events or () if event.kind == "op")


def _count_divided_norms(trace: Trace, projections: Iterable[tuple[str, Projection]]) -> int:
    """Return the normalisations of all heads of queries or keys, which are over columns that ranks divide."""
    widths = {(branch, item.columns) for branch, item in projections if item.divided == "columns"}
    found = 0
    for signature, module in list_op_calls(trace):
        value = next((item for item in signature.inputs if isinstance(item, TensorSpec)), None)
        if signature.packet == "aten::mean" and module and value is not None and value.shape:
            found += (module.rpartition(".")[0], value.shape[-1]) in widths
    return found


class _Call(NamedTuple):
    """A product of a recording: the module that runs it, its sizes, and whether one operand is a weight.

    `experts` is the number of matrices of a grouped product, 0 for others.
    """

    module: str
    rows: int
    columns: int
    inner: int
    batch: int
    is_weight: bool
    experts: int
    values: int = 0

    @property
    def is_attention(self) -> bool:
        return not self.is_weight and not self.experts


def _list_products(trace: Trace) -> Iterator[_Call]:
    for signature, module in list_op_calls(trace):
        kernel = kernel_of(signature)
        if kernel is None or kernel.shape is None or kernel.kind not in ("matmul", "attention"):
            continue
        shape = kernel.shape
        if isinstance(shape, Attention):
            keys = round(shape.keys)
            yield _Call(module, shape.queries, keys, shape.size, shape.heads, False, 0, shape.values)
            continue
        if signature.packet == _GROUPED:  # tokens of all experts by a weight of each
            tokens, weight = (value.shape for value in signature.inputs[:2] if isinstance(value, TensorSpec))
            yield _Call(module, tokens[0], weight[2], weight[1], 1, False, weight[0])
            continue
        rows, columns, inner, batch = round(shape.rows), round(shape.columns), shape.inner, shape.batch
        info = trace.modules.by_name.get(module)
        sizes = [sorted(item.spec.shape) for item in info.parameters] if info and batch > 1 else []
        experts = batch if sorted((batch, columns, inner)) in sizes else 0
        is_weight = batch == 1 and "convolution" not in signature.packet
        yield _Call(module, rows, columns, inner, batch, is_weight, experts)


def _without_scans(calls: Iterable[_Call], prompt: int) -> list[_Call]:
    """Return the calls without the products of a recurrence, which a module repeats for each token of the prompt."""
    found = list(calls)
    repeated = Counter((call.module, call.columns, call.inner) for call in found)
    return [call for call in found if repeated[call.module, call.columns, call.inner] < prompt]


def _as_one_weight(call: _Call, hidden: int) -> _Call:
    """Return a product with the blocks of a block-diagonal weight, which no experts are, as one with all columns."""
    if call.batch != call.experts or call.experts < 2 or hidden in (call.columns, call.inner):
        return call
    return call._replace(columns=call.batch * call.columns, batch=1, is_weight=True, experts=0)


def _read_projections(
    calls: Sequence[_Call], weights: Sequence[_Call], steps: Sequence[_Call], keys: int
) -> tuple[list[tuple[str, Projection]], int]:
    """Return the products with weights and the parents of their modules, and the sums over ranks of a decoded token."""
    head = weights[-1]
    decoded = {call.module for call in steps}
    expanded = {call.module for call in steps if call.is_weight and call.rows == keys}
    hidden = head.inner
    branches = defaultdict(list)
    for call in weights[:-1]:
        branches[call.module.rpartition(".")[0]].append(call)
    summed = {_part_of_layer(call.module) for call in calls if call.experts}
    logits = Projection("logits", head.columns, hidden, "columns", per_sequence=True, is_quantized=False)
    found = [("", logits)]
    for branch, items in branches.items():
        has_rows = len(items) > 1 and items[-1].columns == hidden
        if has_rows and items[-1].module in decoded:
            summed.add(_part_of_layer(branch))
        for index, call in enumerate(items):
            divided = "" if not has_rows else "rows" if call is items[-1] else "columns"
            later = items[index + 1 : -1]
            if call.columns < hidden and any(item.inner != hidden and item.inner <= call.columns for item in later):
                divided = ""  # it only reduces the hidden state for another product: all ranks need its whole result
            name = _NUMBER.sub("*", call.module)
            item = Projection(
                name, call.columns, call.inner, divided, is_quantized=has_rows, of_cached=call.module in expanded
            )
            found.append((branch, item))
    return found, len(summed)


def _part_of_layer(module: str) -> str:
    """Return a module's name up to the child of its layer, such as layers.3.mlp."""
    match = _LAYER_PART.match(module)
    return match.group() if match else module


def _group(calls: Iterable[_Call]) -> dict[str, list[_Call]]:
    by_module = defaultdict(list)
    for call in calls:
        by_module[call.module].append(call)
    return by_module


def _read_experts(calls: Iterable[_Call], prompt: int, topk: int) -> Iterator[ExpertLayer]:
    for module, items in _group(call for call in calls if call.experts).items():
        if len(items) not in (2, 3):
            raise ServingError(f"the mixture {module} has {len(items)} grouped products, where 2 or 3 are known")
        up, down = items[0], items[-1]
        gated = len(items) == 3 or up.columns == 2 * down.inner
        runs_all = up.batch == up.experts
        yield ExpertLayer(up.experts, topk if runs_all else up.rows // prompt, up.inner, down.inner, gated, runs_all)


def _read_attention(
    steps: Sequence[_Call], cache: Sequence[CacheLayer], keys: int, layer_types: Sequence[str]
) -> tuple[tuple[CacheLayer, ...], dict[str, AttentionLayer]]:
    """Return the layers of the cache, and module → the attention to one of them, from the step of one token.

    Products with `keys` cached tokens, or a full window of them, are attention. A product of as many rows with a weight
    expands a latent cache.
    """
    expanded = {call.module.rpartition(".")[0] for call in steps if call.is_weight and call.rows == keys}
    sizes = {keys} | {layer.kept(keys) for layer in cache if layer.window}
    attending = (call for call in steps if call.is_attention and call.module)
    by_module = _group(call for call in attending if call.columns in sizes or (not call.values and call.inner in sizes))
    growing = [layer for layer in cache if layer.token and layer.kind != "cross attention"]
    owners = range(len(growing))
    sharing = len(by_module) > len(growing) and len(layer_types) == len(by_module)
    for kind in layer_types[len(growing) :] if sharing else ():
        growing.append(growing[max(index for index in owners if layer_types[index] == kind)])
    if len(by_module) != len(growing):
        recorded = f"attention to {keys} tokens was recorded in {len(by_module)} modules"
        raise ServingError(f"{len(growing)} layers have a cache that grows, but {recorded}")
    of_tokens = [
        layer._replace(kind="latent", heads=1) if module in expanded else layer
        for module, layer in zip(by_module, growing, strict=True)
    ]
    own = iter(of_tokens)
    layers = tuple(next(own) if layer.token and layer.kind != "cross attention" else layer for layer in cache)
    found = zip(by_module.items(), of_tokens, strict=True)
    return layers, {module: _read_heads(module, items, layer.kept(keys), layer) for (module, items), layer in found}


def _read_encoder(once: Sequence[_Call]) -> Iterator[AttentionLayer]:
    """Yield the attention of an encoder, whose modules run once a request."""
    attending = (call for call in once if call.is_attention and call.rows in (call.columns, call.inner))
    for module, items in _group(attending).items():
        layer = _read_heads(module, items, items[0].columns, CacheLayer("full"), queries=items[0].columns)
        yield layer._replace(cache=CacheLayer("full", heads=layer.heads))


def _read_cross_attention(
    steps: Sequence[_Call], by_module: Mapping[str, AttentionLayer], crossing: Sequence[CacheLayer]
) -> Iterator[AttentionLayer]:
    """Yield the attention to an encoder's tokens, one for each layer of the cache that keeps them."""
    found = _group(call for call in steps if crossing and call.is_attention and call.module not in by_module)
    if len(found) != len(crossing):
        raise ServingError(f"{len(crossing)} layers keep an encoder's tokens, but {len(found)} modules attend to them")
    for (module, items), layer in zip(found.items(), crossing, strict=True):
        yield _read_heads(module, items, items[0].columns, layer)


def _limit_division(branch: str, item: Projection, by_module: Mapping[str, AttentionLayer]) -> Projection:
    """Return a product with the heads of keys that limit its division, where its results are keys or values."""
    layer = by_module.get(branch)
    if layer is None or item.divided != "columns" or layer.cache.kind == "latent":
        return item
    heads = layer.cache.heads
    sizes = {heads * layer.key_size, heads * layer.value_size, heads * (layer.key_size + layer.value_size)}
    return item._replace(heads=heads) if item.columns in sizes and heads < layer.heads else item


def _read_heads(module: str, items: Sequence[_Call], keys: int, layer: CacheLayer, queries: int = 1) -> AttentionLayer:
    """Return the attention of `queries` tokens to `keys`; heads that share a key may be rows of a product."""
    fused = [call for call in items if call.values]
    if fused:
        call = fused[0]
        return AttentionLayer(call.batch * call.rows // queries, call.inner, call.values, layer)
    scores = [call for call in items if call.columns == keys]
    sums = [call for call in items if call.inner == keys]
    if len(scores) != 1 or len(sums) != 1:
        raise ServingError(f"the attention of {module} to a cache has {len(items)} products, where 2 are known")
    return AttentionLayer(scores[0].batch * scores[0].rows // queries, scores[0].inner, sums[0].columns, layer)
