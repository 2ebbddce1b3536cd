"""The modules of the page's script: how they are joined and made short, and each called in a headless Chromium."""

import json
import random
import re
import time
from pathlib import Path

import pytest

import fvflops.reports.html as page
from fvflops.reports.html import pack, script
from fvflops.reports.html.script import join_scripts
from tests.support.reports.breakdowns import unpack

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


KINDS = [0, 1, 7, 2**52, str(2**60), 1.5]


def draw_column(rng):
    """Return a random column: a repeated pattern, whose values may grow by steps, between other values."""
    pattern = [rng.choice(KINDS) for _ in range(rng.randint(1, 7))]
    steps = [rng.choice([0, 0, 1, 3]) if isinstance(value, int) else 0 for value in pattern]
    before, after = ([rng.choice(KINDS) for _ in range(rng.randint(0, 5))] for _ in range(2))
    repeated = [
        value + repetition * step if step else value
        for repetition in range(rng.randint(0, 12))
        for value, step in zip(pattern, steps, strict=True)
    ]
    return [*before, *repeated, *after]


def test_unpacking_restores_any_column():
    rng = random.Random(0)
    columns = [draw_column(rng) for _ in range(2000)]
    packed = [pack(column) for column in columns]
    assert [unpack(column) for column in packed] == columns
    assert sum(isinstance(column, dict) for column in packed) > 300


def test_packing_20_000_values_takes_less_than_a_second():
    rng = random.Random(0)
    for column in [[rng.randint(0, 1) for _ in range(20_000)], [n * n for n in range(20_000)], [0] * 20_000]:
        start = time.process_time()
        assert unpack(pack(column)) == column
        assert time.process_time() - start < 1


# This module with all that it imports; only the page's start module does anything when it is loaded.
ENTRY = "page/comparison.js"


@pytest.fixture(scope="module")
def evaluate(browser):
    page = browser.new_page()
    page.set_content('<svg id="svg"></svg>')
    yield lambda expression, entry=ENTRY: page.evaluate(join_scripts(entry, expression))
    page.close()


def test_numbers(evaluate):
    values = {
        "m.short(4089184256)": "4.09G",
        "m.short(999.6)": "1K",
        "m.short(1536, 'B')": "1.54 KB",
        "m.short(1234567, 'ns')": "1.23 ms",
        "m.short(405853388800, 'parameters')": "405.9B",
        "m.short(109482240, 'parameters')": "109.5M",
        "m.short(999960, 'parameters')": "1.0M",
        "m.short(480, 'parameters')": "480",
        "m.signed(-1500, '')": "−1.5K",
        "m.signed(0, '')": "0",
        "m.percent(1, 3)": "33.3%",
        "m.percent(1, 100000)": "<0.1%",
        "m.enumerate(['a', 'b', 'c'])": "a, b and c",
        "m.plural(1, 'module')": "1 module",
    }
    found = evaluate("((m) => [" + ", ".join(values) + "])(modules['base/numbers.js'])")
    assert dict(zip(values, found, strict=True)) == values


def test_columns_are_unpacked_as_in_python(evaluate):
    column = [0, 5, *(value for layer in range(9) for value in (layer, 9, str(2**60), 9, 7)), 3]
    packed = pack(column)
    assert isinstance(packed, dict) and unpack(packed) == column
    unpacked = f"modules['data/packed.js'].unpack({json.dumps(packed)})"
    assert evaluate(unpacked) == column
    assert evaluate("modules['data/packed.js'].unpack([1, 2])") == [1, 2]


def test_ticks_are_round(evaluate):
    assert evaluate("modules['data/calls.js'].ticks(0, 100, 4)", "data/calls.js") == [0, 50, 100]
    assert evaluate("modules['data/calls.js'].ticks(130, 990, 5)", "data/calls.js") == [200, 400, 600, 800]


RECORD = """{schema: 1, title: 'net', strings: ['', 'a', 'b', 'c', 'd', 'Net', 'L'],
    phases: ['forward'], operators: ['mm'],
    modules: {parent: [-1, 0, 0, 0, 0], name: [0, 1, 2, 3, 4], class: [5, 6, 6, 6, 6], about: [0, 0, 0, 0, 0]},
    rows: {module: [1, 2, 3, 4], phase: [0, 0, 0, 0], operator: [0, 0, 0, 0]},
    measures: [{key: 'flops', title: 'FLOPs', unit: '', note: '', values: [7, 7, 7, LAST], unsupported: UNKNOWN},
               {key: 'time', title: 'Time', unit: 'ns', note: '', values: [1, 2, 3, 4], unsupported: []}]}"""


def labels(evaluate, last="7", unknown="[]"):
    """Return the labels of the nodes below the root of four modules, of which the last has `last` FLOPs."""
    record = RECORD.replace("LAST", last).replace("UNKNOWN", unknown)
    return evaluate(f"""(() => {{
        const {{ ModuleNodes }} = modules["data/module_nodes.js"];
        const nodes = new ModuleNodes(new (modules["data/report.js"].Report)({record}));
        return nodes.children(nodes.root).map((node) => node.label);
    }})()""")


def test_consecutive_equal_modules_are_one_node_whatever_their_times(evaluate):
    assert labels(evaluate) == ["a … d × 4"]
    assert labels(evaluate, last="8") == ["a … c × 3", "d"], "modules of different counts stay apart"
    assert labels(evaluate, unknown="[[0, 1]]") == ["a", "b … d × 3"], "and so do modules of unlike support"
    assert labels(evaluate, unknown="[[1, 1]]") == ["a", "b", "c", "d"], "two equal ones stay two"
