"""Run a language model on a prompt and then token by token from its KV cache, and record each call."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from fvflops.analysis.recording import record
from fvflops.comparison.cost_functions import Axis, CostExpression, GenerationCost, ScalingError
from fvflops.comparison.polynomial import Polynomial
from fvflops.comparison.scaling import BoundsCheckedEmbedding, CostOptions, Sample, describe_costs, read_sample
from fvflops.counting.metrics import METRICS
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.text import Unpack, explaining_arguments
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
    _runs_encoder = False

    def __init__(self, model: nn.Module, batch: int, table: FormulaTable, run: Mapping[str, Any]) -> None:
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        self._cache = next((name for name in _CACHES if name in parameters), "past_key_values")
        needed = (self._cache,) if takes_any else (self._cache, "use_cache")
        missing = [name for name in needed if name not in parameters]
        self._ids = "input_ids" if "input_ids" in parameters else next(iter(parameters), "")
        is_other = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and not self._runs_encoder
        if is_other or missing:
            raise ScalingError(
                f"{type(model).__name__} takes no {' and '.join(missing or needed)}, so it cannot decode with a KV "
                "cache: use a causal language model of transformers, such as transformers:GPT2LMHeadModel, or one "
                "whose forward takes token ids, past_key_values and use_cache, and whose result has past_key_values"
            )
        # As in generate: the language model head is applied to one position of the prompt.
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._has_position_ids = "position_ids" in parameters
        self._model, self._batch, self._table, self._run = model, batch, table, run
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
        inputs = {self._ids: self._make_ids(prompt), **self._positions(0, prompt), **self._last_logits, **given}
        return self._model(use_cache=True, **inputs)

    def _decode(self, length: int, cache: object, result: Any) -> Any:
        """Run the model on one token after `length` cached ones; `result` is the previous call's."""
        inputs = {self._ids: self._make_ids(1), self._cache: cache, **self._positions(length, 1)}
        return self._model(use_cache=True, **inputs)

    def _make_ids(self, tokens: int) -> torch.Tensor:
        return torch.ones(self._batch, tokens, dtype=torch.int64, device=self._device)

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


class EncoderDecoder(Decoder):
    """Run an encoder on `encoded` tokens, or on a sample of the size its configuration has, and then its decoder."""

    _runs_encoder = True

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
            self._encoded = {"input_ids": self._make_ids(encoded)}

    def _prefill(self, prompt: int, given: Mapping[str, object]) -> Any:
        return super()._prefill(prompt, {**given, **self._encoded})

    def _decode(self, length: int, cache: object, result: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        encoded = BaseModelOutput(last_hidden_state=result.encoder_last_hidden_state)
        inputs = {self._ids: self._make_ids(1), self._cache: cache, "encoder_outputs": encoded}
        return self._model(use_cache=True, **inputs)


# Fit the polynomials on lengths up to at least this many tokens, even if fewer are generated.
_MIN_TOKENS = 16


@explaining_arguments
def generation_cost(
    model: nn.Module,
    *,
    prompt: int,
    new: int,
    batch: int = 1,
    execution: str = "shapes",
    **options: Unpack[CostOptions],
) -> GenerationCost:
    """Return the cost of generating `new` tokens after a prompt of `prompt` tokens, for a batch of `batch` sequences.

    `model` is a causal language model of transformers, or one with the same interface, as the zoo's GPT-2, Llama and
    Mixtral: it accepts token ids as `input_ids` or as the first argument, `past_key_values`, the KV cache or None, and
    `use_cache`, and its result has the cache as `past_key_values`, or both name it `cache`, as transformers 5.24 does.
    It may be on the meta device. As in transformers' `generate` the prefill computes the logits of the last position
    only, where the model supports that, and the last token is not fed back: `new` tokens take a prefill and `new` - 1
    decoding steps at the cache lengths `prompt`, `prompt` + 1 ... Sampling and other work of `generate` outside the
    model is not counted. `execution` is "shapes", or "real" for a model with data-dependent control flow, `device`
    the one whose kernels are recorded, by default the model's. A model
    without this interface, and a length that it does not accept, raise ScalingError.
    """
    metric, formulas, progress = options["metric"], resolve_table(options["table"]), options["progress"]
    check_generation_metric(metric)
    for name, size in {"prompt": prompt, "new": new, "batch": batch}.items():
        if type(size) is not int or size < 1:
            raise ScalingError(f"{name} must be an integer >= 1; got {size!r}")
    decoder = Decoder(model, batch, formulas, {"execution": execution, "device": options["device"]})
    runs = count(1)

    def run(prompt: int, tokens: int) -> list[Sample]:
        traces = decoder.record(prompt, tokens)
        if progress is not None:
            progress(next(runs))
        return [read_sample(trace, formulas, metric) for trace in traces]

    longest = max(prompt + new - 1, _MIN_TOKENS)
    prefill = describe_costs(metric, (Axis("prompt", 1, longest),), lambda sizes: run(sizes[0], 0)[0])
    decode = describe_costs(metric, (Axis("cache", 1, longest - 1),), lambda sizes: run(sizes[0], 1)[1])
    prefill_total = prefill.counted.get((prompt,)) or run(prompt, 0)[0].total
    end = prompt + new - 1
    valid = decode.domain[0]
    # Count each step up to `start`, and sum the polynomial from there on.
    start = end if decode.polynomial is None or valid.step > 1 else min(max(valid.first, prompt), end)
    decoding_total = sum(sample.total for sample in run(prompt, start - prompt)[1:]) if start > prompt else 0
    if decode.polynomial is not None and start < end:
        decoding_total += int(decode.polynomial.sum_over("cache", start, end - start).at(()))
    polynomial, total = _total_expression(prefill, decode), prefill_total + decoding_total
    return GenerationCost(metric, batch, prompt, new, prefill, decode, polynomial, total, counted_up_to=start)


def _total_expression(prefill: CostExpression, decode: CostExpression) -> Polynomial | None:
    """Return the cost of a generation as a polynomial in prompt and new; None if it does not hold at all lengths."""
    if prefill.polynomial is None or decode.polynomial is None or not (prefill.everywhere and decode.everywhere):
        return None
    start, tokens = (Polynomial.of((name,), {(1,): 1}) for name in ("prompt", "new"))
    return prefill.polynomial + decode.polynomial.sum_over("cache", start, tokens - 1)


def check_generation_metric(metric: str) -> None:
    """Raise ValueError unless generation has a cost in this metric; parameters do not depend on it."""
    metrics = [name for name in METRICS if name != "parameters"]
    if metric not in metrics:
        raise ValueError(f"metric must be one of {', '.join(metrics)}; got {metric!r}")
