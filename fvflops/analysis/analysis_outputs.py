"""Outputs of an analysis: pages, tables, rows and pictures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from fvflops import __version__, paths
from fvflops.reports import REPORTS
from fvflops.views.analysed_run import AnalysedRun, describe_run, make_summary, with_columns
from fvflops.views.breakdown import Breakdown, read_breakdown

if TYPE_CHECKING:
    import pandas

    from fvflops.reports.document import Table


class AnalysisOutputs:
    """The outputs of an analysis, from its run."""

    def _analysed_run(self) -> AnalysedRun:
        raise NotImplementedError

    def _warnings_disabled(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str] | None = None, *, name: str = "") -> str:
        """Return an HTML page with a navigable chart of the module tree; write it to `path` if given.

        It shows the metric of this analysis, and all others available from its trace and table: FLOPs, MACs,
        activations, parameters, bytes, op calls, and time where measured. It is one file without network access. `name`
        is the page's title, by default the model's class. A path that cannot be written raises OSError before the model
        is run. An op counts for the innermost module around it.

        >>> import torch
        >>> from fvflops import ModelAnalysis
        >>> ModelAnalysis(torch.nn.Linear(3, 2), torch.ones(4, 3)).to_html().startswith("<!doctype html>")
        True
        """
        return self._write_page(path, name=name)

    def _write_page(self, path: str | os.PathLike[str] | None, **changes: Any) -> str:
        if path is not None:
            paths.check_writable(os.fspath(path))
        page = "".join(REPORTS["html"](replace(self._breakdown_of_page(), **changes)))
        if path is not None:
            paths.write_text(os.fspath(path), page)
        return page

    def _breakdown_of_page(self) -> Breakdown:
        return read_breakdown(self._analysed_run())

    def to_dict(self, *, by: str = "module", depth: int | None = None) -> dict[str, list[str | int | bool | None]]:
        """Return heading → cells of its column, with the rows of the CSV report.

        The columns by module are: module ("" is the model), class, parameters, the metric of this analysis, activations
        with FLOPs, each phase if more than a forward pass was recorded, and whether the module was called. `by` is
        "module", "operator" or "both"; for FLOPs also "op" for a row per op call, "call" for a row per module call,
        both in the order of the run and with tensors and bytes, and "line" for a row per source line; any other view
        raises ValueError. `depth` limits the levels below the root. Numbers are exact, None if unknown; names are
        unescaped.

        >>> import torch
        >>> from fvflops import FlopCountAnalysis
        >>> FlopCountAnalysis(torch.nn.Linear(4, 3), torch.ones(2, 4)).to_dict()
        {'module': [''], 'class': ['Linear'], 'parameters': [15], 'flops': [24], 'activations': [6], 'called': [True]}
        """
        return self._list_columns(by, depth, "to_dict()")[0]

    def to_pandas(self, *, by: str = "module", depth: int | None = None) -> pandas.DataFrame:
        """Return the columns of `to_dict` as a data frame; its `attrs` have model, inputs, convention and versions.

        Without pandas (the extra `pandas`) it raises ImportError before the model is run.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            if error.name != "pandas":
                raise  # pandas is installed, but one of its dependencies is missing
            raise ImportError("pandas is not installed: pip install 'fvflops[pandas]', or use to_dict()") from None
        columns, about = self._list_columns(by, depth, "to_pandas()")
        # Without dtype=object pandas would convert a column with unknown numbers to floats.
        types = {heading: "object" if None in cells else None for heading, cells in columns.items()}
        series: Any = {heading: pandas.Series(cells, dtype=types[heading]) for heading, cells in columns.items()}
        frame: Any = pandas.DataFrame(series)
        frame.attrs.update(about)
        return cast("pandas.DataFrame", frame)

    def to_picture(self, path: str | os.PathLike[str], *, measure: str | None = None, depth: int | None = None) -> None:
        """Write an icicle chart of the module tree, in which widths are shares of a metric, as .svg or .png.

        `measure` is a key of the breakdown, such as "flops", "macs", "parameters", "bytes" or "time"; None is the
        metric of this analysis. `depth` limits the levels below the root. Without matplotlib (the extra `plot`), or for
        another file extension, it raises PlotError; an unknown measure raises ValueError. A path that cannot be written
        raises OSError before the model is run. An op counts for the innermost module around it.

        >>> import torch
        >>> from fvflops import ModelAnalysis
        >>> ModelAnalysis(torch.nn.Linear(3, 2)).to_picture("linear.pdf")
        Traceback (most recent call last):
        fvflops.reports.pictures.picture.PlotError: linear.pdf: a plot must be an .svg or .png file
        """
        from fvflops.reports.pictures import picture

        kind = picture.prepare(os.fspath(path))
        run = self._analysed_run()
        picture_bytes = REPORTS[kind](read_breakdown(run), measure=measure or run.counts.metric, depth=depth)
        paths.write_bytes(os.fspath(path), picture_bytes)

    def __str__(self) -> str:
        """Return a table of the largest modules at 80 columns, within a screen; runs the model if necessary."""
        from fvflops.reports.count_report import write_text
        from fvflops.reports.display import WIDTH
        from fvflops.reports.terminal.collapse import collapse

        with self._warnings_disabled():
            summary = collapse(make_summary(with_columns(self._analysed_run())))
        texts = (write_text(summary, depth=depth, width=WIDTH) for depth in (3, 2))
        short = (text for text in texts if text.count("\n") < 50)
        return next(short, "") or write_text(summary, depth=1, width=WIDTH)

    def _repr_html_(self) -> str:
        from fvflops.reports import notebook_page

        with self._warnings_disabled():
            return notebook_page.render(self._breakdown_of_page())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self)}

    def _list_columns(self, by: str, depth: int | None, report: str) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Return the columns of a view and the run's metadata; a ValueError for an unknown view names `report`."""
        from fvflops.reports.call_tables import CALL_VIEWS
        from fvflops.reports.count_report import exact_table
        from fvflops.views.summary_rows import read_view

        if by in CALL_VIEWS:
            table = self._list_call_rows(by, depth).readable_by("data")
            about = {"fvflops": __version__, **describe_run(self._analysed_run())}
        else:
            summary = make_summary(with_columns(self._analysed_run()))
            table, about = exact_table(summary, read_view({"by": by, "depth": depth}, report)), dict(summary.about)
        return {column.key: [row[index] for row in table.rows] for index, column in enumerate(table.columns)}, about

    def _list_call_rows(self, by: str, depth: int | None) -> Table:
        from fvflops.reports.call_tables import CALL_VIEWS

        raise ValueError(f"by={by!r}, {CALL_VIEWS[by]} in each row, is a view of FlopCountAnalysis only")
