"""Pages of an engine's KV cache: how many are free, and at which decode step running sequences take further ones."""

from collections.abc import Iterable


class KVPages:
    """Counts of pages; a decode step is named by its number.

    Sequences of a batch take pages at steps that are known when they begin to decode, so those are a calendar: each
    step of the batch is one look-up, however many sequences it has. `taken` counts all pages ever taken.

    >>> pages = KVPages(total=10, page_size=16)
    >>> pages.of_tokens(17)
    2
    >>> pages.take(2); pages.take_at([5])
    >>> pages.decode_step(5); pages.used, pages.free, pages.peak
    (3, 7, 3)
    """

    __slots__ = ("_calendar", "page_size", "peak", "taken", "total", "used")

    def __init__(self, total: int, page_size: int) -> None:
        """Begin with all pages free."""
        self.total = total
        self.page_size = page_size
        self.used = 0
        self.peak = 0
        self.taken = 0
        self._calendar: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages that nothing holds."""
        return self.total - self.used

    def of_tokens(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> None:
        """Take free pages."""
        self.used += count
        self.taken += count
        if self.used > self.total:
            raise RuntimeError(f"{self.used} pages of {self.total} are taken: the scheduler admits too much")
        if self.used > self.peak:
            self.peak = self.used

    def give_back(self, count: int) -> None:
        self.used -= count

    def take_at(self, steps: Iterable[int], count: int = 1) -> None:
        """Note the decode steps to come at which a sequence takes a page, or takes `-count` no more."""
        calendar = self._calendar
        for step in steps:
            calendar[step] = calendar.get(step, 0) + count

    def wanted(self, step: int) -> int:
        return self._calendar.get(step, 0)

    def decode_step(self, step: int) -> None:
        """Take the pages of a decode step."""
        wanted = self._calendar.pop(step, 0)
        if wanted:
            self.take(wanted)

    def steps_that_fit(self, step: int, count: int) -> int:
        """Return for how many decode steps after `step`, `count` at most, the free pages suffice."""
        free = self.free
        for index in range(1, count + 1):
            free -= self._calendar.get(step + index, 0)
            if free < 0:
                return index - 1
        return count
