"""Run a language model on a prompt and then token by token from its KV cache, and record each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fvflops.analysis.recording import record
from fvflops.comparison.cost_functions import ScalingError
from fvflops.comparison.scaling import BoundsCheckedEmbedding
from fvflops.formulas import FormulaTable
from fvflops.trace import Trace


class Decoder:
    """Run a model on a prompt and then on single tokens, `batch` sequences at once; `run` are options of `record`."""

    def __init__(self, model: nn.Module, batch: int, table: FormulaTable, run: Mapping[str, Any]) -> None:
        parameters = inspect.signature(model.forward).parameters
        is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        self._cache = "cache" if "cache" in parameters else "past_key_values"
        needed = (self._cache,) if takes_any else (self._cache, "use_cache")
        missing = [name for name in needed if name not in parameters]
        self._ids = "input_ids" if "input_ids" in parameters else next(iter(parameters), "")
        if is_encoder_decoder or missing:
            raise ScalingError(
                f"{type(model).__name__} takes no {' and '.join(missing or needed)}, so it cannot decode with a KV "
                "cache: use a causal language model of transformers, such as transformers:GPT2LMHeadModel, or one "
                "whose forward takes token ids, past_key_values and use_cache, and whose result has past_key_values"
            )
        # As in generate: the language model head is applied to one position of the prompt.
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._has_position_ids = "position_ids" in parameters
        self._model = model
        self._batch = batch
        self._table = table
        self._run = run
        devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
        # Ids need values, since models index position embeddings with them.
        self._device = next(iter(devices), torch.device("cpu"))

    def record(self, prompt: int, tokens: int, look: Callable[[Any], None] | None = None) -> list[Trace]:
        """Return the Traces of a prefill, then of each decoded token; `look` is called with the cache after each."""
        ids = torch.ones(self._batch, prompt, dtype=torch.int64, device=self._device)
        recording = record(self._model, table=self._table, warn=False, **self._run)
        with torch.no_grad(), BoundsCheckedEmbedding(), recording:
            result = self._model(**{self._ids: ids}, use_cache=True, **self._positions(0, prompt), **self._last_logits)
            recording.step()
            for length in range(prompt, prompt + tokens):
                if look is not None:
                    look(self._cache_of(result))
                options = {self._ids: ids[:, :1], self._cache: self._cache_of(result), **self._positions(length, 1)}
                result = self._model(use_cache=True, **options)
                recording.step()
            if look is not None:
                look(self._cache_of(result))
        return list(recording.steps)

    def _cache_of(self, result: Any) -> Any:
        cache = getattr(result, self._cache, None)
        if cache is None:
            raise ScalingError(f"the model's result, {type(result).__name__}, has no KV cache ({self._cache})")
        return cache

    def _positions(self, first: int, length: int) -> dict[str, torch.Tensor]:
        """Return the position ids of each sequence, as generate passes them."""
        if not self._has_position_ids:
            return {}
        return {"position_ids": torch.arange(first, first + length).repeat(self._batch, 1).to(self._device)}
