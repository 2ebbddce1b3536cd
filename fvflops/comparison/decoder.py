"""Run a language model on a prompt and then token by token from its KV cache, and record each call."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from fvflops.analysis.recording import record
from fvflops.comparison.cost_functions import ScalingError
from fvflops.comparison.scaling import BoundsCheckedEmbedding
from fvflops.formulas import FormulaTable
from fvflops.trace import Trace

_States = dict[str, dict[str, torch.Tensor]]

# The number of a layer in a module's name, and its prefix.
_LAYER = re.compile(r".*?\.\d+(?=\.|$)")
# Parameters of forward that take a cache.
_CACHES = ("cache", "cache_params", "past_key_values")
_NO_CACHE = "the result of {} has no KV cache ({})"


@contextmanager
def _module_states(model: nn.Module, given: object) -> Iterator[_States]:
    """Yield layer → name → tensors that modules hold after their calls and did not before, for a given cache only.

    They are seen by a global hook, since shape execution restores modules, and all reachable from them, after a call.
    """
    found: _States = defaultdict(dict)
    paths = {id(module): path for path, module in model.named_modules()}
    known = {id(value) for module in model.modules() for value in vars(module).values()}

    def hook(module: nn.Module, *_: object) -> None:
        path = paths.get(id(module), "")
        layer = _LAYER.match(path)
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and id(value) not in known:
                found[layer.group() if layer else path][f"{path}.{name}"] = value

    if given is None:
        yield found
        return
    handle = register_module_forward_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


class Decoder:
    """Run a model on a prompt and then on single tokens, `batch` sequences at once; `run` are options of `record`."""

    # Tokens that an encoder reads of any sample; 0 where it reads as many as it is given.
    encoded = 0

    def __init__(self, model: nn.Module, batch: int, table: FormulaTable, run: Mapping[str, Any]) -> None:
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        self._cache = next((name for name in _CACHES if name in parameters), "past_key_values")
        needed = (self._cache,) if takes_any else (self._cache, "use_cache")
        missing = [name for name in needed if name not in parameters]
        self._ids = "input_ids" if "input_ids" in parameters else next(iter(parameters), "")
        if self._is_refused(model) or missing:
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
        """Return the Traces of a prefill, then of each decoded token; `look` is called with the cache after each.

        A model whose result has no cache is given one of transformers, and its modules' contents are read too.
        """
        traces = self._record(prompt, tokens, look, None) or self._record(prompt, tokens, look, self._new_cache())
        if not traces:
            raise ScalingError(_NO_CACHE.format(type(self._model).__name__, self._cache))
        return traces

    def _record(self, prompt: int, tokens: int, look: Callable[[Any], None] | None, given: object) -> list[Trace]:
        """Return the Traces, none for a model that returns no cache and was not given one."""
        recording = record(self._model, table=self._table, warn=False, **self._run)
        with torch.no_grad(), BoundsCheckedEmbedding(), _module_states(self._model, given) as states, recording:
            result = self._prefill(prompt, {} if given is None else {self._cache: given})
            cache = getattr(result, self._cache, given)
            if cache is None:
                return []
            recording.step()
            for length in range(prompt, prompt + tokens):
                if look is not None:
                    look([cache, states] if states else cache)
                result = self._decode(length, cache, result)
                cache = getattr(result, self._cache, cache)
                if length == prompt + tokens - 1:
                    recording.pause()  # so that no further step begins
                recording.step()
            if look is not None:
                look([cache, states] if states else cache)
        return list(recording.steps)

    def _prefill(self, prompt: int, given: Mapping[str, object]) -> Any:
        ids = torch.ones(self._batch, prompt, dtype=torch.int64, device=self._device)
        inputs = {self._ids: ids, **self._positions(0, prompt), **self._last_logits, **given}
        return self._model(use_cache=True, **inputs)

    def _decode(self, length: int, cache: object, result: Any) -> Any:
        """Run the model on one token after `length` cached ones; `result` is of the call before."""
        ids = torch.ones(self._batch, 1, dtype=torch.int64, device=self._device)
        return self._model(use_cache=True, **{self._ids: ids, self._cache: cache, **self._positions(length, 1)})

    def _new_cache(self) -> object:
        config = getattr(self._model, "config", None)
        if not hasattr(config, "get_text_config"):
            raise ScalingError(_NO_CACHE.format(type(self._model).__name__, self._cache))
        from transformers import DynamicCache

        return DynamicCache(config=config)

    def _positions(self, first: int, length: int) -> dict[str, torch.Tensor]:
        """Return the position ids of each sequence, as generate passes them."""
        if not self._has_position_ids:
            return {}
        return {"position_ids": torch.arange(first, first + length).repeat(self._batch, 1).to(self._device)}

    def _is_refused(self, model: nn.Module) -> bool:
        return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


class EncoderDecoder(Decoder):
    """Run an encoder on `encoded` tokens, or on a sample of the size its configuration has, and then its decoder."""

    def __init__(self, model: nn.Module, batch: int, table: FormulaTable, run: Mapping[str, Any], encoded: int) -> None:
        super().__init__(model, batch, table, run)
        parameters = inspect.signature(model.forward).parameters
        self._ids = "decoder_input_ids"
        self._has_position_ids = False
        if "input_features" in parameters:
            config: Any = model.config
            self.encoded = config.max_source_positions
            size = (batch, config.num_mel_bins, 2 * config.max_source_positions)
            dtype = next(model.parameters()).dtype
            self._encoded = {"input_features": torch.zeros(size, dtype=dtype, device=self._device)}
        else:
            ids = torch.ones(batch, encoded, dtype=torch.int64, device=self._device)
            self._encoded = {"input_ids": ids}

    def _prefill(self, prompt: int, given: Mapping[str, object]) -> Any:
        return super()._prefill(prompt, {**given, **self._encoded})

    def _decode(self, length: int, cache: object, result: Any) -> Any:
        ids = torch.ones(self._batch, 1, dtype=torch.int64, device=self._device)
        from transformers.modeling_outputs import BaseModelOutput

        encoded = BaseModelOutput(last_hidden_state=result.encoder_last_hidden_state)
        inputs = {self._ids: ids, self._cache: cache, "encoder_outputs": encoded}
        return self._model(use_cache=True, **inputs)

    def _is_refused(self, model: nn.Module) -> bool:
        return False
