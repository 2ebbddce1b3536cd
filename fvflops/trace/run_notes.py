"""Sentences on dependences of a run's cost besides its shapes: assumptions, random draws, values of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from fvflops.trace.records import LOCATION_SEPARATOR as _SEPARATOR
from fvflops.trace.records import RunInfo

# Key of a Trace's `about` → its sentence.
_SENTENCES = {
    "bounds": "Upper bound: the output of {} is assumed to have its maximum size.",
    "given": "Given for data-dependent ops: {}.",
    "supposed": "ASSUMED (data-dependent): {}.",
    "random": "Random: Python read a random draw in {}. Another draw may cost more or less.",
    "data_dependent": "Data-dependent: values of the data were read in {}. Other data may cost more or less.",
    "peaks": "Peak memory: the largest of the runs {}.",
    "draws": "{}.",
}


def list_run_notes(about: Mapping[str, str], escape: Callable[[str], str] = str) -> Iterator[str]:
    """Yield the sentences for a Trace's `about`; `escape` is applied to each text in them.

    >>> list(list_run_notes({"given": "aten::nonzero=100"}))
    ['Given for data-dependent ops: aten::nonzero=100.']
    """
    for key, sentence in _SENTENCES.items():
        if key in about:
            yield sentence.format(escape(about[key]))


def merge_reads(abouts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the locations of reads in several runs, each once, for the `about` of their merged Trace."""
    parts = list(abouts)
    merged = {
        key: dict.fromkeys(location for about in parts if key in about for location in about[key].split(_SEPARATOR))
        for key in ("random", "data_dependent")
    }
    return {key: _SEPARATOR.join(locations) for key, locations in merged.items() if locations}


def reads_of(info: RunInfo) -> dict[str, list[str]]:
    """Return where Python read a random draw or a value of the data, as a report's data."""
    return {"random": list(info.random), "data_dependent": list(info.data_dependent)}
