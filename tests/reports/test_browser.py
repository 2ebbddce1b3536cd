"""The HTML report in a headless Chromium: what it shows, and what it does on clicks and keys."""

from fvflops.cli import main
from fvflops.reports import REPORTS
from fvflops.reports.document import Document, Table, number_column, text_column
from fvflops.reports.escaping import printable
from fvflops.reports.formats import write_document
from fvflops.trace import Summary
from fvflops.views.breakdown import Breakdown, Cell, Measure
from tests.support.reports.breakdowns import break_hostile_down, break_large_down, break_net_down, build_tree, column
from tests.support.reports.hostile_names import NAMES


def widths(page):
    """Return the drawn modules by path, with their widths in percent."""
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".icicle .cell.module")].map(
            (cell) => [cell.dataset.path, parseFloat(cell.style.width)]))"""
    )


def test_page_shows_the_model(show):
    page = show(break_net_down())
    assert page.inner_text("h1") == "Net" and "convention default" in page.inner_text("#subtitle")
    assert widths(page) == {"Net": 100, "encoder": 85, "encoder.attn": 40, "encoder.mlp": 40, "head": 15}
    assert page.inner_text(".cell.own") == "itself"
    assert page.eval_on_selector(".cell.own", "(cell) => parseFloat(cell.style.width)") == 5
    assert page.inner_text(".tile[aria-checked=true] .tile-value") == "≥ 1K"
    assert column(page, "module-table", 0) == ["Net", "encoder", "encoder.attn", "encoder.mlp", "head"]
    assert column(page, "module-table", 2) == ["100.0%", "85.0%", "40.0%", "40.0%", "15.0%"]
    assert column(page, "module-table", 3) == ["≥ 1K", "≥ 850", "≥ 400", "400", "150"]
    assert column(page, "operator-table", 0) == ["linear", "mm", "add", "scan"]
    assert column(page, "operator-table", 1) == ["55.0%", "40.0%", "5.0%", "unsupported"]
    assert column(page, "operator-table", 2) == ["550", "400", "50", "unsupported"]
    assert page.inner_text(".status.unsupported .big") == "2 calls" and "4.1K output" in page.inner_text(
        ".status.unsupported"
    )
    assert page.inner_text(".status.zero_flop .big") == "3 calls"
    assert "lower bounds" in page.inner_text("#ledger-hint")


def test_zoom_by_click_and_keys(show):
    page = show(break_net_down())
    page.click(".cell[aria-label^='encoder,']")
    assert widths(page) == {"encoder": 100, "encoder.attn": 47.0588, "encoder.mlp": 47.0588}
    assert page.inner_text("#path").split() == ["Net", "encoder"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    selected = page.get_attribute(".icicle", "aria-activedescendant")
    assert page.get_attribute(f"#{selected}", "aria-label") == "encoder.mlp, Linear, FLOPs 400, 40.0% of the model"
    assert page.inner_text("#live") == "encoder.mlp, Linear, FLOPs 400, 40.0% of the model"
    assert "(in_features=4)" in page.inner_text("#detail")
    page.keyboard.press("Enter")
    assert widths(page) == {"encoder.mlp": 100}
    page.keyboard.press("Escape")
    assert "encoder.attn" in widths(page) and "head" not in widths(page)
    page.keyboard.press("Backspace")
    assert "head" in widths(page)
    owned = page.get_attribute(".icicle", "aria-owns").split()
    assert [page.get_attribute(f"#{cell}", "aria-label").split(",")[0] for cell in owned] == [
        "the whole model", "encoder", "encoder.attn", "encoder.mlp", "head",
    ], "a screen reader is told of modules in their order, whichever was drawn first"  # fmt: skip
    page.click("#module-table button.open >> text=encoder.attn")
    assert widths(page) == {"encoder.attn": 100}
    page.keyboard.press("Home")
    assert len(widths(page)) == 5
    page.click(".crumb")
    assert page.get_attribute(".cell[aria-label^='encoder,']", "aria-expanded") == "true"


def test_measures_phases_and_operators(show):
    page = show(break_net_down())
    page.click(".tile[data-key=parameters]")
    assert widths(page) == {"Net": 100, "encoder": 30, "encoder.mlp": 30, "head": 70}
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".tile[aria-checked=true] .tile-title") == "Bytes"
    assert f"{2**60 + 1:,}" in page.inner_text("#detail"), "every digit of what no double holds"
    page.click(".tile[data-key=rate]")
    assert page.inner_text(".tile[data-key=rate] .tile-value") == "≥ 66.7M"  # 1000 FLOPs in 15 µs
    assert "FLOP/s" in page.inner_text("#legend")
    page.click(".tile[data-key=flops]")
    page.select_option("#phase", "backward")
    assert widths(page) == {"Net": 100, "encoder": 100, "encoder.attn": 100}
    page.select_option("#phase", "")
    page.click("#operator-table button.open >> text=linear")
    assert widths(page) == {"Net": 100, "encoder": 72.7273, "encoder.mlp": 72.7273, "head": 27.2727}
    page.select_option("#operator", "")
    for split, stops in (("phase", "90.00%"), ("operator", "55.00%")):
        page.click(f"#split label:has([value={split}])")
        assert stops in page.eval_on_selector(".cell[aria-label^='the whole']", "(cell) => cell.style.background")
    assert page.inner_text("#legend").split() == ["linear", "mm", "add"]


def test_search(show):
    page = show(break_net_down())
    page.keyboard.press("/")
    page.keyboard.type("LINEAR")
    page.wait_for_selector(".cell.hit")
    assert page.inner_text("#hits").startswith("2 modules found, together 550 (55.0%)")
    assert column(page, "module-table", 0) == ["encoder.mlp", "head"]
    assert page.locator(".cell.hit").count() == 2 and page.locator(".cell.module.dim").count() == 3
    page.keyboard.press("Enter")
    assert widths(page) == {"encoder.mlp": 100}
    page.fill("#search", "nowhere")
    page.wait_for_selector("#module-table tbody tr", state="detached")
    assert page.inner_text("#hits") == "No module has this in its name or class."


def test_tables_are_sorted(show):
    page = show(break_net_down())
    page.click("#module-table thead button >> text=Parameters")
    assert column(page, "module-table", 0) == ["Net", "head", "encoder", "encoder.mlp", "encoder.attn"]
    assert page.inner_text("#module-table [aria-sort=descending]") == "Parameters ↓"
    page.keyboard.press("Enter")  # the heading keeps the focus
    assert column(page, "module-table", 0)[-1] == "Net"
    page.click("#module-table thead button >> text=Class")
    assert column(page, "module-table", 1) == ["Attention", "Block", "Linear", "Linear", "Net"]
    page.click("#operator-table thead button >> text=Operator")
    assert column(page, "operator-table", 0) == ["add", "linear", "mm", "scan"]


def test_hostile_names_are_text(show):
    page = show(break_hostile_down())
    assert page.evaluate("window.HACKED") is None
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    shown = column(page, "module-table", 0)
    assert shown[1:] == [printable(name)[:400] for name in NAMES]
    assert len(page.get_attribute(f"#module-table button[title^='{'L' * 50}']", "title")) == 10_000
    assert page.inner_text("h1") == NAMES[0] and page.title() == f"{NAMES[0]} · fvflops"
    page.click("#split label:has([value=operator])")
    for name in NAMES[:2]:
        assert name in page.inner_text("#legend") and name in page.inner_text("#ledger")
        assert name in page.inner_text("#about") and name in page.inner_text("#operator-table")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a long name does not widen the page"


def test_light_and_dark(show):
    page = show(break_net_down())

    def brightness():
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return int(colour.removeprefix("rgb(").split(",")[0])

    page.emulate_media(color_scheme="light")
    assert brightness() > 200
    page.emulate_media(color_scheme="dark")
    assert brightness() < 50
    page.click("#theme")
    assert "Light" in page.inner_text("#theme") and brightness() > 200
    page.emulate_media(color_scheme="light")
    page.click("#theme")
    assert "Dark" in page.inner_text("#theme") and brightness() < 50
    page.emulate_media(media="print")
    assert brightness() == 255 and not page.is_visible("#search")


def test_fifty_thousand_modules(show):
    page = show(break_large_down())
    assert page.inner_text("#module-hint").startswith("50,001 modules")
    assert page.locator(".cell").count() < 1000, "what is narrower than a pixel or two is drawn together"
    assert len(column(page, "module-table", 0)) == 50
    page.click("#module-table .more")
    assert len(column(page, "module-table", 0)) == 550
    page.fill("#search", "b42.l7")
    page.wait_for_selector("#module-table .more", state="detached")
    assert page.inner_text("#hits").startswith("11 modules found")  # l7 and l70 to l79: the layers end at l498
    page.fill("#search", "")
    page.click(".cell[aria-label^='b42,']")
    assert widths(page)["b42"] == 100 and len(widths(page)) == 500


def test_two_reports_are_compared(show, tmp_path):
    net = break_net_down()
    wider = Measure("FLOPs", {Cell("encoder.mlp", "forward", "linear"): 800, Cell("neck", "forward", "linear"): 20})
    other = Breakdown(build_tree("encoder", "encoder.mlp", "neck"), {"flops": wider})
    (tmp_path / "other.html").write_text("".join(REPORTS["html"](other)), encoding="utf-8")
    (tmp_path / "wrong.json").write_text('{"format": "<b>"}', encoding="utf-8")
    page = show(net)
    page.set_input_files("#other", tmp_path / "wrong.json")
    page.wait_for_selector("#notice:not([hidden])")
    assert "wrong.json cannot be compared with this report" in page.inner_text("#notice")
    page.set_input_files("#other", tmp_path / "other.html")
    page.wait_for_selector("#comparison:not([hidden])")
    assert column(page, "differences", 0) == [
        "encoder.attn",
        "encoder.mlp",
        "the whole model",
        "head",
        "encoder",
        "neck",
    ]
    assert column(page, "differences", 3) == ["−400", "+400", "−180", "−150", "−50", "+20"]
    assert column(page, "differences", 2)[0] == "missing"
    assert column(page, "differences", 4) == ["removed", "+100.0%", "−18.0%", "removed", "−5.9%", "new"]
    assert "2 modules only in Net (this), 1 module only in Net (other.html)" in page.inner_text("#compared")
    assert page.locator(".icicle").count() == 2
    # A summary as --format json writes it can be compared with too; what it holds is with all that is inside.
    columns = {"flops": {"": 1020, "encoder": 870, "encoder.mlp": 420, "encoder.attn": 400, "head": 150}}
    (tmp_path / "summary.json").write_text(REPORTS["json"](Summary(net.modules, columns)), encoding="utf-8")
    page.set_input_files("#other", tmp_path / "summary.json")
    page.wait_for_selector("text=is not split by phase and operator")
    assert column(page, "differences", 0) == ["the whole model", "encoder", "encoder.mlp"]
    assert column(page, "differences", 3) == ["+20", "+20", "+20"]
    assert page.locator(".icicle").count() == 2
    page.click("#uncompare")
    assert page.locator(".icicle").count() == 1 and not page.is_visible("#comparison")


def test_a_report_of_tables_is_sorted_searched_and_fits_a_phone(show, tmp_path):
    assert main(["memory", "zoo:vit_b_16", "--depth", "3", "--output", str(tmp_path / "memory.html")]) == 0
    page = show((tmp_path / "memory.html").read_text(), ready="#theme:visible")
    modules = page.locator("table").filter(has=page.locator("td[data-name]"))

    def shown(column):
        rows = modules.locator("tbody tr:visible")
        return [rows.nth(index).locator("td").nth(column).inner_text() for index in range(rows.count())]

    names, values = (
        shown(0),
        modules.locator("tbody td:nth-child(2)").evaluate_all("cells => cells.map(c => c.dataset.value)"),
    )
    heading = modules.locator("th").nth(1)
    heading.locator("button").click()
    after = modules.locator("tbody td:nth-child(2)").evaluate_all("cells => cells.map(c => c.dataset.value)")
    assert after == sorted(values, key=float, reverse=True) and heading.get_attribute("aria-sort") == "descending"
    assert not any(name.startswith(" ") for name in shown(0)), "whole names, not indented"
    heading.locator("button").click()
    heading.locator("button").click()
    assert shown(0) == names
    page.keyboard.press("/")
    page.keyboard.type("conv_")
    assert [name.strip() for name in shown(0)] == ["conv_proj"]
    page.locator("#search").fill("")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    plot = page.locator(".plot svg:visible")
    assert plot.count() == 1 and plot.bounding_box()["x"] + plot.bounding_box()["width"] <= 390
    assert min(button.bounding_box()["height"] for button in page.locator("th button:visible").all()) >= 24


def test_a_long_title_is_whole_on_a_phone_and_a_table_prints_its_total_once(show):
    table = Table("costs", [text_column("part"), number_column("flops")], [("a", 1)], total=("total", 1))
    page = show(write_document(Document("x", "a title of many words, " * 8, [table]), "html"), ready="#theme:visible")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("(h => h.scrollHeight - h.clientHeight)(document.querySelector('h1'))") <= 1
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('tfoot')).display") == "table-row-group"
