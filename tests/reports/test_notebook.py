"""What notebooks show: pages in frames that keep to themselves, and tables where there are no frames or no scripts."""

import re

import pytest
import torch
from torch import nn

import fvflops
from fvflops.reports import notebook_page
from fvflops.reports.document import Chart, Document, Table, module_column, number_column

# As JupyterLab does, each output is inserted by `innerHTML`, in which no script of the output itself runs.
NOTEBOOK = """<!doctype html><meta charset="utf-8"><style>body {{ color: rgb(1, 2, 3); background: #fff; }}
table {{ color: rgb(9, 9, 9); }}</style><h1>Notebook</h1>{cells}
<script>for (const cell of document.querySelectorAll("template"))
{{ const output = document.createElement("div"); output.className = "output"; output.innerHTML = cell.innerHTML;
cell.replaceWith(output); }}</script>"""


@pytest.fixture(scope="module")
def outputs():
    """Return the HTML of the outputs of a notebook's cells, by what they show."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.ones(4, 8)
    step = fvflops.TrainingStepAnalysis(net, x, loss=torch.sum, warn=False)
    with fvflops.record(net, warn=False) as run:
        net(x)
    meter = fvflops.StepMeter(net, device=fvflops.Device("mine", matrix={"fp32": 10**12}))
    with meter.step():
        net(x).sum().backward()
    shown = {
        "analysis": fvflops.FlopCountAnalysis(net, x),
        "record": run,
        "profile": fvflops.ProfileAnalysis(net, x, repeat=2),
        "memory": fvflops.predict_memory(step),
        "difference": fvflops.diff(net, nn.Sequential(nn.Linear(8, 4)), x),
        "conventions": fvflops.compare(net, x),
        "roofline": fvflops.roofline(step, device="H100"),
        "meter": meter,
    }
    return {name: value._repr_html_() for name, value in shown.items()}


def open_page(browser, text, path, **options):
    context = browser.new_context(viewport={"width": 1000, "height": 900}, **options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    wrong = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "about:")) or wrong.append(request.url))
    path.write_text(text, encoding="utf-8")
    page.goto(path.as_uri())
    return page, wrong


def visible_tables(page):
    return page.eval_on_selector_all("table", "tables => tables.filter((table) => table.offsetHeight).length")


def test_outputs_of_one_notebook_do_not_clash(browser, outputs, tmp_path):
    cells = "".join(f"<template>{output}</template>" for output in outputs.values())
    page, wrong = open_page(browser, NOTEBOOK.format(cells=cells), tmp_path / "notebook.html")
    frames = page.query_selector_all("iframe")
    assert len(frames) == len(outputs)
    for name, frame in zip(outputs, frames, strict=True):
        frame.scroll_into_view_if_needed()  # it is loaded when it is seen
        inside = frame.content_frame()
        inside.wait_for_selector(".cell" if name in ("analysis", "record", "profile", "difference") else "table, h1")
        text = inside.inner_text("body")
        words = {"difference": "before", "roofline": "H100", "conventions": "multiply-add", "meter": "MFU"}.get(
            name, "Sequential"
        )
        assert words in text
        assert "rgb(1, 2, 3)" not in inside.evaluate("getComputedStyle(document.body).color"), "styles of the notebook"
        assert inside.evaluate("document.documentElement.scrollWidth <= innerWidth + 1"), f"{name} is wider than it"
    assert visible_tables(page) == 0, "tables that substitute pages"
    first = frames[0].content_frame()
    first.click(".icicle .cell.module >> nth=1")
    assert (
        page.evaluate("location.hash") == ""
        and page.evaluate("getComputedStyle(document.body).color") == "rgb(1, 2, 3)"
    )
    assert wrong == []
    page.context.close()


def test_a_notebook_without_scripts_or_frames_shows_tables(browser, outputs, tmp_path):
    # nbconvert writes outputs as they are; GitHub, and untrusted notebooks, lose frames and styles.
    page, _ = open_page(
        browser,
        "<meta charset=utf-8>" + "".join(outputs.values()),
        tmp_path / "converted.html",
        java_script_enabled=False,
    )
    assert visible_tables(page) >= len(outputs)
    assert not any(frame.is_visible() for frame in page.query_selector_all("iframe"))
    page.context.close()
    stripped = [
        re.sub(r"<(iframe|style|noscript)\b.*?</\1>", "", output, flags=re.DOTALL) for output in outputs.values()
    ]
    assert all("<table>" in text and "iframe" not in text and "script" not in text for text in stripped)
    page, _ = open_page(browser, "<meta charset=utf-8>" + "".join(stripped), tmp_path / "stripped.html")
    assert visible_tables(page) >= len(outputs) and "iframe" not in page.content()
    page.context.close()


def test_sizes_are_bounded(monkeypatch):
    rows = [(f"layers.{index}", index) for index in range(500)]
    table = Table("modules", (module_column(), number_column("flops", "FLOPs")), rows)
    chart = Chart("memory", {"parameter": [1, 2]})
    output = notebook_page.render_document(Document("memory", "A & B", [chart, table]))
    assert output.count("<tr>") < 540 and "20 of 500 rows" in output and 'title="A &amp; B"' in output
    monkeypatch.setattr(notebook_page, "MAX_PAGE", 1000)
    small = notebook_page.render_document(Document("memory", "A & B", [chart, table]))
    assert "iframe" not in small and "20 of 500 rows" in small and len(small) < 6000
