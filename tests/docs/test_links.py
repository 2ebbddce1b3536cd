"""Links of the README and of the pages under docs: they lead to files, and to headings in them."""

import pytest

from tests.support.checkout import ROOT
from tests.support.documentation.pages import PAGES, anchors, links, target


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
