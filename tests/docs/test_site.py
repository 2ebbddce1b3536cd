"""The site: its navigation, API pages, links and page of models, and it builds without a warning."""

import ast
import doctest
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import yaml

import fvflops
from tests.support.checkout import ROOT
from tests.support.documentation.pages import PAGES, SNIPPET, anchors, links, target
from tests.support.tools import load_tool

DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """A loader that reads Python's own tags, such as a function's, as None."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def read_settings():
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def pages_of(navigation):
    """Return the paths of a navigation: lists of pages, and of mappings from a title to a page or a list."""
    if isinstance(navigation, str):
        yield navigation
    else:
        for entry in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from pages_of(entry)


def api_names(text):
    return re.findall(r"^::: fvflops\.(\w+)$", text, re.MULTILINE)


def test_the_navigation_has_every_page_once():
    assert list(pages_of([{"Start": ["a.md", {"B": "b.md"}]}, "c.md"])) == ["a.md", "b.md", "c.md"]
    pages = {str(path.relative_to(DOCS)): 1 for path in DOCS.rglob("*.md")}
    assert Counter(pages_of(read_settings()["nav"])) == pages


def test_the_settings_name_files_that_exist_and_every_asset():
    settings = read_settings()
    (python,) = [plugin["mkdocstrings"]["handlers"]["python"] for plugin in settings["plugins"] if plugin != "search"]
    for name in (settings["theme"]["custom_dir"], *python["options"]["extensions"]):
        assert (ROOT / name).exists(), name
    assets = [*settings["extra_css"], *settings["extra_javascript"]]
    assert sorted(assets) == sorted(f"assets/{path.name}" for path in (DOCS / "assets").iterdir())


def test_each_public_name_is_on_one_api_page():
    assert api_names("::: fvflops.a\n    options:\n      members: []\n\n::: fvflops.b\n") == ["a", "b"]
    shown = Counter(name for page, text in PAGES.items() if "/api/" in page for name in api_names(text))
    assert shown == Counter(fvflops.__all__)


def test_files_that_pages_include_have_addresses_that_lead_from_there():
    included = [name for text in PAGES.values() for name in SNIPPET.findall(text)]
    assert "CONTRIBUTING.md" in included
    for name in included:
        assert all(re.match(r"https://|#", link) for link in links((ROOT / name).read_text())), name


def test_the_doctests_of_what_rewrites_docstrings():
    pytest.importorskip("griffe")
    result = doctest.testmod(load_tool("documentation.docstrings"))
    assert (result.failed, result.attempted) == (0, 3)


def test_the_api_pages_and_help_show_each_option_of_a_record():
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(ROOT / "tools" / "documentation" / "docstrings.py"))
    modules = griffe.load("fvflops", search_paths=[str(ROOT)], extensions=extensions).modules_collection
    found = {}
    for name in fvflops.__all__:
        public = getattr(fvflops, name)
        function = public.__init__ if isinstance(public, type) else public
        written = inspect.signature(getattr(function, "__wrapped__", function)).parameters
        if "Unpack[" in str(written):
            expected = inspect.signature(function).parameters
            shown = list(modules[f"{function.__module__}.{function.__qualname__}"].parameters)
            assert [item.name for item in shown] == list(expected), name
            found[name] = {item.name: ast.literal_eval(str(item.default)) for item in shown[len(written) - 1 :]}
            assert found[name] == {key: expected[key].default for key in found[name]}
    assert found["mfu"] == {"dtype": None, "devices": 1, "sparse": False, "float32_matmul": None, "attention": None}
    assert {"record", "plan_step", "search_layouts", "StepMeter"} <= found.keys()


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    if not importlib.util.find_spec("zensical"):
        assert not os.environ.get("CI"), "zensical is not installed, and CI is set"
        pytest.skip("zensical is not installed: tools/environment docs")
    for name in ("docs", "fvflops", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", *{name for text in PAGES.values() for name in SNIPPET.findall(text)}):
        shutil.copy(ROOT / name, tmp_path)
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "mkdocs.yml"]
    built = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Warning" not in built.stdout + built.stderr
    site = tmp_path / "build" / "site"
    for page in pages_of(read_settings()["nav"]):
        assert (site / re.sub(r"(^|/)index\.md$|\.md$", "/", page).lstrip("/") / "index.html").is_file(), page
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', text), page  # no network
        assert "<blockquote>\n<blockquote>" not in text, page  # a doctest that is not in a block of code


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for link in links(PAGES[page]):
        found = target(page, link)
        if found:
            file, anchor = found
            assert file.exists(), link
            assert not anchor or anchor in anchors(file.read_text()), link


def test_the_start_page_links_every_guide_and_concept():
    linked = {target("docs/index.md", link)[0] for link in links(PAGES["docs/index.md"]) if link.endswith(".md")}
    assert {file for folder in ("guides", "concepts") for file in (ROOT / "docs" / folder).glob("*.md")} <= linked


def test_what_counts_as_a_link():
    assert links("[a](b.md) and\n![c](d.svg)\n```\n[no](link.md)\n```\n") == ["b.md", "d.svg"]
    assert target("docs/faq.md", "https://pytorch.org/x") is None
    address = "https://github.com/someone/fvflops/blob/main/docs/reference/gpu.md#a-heading"
    assert target("README.md", address) == target("docs/faq.md", "reference/gpu.md#a-heading")
    site = "https://fvflops.github.io/fvflops/reference/gpu/#a-heading"
    assert target("README.md", site) == target("README.md", address)
    assert target("README.md", "https://fvflops.github.io/fvflops/") == (ROOT / "docs" / "index.md", "")
    assert target("docs/faq.md", "#a") == (ROOT / "docs" / "faq.md", "a")


def test_what_counts_as_a_heading():
    assert anchors("# A page, to look at\n```\n# no heading\n```\n") == {"a-page-to-look-at"}


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
