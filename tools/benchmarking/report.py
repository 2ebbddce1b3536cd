"""The report: ratios first with their aims, then times and memory, then errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarking.figures import Figure, find_aim
from benchmarking.sections import Section


def write_report(sections: Sequence[Section]) -> Iterator[str]:
    yield "Ratios: the median over the rounds, [quartiles], the number of rounds"
    yield from _write_figures(sections, ratios=True)
    yield ""
    yield "Times, memory and numbers: medians likewise"
    yield from _write_figures(sections, ratios=False)
    failures = [(section.name, *item) for section in sections for item in section.rounds.failures.items()]
    if failures:
        yield ""
        yield "Raised, and left out:"
        for section_name, contender, error in failures:
            yield f"  {section_name}: {contender}: {error}"


def _write_figures(sections: Sequence[Section], *, ratios: bool) -> Iterator[str]:
    for section in sections:
        figures = [figure for figure in section.figures if (figure.unit == "ratio") == ratios]
        if figures:
            yield ""
            yield f"  {section.name}"
        for figure in figures:
            line = f"    {figure.name:44}{_show(figure, figure.value):>24}{_show_spread(figure):30}{_show_aim(figure)}"
            yield line.rstrip()


def _show(figure: Figure, value: float) -> str:
    if figure.unit == "s":
        return f"{value * 1e3:,.2f} ms"
    if figure.unit == "MB":
        return f"{value:,.1f} MB"
    if figure.unit == "a second":
        return f"{value:,.1f} /s"
    return f"{value:,.0f}" if figure.unit == "count" else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _show_spread(figure: Figure) -> str:
    if figure.samples == 1:
        return ""
    low, high = (
        _show(figure, value).removesuffix(" ms").removesuffix(" MB").removesuffix(" /s")
        for value in (figure.low, figure.high)
    )
    return f"  [{low}, {high}] {figure.samples}"


def _show_aim(figure: Figure) -> str:
    aim = find_aim(figure)
    if aim is None:
        return ""
    bound = f"{aim.bound * 1e3:g} ms" if figure.unit == "s" else f"{aim.bound:g}"
    return f"  aim {aim.at} {bound}: {'met' if aim.is_met(figure.value) else 'MISSED'}"
