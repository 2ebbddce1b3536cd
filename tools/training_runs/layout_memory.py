"""Compare predicted memory with runs under ZeRO-1: layouts that ran or did not fit, and BigScience's figures.

Run it in tools/, with the checkout on PYTHONPATH: python -m training_runs.layout_memory [--model llama-13B]
"""

from __future__ import annotations

import argparse
import csv
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
from torch import Tensor, nn
from torch.nn import functional as F

from fvflops.devices.devices import find_device
from fvflops.devices.measured_errors import VerdictErrors
from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.storage_lifetimes import Block, MemoryTimeline
from fvflops.plan.plans import plan_step
from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.step_time.step_time_report import judge
from fvflops.zoo.decoder_parts import KVCache
from fvflops.zoo.llama import Attention, Llama, LlamaConfig, rotate
from fvflops.zoo.megatron_gpt import MegatronGPT, MegatronGPTConfig
from training_runs.measured_llama import SeparateRMSNorm
from training_runs.study_rows import SEQUENCES, SIZES, divide_evenly

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "training_times"
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


@dataclass(frozen=True, slots=True)
class Layout:
    """A run of the study: `seconds` of a step, None where it ran out of memory."""

    model: str
    sequence: int
    gpus: int
    seconds: float | None
    checkpointing: str
    kernel: str
    micro_batch: int
    tp: int
    pp: int
    sequence_parallel: bool

    @property
    def replicas(self) -> int:
        return self.gpus // (self.tp * self.pp)

    @property
    def mesh(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.replicas, "tp": self.tp}

    @property
    def microbatches(self) -> int:
        """As many as a step has, or one more than stages: then the pipeline is full while there are gradients."""
        return min(SEQUENCES[self.sequence] // (self.replicas * self.micro_batch), self.pp + 1)

    @property
    def stage_layers(self) -> tuple[int, ...] | None:
        return divide_evenly(MODELS[self.model].layers, self.pp)

    @property
    def key(self) -> Hashable:
        """Key of runs that differ in their number of replicas only."""
        attention = self.kernel if self.kernel in ("torch", "fused") else "flash"
        kernel = f"{attention}{_RMS if _RMS in self.kernel else ''}"
        return replace(self, gpus=self.tp * self.pp, seconds=None, kernel=kernel), self.microbatches

    @property
    def stale_logits(self) -> int:
        """The bytes of an earlier microbatch's logits, in bfloat16, which the next one's replace."""
        return 2 * MODELS[self.model].vocab_size * self.micro_batch * self.sequence * (self.microbatches > 1)

    @property
    def group(self) -> tuple[str, int, int]:
        """The runs that compete with each other."""
        return self.model, self.sequence, self.gpus

    def __str__(self) -> str:
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        return (
            f"{self.model} {self.sequence} on {self.gpus}: micro batch {self.micro_batch}, tp {self.tp}, pp {self.pp}"
            f"{sequence}, {self.kernel}, checkpointing {self.checkpointing}"
        )


def read_layouts(path: Path) -> list[Layout]:
    """Return the runs with a verdict: those without the kernel have none."""
    with path.open(newline="") as file:
        return [
            Layout(
                model=row["model"],
                sequence=int(row["sequence"]),
                gpus=int(row["gpus"]),
                seconds=None if row["status"] == "oom" else float(row["step_s"]),
                checkpointing=row["checkpointing"],
                kernel=row["kernel"],
                micro_batch=int(row["micro_batch"]),
                tp=int(row["tp"]),
                pp=int(row["pp"]),
                sequence_parallel=row["sequence_parallel"] == "True",
            )
            for row in csv.DictReader(file)
            if row["status"] in ("ok", "oom")
        ]


MODELS = {
    name: LlamaConfig(
        vocab_size=128_000, layers=layers, hidden_size=hidden, heads=heads, kv_heads=heads, intermediate_size=width
    )
    for name, (layers, hidden, heads, width) in SIZES.items()
}
_RMS = " + RMS kernel"


class ScoredAttention(Attention):
    """Attention that writes its scores to memory; with `fused`, mask and softmax are one kernel."""

    fused = False

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, n = rotate(q, cos, sin), rotate(k, cos, sin), x.shape[1]
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_size**-0.5
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu_(1)
        if self.fused:
            scores.detach().masked_fill_(future, float("-inf"))
        else:
            scores = scores.float().masked_fill(future, -10_000.0)
        out = torch.matmul(scores.softmax(-1).to(v.dtype), v)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


class FusedScoredAttention(ScoredAttention):
    fused = True


_ATTENTION = {"torch": ScoredAttention, "fused": FusedScoredAttention}


def build_layout(layout: Layout) -> nn.Module:
    """Return the model on the meta device, with the kernels of the run."""
    config = MODELS[layout.model]
    with torch.device("meta"):
        model = Llama(config).bfloat16()
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.RMSNorm) and _RMS not in layout.kernel:
                model.set_submodule(name, SeparateRMSNorm(config.hidden_size, eps=config.norm_eps).bfloat16())
            elif isinstance(module, Attention) and layout.kernel in _ATTENTION:
                model.set_submodule(name, _ATTENTION[layout.kernel](config).bfloat16())
    return model


def average_loss(logits: Tensor) -> Tensor:
    logits = logits.flatten(0, 1)
    labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.float(), labels, reduction="none").mean()


def plan_layout(layout: Layout) -> tuple[RankPlan, ...]:
    """Return the plans of a pipeline, without data parallelism."""
    tokens = torch.ones(layout.micro_batch, layout.sequence, dtype=torch.int64)
    return plan_step(
        build_layout(layout),
        (tokens,),
        mesh={**layout.mesh, "dp": 1},
        microbatches=layout.microbatches,
        stage_layers=layout.stage_layers,
        sequence_parallel=layout.sequence_parallel,
        checkpoint="full" if layout.checkpointing == "full" else (),
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
        return self.fits == (self.layout.seconds is not None)


def judge_layouts(layouts: Iterable[Layout]) -> Iterator[Judged]:
    """Yield the verdicts; runs that differ in their replicas only are planned once."""
    groups: dict[Hashable, list[Layout]] = defaultdict(list)
    for layout in layouts:
        groups[layout.key].append(layout)
    for number, group in enumerate(groups.values(), start=1):
        plans = plan_layout(group[0])
        needed: dict[int, Needed] = {}
        for layout in group:
            replicas = layout.replicas
            if replicas not in needed:
                needed[replicas] = read_needed(plans, replicas, outputs=layout.stale_logits)
            own = needed[replicas]
            yield Judged(layout, own, bool(judge(own.reserved, DEVICE, layout.mesh).fits))
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
        "model": lambda item: item.layout.model,
        "kernel": lambda item: item.layout.kernel,
        "measured": lambda item: "out of memory" if item.layout.seconds is None else "ran",
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
            "ran" if item.layout.seconds else "out of memory",
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
    for item in judged:
        group = item.layout.group
        if item.layout.seconds and (group not in best or item.layout.seconds < (best[group].layout.seconds or 0)):
            best[group] = item
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
    parser.add_argument("--model", choices=MODELS, action="append", help="only layouts of this model; may be repeated")
    parser.add_argument("--write", action="store_true", help="write the number of right verdicts, which reports show")
    parser.add_argument("--trials", action="store_true", help="only BigScience's trials")
    arguments = parser.parse_args()
    if not arguments.trials:
        layouts = read_layouts(arguments.data / "layout_study_a100.csv")
        chosen = [layout for layout in layouts if arguments.model is None or layout.model in arguments.model]
        judged = list(judge_layouts(chosen))
        print(describe_verdicts(judged), end="\n\n")
        if arguments.write:
            write_errors("memory", [count_verdicts(judged)])
    trials = dict.fromkeys(read_trials(arguments.data / "measured_runs.csv"))
    print(tabulate(map(compare_trial, trials), _TRIAL_HEADS))


if __name__ == "__main__":
    main()
