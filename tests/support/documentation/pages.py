"""Markdown pages of the repository: their blocks, files shown in them, headings, links and pictures."""

import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.support.checkout import ROOT

# The page of models has thousands of rows of figures, and no example.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
# A file of this repository, as a page names it that is shown elsewhere too, such as the README on a package index.
OURS = re.compile(r"https://(?:github\.com|raw\.githubusercontent\.com)/[\w.-]+/fvflops/(?:(?:blob|raw|tree)/)?main/")
# A page as it is on the site, and a line that includes another file in a page.
SITE = re.compile(r"https://fvflops\.github\.io/fvflops/([\w/]*)")
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)


class Case(NamedTuple):
    """A command, the files of its page that it names, and what it prints: nothing where the page does not show it."""

    command: str
    files: tuple[tuple[str, str], ...]
    shown: str


def console_blocks(text: str) -> list[tuple[str, str]]:
    """Return (command, output shown below it) for each `$ fvflops ...` of the console blocks."""
    commands = []
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            commands.append((command, output))
    return commands


def shown_files(text: str) -> dict[str, str]:
    """Return name → content of the files that a text shows: blocks whose first line is a comment with the name."""
    return {
        name: f"# {name}\n{rest}"
        for name, rest in re.findall(r"^```\w+\n# (\w+\.\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    }


def collect(pages: dict[str, str]) -> list[Case]:
    """Return the commands of all pages, each once; that two pages show it with different outputs is a ValueError."""
    cases = {}
    for page, text in pages.items():
        for command, shown in console_blocks(text):
            files = tuple((name, content) for name, content in shown_files(text).items() if name in command)
            before = cases.get((command, files))
            if before and before.shown and shown not in ("", before.shown):
                raise ValueError(f"{page}: another page shows other output of {command}")
            cases[command, files] = before if before and before.shown else Case(command, files, shown)
    return list(cases.values())


def texts_of(picture: Path) -> list[str]:
    """Return the texts of an SVG; matplotlib draws them as paths and says in comments what they are."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tree = ElementTree.parse(picture, parser)
    texts = [*tree.iter(ElementTree.Comment), *tree.iter("{http://www.w3.org/2000/svg}text")]
    return [element.text.strip() for element in texts]


def anchors(text: str) -> set[str]:
    """Return what a link to a heading of a page ends with: its words in small letters, with hyphens between them."""
    text = SNIPPET.sub(lambda match: (ROOT / match[1]).read_text(), text)
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    """Return the addresses of the links and pictures of a text, without those inside blocks of code."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def target(page: str, link: str) -> tuple[Path, str] | None:
    """Return the file and the heading of the repository to which a link of a page leads, None outside of it."""
    if site := SITE.match(link):
        name = f"docs/{site[1].strip('/') or 'index'}"
        path, anchor, folder = f"{name}.md", link[site.end() :].lstrip("#"), ROOT
    else:
        ours = OURS.match(link)
        if not ours and re.match(r"\w+:", link):
            return None
        path, _, anchor = (link[ours.end() :] if ours else link).partition("#")
        folder = ROOT if ours else (ROOT / page).parent
    return (folder / path if path else ROOT / page).resolve(), anchor


def shown_pictures(pages: dict[str, str]) -> set[str]:
    found = (target(page, link) for page, text in pages.items() for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text))
    return {str(file.relative_to(ROOT)) for file, _ in filter(None, found)}
