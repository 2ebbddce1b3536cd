"""Cost of text generation: prefill, then decoding token by token from a KV cache."""

from __future__ import annotations

from itertools import count

from torch import nn

from fvflops.comparison.cost_functions import Axis, CostExpression, GenerationCost, ScalingError
from fvflops.comparison.decoder import Decoder
from fvflops.comparison.polynomial import Polynomial
from fvflops.comparison.scaling import CostOptions, Sample, describe_costs, read_sample
from fvflops.counting.metrics import METRICS
from fvflops.formulas import resolve_table
from fvflops.text import Unpack, explaining_arguments

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
