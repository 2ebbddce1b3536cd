"""Record a language model's prompt and next token in shape execution, and read the work of serving it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_counts import parameter_count
from fvflops.analysis.recording import record
from fvflops.capture.shapes.shape_tensor import DataDependentError
from fvflops.comparison.cost_functions import ScalingError
from fvflops.comparison.decoder import Decoder, EncoderDecoder
from fvflops.formulas import resolve_table
from fvflops.garbage_collector import gc_paused
from fvflops.serve.cache_size import LayerSnapshot, read_cache, take_snapshot
from fvflops.serve.image_encoder import count_image_tokens, read_image_encoder
from fvflops.serve.read_serving_model import read_serving_model
from fvflops.serve.serving_model import ServingError, ServingModel

# Tokens of the recorded prompt, and of an encoder: 67 and 59 keys occur in no other size of a model.
_PROMPT, _ENCODED = 66, 59
# A router's bias that training moves until its experts are chosen equally often: DeepSeek's, GLM's, MiniMax's.
_BALANCE = "correction_bias"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: for masks of few tokens, threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@gc_paused()
@_one_thread()
def record_serving(model: nn.Module, name: str = "", *, image: Mapping[str, Any] | None = None) -> ServingModel:
    """Return a causal language model as engines run it, by its cache after a prompt and after one more token.

    `model` is as for `generation_cost`, and may be on the meta device; nothing is computed. `image` are the arguments
    of a call with one image, whose encoder is read too. Raise ScalingError or ServingError for a model that cannot be
    served from a cache of one sequence.
    """
    snapshots: list[list[LayerSnapshot]] = []
    run: dict[str, Any] = {"execution": "shapes"}
    table = resolve_table("default")
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        decoder: Decoder = EncoderDecoder(model, 1, table, run, _ENCODED)
    else:
        decoder = Decoder(model, 1, table, run)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    try:
        prefill, decode = decoder.record(_PROMPT, 1, lambda cache: snapshots.append(take_snapshot(cache)))
    except ValueError as error:
        if isinstance(error, ScalingError) or not types or any("linear" not in kind for kind in types):
            raise
        message = "does not run from a cache without attention layers: use a configuration that has some"
        raise ServingError(f"{type(model).__name__} {message} ({error})") from error
    except DataDependentError as error:
        op = str(error).partition(" (")[0]
        raise ServingError(f"{type(model).__name__} depends on values, so its serving is not known: {op}") from error
    serving = read_serving_model(
        name or type(model).__name__,
        prefill,
        decode,
        read_cache(*snapshots),
        prompt=_PROMPT,
        parameters=parameter_count(model)[""],
        topk=getattr(text, "num_experts_per_tok", 1),
        layer_types=types,
    )
    images = None
    if image is not None:
        tokens = count_image_tokens(model, image)
        with torch.no_grad(), record(model, table=table, warn=False, **run) as recording:
            model(**image)
        images = read_image_encoder(recording.trace(), prefill, tokens)
    names = [name for name, _ in (*model.named_buffers(), *model.named_parameters())]
    return replace(
        serving,
        encoded=decoder.encoded,
        images=images,
        reads_images=any(hasattr(part, "get_image_features") for part in model.modules()),
        balances_experts=any(name.endswith(_BALANCE) for name in names),
        positions=_find_positions(text),
    )


def _find_positions(config: Any) -> int:
    """Return the longest sequence of a configuration, as vLLM derives it: scaled by its rotary positions, 0 if unknown.

    For llama3 and longrope `max_position_embeddings` includes the factor already.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(limit, int) or not isinstance(rope, Mapping):
        return 0
    if rope.get("rope_type", rope.get("type")) in ("linear", "dynamic", "yarn"):
        limit = int(rope.get("original_max_position_embeddings", limit) * rope.get("factor", 1))
    return limit
