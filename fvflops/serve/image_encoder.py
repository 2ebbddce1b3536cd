"""The work of a vision-language model for an image of a prompt, and its time on an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from fvflops.devices.kernel_models.fused_attention import Attention
from fvflops.devices.kernel_models.products import Product
from fvflops.plan.step_time.kernel_times import kernel_of
from fvflops.serve.engine_kernels import EngineKernels
from fvflops.serve.read_serving_model import ACTIVATIONS, NORMS, list_op_calls
from fvflops.serve.serving_model import ImageEncoder, ServingError
from fvflops.trace import Trace

# Names of the image token's id in configurations of transformers.
_PLACEHOLDERS = ("image_token_id", "image_token_index")


def image_seconds(images: ImageEncoder, kernels: EngineKernels, ranks: int) -> float:
    """Return the seconds of the kernels for all images of a prompt, in bf16, on each of `ranks` GPUs."""
    ranks = images.ranks(ranks)
    total = 0.0
    for shape, count in images.products.items():
        columns = max(1, shape.columns // ranks)
        # Kernels between products read and write about three times a product's input.
        moved = kernels.moved(3 * 2.0 * images.number * shape.batch * shape.rows * shape.inner)
        # With a weight, images add rows; products of two activations are batched.
        many = "rows" if shape.batch == 1 else "batch"
        own = shape._replace(columns=columns, **{many: getattr(shape, many) * images.number})
        total += count * (kernels.products(own) + moved)
    for each, count in images.attention.items():
        batch, heads, key_heads = each.batch * images.number, each.heads // ranks, max(1, each.key_heads // ranks)
        total += count * kernels.encoder(each._replace(batch=batch, heads=heads, key_heads=key_heads))
        summed = 2.0 * batch * each.queries * each.heads * each.values
        total += count * 2 * kernels.collective("all_reduce", ranks, summed)  # of attention and of the MLP
    return total


def count_image_tokens(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Return the tokens of a prompt that stand for its image; ServingError for a prompt without one."""
    if not any("pixel" in name or "image" in name for name in inputs):
        raise ServingError(f"the inputs of {type(model).__name__} have no image: serve it with prompts of text")
    config: Any = getattr(model, "config", None)
    token = next((getattr(config, name) for name in _PLACEHOLDERS if getattr(config, name, None) is not None), None)
    ids = inputs.get("input_ids")
    tokens = 0 if token is None or ids is None else int((ids == token).sum())
    if not tokens:
        lacking = "no tokens that stand for an image (image_token_id in its configuration), so images cannot be timed"
        raise ServingError(f"a prompt of {type(model).__name__} has {lacking}: serve it with prompts of text")
    return tokens


def read_image_encoder(trace: Trace, text: Trace, tokens: int) -> ImageEncoder:
    """Return the work of modules that ran for a recorded prompt with an image, but not for a recorded prompt of text.

    `tokens` is the image's number of tokens.
    """
    ran = {scope for stack in text.scopes() for scope in stack}
    products: Counter[Product] = Counter()
    attention: Counter[tuple[str, Attention]] = Counter()
    others = macs = 0
    for signature, module in list_op_calls(trace):
        if not module or module in ran:
            continue
        others += signature.packet in (*NORMS, *ACTIVATIONS)
        kernel = kernel_of(signature)
        if kernel is None or kernel.shape is None:
            continue
        macs += kernel.macs
        if isinstance(kernel.shape, Attention):
            attention[module, kernel.shape] += 1
        elif kernel.kind == "matmul":
            products[kernel.shape] += 1
    # A module attends to windows of an image one after the other, engines to all at once.
    together = Counter(shape._replace(batch=shape.batch * number) for (_, shape), number in attention.items())
    return ImageEncoder(1, tokens, products, together, others, macs)
