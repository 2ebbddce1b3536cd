"""Straggling ranks: how long the other ranks wait for them in collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fvflops.explain.kernel_kinds import kind_of_kernel
from fvflops.explain.rank_timeline import RankTimeline
from fvflops.text import shown_by_fields

# Arguments that collectives of one group and kind share on all its ranks.
_SHARED = ("Process Group Name", "Collective name", "dtype")


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class RankWait:
    """How long a rank's collectives waited for others, in nanoseconds over the whole trace.

    A collective's kernel runs from the time at which its rank joins until all have. Clocks of different hosts differ,
    so durations are compared: the rank that joins last has the shortest, and the others waited for the difference.
    `collectives` is the number of collectives in the traces of all given ranks of the group, `kernel_ns` their time.
    """

    rank: int | None
    collectives: int
    kernel_ns: int
    waiting_ns: int


def find_waits(timelines: Sequence[RankTimeline]) -> tuple[RankWait, ...]:
    """Return the wait of each rank; empty if the traces have no collective in common."""
    sums = [[0, 0, 0] for _ in timelines]
    for _, index, time, waiting in _compare(timelines):
        sums[index] = [a + b for a, b in zip(sums[index], (1, time, waiting), strict=True)]
    if not any(count for count, _, _ in sums):
        return ()
    return tuple(RankWait(timeline.rank, *own) for timeline, own in zip(timelines, sums, strict=True))


def sum_waits(timelines: Sequence[RankTimeline]) -> Counter[str]:
    """Return how long all ranks together waited in the collectives of each name, in nanoseconds."""
    sums: Counter[str] = Counter()
    for name, _, _, waiting in _compare(timelines):
        sums[name] += waiting
    return sums


def _compare(timelines: Sequence[RankTimeline]) -> Iterator[tuple[str, int, int, int]]:
    """Yield the name of each collective, and for each rank its index, its time and how much of it is waiting."""
    durations = [_list_durations(timeline) for timeline in timelines]
    for key in dict.fromkeys(key for own in durations for key in own):
        members = [index for index, own in enumerate(durations) if key in own]
        if len(members) < 2 or len({len(durations[index][key]) for index in members}) > 1:
            continue  # a trace that lacks some of them does not tell which
        for times in zip(*(durations[index][key] for index in members), strict=True):
            for index, time in zip(members, times, strict=True):
                yield " ".join(map(str, key)), index, time, time - min(times)


def _list_durations(timeline: RankTimeline) -> dict[tuple[object, ...], list[int]]:
    """Return the durations of a rank's collectives in their order, by group and kind."""
    columns, activities = timeline.columns, timeline.activities
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, name in enumerate(activities.name):
        kernel = str(columns.names[name])
        is_launch = not timeline.on_gpu and activities.op[index] >= 0  # on the CPU gloo's threads do the work
        if kind_of_kernel(kernel) == "communication" and not is_launch:
            number = activities.details[index]
            details = columns.details[number] if number >= 0 else {}
            key = (kernel, *(details.get(shared) for shared in _SHARED))
            found[key].append(activities.end[index] - activities.start[index])
    return found
