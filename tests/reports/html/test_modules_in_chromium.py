"""Modules of the page's script, each called in a headless Chromium."""

import json

import pytest

from fvflops.reports.html import pack
from fvflops.reports.html.script import join_scripts
from tests.support.reports.breakdowns import unpack

# This module with all that it imports; only the page's start module does anything when it is loaded.
ENTRY = "page/comparison.js"


@pytest.fixture(scope="module")
def evaluate(browser):
    page = browser.new_page()
    page.set_content('<svg id="svg"></svg>')
    yield lambda expression, entry=ENTRY: page.evaluate(join_scripts(entry, expression))
    page.close()


def test_numbers(evaluate):
    values = {
        "m.short(4089184256)": "4.09G",
        "m.short(999.6)": "1K",
        "m.short(1536, 'B')": "1.54 KB",
        "m.short(1234567, 'ns')": "1.23 ms",
        "m.short(405853388800, 'parameters')": "405.9B",
        "m.short(109482240, 'parameters')": "109.5M",
        "m.short(999960, 'parameters')": "1.0M",
        "m.short(480, 'parameters')": "480",
        "m.signed(-1500, '')": "−1.5K",
        "m.signed(0, '')": "0",
        "m.percent(1, 3)": "33.3%",
        "m.percent(1, 100000)": "<0.1%",
        "m.enumerate(['a', 'b', 'c'])": "a, b and c",
        "m.plural(1, 'module')": "1 module",
    }
    found = evaluate("((m) => [" + ", ".join(values) + "])(modules['base/numbers.js'])")
    assert dict(zip(values, found, strict=True)) == values


def test_columns_are_unpacked_as_in_python(evaluate):
    column = [0, 5, *(value for layer in range(9) for value in (layer, 9, str(2**60), 9, 7)), 3]
    packed = pack(column)
    assert isinstance(packed, dict) and unpack(packed) == column
    unpacked = f"modules['data/packed.js'].unpack({json.dumps(packed)})"
    assert evaluate(unpacked) == column
    assert evaluate("modules['data/packed.js'].unpack([1, 2])") == [1, 2]


def test_ticks_are_round(evaluate):
    assert evaluate("modules['data/calls.js'].ticks(0, 100, 4)", "data/calls.js") == [0, 50, 100]
    assert evaluate("modules['data/calls.js'].ticks(130, 990, 5)", "data/calls.js") == [200, 400, 600, 800]


RECORD = """{schema: 1, title: 'net', strings: ['', 'a', 'b', 'c', 'd', 'Net', 'L'],
    phases: ['forward'], operators: ['mm'],
    modules: {parent: [-1, 0, 0, 0, 0], name: [0, 1, 2, 3, 4], class: [5, 6, 6, 6, 6], about: [0, 0, 0, 0, 0]},
    rows: {module: [1, 2, 3, 4], phase: [0, 0, 0, 0], operator: [0, 0, 0, 0]},
    measures: [{key: 'flops', title: 'FLOPs', unit: '', note: '', values: [7, 7, 7, LAST], unsupported: UNKNOWN},
               {key: 'time', title: 'Time', unit: 'ns', note: '', values: [1, 2, 3, 4], unsupported: []}]}"""


def labels(evaluate, last="7", unknown="[]"):
    """Return the labels of the nodes below the root of four modules, of which the last has `last` FLOPs."""
    record = RECORD.replace("LAST", last).replace("UNKNOWN", unknown)
    return evaluate(f"""(() => {{
        const {{ ModuleNodes }} = modules["data/module_nodes.js"];
        const nodes = new ModuleNodes(new (modules["data/report.js"].Report)({record}));
        return nodes.children(nodes.root).map((node) => node.label);
    }})()""")


def test_consecutive_equal_modules_are_one_node_whatever_their_times(evaluate):
    assert labels(evaluate) == ["a … d × 4"]
    assert labels(evaluate, last="8") == ["a … c × 3", "d"], "modules of different counts stay apart"
    assert labels(evaluate, unknown="[[0, 1]]") == ["a", "b … d × 3"], "and so do modules of unlike support"
    assert labels(evaluate, unknown="[[1, 1]]") == ["a", "b", "c", "d"], "two equal ones stay two"
