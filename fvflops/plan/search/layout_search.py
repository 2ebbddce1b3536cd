"""Search for the layout of a training run on a number of GPUs."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from fvflops.analysis.model_run import bind_inputs
from fvflops.capture.run import ExecutionError
from fvflops.capture.training_step import OptimizerMaker
from fvflops.devices.devices import Device
from fvflops.plan.memory.step_settings import OWN_CHECKPOINTING
from fvflops.plan.parallel_axes import count_ranks
from fvflops.plan.plan_options import LayoutOptions, PlanError, PlanOptions
from fvflops.plan.search.candidates import Candidate, LayoutResult, LayoutSearch, Space, in_order
from fvflops.plan.search.evaluate import MicrobatchCost, Workload, describe_shortage, least_peak, least_seconds
from fvflops.plan.step_time.buckets import check_bucket_cap
from fvflops.plan.step_time.calibration import Efficiency, Network, resolve_timing
from fvflops.text import Unpack, explaining_arguments, require_int
from fvflops.units import format_seconds

Job = tuple[Any, Any]  # what identifies a result, and the argument of the call that gives it
Results = Iterator[Job]
# id → function that forked processes call, so that the model need not be pickled.
_SHARED: dict[int, Callable[[Any], Any]] = {}


def _run_in_pool(
    function: Callable[[Any], Any], pool: ProcessPoolExecutor, jobs: int, pending: Iterator[Job | None]
) -> Results:
    running: dict[Future[Any], Any] = {}
    while True:
        while len(running) < jobs and (call := next(pending, None)) is not None:
            running[pool.submit(_call, id(function), call[1])] = call[0]
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield running.pop(future), future.result()


@contextmanager
def workers(function: Callable[[Any], Any], jobs: int) -> Iterator[Callable[[Iterator[Job | None]], Results]]:
    """Start processes that call `function`; with one job or without fork, this process calls it.

    So it does, with a warning, if its autograd has threads, which forked processes would lack. The yielded function
    takes jobs, which are read when a call can start, None while there is none, and yields the key and the result of
    each call.
    """

    def run_here(pending: Iterator[Job | None]) -> Results:
        return ((job[0], function(job[1])) for job in pending if job is not None)

    if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield run_here
        return
    _SHARED[id(function)] = function
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))
    try:
        if pool.submit(_can_differentiate).result():
            yield partial(_run_in_pool, function, pool, jobs)
        else:
            warnings.warn(
                f"the search runs in one process, not in {jobs}: this program's autograd has threads, without which "
                "forked processes cannot run a backward pass",
                stacklevel=5,
            )
            yield run_here
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        del _SHARED[id(function)]


def _can_differentiate() -> bool:
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError:  # of autograd's threads, which a forked process does not have
        return False
    return True


def _call(key: int, item: Any) -> Any:
    return _SHARED[key](item)


# Called with the current activity and the number of layouts that are left.
Progress = Callable[[str, int], None]
ADAMW: OptimizerMaker = partial(torch.optim.AdamW, fused=True)
_ONE_NODE = 8  # GPUs per node, if the network is unknown
_NO_MORE_RECOMPUTATION = {"full": ("full", "selective", "none"), "selective": ("selective", "none"), "none": ("none",)}


class SearchOptions(LayoutOptions, total=False):
    """Options of a search and of the plans in it, as `search_layouts` describes them."""

    network: Annotated[str | Network | None, None]
    efficiency: Annotated[Efficiency | None, None]
    choices: Annotated[Mapping[str, Sequence[Any]] | None, None]
    kernels: Annotated[str | None, "cuda"]
    fused: Annotated[Collection[str], ()]
    bucket_cap_mb: Annotated[float | None, None]
    jobs: Annotated[int, 1]
    on_progress: Annotated[Progress | None, None]


@explaining_arguments
def search_layouts(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    gpus: int,
    global_batch: int,
    device: str | Device,
    optimizer: OptimizerMaker | None = ADAMW,
    best: int = 20,
    **options: Unpack[SearchOptions],
) -> LayoutSearch:
    """Return the layouts with the fastest training steps that fit a number of GPUs, by planning and simulating them.

    The search covers all combinations of `CHOICES`, where `choices` replaces the values of some, such as
    {"pp": [1, 2]}, and for fsdp both ZeRO-2 and ZeRO-3. `args` and `kwargs` are the inputs of a replica, whose first
    dimension is replaced by the size of a microbatch; `global_batch` is the number of samples in a step of all GPUs.
    Recordings of microbatches give lower bounds of the time and memory of the layouts that compute them so, and of
    layouts with larger microbatches or more recomputation. The layout with the lowest bound comes next: its microbatch
    is recorded, or it is planned as by `plan_step` and simulated as by `estimate_step`, until the `best` fastest are
    known. `jobs` processes share the work. The other arguments are as for `plan_step` and `estimate_step`. A model that
    fails in every layout raises PlanError.

    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> few = {"tp": [1, 2], "pp": [1], "micro-batch": [1], "checkpoint": ["none"], "dp": [1]}
    >>> search = search_layouts(
    ...     build("llama_tiny", device="meta"), tokens, gpus=4, global_batch=4, device="H100", choices=few)
    >>> search.best()[0].candidate.command()
    '--mesh fsdp=4 --batch 1 --microbatches 1 --no-reshard-after-forward'
    """
    require_int("best", best, least=1)
    require_int("jobs", options["jobs"], least=1)
    check_bucket_cap(options["bucket_cap_mb"])
    start, given, choices = time.monotonic(), dict(options), options["choices"] or {}
    of_time: dict[str, Any] = {"fused": tuple(options["fused"]), "bucket_cap_mb": options["bucket_cap_mb"]}
    timing = resolve_timing(device, options["network"], options["efficiency"], gpus, **of_time)
    planned: Any = {name: given[name] for name in LayoutOptions.__annotations__}
    shared = PlanOptions(mesh={}, optimizer=optimizer, device=options["kernels"], **planned)
    workload = Workload(model, bind_inputs(model, args, kwargs), shared, timing)
    not_tried = _find_unknown_axes(workload, choices)
    node = _ONE_NODE if timing.network is None else timing.network.gpus_per_node
    candidates = Space(
        *(gpus, min(node, gpus), global_batch, workload.layers, workload.sequence_parallel),
        choices={**choices, **dict.fromkeys(not_tried, (1,))},
    ).list_candidates()
    search = _Search(workload, candidates, best, options["on_progress"] or (lambda what, left: None))
    results = search.run(options["jobs"])
    if all(result.status == "failed" for result in results):
        raise PlanError(f"no layout can be planned; the first one, {candidates[0].command()}: {results[0].reason}")
    return LayoutSearch(
        *(in_order(results), gpus, global_batch, best, *timing[:3], timing.bucket_cap_mb, time.monotonic() - start),
        not_tried=not_tried,
        settings=search.settings,
    )


def _find_unknown_axes(workload: Workload, choices: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return axis → why the model cannot be divided along it; PlanError if `choices` requires that axis."""
    unknown = {}
    for axis, found in (("pp", workload.stages), ("tp", workload.sharding)):
        ranks = list(choices.get(axis, ()))
        if isinstance(found, str) and ranks != [1]:
            if ranks and 1 not in ranks:
                raise PlanError(f"{axis}={ranks[0]}: {found}")
            unknown[axis] = found
    return unknown


class _Search:
    def __init__(self, workload: Workload, candidates: Sequence[Candidate], best: int, progress: Progress) -> None:
        self._workload = workload
        self._candidates = candidates
        self._best = best
        self._gpus = count_ranks(candidates[0].mesh)
        self._progress = progress
        self._results: dict[int, LayoutResult] = {}
        self._bounds = dict.fromkeys(range(len(candidates)), (0.0, 0))
        self._like: dict[Hashable, list[int]] = {}  # layouts that differ in microbatches and recomputation only
        for number, candidate in enumerate(candidates):
            self._like.setdefault(_key_without_microbatches(candidate), []).append(number)
        measured_on = [candidate.measured_on(self._gpus) for candidate in candidates]
        self._keys = [layout.command() for layout in measured_on]
        self._recordings = dict(zip(self._keys, measured_on, strict=True))
        self._sizes: dict[Hashable, list[str]] = {}  # recordings that differ in the size of the microbatch only
        for key, layout in sorted(self._recordings.items(), key=lambda item: item[1].micro_batch):
            self._sizes.setdefault(_key_without_size(layout), []).append(key)
        self._costs: dict[str, MicrobatchCost | str] = {}
        self.settings: dict[str, Any] = {}

    def run(self, jobs: int) -> list[LayoutResult]:
        """Return the result of each layout, in the order of the candidates."""
        with workers(self._run, jobs) as run:
            for source, result in run(self._list_pending()):
                if isinstance(source, Candidate):
                    self._add_cost(source, result)
                else:
                    self._add(source, result)
        return [self._results[number] for number in range(len(self._candidates))]

    def _run(self, item: Candidate | tuple[Candidate, float | None]) -> Any:
        """Measure or evaluate a layout; if it does not suit the model, return the reason: the search goes on."""
        try:
            if isinstance(item, Candidate):
                return self._workload.measure(item)
            return self._workload.evaluate(*item)
        except (ValueError, TypeError, RuntimeError, ExecutionError) as error:
            return str(error).partition("\n")[0] or type(error).__name__

    def _list_pending(self) -> Iterator[Job | None]:
        """Yield the recording or plan that the lowest bound needs, None while all run; settle slower layouts."""
        started: set[int | str] = set()
        while unknown := [number for number in range(len(self._candidates)) if number not in self._results]:
            needed = {number: self._find_needed(number) for number in unknown if number not in started}
            waiting = [n for n, key in needed.items() if key is None or key not in started]
            limit = self._find_limit()
            if not waiting:
                yield None
                continue
            number = min(waiting, key=self._priority)
            key = needed[number]
            if limit is not None and self._bounds[number][0] >= limit:
                for number in waiting:
                    self._decide(number, "slower", f"at least {format_seconds(self._bounds[number][0])}")
            elif key is None:
                started.add(number)
                self._progress("planning", len(unknown))
                yield number, (self._candidates[number], limit)
            else:
                started.add(key)
                self._progress("recording", len(unknown))
                yield self._recordings[key], self._recordings[key]

    def _find_needed(self, number: int) -> str | None:
        """Return the recording that a layout needs next, None if it has its own; the two smallest ones come first."""
        own = self._keys[number]
        if own in self._costs:
            return None
        for key in self._sizes[_key_without_size(self._recordings[own])][:2]:
            if key not in self._costs:
                return key
        return own

    def _priority(self, number: int) -> tuple[float, int, int]:
        seconds, peak = self._bounds[number]
        return seconds, self._candidates[number].micro_batch, peak

    def _add_cost(self, layout: Candidate, cost: MicrobatchCost | str) -> None:
        """Bound layouts by a recording, also with larger microbatches or more recomputation; settle what cannot fit."""
        self._costs[layout.command()] = cost
        if isinstance(cost, str):
            for number, key in enumerate(self._keys):
                if key == layout.command() and number not in self._results:
                    self._decide(number, "failed", cost)
            return
        self.settings = self.settings or _settings_of_all(cost.settings, layout)
        if cost.settings.get("checkpointing") == OWN_CHECKPOINTING:
            self.settings["checkpointing"] = OWN_CHECKPOINTING
        workload, smaller = self._workload, self._smaller_cost(layout)
        for number, candidate in enumerate(self._candidates):
            own = self._recordings[self._keys[number]]
            if number in self._results or not _is_larger(own, layout, recomputes=own, less=layout):
                continue
            seconds, peak = self._bounds[number]
            grown = cost if smaller is None else cost.extrapolate(*smaller, layout.micro_batch, candidate.micro_batch)
            seconds = max(seconds, least_seconds(candidate, grown, workload.layers, workload.timing))
            if candidate.checkpoint == layout.checkpoint:
                peak = max(peak, least_peak(candidate, cost, workload.layers))
            self._bounds[number] = seconds, peak
            lack = describe_shortage(peak, workload.timing.device, candidate.mesh, at_least=True)
            if lack:
                self._decide(number, "does not fit", lack)
                self._settle_larger(candidate, self._results[number])

    def _smaller_cost(self, layout: Candidate) -> tuple[MicrobatchCost, int] | None:
        sizes = ((key, self._recordings[key].micro_batch) for key in reversed(self._sizes[_key_without_size(layout)]))
        costs = ((self._costs.get(key, ""), size) for key, size in sizes if size < layout.micro_batch)
        return next(((cost, size) for cost, size in costs if not isinstance(cost, str)), None)

    def _decide(self, number: int, status: str, reason: str) -> None:
        seconds, peak = self._bounds[number]
        self._results[number] = LayoutResult(
            candidate=self._candidates[number], status=status, reason=reason, least_seconds=seconds, least_peak=peak
        )

    def _find_limit(self) -> float | None:
        times = sorted(item.seconds for item in self._results.values() if item.status == "fits" and item.seconds)
        return times[self._best - 1] if len(times) >= self._best else None

    def _add(self, number: int, result: LayoutResult | str) -> None:
        if isinstance(result, str):
            self._decide(number, "failed", result)
            return
        seconds, peak = self._bounds[number]
        self._results[number] = replace(result, least_seconds=seconds, least_peak=peak)
        if result.status == "does not fit":
            self._settle_larger(self._candidates[number], result)

    def _settle_larger(self, smaller: Candidate, result: LayoutResult) -> None:
        for number in self._like[_key_without_microbatches(smaller)]:
            if number not in self._results and needs_more(self._candidates[number], smaller):
                reason = f"at least {result.reason.removeprefix('at least ')}, as with {smaller.command()}"
                self._decide(number, "does not fit", reason)


def _settings_of_all(settings: Mapping[str, Any], layout: Candidate) -> dict[str, Any]:
    """Return the settings that all layouts share, from the settings of one; "sequence" is the whole sequence."""
    own = Candidate({"fsdp": 2, "tp": 2}, 1, 1, "1f1b").settings()
    kept = {key: value for key, value in settings.items() if key not in own}
    return kept | ({"sequence": kept["sequence"] * layout.size("cp")} if "sequence" in kept else {})


def _key_without_microbatches(candidate: Candidate) -> Hashable:
    return tuple(candidate.mesh.items()), candidate.schedule, candidate.reshard, candidate.sequence_parallel


def _key_without_size(layout: Candidate) -> Hashable:
    return _key_without_microbatches(layout), layout.checkpoint


def _is_larger(layout: Candidate, smaller: Candidate, *, recomputes: Candidate, less: Candidate) -> bool:
    """Return whether layouts differ only in a larger microbatch, and one `recomputes` at least as much, one `less`."""
    return (
        layout.micro_batch >= smaller.micro_batch
        and less.checkpoint in _NO_MORE_RECOMPUTATION.get(recomputes.checkpoint, (recomputes.checkpoint,))
        and _key_without_microbatches(layout) == _key_without_microbatches(smaller)
    )


def needs_more(candidate: Candidate, smaller: Candidate) -> bool:
    """Return whether a layout differs from another one only in larger microbatches and fewer recomputed activations.

    Without FSDP2 each microbatch in flight has copies of the weights in autocast's dtype: there must be as many.
    """
    in_flight = [min(item.microbatches, item.size("pp")) for item in (candidate, smaller)]
    has_as_many = candidate.size("fsdp") > 1 or in_flight[0] >= in_flight[1]
    return has_as_many and _is_larger(candidate, smaller, recomputes=smaller, less=candidate)
