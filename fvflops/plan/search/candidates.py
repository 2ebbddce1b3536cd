"""The layouts and policies that a search tries, and what it finds of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from fvflops.devices.devices import Device
from fvflops.devices.measured_errors import ErrorEstimate, expect_step_error
from fvflops.plan.memory.step_settings import NO_CHECKPOINTING, given
from fvflops.plan.parallel_axes import count_shares
from fvflops.plan.pipeline_schedules import choose_schedule, find_schedule
from fvflops.plan.plan_options import OPTIMIZER_SHARDINGS, PlanError
from fvflops.plan.step_time.calibration import Efficiency, Network
from fvflops.reports.display import Displayed
from fvflops.text import record_repr, short_repr, suggest

_OPTIMIZER_SHARDINGS = ("none", *OPTIMIZER_SHARDINGS)

# What a search chooses, and what it tries by default.
CHOICES: Mapping[str, str] = {
    "tp": "tensor parallel ranks, with sequence parallelism where it is known: 1, 2, 4 and so on up to a node's GPUs",
    "pp": "pipeline ranks: 1, 2, 4, 8, 16, up to the model's layers; with others than 1 for models with known stages",
    "cp": "context parallel ranks: 1",
    "ep": "expert parallel ranks: 1",
    "dp": "replicas, among each of which FSDP2 shards the parameters: 1, 4, 16, and all (DDP)",
    "micro-batch": "samples of a microbatch of a replica: 1, 2, 4 and so on up to its share of the global batch",
    "schedule": "pipeline schedule: 1f1b, interleaved (two stages on each rank)",
    "checkpoint": "activation checkpointing: none, selective, full",
    "optimizer-sharding": "of replicas without FSDP2: none, dp (each updates a part of the parameters)",
}
_NUMBERS = ("tp", "pp", "cp", "ep", "dp", "micro-batch")


@dataclass(frozen=True, slots=True, repr=False)
class Candidate:
    """A layout of a training run with its policies.

    `mesh` is axis → size, outermost first, `micro_batch` the samples of each of the `microbatches`. `schedule` is ""
    without pipeline stages; `reshard` is whether FSDP2 gathers parameters again for the backward pass (ZeRO-3);
    `sequence_parallel` is whether tp divides the sequence between the layers, `optimizer_sharding` whether replicas
    divide the optimizer.
    """

    mesh: Mapping[str, int]
    micro_batch: int
    microbatches: int
    schedule: str = ""
    checkpoint: str = "none"
    reshard: bool = True
    sequence_parallel: bool = False
    optimizer_sharding: str = "none"

    __repr__ = record_repr

    def size(self, axis: str) -> int:
        return self.mesh.get(axis, 1)

    @property
    def stages_per_rank(self) -> int:
        return choose_schedule(self.schedule, None)[1] if self.schedule else 1

    def measured_on(self, gpus: int) -> Candidate:
        """Return the layout from whose recording a microbatch is bounded: without stages, with the most shards.

        >>> Candidate({"pp": 4, "fsdp": 8, "tp": 2}, 1, 16, "1f1b", "full").measured_on(64).command()
        '--mesh fsdp=32,tp=2 --batch 1 --microbatches 1 --no-reshard-after-forward --checkpoint full'
        """
        axes = {axis: self.size(axis) for axis in ("cp", "tp", "ep") if self.size(axis) > 1}
        mesh = {"fsdp": max(2, gpus // (self.size("cp") * self.size("tp"))), **axes}
        # Without resharding there are the fewest kernels.
        return replace(self, mesh=mesh, microbatches=1, schedule="", reshard=False, optimizer_sharding="none")

    def settings(self) -> dict[str, Any]:
        """Return what a plan of the candidate assumes, as its settings name it.

        >>> Candidate({"fsdp": 8}, 2, 4, checkpoint="full").settings()["reshard_after_forward"]
        True
        """
        return given(
            mesh=dict(self.mesh),
            batch=self.micro_batch,
            microbatches=self.microbatches,
            checkpointing=self.checkpoint,
            schedule=self.schedule or None,
            stages_per_rank=self.stages_per_rank if self.schedule else None,
            reshard_after_forward=self.reshard if self.size("fsdp") > 1 else None,
            optimizer_sharding=None if self.optimizer_sharding == "none" else self.optimizer_sharding,
            sequence_parallel=self.sequence_parallel if self.size("tp") > 1 else None,
        )

    def plan_options(self) -> dict[str, Any]:
        """Return the arguments of `plan_step` for the candidate."""
        options: dict[str, Any] = {
            "mesh": dict(self.mesh),
            "microbatches": self.microbatches,
            "sequence_parallel": self.sequence_parallel,
            "optimizer_sharding": None if self.optimizer_sharding == "none" else self.optimizer_sharding,
            "checkpoint": () if self.checkpoint == "none" else self.checkpoint,
        }
        if self.schedule:
            options["schedule"] = self.schedule
        elif self.size("fsdp") > 1:
            options["reshard_after_forward"] = self.reshard
        return options

    def command(self) -> str:
        """Return the options of `fvflops plan` for the candidate, besides the inputs.

        >>> Candidate({"pp": 2, "fsdp": 4, "tp": 8}, 1, 16, "1f1b", "full").command()
        '--mesh pp=2,fsdp=4,tp=8 --batch 1 --microbatches 16 --schedule 1f1b --checkpoint full'
        """
        words = [f"--mesh {','.join(f'{axis}={size}' for axis, size in self.mesh.items())}"]
        words += ["--sequence-parallel"] * self.sequence_parallel
        words += [f"--batch {self.micro_batch}", f"--microbatches {self.microbatches}"]
        words += [f"--schedule {self.schedule}"] * bool(self.schedule)
        words += ["--no-reshard-after-forward"] * (self.size("fsdp") > 1 and not self.schedule and not self.reshard)
        words += [f"--optimizer-sharding {self.optimizer_sharding}"] * (self.optimizer_sharding != "none")
        words += [f"--checkpoint {self.checkpoint}"] * (self.checkpoint != "none")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Space:
    """The searched space: `gpus` GPUs, `gpus_per_node` of them in a node, and a global batch, in samples.

    `layers` is the number of layers that can be divided among pipeline stages, 0 for none; `sequence_parallel` is
    whether tp can divide the sequence. `choices` is a key of `CHOICES` → its values instead of the default.
    """

    gpus: int
    gpus_per_node: int
    global_batch: int
    layers: int = 0
    sequence_parallel: bool = False
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("gpus", "global_batch"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name, values in self.choices.items():
            if name not in CHOICES:
                raise PlanError(f"no choice {name!r}{suggest(name, CHOICES)}: a search chooses {', '.join(CHOICES)}")
            known = {"optimizer-sharding": _OPTIMIZER_SHARDINGS}.get(name, values)
            if unknown := [value for value in values if value not in known]:
                raise PlanError(f"{name} must be among {', '.join(known)}; got {unknown[0]!r}")
            if not values or (name in _NUMBERS and any(not isinstance(item, int) or item < 1 for item in values)):
                raise PlanError(f"{name} must be some numbers of at least 1; got {list(values)}")
        for name in self.choices.get("schedule", ()):
            find_schedule(name)

    def list_candidates(self) -> list[Candidate]:
        """Return the layouts in which the sizes divide each other.

        >>> space = Space(8, 8, 8, choices={"micro-batch": [1], "checkpoint": ["full"], "tp": [4]})
        >>> for candidate in space.list_candidates():
        ...     print(candidate.command())
        --mesh fsdp=2,tp=4 --batch 1 --microbatches 4 --checkpoint full
        --mesh fsdp=2,tp=4 --batch 1 --microbatches 4 --no-reshard-after-forward --checkpoint full
        --mesh dp=2,tp=4 --batch 1 --microbatches 4 --checkpoint full
        --mesh dp=2,tp=4 --batch 1 --microbatches 4 --optimizer-sharding dp --checkpoint full
        """
        sizes = self._values("micro-batch", _powers_of_two(self.global_batch))
        checkpoints = self._values("checkpoint", ("none", "selective", "full"))
        candidates = {
            candidate.command(): candidate
            for mesh, size, checkpoint in product(self._list_meshes(), sizes, checkpoints)
            for candidate in self._with_policies(mesh, size, checkpoint)
        }
        if not candidates:
            raise PlanError(
                f"no layout has a global batch of {self.global_batch:,} on {self.gpus:,} GPUs: the replicas (dp and "
                "fsdp) times a microbatch must divide it"
            )
        return list(candidates.values())

    def _values(self, name: str, default: Iterable[Any]) -> Sequence[Any]:
        return self.choices.get(name, tuple(default))

    def _list_meshes(self) -> Iterator[dict[str, int]]:
        tensor = self._values("tp", _powers_of_two(self.gpus_per_node))
        pipeline = self._values("pp", (size for size in (1, 2, 4, 8, 16) if size == 1 or size <= self.layers))
        for tp, pp, cp in product(tensor, pipeline, self._values("cp", [1])):
            replicas, rest = divmod(self.gpus, tp * pp * cp)
            if rest or not replicas:
                continue
            for dp in dict.fromkeys(self._values("dp", (1, 4, 16, replicas))):
                for ep in self._values("ep", [1]):
                    if replicas % dp == 0 and (replicas // dp * cp * tp) % ep == 0:
                        axes = {"pp": pp, "dp": dp, "fsdp": replicas // dp, "cp": cp, "tp": tp, "ep": ep}
                        yield {axis: size for axis, size in axes.items() if size > 1} or {"dp": 1}

    def _with_policies(self, mesh: Mapping[str, int], micro_batch: int, checkpoint: str) -> Iterator[Candidate]:
        replicas = mesh.get("dp", 1) * mesh.get("fsdp", 1)
        microbatches, rest = divmod(self.global_batch, replicas * micro_batch)
        if rest or not microbatches:
            return
        divides = self.sequence_parallel and mesh.get("tp", 1) > 1
        is_plain = count_shares(mesh, "tokens") == 1 or mesh.get("fsdp", 1) > 1  # no replicas that could divide it
        shardings = ("none",) if is_plain else self._values("optimizer-sharding", _OPTIMIZER_SHARDINGS)
        if mesh.get("pp", 1) > 1:
            for schedule in self._values("schedule", ("1f1b", "interleaved")):
                if choose_schedule(schedule, None)[1] * mesh["pp"] <= self.layers:
                    for sharding in shardings:
                        yield Candidate(mesh, micro_batch, microbatches, schedule, checkpoint, False, divides, sharding)
            return
        for reshard, sharding in product((True, False) if mesh.get("fsdp", 1) > 1 else (True,), shardings):
            yield Candidate(mesh, micro_batch, microbatches, "", checkpoint, reshard, divides, sharding)


def _powers_of_two(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length())]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LayoutResult:
    """A layout and its figures.

    `seconds` is the estimated time of a step, `peak` what torch's allocator reserves in bytes on its peak-memory rank.
    Both are None for a layout that was not planned, for which `least_seconds` and `least_peak` are lower bounds, 0
    where no recording bounds it. `status` is "fits", "does not fit", "slower" (not planned, since its lower bound is
    above the time of the best), or "failed"; `reason` says why it is not among the best. `unknown` and `bytes_only` are
    as in StepEstimate.
    """

    candidate: Candidate
    status: str
    reason: str = ""
    seconds: float | None = None
    peak: int | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    bubble_share: float | None = None
    exposed_share: float | None = None
    least_seconds: float = 0.0
    least_peak: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)
    bytes_only: Mapping[str, int] = field(default_factory=dict)

    __repr__ = record_repr


@dataclass(frozen=True, slots=True, repr=False)
class LayoutSearch(Displayed):
    """The layouts that a search has tried: those that fit in the order of their time, then all others.

    `not_tried` is an axis that no layout has, though nobody excluded it → why. `settings` are what all
    plans assume.
    """

    _report = "fvflops.plan.search.search_report:search_report"

    results: tuple[LayoutResult, ...]
    gpus: int
    global_batch: int
    wanted: int
    device: Device
    network: Network | None
    efficiency: Efficiency
    bucket_cap_mb: float | None = None
    seconds: float = 0.0
    not_tried: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return short_repr(self, f"{len(self.results):,} layouts", f"{len(self.fitting())} fit")

    @property
    def error(self) -> ErrorEstimate:
        """The error to expect of the times, from measured runs that are most like these."""
        is_one_node = self.network is None or self.gpus <= self.network.gpus_per_node
        return expect_step_error(self.efficiency.software, self.device, is_one_node=is_one_node)

    def settings_of(self, candidate: Candidate) -> dict[str, Any]:
        """Return what the plan of a layout assumes."""
        settings = {**candidate.settings(), **self.settings}
        if candidate.checkpoint != NO_CHECKPOINTING:
            settings["checkpointing"] = candidate.checkpoint
        if "sequence" in settings:
            settings["sequence"] //= candidate.size("cp")
        if count_shares(candidate.mesh, "tokens") == 1:
            settings.pop("gradient_reduction", None)
        return settings

    def fitting(self) -> list[LayoutResult]:
        """Return the planned layouts that fit, the fastest first."""
        return [result for result in self.results if result.status == "fits"]

    def best(self, count: int | None = None) -> list[LayoutResult]:
        """Return the fastest layouts that fit; `count` is by default the number that the search was asked for."""
        return self.fitting()[: self.wanted if count is None else count]

    def pareto_front(self) -> list[LayoutResult]:
        """Return the planned layouts that fit and that no other one beats in both time and memory, fastest first."""
        front: list[LayoutResult] = []
        for result in self.fitting():
            if not front or (result.peak or 0) < (front[-1].peak or 0):
                front.append(result)
        return front


def in_order(results: Iterable[LayoutResult]) -> tuple[LayoutResult, ...]:
    order = ("fits", "slower", "does not fit", "failed")
    timed = [(order.index(item.status), item.seconds or item.least_seconds, item) for item in results]
    return tuple(item for *_, item in sorted(timed, key=lambda entry: entry[:2]))
