"""Compare predicted memory with the memory of measured training runs and of a paper's figure.

Run it in tools/, with the checkout on PYTHONPATH: python -m training_runs.memory
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.storage_lifetimes import Block, MemoryTimeline
from fvflops.plan.plans import plan_rank
from fvflops.plan.rank_plan import RankPlan
from fvflops.zoo.llama import LlamaConfig
from fvflops.zoo.megatron_gpt import CoreAttention, MegatronGPT, MegatronGPTConfig
from training_runs.field_memory import WithLoss
from training_runs.rows import TrainingRun, read_runs

GIB = 2**30
_ADAMW = partial(torch.optim.AdamW, fused=True)


class Compared(NamedTuple):
    """A predicted and a published value in bytes, and the prediction's assumptions."""

    run: str
    quantity: str
    predicted: float
    published: float
    assumes: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


# --- figure 1 of Korthikanti et al. -----------------------------------------------------------------------------------
# "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198). It counts the layers alone,
# and 18 bytes a parameter: weights in float16; gradients, master weights and two moments in float32.


@dataclass(frozen=True, slots=True)
class FigureRow:
    """A model of the figure: GiB of a GPU for parameters and optimizer, for activations, and for them when reduced."""

    name: str
    config: MegatronGPTConfig
    micro_batch: int
    states: float
    activations: float
    reduced: float
    mesh: Mapping[str, int] = field(default_factory=lambda: {"tp": 8})
    options: Mapping[str, Any] = field(default_factory=dict)


FIGURE = (
    FigureRow(
        "22B", MegatronGPTConfig(layers=48, hidden_size=6144, heads=64, vocab_multiple=1024), 4, 45.56, 59.25, 9.56
    ),
    FigureRow(
        "530B",
        MegatronGPTConfig(layers=105, hidden_size=20_480, heads=128, vocab_multiple=1024),
        1,
        31.64,
        114.02,
        23.08,
        {"pp": 35, "tp": 8},
        {"microbatches": 280, "schedule": "interleaved", "stages_per_rank": 3},
    ),
)


def compare_figure(row: FigureRow) -> Iterator[Compared]:
    """Yield the bytes of the layers of the first rank, without embeddings and head, as the figure has them.

    torch's pipeline stages keep the hidden state that they have sent until its backward pass; Megatron-LM frees it
    (deallocate_pipeline_outputs), which is 2 % to 5 % of the 530B's activations.
    """
    plain = _plan_figure(row, sequence_parallel=False, checkpoint=())
    of_layers = sum(block.nbytes for block in plain.memory().blocks if block.kind == "parameter" and _in_layer(block))
    timeline = plain.memory()
    last = timeline.at(len(timeline.trace.events or ()) - 1).by_kind
    states = last["parameter"] + last["gradient"] + last["optimizer state"]
    yield Compared(row.name, "parameters, optimizer", states * of_layers / last["parameter"], row.states * GIB)
    yield Compared(row.name, "activations", _kept(timeline), row.activations * GIB)
    reduced = _plan_figure(row, sequence_parallel=True, checkpoint=[CoreAttention]).memory()
    yield Compared(row.name, "activations, reduced", _kept(reduced), row.reduced * GIB)


def _plan_figure(row: FigureRow, **options: Any) -> RankPlan:
    with torch.device("meta"):
        model = MegatronGPT(row.config).half()
    tokens = torch.ones(row.micro_batch, row.config.positions, dtype=torch.int64)
    options |= {"optimizer": partial(MasterWeights, make=_ADAMW), "gradient_dtype": "fp32"}
    return plan_rank(model, (tokens, tokens), mesh=row.mesh, device="cuda", **row.options, **options)


def _kept(timeline: MemoryTimeline) -> int:
    """Return the highest number of bytes that forward passes have left for backward passes, in layers."""
    events = timeline.trace.events or ()
    changes = [0] * (len(events) + 1)
    for block in timeline.blocks:
        if block.kind == "activation" and _in_layer(block):
            changes[max(block.begin, 0)] += block.nbytes
            changes[len(events) if block.end is None else block.end] -= block.nbytes
    levels = accumulate(changes)
    return max(level for level, event in zip(levels, events, strict=False) if event.phase == "forward")


def _in_layer(block: Block) -> bool:
    return "layers." in block.module


# --- measured runs ----------------------------------------------------------------------------------------------------


def compare_run(run: TrainingRun) -> Iterator[Compared]:
    """Yield the memory that a GPU's allocator reserves in a run of torchtitan, with and without expandable segments."""
    assert run.memory is not None and run.micro_batch is not None and run.microbatches is not None
    tokens = torch.ones(run.micro_batch, run.sequence, dtype=torch.int64)
    plan = plan_rank(
        WithLoss(run.build_model()),
        (tokens, tokens),
        mesh=dict(run.mesh),
        microbatches=run.microbatches,
        precision="bf16-mixed",
        checkpoint={"none": (), "selective": "selective", "full": "full"}[run.checkpointing],
        optimizer=_ADAMW,
        device="cuda",
    )
    timeline = plan.memory()
    name = f"{run.name} {', '.join(f'{axis}={size}' for axis, size in run.mesh.items())}"
    assumes = "eager, as if not compiled" if run.compiled else ""
    yield Compared(name, "allocated", timeline.peak, run.memory, assumes)
    for expandable, quantity in ((True, "reserved, expandable segments"), (False, "reserved")):
        reserved = reserved_memory(timeline, expandable_segments=expandable).peak
        yield Compared(name, quantity, reserved, run.memory, assumes)


def write_table(rows: Iterable[Compared]) -> str:
    cells = [
        (
            *(row.run, row.quantity, f"{row.predicted / GIB:.2f}"),
            *(f"{row.published / GIB:.2f}", f"{row.error:+.1%}", row.assumes),
        )
        for row in rows
    ]
    return tabulate(cells, ["run", "memory of a GPU", "predicted, GiB", "published", "error", "assumes"])


def main() -> None:
    print(write_table([row for item in FIGURE for row in compare_figure(item)]))
    print()
    runs = [run for run in read_runs() if run.memory is not None and isinstance(run.config, LlamaConfig)]
    print(write_table([row for run in runs if run.micro_batch is not None for row in compare_run(run)]))
    for run in runs:
        if run.micro_batch is None:
            print(f"not compared, its batch is not published: {run.name} on {run.gpus} GPUs")


if __name__ == "__main__":
    main()
