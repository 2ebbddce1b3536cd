"""Compare predicted memory with runs under ZeRO-1: layouts that ran or did not fit, and BigScience's figures.

Run it in tools/, with the checkout on PYTHONPATH: python -m training_runs.layout_memory [--model llama-13B]
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
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
from fvflops.zoo.megatron_gpt import MegatronGPT, MegatronGPTConfig, UnfusedMaskedSoftmax
from training_runs.measured_llama import MeasuredBlock, MeasuredLlamaConfig, SeparateRMSNorm
from training_runs.rows import FOLDER
from training_runs.run_record import TrainingRun
from training_runs.study_rows import SIZES, read_layout

DEVICE = find_device("A100 SXM 80GB")
_ADAMW = partial(torch.optim.AdamW, foreach=True)


# --- ZeRO-1 -----------------------------------------------------------------------------------------------------------


def shard_optimizer(timeline: MemoryTimeline, ranks: int) -> MemoryTimeline:
    """Return the timeline with the optimizer's state and its step's allocations divided among data-parallel ranks.

    Stands in for ZeRO-1 (Rajbhandari et al., arXiv:1910.02054, section 5.1), which the runs' plans do not have: their
    float32 weights are the optimizer's state too. Gradients stay whole.
    """
    events = timeline.trace.events or ()

    def is_sharded(block: Block) -> bool:
        return block.kind == "optimizer state" or (block.begin >= 0 and events[block.begin].phase == "optimizer")

    blocks = (item._replace(nbytes=-(-item.nbytes // ranks)) if is_sharded(item) else item for item in timeline.blocks)
    return replace(timeline, blocks=tuple(blocks))


class Needed(NamedTuple):
    """The bytes that torch's allocator reserves on the fullest rank of a pipeline, and of those in use at the peak."""

    reserved: int
    allocated: int
    rank: int
    phase: str
    by_kind: dict[str, int]


def read_needed(plans: Sequence[RankPlan], replicas: int, *, outputs: int = 0) -> Needed:
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
            peak = timeline.at_peak()
            reserved = reserved_memory(timeline, expandable_segments=True).peak
            known[key] = Needed(reserved, timeline.peak, plan.rank, peak.phase, dict(peak.by_kind))
    return max(known.values(), key=lambda needed: needed.reserved)


# --- layout study -----------------------------------------------------------------------------------------------------
# Hagemann et al., "Efficient Parallelization Layouts for Large-Scale Distributed Model Training" (arXiv:2311.05610).
# Its saved tensors follow Aleph-Alpha/scaling on GitHub, by the same authors: bfloat16 gradients, float32 weights and
# moments divided by ZeRO-1, logits gathered over tp, and the outputs of two microbatches on the last stage. Assumed are
# a vocabulary of 128,000, and RMSNorm in float32 where its kernel is not used, as in LLaMA's code.


class Layout(NamedTuple):
    """A run of the study, and its kernel of attention by the study's name."""

    run: TrainingRun
    kernel: str

    @property
    def ran(self) -> bool:
        return self.run.value < math.inf

    @property
    def microbatches(self) -> int:
        """As many as a step has, or one more than stages: then the pipeline is full while there are gradients."""
        return min(self.run.microbatches or 1, self.run.mesh.get("pp", 1) + 1)

    @property
    def key(self) -> Hashable:
        """Key of runs that differ in their number of replicas only."""
        run = self.run
        names = ("config", "sequence", "micro_batch", "checkpointing", "sequence_parallel", "stage_layers")
        sizes = run.mesh.get("tp"), run.mesh.get("pp"), self.microbatches
        return *(getattr(run, name) for name in names), *sizes

    @property
    def stale_logits(self) -> int:
        """The bytes of an earlier microbatch's logits, in bfloat16, which the next one's replace."""
        run = self.run
        return 2 * run.config.vocab_size * (run.micro_batch or 0) * run.sequence * (self.microbatches > 1)

    @property
    def group(self) -> tuple[str, int, int]:
        """The runs that compete with each other."""
        return self.run.name, self.run.sequence, self.run.gpus

    def __str__(self) -> str:
        run, (tp, pp) = self.run, (self.run.mesh.get(axis, 1) for axis in ("tp", "pp"))
        sequence = ", sequence parallel" if run.sequence_parallel else ""
        return (
            f"{run.name} {run.sequence} on {run.gpus}: micro batch {run.micro_batch}, tp {tp}, pp {pp}{sequence}, "
            f"{self.kernel}, checkpointing {run.checkpointing}"
        )


def read_layouts(path: Path) -> list[Layout]:
    """Return the runs with a verdict: those without the kernel have none."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [
            Layout(read_layout("layout study", rows.line_num, row), row["kernel"])
            for row in rows
            if row["status"] in ("ok", "oom")
        ]


class LayoutBlock(MeasuredBlock):
    """A layer of the study; the softmax of separate ops is in float32."""

    def __init__(self, config: MeasuredLlamaConfig) -> None:
        super().__init__(config)
        if config.attention == "separate ops":
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


def plan_layout(layout: Layout) -> tuple[RankPlan, ...]:
    """Return the plans of a pipeline, without data parallelism."""
    run = layout.run
    assert isinstance(run.config, MeasuredLlamaConfig) and run.micro_batch is not None
    tokens = torch.ones(run.micro_batch, run.sequence, dtype=torch.int64)
    with torch.device("meta"):
        model = LayoutLlama(run.config).bfloat16()
    return plan_step(
        model,
        (tokens,),
        mesh={**run.mesh, "dp": 1},
        microbatches=layout.microbatches,
        stage_layers=run.stage_layers,
        sequence_parallel=run.sequence_parallel,
        checkpoint="full" if run.checkpointing == "full" else (),
        optimizer=partial(MasterWeights, make=_ADAMW),
        loss=average_loss,
        device="cuda",
    ).ranks


class Judged(NamedTuple):
    """A layout with its prediction."""

    layout: Layout
    needed: Needed
    fits: bool

    @property
    def is_right(self) -> bool:
        return self.fits == self.layout.ran


def judge_layouts(layouts: Iterable[Layout]) -> Iterator[Judged]:
    """Yield the verdicts; runs that differ in their replicas only are planned once."""
    groups: dict[Hashable, list[Layout]] = defaultdict(list)
    for layout in layouts:
        groups[layout.key].append(layout)
    for number, group in enumerate(groups.values(), start=1):
        plans = plan_layout(group[0])
        needed: dict[int, Needed] = {}
        for layout in group:
            replicas = layout.run.replicas
            if replicas not in needed:
                needed[replicas] = read_needed(plans, replicas, outputs=layout.stale_logits)
            own = needed[replicas]
            yield Judged(layout, own, bool(judge(own.reserved, DEVICE, layout.run.mesh).fits))
        if number % 20 == 0:
            print(f"{number} of {len(groups)} layouts, {time.process_time():.0f} s of CPU", file=sys.stderr)


def count_verdicts(judged: Sequence[Judged]) -> VerdictErrors:
    """Return how many verdicts are right, of layouts that are said to fit and of others."""
    counts = Counter((item.fits, item.is_right) for item in judged)
    return VerdictErrors(
        source="Llama of 7B to 65B on A100s",
        fit=counts[True, True] + counts[True, False],
        fit_right=counts[True, True],
        unfit=counts[False, True] + counts[False, False],
        unfit_right=counts[False, True],
    )


def describe_verdicts(judged: Sequence[Judged]) -> str:
    """Return how many verdicts are right by model and by kernel, the wrong ones, and the best layouts refused."""
    kinds: dict[str, Callable[[Judged], str]] = {
        "model": lambda item: item.layout.run.name,
        "kernel": lambda item: item.layout.kernel,
        "measured": lambda item: "ran" if item.layout.ran else "out of memory",
        "all": lambda item: "all",
    }
    rows = []
    for kind, name_of in kinds.items():
        total, right = (Counter(map(name_of, items)) for items in (judged, [item for item in judged if item.is_right]))
        rows += [(kind, name, right[name], total[name], f"{right[name] / total[name]:.1%}") for name in sorted(total)]
    wrong = [
        (
            f"{item.needed.reserved / 1e9:.1f}",
            f"{item.needed.allocated / 1e9:.1f}",
            f"{item.needed.rank}, {item.needed.phase}",
            "ran" if item.layout.ran else "out of memory",
            item.layout,
        )
        for item in sorted(judged, key=lambda item: item.needed.reserved)
        if not item.is_right
    ]
    refused = [item.layout for item in _best(judged) if not item.fits]
    return "\n\n".join(
        [
            tabulate(rows, ["by", "", "right", "of", "share"]),
            "Wrong:\n" + tabulate(wrong, ["reserved, GB", "allocated", "fullest rank", "measured", "layout"]),
            f"Best timed layouts that are refused: {', '.join(map(str, refused)) or 'none'}.",
        ]
    )


def _best(judged: Iterable[Judged]) -> list[Judged]:
    best: dict[object, Judged] = {}
    for item in sorted(judged, key=lambda item: item.layout.run.value):
        if item.layout.ran:
            best.setdefault(item.layout.group, item)
    return list(best.values())


# --- BigScience -------------------------------------------------------------------------------------------------------
# Trials of 2022 for the 176B model (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md), by
# Megatron-DeepSpeed: bfloat16 with gradients accumulated in float32, full checkpointing.


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial: `memory` in GB of a GPU."""

    config: MegatronGPTConfig
    tp: int
    pp: int
    replicas: int
    micro_batch: int
    memory: float


_TRIAL = re.compile(r"gpt (\d+)x(\d+),\d+,tp(\d+) pp(\d+) dp(\d+) mb(\d+) heads(\d+)")


def read_trials(path: Path) -> list[Trial]:
    """Return BigScience's runs with memory."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["memory_gb"] and row["source"].startswith("BigScience")]
    trials = []
    for row in rows:
        found = _TRIAL.fullmatch(",".join(row[name] for name in ("model", "gpus", "layout")))
        if found is None:
            raise ValueError(f"{path}: the model or layout of {row} is not known")
        layers, hidden, tp, pp, replicas, micro_batch, heads = map(int, found.groups())
        config = MegatronGPTConfig(
            vocab_size=50_257,
            vocab_multiple=128 * tp,
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        trials.append(Trial(config, tp, pp, replicas, micro_batch, float(row["memory_gb"])))
    return trials


def compare_trial(trial: Trial) -> tuple[str, ...]:
    """Return a row of the table: the trial, predicted and measured GB, and the error."""
    with torch.device("meta"):
        model = MegatronGPT(trial.config).bfloat16()
    tokens = torch.ones(trial.micro_batch, trial.config.positions, dtype=torch.int64)
    plan = plan_step(
        model,
        (tokens, tokens),
        mesh={"pp": trial.pp, "tp": trial.tp},
        microbatches=trial.pp + 1,
        checkpoint="full",
        optimizer=partial(MasterWeights, make=_ADAMW),
        gradient_dtype="fp32",
        device="cuda",
    )
    needed = read_needed(plan.ranks, trial.replicas)
    name = f"{trial.config.layers} x {trial.config.hidden_size}, {trial.config.heads} heads"
    mesh = f"pp {trial.pp}, dp {trial.replicas}, tp {trial.tp}, micro batch {trial.micro_batch}"
    total = needed.reserved + DEVICE.reserve({"pp": trial.pp, "dp": trial.replicas, "tp": trial.tp})
    return (
        f"{name}: {mesh}",
        f"{needed.allocated / 1e9:.1f}",
        f"{needed.reserved / 1e9:.1f}",
        f"{total / 1e9:.1f}",
        f"{trial.memory:.0f}",
        f"{total / 1e9 / trial.memory - 1:+.1%}",
    )


_TRIAL_HEADS = ["trial", "allocated, GB", "reserved", "with context and NCCL", "measured", "error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the files (tests/data/training_times)")
    parser.add_argument("--model", choices=SIZES, action="append", help="only layouts of this model; may be repeated")
    parser.add_argument("--write", action="store_true", help="write the number of right verdicts, which reports show")
    parser.add_argument("--trials", action="store_true", help="only BigScience's trials")
    arguments = parser.parse_args()
    if not arguments.trials:
        layouts = read_layouts(arguments.data / "layout_study_a100.csv")
        chosen = [layout for layout in layouts if arguments.model is None or layout.run.name in arguments.model]
        judged = list(judge_layouts(chosen))
        print(describe_verdicts(judged), end="\n\n")
        if arguments.write:
            write_errors("memory", [count_verdicts(judged)])
    trials = dict.fromkeys(read_trials(arguments.data / "measured_runs.csv"))
    print(tabulate(map(compare_trial, trials), _TRIAL_HEADS))


if __name__ == "__main__":
    main()
