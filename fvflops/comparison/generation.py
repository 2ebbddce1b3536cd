"""Cost of text generation: prefill, then decoding token by token from a KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fvflops.analysis.recording import record
from fvflops.comparison.cost_functions import Axis, CostExpression, GenerationCost, ScalingError, Sizes
from fvflops.comparison.polynomial import Polynomial
from fvflops.comparison.scaling import BoundsCheckedEmbedding, Progress, Sample, describe_costs, read_sample
from fvflops.counting.metrics import METRICS
from fvflops.formulas import FormulaTable, resolve_table

# Fit the polynomials on lengths up to at least this many tokens, even if fewer are generated.
_MIN_TOKENS = 16


def generation_cost(
    model: nn.Module,
    *,
    prompt: int,
    new: int,
    batch: int = 1,
    metric: str = "flops",
    table: str | FormulaTable = "default",
    execution: str = "shapes",
    device: str | torch.device | None = None,
    progress: Progress | None = None,
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
    check_generation_metric(metric)
    for name, size in {"prompt": prompt, "new": new, "batch": batch}.items():
        if type(size) is not int or size < 1:
            raise ScalingError(f"{name} must be an integer >= 1; got {size!r}")
    formulas = resolve_table(table)
    decoder = _Decoder(model, batch, metric, formulas, {"execution": execution, "device": device}, progress)
    longest = max(prompt + new - 1, _MIN_TOKENS)
    prefill = describe_costs(metric, (Axis("prompt", 1, longest),), decoder.prefill)
    decode = describe_costs(metric, (Axis("cache", 1, longest - 1),), decoder.decode)
    prefill_total = prefill.counted.get((prompt,)) or decoder.prefill((prompt,)).total
    end = prompt + new - 1
    valid = decode.domain[0]
    # Count each step up to `start`, and sum the polynomial from there on.
    start = end if decode.polynomial is None or valid.step > 1 else min(max(valid.first, prompt), end)
    decoding_total = sum(sample.total for sample in decoder.run(prompt, start - prompt)[1:]) if start > prompt else 0
    if decode.polynomial is not None and start < end:
        decoding_total += int(decode.polynomial.sum_over("cache", start, end - start).at(()))
    return GenerationCost(
        metric=metric,
        batch=batch,
        prompt=prompt,
        new=new,
        prefill=prefill,
        decode=decode,
        polynomial=_total_expression(prefill, decode),
        total=prefill_total + decoding_total,
        counted_up_to=start,
    )


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


class _Decoder:
    """Run a model on a prompt and then on single tokens, and count each call."""

    def __init__(
        self,
        model: nn.Module,
        batch: int,
        metric: str,
        table: FormulaTable,
        run: Mapping[str, Any],
        progress: Progress | None,
    ) -> None:
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
        self._metric = metric
        self._table = table
        self._run = run
        self._progress = progress
        self._runs = 0
        devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
        # Ids need values, since models index position embeddings with them.
        self._device = next(iter(devices), torch.device("cpu"))

    def prefill(self, sizes: Sizes) -> Sample:
        return self.run(sizes[0], 0)[0]

    def decode(self, sizes: Sizes) -> Sample:
        return self.run(sizes[0], 1)[1]

    def run(self, prompt: int, tokens: int) -> list[Sample]:
        """Return the counts of a prefill, then of each decoded token."""
        ids = torch.ones(self._batch, prompt, dtype=torch.int64, device=self._device)
        recording = record(self._model, table=self._table, warn=False, **self._run)
        with torch.no_grad(), BoundsCheckedEmbedding(), recording:
            result = self._model(**{self._ids: ids}, use_cache=True, **self._positions(0, prompt), **self._last_logits)
            recording.step()
            for length in range(prompt, prompt + tokens):
                options = {self._ids: ids[:, :1], self._cache: self._cache_of(result), **self._positions(length, 1)}
                result = self._model(use_cache=True, **options)
                recording.step()
        self._runs += 1
        if self._progress is not None:
            self._progress(self._runs)
        return [read_sample(trace, self._table, self._metric) for trace in recording.steps]

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
