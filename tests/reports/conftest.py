"""Fixtures of the tests that open pages in a headless Chromium."""

import os
import shutil

import pytest

from fvflops.reports import REPORTS

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def give_up(reason):
    """Skip with a notice, but fail in CI, where these tests are to be run."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI is set")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        give_up("playwright is not installed: tools/environment test")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        give_up("no Chromium is installed: apt-get install chromium")
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # for whom Chromium has no sandbox
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if root else [])
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser, tmp_path):
    """Return what opens a breakdown, or the text of a page; there may be no error on the console, nor any request."""
    page = browser.new_page(viewport={"width": 1200, "height": 900}, reduced_motion="reduce")
    wrong = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("request", lambda request: request.url.startswith(("file:", "blob:")) or wrong.append(request.url))
    page.set_default_timeout(15_000)

    def open_page(shown, ready=".cell"):
        path = tmp_path / "report.html"
        text = shown if isinstance(shown, str) else "".join(REPORTS["html"](shown))
        path.write_text(text, encoding="utf-8")
        page.goto(path.as_uri())
        page.wait_for_selector(ready)
        return page

    yield open_page
    page.close()
    assert wrong == []
