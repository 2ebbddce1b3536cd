"""How engines schedule: the settings of vLLM, SGLang and TensorRT-LLM that a simulation follows."""

from dataclasses import dataclass
from typing import Any

from fvflops.text import suggest


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: `draft_tokens` a step, each accepted at `acceptance` if those before it were."""

    draft_tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.draft_tokens < 1 or not 0 <= self.acceptance <= 1:
            raise ValueError(f"{self}: at least one draft token, and an acceptance between 0 and 1")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits and policy of an engine's scheduler.

    `pages` of `page_size` tokens are the cache of each replica. `max_batched_tokens` is the token budget of a step.
    `mixed` steps hold decoding sequences and chunks of prompts; otherwise prompts go first and decoding waits.
    `chunked_prefill` splits a prompt that exceeds the budget. `steps_ahead` is how many steps are scheduled while an
    earlier one runs: 1 with asynchronous (overlapped) scheduling.

    A waiting request is admitted when its whole prompt fits in the free pages beside `watermark` of all pages, with
    `reserve_own` of the pages of its output and `reserve_running` of the pages that running requests may still take. If
    pages run out, the last admitted request is preempted and computed again later, except its pages that are still in
    the prefix cache with `prefix_caching`.

    `replicas` are attention data-parallel replicas, each with requests and pages of its own, whose steps last as long
    as the slowest one's. `stages` are the batches that a pipeline computes at once, in different stages; each has its
    part of the pages and sequences.
    """

    pages: int
    page_size: int = 16
    max_sequences: int = 256
    max_batched_tokens: int = 2048
    chunked_prefill: bool = True
    mixed: bool = True
    steps_ahead: int = 1
    watermark: float = 0.0
    reserve_own: float = 0.0
    reserve_running: float = 0.0
    prefix_caching: bool = True
    replicas: int = 1
    stages: int = 1
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if min(self.pages, self.page_size, self.max_sequences, self.replicas, self.stages) < 1:
            raise ValueError(f"{self}: pages, page_size, max_sequences, replicas and stages are at least 1")
        if self.steps_ahead not in (0, 1):
            raise ValueError(f"steps_ahead is 0 or 1, got {self.steps_ahead}")
        if self.max_batched_tokens < self.max_sequences * self.decode_tokens:
            raise ValueError(
                f"max_batched_tokens {self.max_batched_tokens} is below the {self.max_sequences * self.decode_tokens}"
                f" tokens of {self.max_sequences} decoding sequences: raise it or lower max_sequences"
            )

    @property
    def decode_tokens(self) -> int:
        """Tokens of a decoding sequence in a step."""
        return 1 + (self.speculation.draft_tokens if self.speculation else 0)


# vLLM V1 (vllm/v1/core/sched/scheduler.py): running requests first, then chunks of waiting ones within the budget; the
# whole prompt must fit (scheduler_reserve_full_isl), none of its output; asynchronous scheduling since 0.14.
#
# SGLang (sglang/srt/managers/schedule_policy.py, scheduler.py): a batch of prompts whenever one can be formed, decoding
# otherwise; a new request reserves its output, running ones new_token_ratio of theirs. The ratio falls from 0.7 to
# 0.098 within 600 steps: the lowest is used here. The overlap scheduler is one step ahead.
#
# TensorRT-LLM (tensorrt_llm/_torch/pyexecutor/scheduler.py): in-flight batching, generation first, then whole prompts
# within max_num_tokens; GUARANTEED_NO_EVICT admits a request only if all outputs fit. The overlap scheduler is one step
# ahead.
_ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"max_sequences": 256, "max_batched_tokens": 2048, "page_size": 16},
    "sglang": {
        "max_sequences": 1024,
        "max_batched_tokens": 8192,
        "page_size": 1,
        "mixed": False,
        "reserve_own": 1.0,
        "reserve_running": 0.098,
    },
    "trtllm": {
        "max_sequences": 2048,
        "max_batched_tokens": 8192,
        "page_size": 32,
        "chunked_prefill": False,
        "reserve_own": 1.0,
        "reserve_running": 1.0,
    },
}


def engine_settings(engine: str, cache_tokens: int, **changes: Any) -> EngineSettings:
    """Return the usual settings of an engine with a cache of a number of tokens, with changes to its fields.

    >>> settings = engine_settings("sglang", 100_000, max_sequences=64)
    >>> settings.pages, settings.max_sequences, settings.mixed
    (100000, 64, False)
    """
    if engine not in _ENGINES:
        raise ValueError(f"no engine {engine!r}{suggest(engine, _ENGINES)}; one of {', '.join(_ENGINES)}")
    values = {**_ENGINES[engine], **changes}
    return EngineSettings(pages=cache_tokens // values["page_size"], **values)
