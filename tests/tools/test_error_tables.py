"""Tables of errors by source, and how well estimates rank layouts."""

from dataclasses import replace

import numpy as np

from tests.support.tools import load_tool

tables = load_tool("training_runs.error_tables")
read_runs = load_tool("training_runs.rows").read_runs


def layouts(*seconds):
    """Return runs of a layout study with these measured seconds."""
    run = next(run for run in read_runs() if run.publisher == "layout")
    return [replace(run, seconds=value) for value in seconds]


def test_a_source_has_the_mean_error_and_the_bias_of_its_runs():
    study, other = layouts(10.0, 20.0), read_runs()[:1]
    runs = [*study, *other]
    predicted = np.array([11.0, 16.0, other[0].seconds])
    *_, first, second, total = tables.source_table(runs, {"shipped": predicted}).splitlines()
    assert first.split() == ["layout", "study", "2023", "2", "15.0", "-5.0", "19.5"]
    assert second.split()[-4:] == ["1", "0.0", "+0.0", "0.0"] and total.split()[:3] == ["all", "3", "10.0"]


def test_a_source_without_a_prediction_has_an_empty_cell():
    runs = layouts(10.0)
    table = tables.source_table(runs, {"shipped": np.array([11.0]), "held out": np.array([np.nan])})
    assert table.splitlines()[2].split() == ["layout", "study", "2023", "1", "10.0", "+10.0", "10.0"]


def test_layouts_are_ranked_within_their_model_and_gpus():
    runs = layouts(1.0, 2.0, 4.0)
    # The chosen layout takes twice as long as the best; two of three pairs are in order.
    lines = tables.study_table(runs, np.array([3.0, 2.5, 5.0])).splitlines()
    assert lines[2].split()[-3:] == ["0.33", "100.0", "%"]
    assert tables.study_table(runs[:2], np.ones(2)) == ""
