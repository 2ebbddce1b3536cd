"""The page of models in a headless Chromium: the box filters rows by name, and headings sort them."""

import os
import re
import shutil

import pytest

from tests.support.checkout import ROOT

ASSETS = ROOT / "docs" / "assets"
TABLE = (
    "<table><thead><tr><th>model</th><th>Parameters</th><th>Peak memory</th></tr></thead><tbody>"
    "<tr><td>timm:b_10</td><td>1.2B</td><td>4.97 GB</td></tr>"
    "<tr><td>timm:b_9</td><td>25.6M</td><td>999 MB</td></tr>"
    "<tr><td>timm:a</td><td>950</td><td></td></tr></tbody></table>"
)
PAGE = f'<article class="md-typeset"><h1 id="models">Models</h1><p>Text</p><h2>timm</h2>{TABLE}</article>'


@pytest.fixture(scope="module")
def page():
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        assert not os.environ.get("CI"), "no Chromium is installed, and CI is set"
        pytest.skip("no Chromium is installed: apt-get install chromium")
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # for whom Chromium has no sandbox
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"] if root else [])
        yield browser.new_page()
        browser.close()


def show(page, html, folder):
    style, script = (ASSETS / name for name in ("site.css", "catalogue.js"))
    text = f'<link rel="stylesheet" href="{style.as_uri()}"><script src="{script.as_uri()}"></script>{html}'
    (folder / "page.html").write_text(f"<!doctype html>{text}")
    page.goto((folder / "page.html").as_uri())


def names(page):
    return [name for name in page.locator("tbody tr:visible td:first-child").all_inner_texts() if name]


def test_rows_are_filtered_and_sorted(page, tmp_path):
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    show(page, PAGE, tmp_path)
    assert names(page) == ["timm:b_10", "timm:b_9", "timm:a"]
    assert page.locator("output").inner_text() == "3 of 3 models"
    page.get_by_role("button", name="Parameters").click()  # the largest first, with their units
    assert names(page) == ["timm:b_10", "timm:b_9", "timm:a"]
    assert page.locator("th").nth(1).get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="Parameters").click()
    assert names(page) == ["timm:a", "timm:b_9", "timm:b_10"]
    page.get_by_role("button", name="model").press("Enter")  # by keyboard, numbers in names by value
    assert names(page) == ["timm:a", "timm:b_9", "timm:b_10"]
    assert page.locator("th[aria-sort]").all_inner_texts() == ["model"]
    page.get_by_role("button", name="Peak memory").click()
    assert names(page) == ["timm:b_10", "timm:b_9", "timm:a"]
    page.get_by_role("searchbox", name="Filter models by name").fill(" B_  10 ")
    assert names(page) == ["timm:b_10"]
    assert page.locator("output").inner_text() == "1 of 3 models"
    page.get_by_role("searchbox").fill("none")
    assert names(page) == []
    page.get_by_role("searchbox").press("Enter")  # submits nothing
    page.get_by_role("searchbox").fill("")
    assert len(names(page)) == 3
    assert wrong == []


def test_other_pages_are_left_alone(page, tmp_path):
    show(page, PAGE.replace('id="models"', 'id="devices"'), tmp_path)
    assert page.locator("input, button").count() == 0


def test_the_page_has_the_columns_that_the_style_aligns():
    text = (ROOT / "docs" / "models.md").read_text()
    heads = set(re.findall(r"^\| model .*$", text, re.MULTILINE))
    assert heads == {"| model | Parameters | MACs | Activations | Peak memory | Inputs |"}
    assert set(re.findall(r"^\| :?-.*$", text, re.MULTILINE)) == {"| --- | --- | --- | --- | --- | --- |"}
    assert len(re.findall(r"^\| \w+:", text, re.MULTILINE)) > 2000
