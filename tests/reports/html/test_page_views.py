"""Views of the page in a headless Chromium: equal modules, top costs, timeline, memory, roofline, comparison, files."""

import csv
import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from fvflops.reports.html import render_comparison
from fvflops.views.breakdown import Peaks
from tests.support.reports.breakdowns import break_run_down, break_stack_down, column


def paths(page):
    return page.eval_on_selector_all(".icicle .cell.module", "(cells) => cells.map((cell) => cell.dataset.path)")


def download(page, selector):
    with page.expect_download() as found:
        page.click(selector)
    return Path(found.value.path()).read_text(encoding="utf-8")


def test_equal_layers_are_one_block_that_opens(show):
    page = show(break_stack_down())
    assert page.inner_text("h1") == "zoo:stack" and page.title() == "zoo:stack · fvflops"
    assert page.inner_text(".tile[data-key=parameters] .tile-value") == "37.8B"
    assert set(paths(page)) == {
        "zoo:stack", "layers", "head", "layers.0–125", "layers.0–125.attn", "layers.0–125.mlp",
    }  # fmt: skip
    assert page.inner_text(".cell.run .label") == "0–125 × 126"
    sentence, operators = page.eval_on_selector_all(
        "#top-costs-list li", "(items) => items.map((item) => item.textContent)"
    )
    assert sentence.startswith("layers.0–125 (126 equal modules) take 96.9% of the FLOPs: ")
    assert sentence.endswith(": layers.0–125.mlp 72.7%, layers.0–125.attn 24.2%.")
    assert operators == "By operator: linear 100.0%."
    assert column(page, "module-table", 0)[2:4] == ["layers.0–125 × 126", "layers.0–125.mlp × 126"]
    page.hover(".cell.run")
    tip = page.inner_text("#tip").splitlines()
    assert tip == ["layers.0–125", "Block × 126", "FLOPs 12.6K · 96.9% of the model", "100 each"]
    # By keys: down to the run, which says what it is, and open it.
    page.focus(".icicle")
    for key in ("Home", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert page.inner_text("#live").startswith("layers.0–125, 126 equal modules, Block, FLOPs 12.6K, 96.9%")
    assert "126 equal modules, together. Enter or a click opens them." in page.inner_text("#detail")
    page.keyboard.press("Enter")
    assert {"layers.0", "layers.64", "layers.125", "layers.64.mlp"} <= set(paths(page))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#live").startswith("layers.1, Block, FLOPs 100, ")
    assert page.is_visible("#tip"), "what is too narrow for its name shows it at once"
    page.keyboard.press("Enter")
    assert set(paths(page)) == {"layers.1", "layers.1.mlp", "layers.1.attn"}
    assert page.inner_text("#path").split() == ["zoo:stack", "layers", "0–125", "×", "126", "1"]
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert "layers.0–125" in paths(page) and "layers.1" not in paths(page)


def test_a_layer_that_differs_is_not_hidden_among_equal_ones(show):
    page = show(break_stack_down(12, odd=5))
    shown = {path for path in paths(page) if path.count(".") == 1}
    assert shown == {"layers.0–4", "layers.5", "layers.6–11"}


def test_a_profile_has_its_timeline_memory_and_roofline(show):
    page = show(break_run_down())
    assert page.inner_text("h1") == "<b>net</b>"
    assert page.get_attribute(".tile[aria-checked=true]", "data-key") == "time"
    sentences = page.inner_text("#top-costs-list").splitlines()
    assert sentences[0] == "fc1 takes 80.0% of the time and 99.9% of the FLOPs, act 20.0% and 0.1% of the FLOPs."
    assert "relu takes 20.0% of the time for 0.1% of the FLOPs and 4 KB of memory traffic: memory-bound." in sentences
    assert sentences[-1] == "Memory is highest, 900 B, in the forward phase at relu of act (measured)."
    assert page.eval_on_selector_all("[role=tab]", "(tabs) => tabs.map((tab) => tab.textContent)") == [
        "Modules", "Timeline", "Memory", "Roofline",
    ]  # fmt: skip
    page.click("#tab-timeline")
    calls = page.eval_on_selector_all(
        ".timeline .cell", "(cells) => cells.map((cell) => [cell.textContent, parseFloat(cell.style.width)])"
    )
    assert [(name, round(width)) for name, width in calls] == [
        *(("<b>net</b>80 µs", 80), ("fc160 µs", 60), ("mm60 µs", 60)),
        *(("act20 µs", 20), ("relu20 µs", 20), ("mm_backward20 µs", 20)),
    ]
    page.focus(".timeline")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert page.inner_text("#live") == "act, forward, 20 µs, 20.0% of the run"
    assert "20 µs of 100 µs shown" in page.inner_text("#view-timeline .hint")
    page.keyboard.press("Home")
    assert page.locator(".timeline .cell").count() == 6
    page.focus("#tab-timeline")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#tab-memory", "aria-selected") == "true" and not page.is_visible(".timeline")
    assert page.text_content(".peak-label") == "peak 900 B" and page.locator(".area").count() == 1
    page.focus("#view-memory .chart")
    page.keyboard.press("Home")
    assert page.get_attribute("#view-memory .chart", "aria-valuetext") == "500 B at op 1, mm of fc1, forward."
    page.keyboard.press("Enter")
    assert page.inner_text("#path").split() == ["<b>net</b>", "fc1"], "Enter opens the module"
    page.click("#tab-roofline")
    assert "mm: 1 GFLOP/s at 60 FLOP/byte" in page.get_attribute("#view-roofline .chart", "aria-label")
    assert page.locator(".point").count() == 3 and "fp32 10 GFLOP/s" in page.text_content("#view-roofline svg")
    assert ElementTree.fromstring(download(page, "#save-view")).tag == "{http://www.w3.org/2000/svg}svg"


def test_two_models_are_born_as_a_comparison(show):
    page = show("".join(render_comparison(break_stack_down(40), break_stack_down(40, odd=7))))
    assert page.inner_text("h1") == "zoo:stack (this) → zoo:stack (other)"
    assert page.inner_text(".tile[data-key=flops] .tile-other") == "→ 4.46K +1.4%"
    assert page.inner_text(".tile[data-key=parameters] .tile-other") == "→ 12.0B equal"
    sentences = page.inner_text("#top-costs-list").splitlines()
    assert sentences == ["FLOPs: 4.4K → 4.46K (+1.4%).", "Largest differences: layers.7.mlp +60."]
    assert column(page, "differences", 0) == ["the whole model", "layers", "layers.7", "layers.7.mlp"]
    assert "4 modules of both differ, 119 modules are equal." in page.inner_text("#compared")
    page.click("#equal-rows")
    assert "layers.8–39.mlp × 32" in column(page, "differences", 0)
    page.click("#equal-rows")
    assert len(column(page, "differences", 0)) == 4
    page.click("#uncompare")
    assert page.inner_text("h1") == "zoo:stack" and "layers.0–39" in paths(page), "alone, its layers are equal"


def test_files_hold_what_is_seen(show):
    page = show(break_stack_down(12))
    rows = list(csv.reader(io.StringIO(download(page, "[data-save=modules]"))))
    assert rows[0] == ["Module", "Class", "% of FLOPs", "FLOPs", "Parameters"] and len(rows) == 1 + 39
    assert ["layers.3.mlp", "MLP", "4.7%", "75", "150000000"] in rows, "every module, with exact numbers"
    picture = ElementTree.fromstring(download(page, "#save-view"))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "0–11 × 12" in texts and "head" in texts
    fills = {element.get("fill") for element in picture.iter("{http://www.w3.org/2000/svg}rect")}
    assert all(fill == "none" or fill.startswith("#") for fill in fills), "colours that any viewer knows"
    assert len(fills) >= 4


def test_narrow_screens(show):
    page = show(break_run_down())
    page.set_viewport_size({"width": 390, "height": 800})
    for tab in ("modules", "timeline", "memory", "roofline"):
        page.click(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
    first = "#module-table tbody th"
    before = page.eval_on_selector(first, "(cell) => cell.getBoundingClientRect().left")
    page.eval_on_selector("#module-table .scroll", "(box) => (box.scrollLeft = 200)")
    after = page.eval_on_selector(first, "(cell) => cell.getBoundingClientRect().left")
    assert abs(after - before) <= 2, "names stay beside the numbers"
    page = show(break_stack_down(12))
    clipped = "(names) => names.filter((name) => name.scrollWidth > name.clientWidth).map((name) => name.textContent)"
    assert page.eval_on_selector_all("#module-table .open", clipped) == [], "names wrap"


def test_labels_of_near_roofs_hide_no_line_and_no_other_label(show):
    flops = {"int8": 624e12, "bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}
    page = show(replace(break_run_down(), peaks=Peaks("A100", 2.0e12, flops)))
    page.click("#tab-roofline")
    boxes = page.eval_on_selector_all(
        ".roof-label, .roof",
        """(marks) => marks.map((mark) => {
            const { left, right, top, bottom } = mark.getBoundingClientRect();
            return [mark.textContent, left, right, top, bottom];
        })""",
    )
    assert [text for text, *_ in boxes if "FLOP/s" in text] == [
        "int8 624 TFLOP/s", "bf16, fp16 312 TFLOP/s", "tf32 156 TFLOP/s", "fp32 19.5 TFLOP/s",
    ]  # fmt: skip
    level = [box for box in boxes if box[0] or box[4] - box[3] < 3]  # but the slope's box
    for first, second in combinations(level, 2):
        if first[0] or second[0]:
            assert min(first[2], second[2]) <= max(first[1], second[1]) or (
                min(first[4], second[4]) - max(first[3], second[3]) < 3
            ), (first, second)
