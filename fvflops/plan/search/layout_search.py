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
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_run import bind_inputs
from fvflops.capture.run import ExecutionError, Loss
from fvflops.capture.training_step import OptimizerMaker
from fvflops.devices.devices import Device
from fvflops.plan.memory.step_settings import OWN_CHECKPOINTING
from fvflops.plan.parallel_axes import count_ranks
from fvflops.plan.plan_options import PlanError, PlanOptions
from fvflops.plan.search.candidates import Candidate, LayoutResult, LayoutSearch, Space, in_order
from fvflops.plan.search.evaluate import (
    MicrobatchCost,
    Workload,
    describe_shortage,
    least_peak,
    least_seconds,
)
from fvflops.plan.step_time.buckets import check_bucket_cap
from fvflops.plan.step_time.calibration import Efficiency, Network, resolve_timing
from fvflops.text import require_int
from fvflops.units import format_seconds

Numbered = Iterator[tuple[int, Any]]
# id → function that forked processes call, so that the model need not be pickled.
_SHARED: dict[int, Callable[[Any], Any]] = {}


def _run_in_pool(function: Callable[[Any], Any], pool: ProcessPoolExecutor, jobs: int, pending: Numbered) -> Numbered:
    running: dict[Future[Any], int] = {}
    while True:
        while len(running) < jobs and (call := next(pending, None)) is not None:
            running[pool.submit(_call, id(function), call[1])] = call[0]
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield running.pop(future), future.result()


@contextmanager
def workers(function: Callable[[Any], Any], jobs: int) -> Iterator[Callable[[Numbered], Numbered]]:
    """Start processes that call `function`; with one job or without fork, this process calls it.

    So it does, with a warning, if its autograd has threads, which forked processes would lack. The yielded function
    takes numbered arguments, which are read when a call can start, and yields the number and the result of each call.
    """

    def run_here(pending: Numbered) -> Numbered:
        return ((number, function(item)) for number, item in pending)

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
                stacklevel=4,
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


def search_layouts(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    gpus: int,
    global_batch: int,
    device: str | Device,
    network: str | Network | None = None,
    efficiency: Efficiency | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    best: int = 20,
    loss: Loss | None = None,
    optimizer: OptimizerMaker | None = ADAMW,
    precision: str | None = None,
    kernels: str | None = "cuda",
    fused: Collection[str] = (),
    bucket_cap_mb: float | None = None,
    jobs: int = 1,
    on_progress: Progress | None = None,
    **options: Any,
) -> LayoutSearch:
    """Return the layouts with the fastest training steps that fit a number of GPUs, by planning and simulating them.

    The search covers all combinations of `CHOICES`, where `choices` replaces the values of some, such as
    {"pp": [1, 2]}, and for fsdp both ZeRO-2 and ZeRO-3. `args` and `kwargs` are the inputs of a replica, whose first
    dimension is replaced by the size of a microbatch; `global_batch` is the number of samples in a step of all GPUs.
    A layer is recorded once for each way to compute a microbatch, which gives lower bounds of the time and memory of
    each layout. Layouts are then planned as by `plan_step` and simulated as by `estimate_step`, lowest bound first,
    until the `best` fastest are known. `jobs` processes share the work. The other arguments are as for `plan_step` and
    `estimate_step`. A model that fails in every layout raises PlanError.

    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> few = {"tp": [1, 2], "pp": [1], "micro-batch": [1], "checkpoint": ["none"], "dp": [1]}
    >>> search = search_layouts(
    ...     build("llama_tiny", device="meta"), tokens, gpus=4, global_batch=4, device="H100", choices=few)
    >>> search.best()[0].candidate.command()
    '--mesh fsdp=4 --batch 1 --microbatches 1 --no-reshard-after-forward'
    """
    require_int("best", best, least=1)
    require_int("jobs", jobs, least=1)
    check_bucket_cap(bucket_cap_mb)
    start = time.monotonic()
    options_of_time: dict[str, Any] = {"fused": tuple(fused), "bucket_cap_mb": bucket_cap_mb}
    timing = resolve_timing(device, network, efficiency, gpus, **options_of_time)
    shared = PlanOptions(mesh={}, loss=loss, optimizer=optimizer, precision=precision, device=kernels, **options)
    inputs = bind_inputs(model, args, kwargs)
    workload = Workload(model, inputs, shared, timing)
    not_tried = _find_unknown_axes(workload, choices or {})
    node = _ONE_NODE if timing.network is None else timing.network.gpus_per_node
    space = Space(
        *(gpus, min(node, gpus), global_batch, workload.layers, workload.sequence_parallel),
        choices={**(choices or {}), **dict.fromkeys(not_tried, (1,))},
    )
    candidates = space.list_candidates()
    search = _Search(workload, candidates, best, on_progress or (lambda what, left: None))
    results = search.run(jobs)
    if all(result.status == "failed" for result in results):
        raise PlanError(f"no layout can be planned; the first one, {candidates[0].command()}: {results[0].reason}")
    return LayoutSearch(
        results=in_order(results),
        gpus=gpus,
        global_batch=global_batch,
        wanted=best,
        device=timing.device,
        network=timing.network,
        efficiency=timing.efficiency,
        bucket_cap_mb=bucket_cap_mb,
        seconds=time.monotonic() - start,
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
    """The layouts of a search, with their bounds and results."""

    def __init__(self, workload: Workload, candidates: Sequence[Candidate], best: int, progress: Progress) -> None:
        self._workload = workload
        self._candidates = candidates
        self._best = best
        self._gpus = count_ranks(candidates[0].mesh)
        self._progress = progress
        self._results: dict[int, LayoutResult] = {}
        self._bounds: dict[int, tuple[float, int]] = {}
        self._like: dict[Hashable, list[int]] = {}  # layouts that differ in microbatches and recomputation only
        for number, candidate in enumerate(candidates):
            self._like.setdefault(_key_without_microbatches(candidate), []).append(number)
        self._costs: dict[str, MicrobatchCost | str] = {}  # of the largest microbatches so far
        self.settings: dict[str, Any] = {}

    def run(self, jobs: int) -> list[LayoutResult]:
        """Return the result of each layout, in the order of the candidates."""
        with workers(self._run, jobs) as run:
            # Of larger microbatches only those are recorded that may fit.
            for size in sorted({candidate.micro_batch for candidate in self._candidates}):
                self._measure([n for n, candidate in enumerate(self._candidates) if candidate.micro_batch == size], run)
            for number, result in run(self._list_pending()):
                self._add(number, result)
        return [self._results[number] for number in range(len(self._candidates))]

    def _run(self, item: Candidate | tuple[Candidate, float | None]) -> Any:
        """Measure or evaluate a layout; if it does not suit the model, return the reason: the search goes on."""
        try:
            if isinstance(item, Candidate):
                return self._workload.measure(item)
            return self._workload.evaluate(*item)
        except (ValueError, TypeError, RuntimeError, ExecutionError) as error:
            return str(error).partition("\n")[0] or type(error).__name__

    def _measure(self, numbers: Sequence[int], run: Callable[[Numbered], Numbered]) -> None:
        """Record a microbatch for some layouts, unless these are settled, and compute their bounds."""
        self._bound_by_smaller(numbers)
        measured_on = {
            number: self._candidates[number].measured_on(self._gpus)
            for number in numbers
            if number not in self._results
        }
        layouts = list({layout.command(): layout for layout in measured_on.values()}.values())
        costs: dict[str, MicrobatchCost | str] = {}
        for index, cost in run(enumerate(layouts)):
            costs[layouts[index].command()] = cost
            self._costs[replace(layouts[index], micro_batch=1).command()] = cost
            if not isinstance(cost, str):
                self.settings = self.settings or _settings_of_all(cost.settings, layouts[index])
                if cost.settings.get("checkpointing") == OWN_CHECKPOINTING:
                    self.settings["checkpointing"] = OWN_CHECKPOINTING
            self._progress("recording", len(layouts) - len(costs))
        self._bound({number: costs[layout.command()] for number, layout in measured_on.items()})
        for number in numbers:
            if number in self._bounds and number in self._results:
                self._settle_larger(self._candidates[number], self._results[number])

    def _bound_by_smaller(self, numbers: Sequence[int]) -> None:
        """Settle layouts that do not fit with the memory of the largest microbatch that was recorded so far."""
        workload = self._workload
        for number in numbers:
            candidate = self._candidates[number]
            cost = self._costs.get(replace(candidate.measured_on(self._gpus), micro_batch=1).command(), "")
            if number not in self._results and not isinstance(cost, str):
                peak = least_peak(candidate, cost, workload.layers)
                lack = describe_shortage(peak, workload.timing.device, candidate.mesh, at_least=True)
                if lack:
                    self._bounds[number] = 0.0, peak
                    self._decide(number, "does not fit", lack)

    def _bound(self, costs: Mapping[int, MicrobatchCost | str]) -> None:
        """Compute the bounds of layouts; settle layouts whose recording failed or whose memory cannot fit."""
        workload = self._workload
        for number, cost in costs.items():
            candidate = self._candidates[number]
            if isinstance(cost, str):
                self._results[number] = LayoutResult(candidate=candidate, status="failed", reason=cost)
                continue
            seconds = least_seconds(candidate, cost, workload.timing.network)
            peak = least_peak(candidate, cost, workload.layers)
            self._bounds[number] = seconds, peak
            lack = describe_shortage(peak, workload.timing.device, candidate.mesh, at_least=True)
            if lack:
                self._decide(number, "does not fit", lack)

    def _decide(self, number: int, status: str, reason: str) -> None:
        seconds, peak = self._bounds[number]
        self._results[number] = LayoutResult(
            candidate=self._candidates[number],
            status=status,
            reason=reason,
            least_seconds=seconds,
            least_peak=peak,
        )

    def _list_pending(self) -> Iterator[tuple[int, tuple[Candidate, float | None]]]:
        """Yield the layouts to plan, lowest bound first; settle layouts that cannot be among the best."""
        order = sorted(self._bounds, key=self._bounds.__getitem__)
        for position, number in enumerate(order):
            if number in self._results:
                continue
            limit, seconds = self._find_limit(), self._bounds[number][0]
            if limit is not None and seconds >= limit:
                self._decide(number, "slower", f"at least {format_seconds(seconds)}")
                continue
            self._progress("planning", sum(item not in self._results for item in order[position:]))
            yield number, (self._candidates[number], limit)

    def _find_limit(self) -> float | None:
        """Return the time of the slowest of the best layouts, None while fewer are known."""
        times = sorted(item.seconds for item in self._results.values() if item.status == "fits" and item.seconds)
        return times[self._best - 1] if len(times) >= self._best else None

    def _add(self, number: int, result: LayoutResult | str) -> None:
        candidate = self._candidates[number]
        if isinstance(result, str):
            self._decide(number, "failed", result)
            return
        seconds, peak = self._bounds[number]
        self._results[number] = replace(result, least_seconds=seconds, least_peak=peak)
        if result.status == "does not fit":
            self._settle_larger(candidate, result)

    def _settle_larger(self, smaller: Candidate, result: LayoutResult) -> None:
        """Settle the layouts that need at least as much memory as one that does not fit."""
        for number in self._like[_key_without_microbatches(smaller)]:
            if number not in self._results and needs_more(self._candidates[number], smaller):
                self._bounds.setdefault(number, (0.0, result.least_peak))
                reason = f"at least {result.reason.removeprefix('at least ')}, as with {smaller.command()}"
                self._decide(number, "does not fit", reason)


def _settings_of_all(settings: Mapping[str, Any], layout: Candidate) -> dict[str, Any]:
    """Return the settings that all layouts share, from the settings of one; "sequence" is the whole sequence."""
    own = {"schedule", "stages_per_rank", *Candidate({"fsdp": 2, "tp": 2}, 1, 1).settings()}
    kept = {key: value for key, value in settings.items() if key not in own}
    return kept | ({"sequence": kept["sequence"] * layout.size("cp")} if "sequence" in kept else {})


def _key_without_microbatches(candidate: Candidate) -> Hashable:
    return tuple(candidate.mesh.items()), candidate.schedule, candidate.reshard, candidate.sequence_parallel


def needs_more(candidate: Candidate, smaller: Candidate) -> bool:
    """Return whether a layout differs from another one only in larger microbatches and fewer recomputed activations.

    Without FSDP2 each microbatch in flight has copies of the weights in autocast's dtype: there must be as many.
    """
    in_flight = [min(item.microbatches, item.size("pp")) for item in (candidate, smaller)]
    return (
        _key_without_microbatches(candidate) == _key_without_microbatches(smaller)
        and candidate.micro_batch >= smaller.micro_batch
        and candidate.checkpoint in _NO_MORE_RECOMPUTATION.get(smaller.checkpoint, (smaller.checkpoint,))
        and (candidate.size("fsdp") > 1 or in_flight[0] >= in_flight[1])
    )
