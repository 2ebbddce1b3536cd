"""One replica's scheduler: which sequences take part in the next step, and which pages of the cache they take."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from fvflops.serve.simulation.engine_settings import EngineSettings
from fvflops.serve.simulation.requests import Sequence, decode_steps


class KVPages:
    """Counts of pages; a decode step is named by its number.

    Sequences of a batch need pages at steps that are known when they begin to decode, which are in a calendar: each
    step of the batch is one look-up, however many sequences it has. `allocated` counts all pages ever allocated.

    >>> pages = KVPages(total=10, page_size=16)
    >>> pages.of_tokens(17)
    2
    >>> pages.allocate(2); pages.schedule([5])
    >>> pages.decode_step(5); pages.used, pages.free, pages.peak
    (3, 7, 3)
    """

    __slots__ = ("_calendar", "allocated", "page_size", "peak", "total", "used")

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self.used = 0
        self.peak = 0
        self.allocated = 0
        self._calendar: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages that are not allocated."""
        return self.total - self.used

    def of_tokens(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> None:
        self.used += count
        self.allocated += count
        if self.used > self.total:
            raise RuntimeError(f"{self.used} pages of {self.total} are allocated: the scheduler admits too much")
        if self.used > self.peak:
            self.peak = self.used

    def release(self, count: int) -> None:
        self.used -= count

    def schedule(self, steps: Iterable[int], count: int = 1) -> None:
        """Schedule allocations of `count` pages at decode steps to come; a negative count cancels some."""
        calendar = self._calendar
        for step in steps:
            calendar[step] = calendar.get(step, 0) + count

    def scheduled(self, step: int) -> int:
        return self._calendar.get(step, 0)

    def decode_step(self, step: int) -> None:
        """Allocate the pages of a decode step."""
        wanted = self._calendar.pop(step, 0)
        if wanted:
            self.allocate(wanted)

    def steps_that_fit(self, step: int, count: int) -> int:
        """Return how many decode steps after `step`, at most `count`, the free pages suffice for."""
        free = self.free
        for index in range(1, count + 1):
            free -= self._calendar.get(step + index, 0)
            if free < 0:
                return index - 1
        return count


@dataclass(slots=True)
class Plan:
    """Work of a replica in one step, and which sequences get their first or last token by it."""

    chunks: list[tuple[int, int]] = field(default_factory=list)
    decoding: int = 0
    cached: int | float = 0
    admitted: list[Sequence] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    preempted: bool = False

    @property
    def is_steady(self) -> bool:
        """Whether the next step can be like this one, if nothing happens: none was admitted, and none could be."""
        return not (self.chunks or self.admitted or self.finished or self.preempted)

    @property
    def empty(self) -> bool:
        """Whether the replica has nothing to do."""
        return not (self.chunks or self.decoding)


class Scheduler:
    """Queues, running sequences and cache of one replica.

    All sequences that decode take part in every decode step. So each is described by the number of the step at which
    it joined, and sums over the batch are linear in the number of the step: a step costs nothing for each sequence.
    """

    def __init__(self, settings: EngineSettings, seed: int) -> None:
        self.settings = settings
        self.pages = KVPages(settings.pages, settings.page_size)
        self.preemptions = 0
        self.queued: dict[int, float] = {}
        self.running: dict[Sequence, None] = {}
        self.decoding = 0
        self._seed = seed
        self._draft = settings.decode_tokens - 1
        self._watermark = int(settings.watermark * settings.pages)
        self._inbox: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._step = 0
        self._finishing: dict[int, list[Sequence]] = {}
        self._finish_steps: list[int] = []
        # Tokens in the caches of all that decode, before decode step n: offset + rate * n.
        self._offset: int | float = 0
        self._rate: int | float = 0
        # Pages of sequences that are done, until their end is known to the scheduler.
        self._leaving: list[tuple[float, int]] = []
        self._leaving_pages = 0
        self._final_pages = 0

    @property
    def blocked(self) -> bool:
        """Whether requests wait that did not fit when the last step was planned."""
        return bool(self._waiting)

    @property
    def next_release(self) -> float:
        """When pages and places of a finished sequence become free next."""
        return self._leaving[0][0] if self._leaving else float("inf")

    def enqueue(self, sequence: Sequence) -> None:
        """Receive a sequence: it is seen when a step is planned at its arrival or later."""
        needed = self.pages.of_tokens(sequence.final_tokens)
        if needed > self.pages.total:
            problem = f"{sequence.request} needs {needed} pages of the cache, which has {self.pages.total}"
            raise ValueError(f"{problem}: give the cache more pages or shorten the request")
        self._inbox.append(sequence)

    def plan(self, now: float) -> Plan:
        """Schedule a step at a time, and bring the state to that after the step."""
        self._look(now)
        plan, before = Plan(), self.preemptions
        if self.settings.mixed:
            self._make_room()
            budget = self.settings.max_batched_tokens - self.decoding * self.settings.decode_tokens
            self._prefill(plan, budget, admit=self.preemptions == before)
            self._decode(plan)
        else:
            self._prefill(plan, self.settings.max_batched_tokens, admit=True)
            if not plan.chunks:
                self._make_room()
                self._decode(plan)
        for sequence in plan.prefilled:
            sequence.generated += 1
            if sequence.generated < sequence.output_tokens:
                self._join(sequence)
            else:
                plan.finished.append(sequence)
        plan.preempted = self.preemptions > before
        return plan

    def leave(self, sequence: Sequence, end: float) -> None:
        """Free the pages of a finished sequence, once a step is planned at `end` or later."""
        del self.running[sequence]
        held = self._held(sequence)
        self._final_pages -= self.pages.of_tokens(sequence.final_tokens)
        self._leaving_pages += held
        heappush(self._leaving, (end, held))

    def quiet_steps(self, most: int) -> int:
        """Return how many decode steps come before a sequence ends, starts or needs pages that are not free."""
        if self._inbox or self._prefilling or (self._waiting and self._leaving):
            return 0
        if not self.decoding:
            return 0 if self._waiting else most
        while self._finish_steps and not self._finishing.get(self._finish_steps[0]):
            self._finishing.pop(heappop(self._finish_steps), None)
        return self.pages.steps_that_fit(self._step, min(most, self._finish_steps[0] - self._step - 1))

    def cached_tokens(self, count: int) -> list[float]:
        """Return the cached tokens of each of the next decode steps."""
        return [step * self._rate + self._offset for step in range(self._step + 1, self._step + 1 + count)]

    def advance(self, times: Series[float]) -> None:
        """Take steady decode steps, planned at these times."""
        for sequence in self._inbox:
            place = bisect_left(times, sequence.arrival)
            if place < len(times):
                self.queued.setdefault(sequence.index, times[place])
        for time in times:
            if self._leaving:
                self._release(time)
            if self.decoding:
                self._step += 1
                self.pages.decode_step(self._step)

    def _look(self, now: float) -> None:
        """Take notice of ended and arrived requests."""
        self._release(now)
        while self._inbox and self._inbox[0].arrival <= now:
            sequence = self._inbox.popleft()
            self.queued.setdefault(sequence.index, now)
            self._waiting.append(sequence)

    def _release(self, now: float) -> None:
        while self._leaving and self._leaving[0][0] <= now:
            held = heappop(self._leaving)[1]
            self._leaving_pages -= held
            self.pages.release(held)

    def _free(self) -> int:
        """Return the pages that are free after the next decode step takes its own."""
        return self.pages.free - self.pages.scheduled(self._step + 1)

    def _make_room(self) -> None:
        """Preempt the last admitted sequences until the next decode step fits."""
        while self._free() < 0:
            self._preempt(next(reversed(self.running)))

    def _preempt(self, sequence: Sequence) -> None:
        """Drop a sequence's cache; it is first in the queue, and computes all its tokens again."""
        self.preemptions += 1
        del self.running[sequence]
        self._final_pages -= self.pages.of_tokens(sequence.final_tokens)
        sequence.kept_until = self.pages.allocated + self.pages.free
        self.pages.release(self._held(sequence))
        if sequence.joined < 0:
            self._prefilling.remove(sequence)
        else:
            self._stop_decoding(sequence)
            sequence.target = sequence.request.input_tokens + sequence.generated
            sequence.computed = sequence.target - 1
        sequence.kept_pages = sequence.computed // self.pages.page_size
        sequence.computed = self._found(sequence)
        sequence.pages = 0
        self._waiting.appendleft(sequence)

    def _stop_decoding(self, sequence: Sequence) -> None:
        done = self._step - sequence.joined
        steps = sequence.page_steps(self.pages.page_size, self._draft)
        self.pages.schedule([step for step in steps if step > self._step], -1)
        self._finishing[sequence.joined + sequence.steps].remove(sequence)
        self._remove_from_sums(sequence)
        sequence.generated += sequence.tokens_after(done)
        sequence.joined = -1

    def _found(self, sequence: Sequence) -> int:
        """Return the tokens of a preempted sequence that the prefix cache has.

        Its last pages are the first that others take, after those that were free before.
        """
        found = min(sequence.request.prefix_tokens, sequence.request.input_tokens - 1)
        if not self.settings.prefix_caching:
            return found
        kept = sequence.kept_pages - max(0, self.pages.allocated - sequence.kept_until)
        return max(found, min(kept * self.pages.page_size, sequence.target - 1))

    def _held(self, sequence: Sequence) -> int:
        if sequence.joined < 0:
            return sequence.pages
        done = self._step - sequence.joined
        if not done:
            return sequence.pages
        tokens = min(sequence.tokens_after(done - 1) + 1 + self._draft, sequence.remaining)
        return max(sequence.pages, self.pages.of_tokens(sequence.cached + tokens))

    def _prefill(self, plan: Plan, budget: int, *, admit: bool) -> None:
        """Add chunks of prompts within a budget of tokens: of running sequences first, then of waiting ones."""
        for sequence in list(self._prefilling):
            if sequence not in self.running or budget <= 0:
                continue
            new = min(budget, sequence.target - sequence.computed)
            pages = self.pages.of_tokens(sequence.computed + new) - sequence.pages
            while sequence in self.running and pages > self._free():
                self._preempt(next(reversed(self.running)))
                admit = False
            if sequence in self.running:
                self._prefilling.remove(sequence)
                budget -= self._chunk(plan, sequence, new)
        while admit and self._waiting:
            admitted = self._admissible(budget, alone=not plan.chunks)
            if admitted is None:
                return
            sequence = self._waiting.popleft()
            self.running[sequence] = None
            self._final_pages += self.pages.of_tokens(sequence.final_tokens)
            plan.admitted.append(sequence)
            budget -= self._chunk(plan, sequence, admitted)

    def _admissible(self, budget: int, *, alone: bool) -> int | None:
        """Return how many tokens of the first waiting sequence this step computes; None if it cannot be admitted."""
        sequence, settings = self._waiting[0], self.settings
        if sequence.kept_pages:
            sequence.computed = self._found(sequence)
        new = sequence.target - sequence.computed
        if len(self.running) + len(self._leaving) >= settings.max_sequences:
            return None
        if new > max(budget, 0):
            if budget <= 0 or not (settings.chunked_prefill or alone):
                return None
            new = budget if settings.chunked_prefill else new
        # A sequence whose cache came from elsewhere decodes at once.
        own = self.pages.of_tokens(sequence.target + (not new))
        own += ceil(settings.reserve_own * (self.pages.of_tokens(sequence.final_tokens) - own))
        others = self.pages.scheduled(self._step + 1)
        if self.running:
            outstanding = self._final_pages - (self.pages.used - self._leaving_pages)
            others = max(others, ceil(settings.reserve_running * outstanding)) + self._watermark
        return new if own + others <= self.pages.free else None

    def _chunk(self, plan: Plan, sequence: Sequence, new: int) -> int:
        pages = self.pages.of_tokens(sequence.computed + new)
        self.pages.allocate(pages - sequence.pages)
        sequence.pages = pages
        if not new:
            self._join(sequence)
            return self.settings.decode_tokens
        plan.chunks.append((new, sequence.computed))
        sequence.computed += new
        (self._prefilling if sequence.computed < sequence.target else plan.prefilled).append(sequence)
        return new

    def _join(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next decode step on."""
        tokens = sequence.output_tokens - sequence.generated
        steps = decode_steps(tokens, self.settings.speculation, f"{self._seed} {sequence.index} {tokens}")
        sequence.begin_decoding(self._step, steps)
        self.pages.schedule(sequence.page_steps(self.pages.page_size, self._draft))
        finish = self._step + sequence.steps
        if finish not in self._finishing:
            self._finishing[finish] = []
            heappush(self._finish_steps, finish)
        self._finishing[finish].append(sequence)
        self.decoding += 1
        rate = sequence.tokens_a_step
        self._rate += rate
        self._offset += sequence.cached - rate * (sequence.joined + 1)

    def _decode(self, plan: Plan) -> None:
        if not self.decoding:
            return
        self._step += 1
        self.pages.decode_step(self._step)
        plan.decoding = self.decoding
        plan.cached = self._offset + self._rate * self._step
        for sequence in self._finishing.pop(self._step, ()):
            self._remove_from_sums(sequence)
            sequence.generated = sequence.output_tokens
            plan.finished.append(sequence)

    def _remove_from_sums(self, sequence: Sequence) -> None:
        rate = sequence.tokens_a_step
        self.decoding -= 1
        self._rate -= rate
        self._offset -= sequence.cached - rate * (sequence.joined + 1)
        if not self.decoding:
            self._rate = self._offset = 0
