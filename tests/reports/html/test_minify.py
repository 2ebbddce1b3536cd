"""Scripts and styles made short: the same tokens remain."""

from __future__ import annotations

import re

import pytest

from fvflops.reports.html import script
from tests.support.reports.page_scripts import NAMES, SCRIPTS

TRICKY = {
    "spaces in texts stay": ("const a = 'b  c' + \"d  e\";", "const a='b  c'+\"d  e\";"),
    "so do comments in texts": ("f('/* a */ // b');", "f('/* a */ // b');"),
    "a regular expression is one token": ('x.match(/ [/] "/ ) // "', 'x.match(/ [/] "/)'),
    "a division is none": ("x = (a) / b / c[0] / 2", "x=(a)/b/c[0]/2"),
    "templates in templates": ("`a  ${ b ? `c  ${ d }` : '}' }  e` + f", "`a  ${ b ? `c  ${ d }` : '}' }  e`+f"),
    "signs stay apart": ("a + +b - -c + -d", "a+ +b- -c+-d"),
    "a line that ends a statement": ("let a = b\nlet c = d\n++e", "let a=b\nlet c=d\n++e"),
    "a statement on several lines": ("a\n  .b() // c\n  .c(\n    d,\n  );", "a.b().c(d,);"),
    "words": ("return typeof x instanceof Y ? /a b/g : void 0", "return typeof x instanceof Y?/a b/g:void 0"),
}


@pytest.mark.parametrize(("text", "short"), TRICKY.values(), ids=TRICKY)
def test_a_script_keeps_its_tokens(text, short):
    assert script.minify_script(text) == script.minify_script(short) == short


@pytest.mark.parametrize("name", NAMES)
def test_the_page_s_modules_lose_only_spaces_and_comments(name):
    text = (SCRIPTS / name).read_text()
    short = script.minify_script(text)
    patterns = re.findall(r"[(=] ?(/[^/* ].+?/[gimu]*)[;,).]", text)
    assert not [pattern for pattern in patterns if pattern not in short]
    without_comments = re.sub(r"^\s*//.*|(?<=\s)//\s.*|/\*\*[\s\S]*?\*/", "", text, flags=re.MULTILINE)
    assert "".join(short.split()) == "".join(without_comments.split())


def test_a_style_keeps_its_selectors_and_values():
    style = """
    /* of a cell */
    .a:hover > .b, .c :is(p, q) { content: "a ; b"; font: 14px/1.5 var(--sans) }
    @media (max-width: 600px) and (hover: none) { .a { width: calc(100% - (2 * 4px)); } }
    """
    assert script.minify_style(style) == (
        '.a:hover > .b,.c :is(p,q){content:"a ; b";font:14px/1.5 var(--sans)}'
        "@media (max-width:600px) and (hover:none){.a{width:calc(100% - (2 * 4px))}}"
    )
    assert re.search(r"\S", script.minify_style(" /* a */ ")) is None
