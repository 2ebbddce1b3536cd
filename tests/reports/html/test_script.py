"""The modules of the page's script, without a browser: that they are small, how they are joined and made short."""

import re
from pathlib import Path

import pytest

import fvflops.reports.html as page
from fvflops.reports.html import script

SCRIPTS = Path(page.__file__).parent / "scripts"
NAMES = sorted(path.relative_to(SCRIPTS).as_posix() for path in SCRIPTS.rglob("*.js"))
LONGEST_FILE = 350
LARGEST_FOLDER = 16
WORD = re.compile(r"(?:(?<=\.\.\.)|(?<![.\w]))([A-Za-z_]\w*)")


def exports(text):
    return set(re.findall(r"^export (?:async )?(?:function|class|const) (\w+)", text, re.MULTILINE))


def imports(text):
    lines = re.findall(r'^import \{ (.+) \} from "(.+)";$', text, re.MULTILINE)
    return {name: path for names, path in lines for name in names.split(", ")}


def code_of(text):
    return re.sub(r"^import .*$|//.*|/\*[\s\S]*?\*/", "", text, flags=re.MULTILINE)


def test_every_module_is_joined_once_after_its_imports():
    order = script.order_modules(*script.VIEWS.values(), script.ENTRY, script.REPORT)
    assert sorted(order) == NAMES
    for position, name in enumerate(order):
        for path in imports((SCRIPTS / name).read_text()).values():
            wanted = ((SCRIPTS / name).parent / path).resolve().relative_to(SCRIPTS).as_posix()
            assert wanted in order[:position]


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_what_it_uses_and_no_more(name):
    text = (SCRIPTS / name).read_text()
    found = imports(text)
    for imported, path in found.items():
        assert imported in exports((SCRIPTS / name).parent.joinpath(path).resolve().read_text())
    code = code_of(text)
    assert not set(found) - set(WORD.findall(code)), "unused imports"
    assert text.count("import ") == len(re.findall(r'^import \{ .+ \} from ".+";$', text, re.MULTILINE))
    assert text.startswith("// "), "a module begins with what it is for"


def test_modules_and_folders_are_small():
    sizes = {name: len((SCRIPTS / name).read_text().splitlines()) for name in NAMES}
    assert not {name: size for name, size in sizes.items() if size > LONGEST_FILE}
    folders = {path.parent for path in SCRIPTS.rglob("*.js")}
    assert all(len([*folder.iterdir()]) <= LARGEST_FOLDER for folder in folders)


def test_nothing_makes_elements_from_text():
    for name in NAMES:
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert forbidden not in (SCRIPTS / name).read_text(), name


def test_joined_modules_keep_their_names_to_themselves(monkeypatch):
    texts = {
        "a.js": "const ONE = 1;\nexport function f() {\n  return ONE;\n}\n",
        "b.js": 'import { f as g } from "./a.js";\n\nconst ONE = 2;\nexport const h = () => g() + ONE;\n',
    }
    monkeypatch.setattr(script, "_read", texts.__getitem__)
    script.join_scripts.cache_clear()
    joined = script.join_scripts("b.js", 'modules["b.js"].h()')
    assert script.order_modules("b.js") == ["a.js", "b.js"]
    assert 'const{f:g}=modules["a.js"];' in joined and "import" not in joined and "export" not in joined
    script.join_scripts.cache_clear()


def test_modules_that_import_each_other_are_refused(monkeypatch):
    texts = {"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\n'}
    monkeypatch.setattr(script, "_read", texts.__getitem__)
    with pytest.raises(ValueError, match=r"a\.js → b\.js → a\.js"):
        script.order_modules("a.js")


# --- shorter scripts and styles, of the same tokens

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
