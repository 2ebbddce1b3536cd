"""Compare predicted memory with layouts of Llama under ZeRO-1 that ran, or did not fit a GPU.

Run it in tools/, with the checkout on PYTHONPATH: python -m training_runs.layout_memory [--model llama-13B] [--write]

Hagemann et al., "Efficient Parallelization Layouts for Large-Scale Distributed Model Training" (arXiv:2311.05610). Its
saved tensors follow Aleph-Alpha/scaling on GitHub, by the same authors: bfloat16 gradients, float32 weights and moments
divided by ZeRO-1, logits gathered over tp, and the outputs of two microbatches on the last stage. Assumed are a
vocabulary of 128,000, and RMSNorm in float32 where its kernel is not used, as in LLaMA's code.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from error_figures import write_errors
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional as F

from fvflops.devices.devices import find_device
from fvflops.devices.measured_errors import VerdictErrors
from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.storage_lifetimes import Block, MemoryTimeline
from fvflops.plan.plans import plan_step
from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.step_time.step_time_report import judge
from fvflops.zoo.llama import Llama
from fvflops.zoo.megatron_gpt import UnfusedMaskedSoftmax
from training_runs.measured_llama import MeasuredBlock, MeasuredLlamaConfig, SeparateRMSNorm
from training_runs.rows import TrainingRun, read_runs

DEVICE = find_device("A100 SXM 80GB")


def shard_optimizer(timeline: MemoryTimeline, ranks: int) -> MemoryTimeline:
    """Return the timeline with the optimizer's state and its step's allocations divided among data-parallel ranks.

    Stands in for ZeRO-1 (Rajbhandari et al., arXiv:1910.02054, section 5.1): float32 weights are the optimizer's state
    too. Gradients stay whole.
    """
    events = timeline.trace.events or ()

    def is_sharded(block: Block) -> bool:
        return block.kind == "optimizer state" or (block.begin >= 0 and events[block.begin].phase == "optimizer")

    blocks = (item._replace(nbytes=-(-item.nbytes // ranks)) if is_sharded(item) else item for item in timeline.blocks)
    return replace(timeline, blocks=tuple(blocks))


class Needed(NamedTuple):
    """Memory of a pipeline's peak-memory rank, in bytes: reserved by torch's allocator, and in use at the peak."""

    reserved: int
    allocated: int
    rank: int
    phase: str


def read_needed(plans: Sequence[RankPlan], replicas: int, *, outputs: int) -> Needed:
    """Return the memory of the rank that needs most; ranks that do the same are read once.

    `outputs` are bytes that the last rank of the pipeline has besides.
    """
    known: dict[Hashable, Needed] = {}
    for plan in plans:
        added = outputs if plan is plans[-1] else 0
        key = id(plan.recorded.events), tuple(plan.step.passes[action].begin for action in plan.step.actions), added
        if key not in known:
            timeline = shard_optimizer(plan.memory(), replicas)
            kept = Block(None, added, "activation", "", "", -1, None)
            timeline = replace(timeline, blocks=(kept, *timeline.blocks))
            reserved = reserved_memory(timeline, expandable_segments=True).peak
            known[key] = Needed(reserved, timeline.peak, plan.rank, timeline.at_peak().phase)
    return max(known.values(), key=lambda needed: needed.reserved)


def read_layouts() -> list[TrainingRun]:
    return [run for run in read_runs() if run.publisher == "layout"]


def has_run(run: TrainingRun) -> bool:
    return (run.seconds or 0.0) < math.inf


def planned_microbatches(run: TrainingRun) -> int:
    """Return as many as a step has, or one more than stages: then the pipeline is full while there are gradients."""
    return min(run.microbatches or 1, run.mesh.get("pp", 1) + 1)


class LayoutBlock(MeasuredBlock):
    """A layer of the study; the softmax of separate ops is in float32."""

    def __init__(self, config: MeasuredLlamaConfig) -> None:
        super().__init__(config)
        if config.attention == "separate_ops":
            self.self_attn.softmax = UnfusedMaskedSoftmax()


class LayoutLlama(Llama):
    """A Llama of the study, which returns its logits."""

    block = LayoutBlock

    def __init__(self, config: MeasuredLlamaConfig) -> None:
        super().__init__(config)
        if not config.fused_norms:
            self.norm = SeparateRMSNorm(config.hidden_size, eps=config.norm_eps)


def average_loss(logits: Tensor) -> Tensor:
    logits = logits.flatten(0, 1)
    labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.float(), labels, reduction="none").mean()


def plan_layout(run: TrainingRun) -> tuple[RankPlan, ...]:
    """Return the plans of a pipeline, without data parallelism."""
    assert isinstance(run.config, MeasuredLlamaConfig) and run.micro_batch is not None
    tokens = torch.ones(run.micro_batch, run.sequence, dtype=torch.int64)
    with torch.device("meta"):
        model = LayoutLlama(run.config).bfloat16()
    return plan_step(
        model,
        (tokens,),
        mesh={**run.mesh, "dp": 1},
        microbatches=planned_microbatches(run),
        stage_layers=run.stage_layers,
        sequence_parallel=run.sequence_parallel,
        checkpoint="full" if run.checkpointing == "full" else (),
        optimizer=partial(MasterWeights, make=partial(torch.optim.AdamW, foreach=True)),
        loss=average_loss,
        device="cuda",
    ).ranks


class Judged(NamedTuple):
    """A layout with its prediction."""

    run: TrainingRun
    needed: Needed
    fits: bool

    @property
    def is_right(self) -> bool:
        return self.fits == has_run(self.run)

    def __str__(self) -> str:
        run, (tp, pp) = self.run, (self.run.mesh.get(axis, 1) for axis in ("tp", "pp"))
        sequence = ", sequence parallel" if run.sequence_parallel else ""
        return (
            f"{run.name} {run.sequence} on {run.gpus}: micro batch {run.micro_batch}, tp {tp}, pp {pp}{sequence}, "
            f"{run.kernel}, checkpointing {run.checkpointing}"
        )


_PLANNED = ("config", "sequence", "micro_batch", "checkpointing", "sequence_parallel", "stage_layers")


def judge_layouts(runs: Iterable[TrainingRun]) -> Iterator[Judged]:
    """Yield the verdicts; runs that differ in their replicas only are planned once."""
    groups: dict[Hashable, list[TrainingRun]] = defaultdict(list)
    for run in runs:
        key = (
            *(getattr(run, name) for name in _PLANNED),
            run.mesh.get("tp"),
            run.mesh.get("pp"),
            planned_microbatches(run),
        )
        groups[key].append(run)
    for number, group in enumerate(groups.values(), start=1):
        plans = plan_layout(group[0])
        needed: dict[int, Needed] = {}
        for run in group:
            if run.replicas not in needed:
                # An earlier microbatch's logits in bfloat16, which the next one's replace.
                logits = 2 * run.config.vocab_size * (run.micro_batch or 0) * run.sequence
                stale = logits * (planned_microbatches(run) > 1)
                needed[run.replicas] = read_needed(plans, run.replicas, outputs=stale)
            own = needed[run.replicas]
            yield Judged(run, own, bool(judge(own.reserved, DEVICE, run.mesh).fits))
        if number % 20 == 0:
            print(f"{number} of {len(groups)} layouts, {time.process_time():.0f} s of CPU", file=sys.stderr)


def count_verdicts(judged: Sequence[Judged]) -> VerdictErrors:
    """Return how many verdicts are right, of layouts that are said to fit and of others."""
    counts = Counter((item.fits, item.is_right) for item in judged)
    return VerdictErrors(
        source="Llama of 7B to 65B on A100s",
        fit=counts[True, True] + counts[True, False],
        fit_right=counts[True, True],
        too_large=counts[False, True] + counts[False, False],
        too_large_right=counts[False, True],
    )


def describe_verdicts(judged: Sequence[Judged]) -> str:
    """Return how many verdicts are right by model and by kernel, the wrong ones, and the best layouts refused."""
    kinds: dict[str, Callable[[Judged], str]] = {
        "model": lambda item: item.run.name,
        "kernel": lambda item: item.run.kernel,
        "measured": lambda item: "ran" if has_run(item.run) else "out of memory",
        "all": lambda item: "all",
    }
    rows = []
    for kind, name_of in kinds.items():
        total, right = (Counter(map(name_of, items)) for items in (judged, [item for item in judged if item.is_right]))
        rows += [(kind, name, right[name], total[name], f"{right[name] / total[name]:.1%}") for name in sorted(total)]
    wrong = [
        (
            *(f"{item.needed.reserved / 1e9:.1f}", f"{item.needed.allocated / 1e9:.1f}"),
            *(f"{item.needed.rank}, {item.needed.phase}", kinds["measured"](item), item),
        )
        for item in sorted(judged, key=lambda item: item.needed.reserved)
        if not item.is_right
    ]
    best: dict[object, Judged] = {}
    for item in sorted(judged, key=lambda item: item.run.seconds or 0.0):
        if has_run(item.run):
            best.setdefault((item.run.name, item.run.sequence, item.run.gpus), item)
    refused = [str(item) for item in best.values() if not item.fits]
    return "\n\n".join(
        [
            tabulate(rows, ["by", "", "right", "of", "share"]),
            "Wrong:\n" + tabulate(wrong, ["reserved, GB", "allocated", "peak-memory rank", "measured", "layout"]),
            f"Best timed layouts that are refused: {', '.join(refused) or 'none'}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", help="only layouts of this model; may be repeated")
    parser.add_argument("--write", action="store_true", help="write the number of right verdicts, which reports show")
    arguments = parser.parse_args()
    runs = [run for run in read_layouts() if arguments.model is None or run.name in arguments.model]
    judged = list(judge_layouts(runs))
    print(describe_verdicts(judged))
    if arguments.write:
        write_errors("memory", [count_verdicts(judged)])


if __name__ == "__main__":
    main()
