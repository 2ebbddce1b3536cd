"""A slow engine that is obviously right: every step goes through every sequence, token by token.

It follows the loop of vLLM's scheduler literally: running requests in order, each preempting the last one until its
pages are free; then waiting requests.
"""

from dataclasses import dataclass, field


@dataclass(eq=False)
class NaiveSequence:
    index: int
    request: object
    computed: int = 0
    generated: int = 0
    done: bool = False
    tokens: int = field(init=False)

    def __post_init__(self):
        self.tokens = self.request.input_tokens

    @property
    def decoding(self):
        return self.generated > 0 and self.computed == self.tokens - 1


def naive_times(requests, settings, times):
    """Return (queued, scheduled, first, last) of each request, the number of preemptions and the peak of pages."""
    return NaiveEngine(requests, settings, times).run()


class NaiveEngine:
    def __init__(self, requests, settings, times):
        self.settings, self.times = settings, times
        self.coming = [NaiveSequence(index, request) for index, request in enumerate(requests)]
        self.waiting, self.running, self.leaving = [], [], []
        self.columns = [{} for _ in range(4)]
        self.count, self.preemptions, self.peak = len(self.coming), 0, 0
        self.allocated = {}

    def run(self):
        plan_at = free_at = self.coming[0].request.arrival
        while len(self.columns[3]) < self.count:
            chunks, cached, now = self.plan(plan_at)
            if not chunks and not cached:
                later = [sequence.request.arrival for sequence in self.coming] + [end for end, _ in self.leaving]
                plan_at = free_at if free_at > now else min(later)
                continue
            start = max(free_at, now)
            free_at = start + self.seconds(chunks, cached)
            self.settle(free_at)
            plan_at = start if self.settings.steps_ahead else free_at
        rows = [[column[index] for index in range(self.count)] for column in self.columns]
        return rows, self.preemptions, self.peak

    def seconds(self, chunks, cached):
        if chunks:
            return self.times.seconds(chunks, len(cached), sum(cached))
        return self.times.decode_seconds(len(cached), [sum(cached)])[0]

    def free(self):
        held = sum(self.allocated.get(sequence, 0) for sequence in self.running) + sum(n for _, n in self.leaving)
        return self.settings.pages - held

    def fit(self, sequence, tokens):
        needed = -(-tokens // self.settings.page_size)
        extra = needed - self.allocated.get(sequence, 0)
        if extra > self.free():
            return False
        self.allocated[sequence] = max(needed, self.allocated.get(sequence, 0))
        return True

    def plan(self, now):
        self.leaving = [(end, pages) for end, pages in self.leaving if end > now]
        while self.coming and self.coming[0].request.arrival <= now:
            sequence = self.coming.pop(0)
            self.columns[0][sequence.index] = now
            self.waiting.append(sequence)
        budget, chunks, cached, before = self.settings.max_batched_tokens, [], [], self.preemptions
        self.step = []
        for sequence in list(self.running):
            if sequence not in self.running or sequence.done:
                continue
            new = min(budget, sequence.tokens - sequence.computed)
            while sequence in self.running and not self.fit(sequence, sequence.computed + new):
                self.preempt(self.running[-1])
            if sequence in self.running:
                budget -= new
                if sequence.decoding:
                    cached.append(sequence.computed)
                else:
                    chunks.append((new, sequence.computed))
                self.step.append((sequence, new))
        while self.waiting and budget > 0 and self.preemptions == before:
            sequence = self.waiting[0]
            places = len(self.running) + len(self.leaving)
            pages = -(-sequence.tokens // self.settings.page_size)
            if places >= self.settings.max_sequences or pages > self.free():
                break
            new = min(budget, sequence.tokens)
            self.running.append(self.waiting.pop(0))
            assert self.fit(sequence, new)
            self.columns[1].setdefault(sequence.index, now)
            budget -= new
            chunks.append((new, 0))
            self.step.append((sequence, new))
        self.peak = max(self.peak, self.settings.pages - self.free())
        return chunks, cached, now

    def preempt(self, sequence):
        self.preemptions += 1
        self.running.remove(sequence)
        del self.allocated[sequence]
        sequence.computed = 0
        self.waiting.insert(0, sequence)

    def settle(self, end):
        for sequence, new in self.step:
            sequence.computed += new
            if sequence.computed < sequence.tokens:
                continue
            sequence.generated += 1
            sequence.tokens += 1
            self.columns[2].setdefault(sequence.index, end)
            if sequence.generated == sequence.request.output_tokens:
                self.columns[3][sequence.index] = end
                self.running.remove(sequence)
                self.leaving.append((end, self.allocated.pop(sequence)))
