"""The mistakes in a table: each is told with its file and line, and none of them runs anything."""

import sys

import pytest
import yaml

from fvflops import paths
from fvflops.formulas import TableError, load_table, register_formula, shipped_tables
from fvflops.formulas.loading import PARTS, _read_fields, _read_ops, _read_rows
from fvflops.formulas.row_validation import check_module, check_op
from fvflops.formulas.schema import overloads_of
from tests.support.checkout import ROOT
from tests.support.old_torch import OLDER, may_lack
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas
from tests.support.table_folder import TableFolder, signature


@pytest.fixture
def load(tmp_path):
    return TableFolder(tmp_path)


# name → the line of the mistake, the pattern of what is said of it, and the table
MISTAKES = yaml.safe_load((ROOT / "tests" / "formulas" / "table_mistakes.yaml").read_text(encoding="utf-8"))
LONG_MISTAKES = {
    "a label that is too long": (f"ops:\n  aten::mm: {{macs: 1, label: {'x' * 201}}}", 2, "at most 200 are allowed"),
    "a much newer schema": (f"schema: {'9' * 400}", 1, "reads up to 3: update fvflops"),
    "nested too deep": ("\n" + "ops: " + "[" * 50 + "]" * 50, 2, "levels of nesting"),
    "extends a name that is too long": ("extends: " + "x" * 300, 1, "does not exist"),
}
MISTAKES |= {
    name: dict(zip(("table", "line", "says"), mistake, strict=True)) for name, mistake in LONG_MISTAKES.items()
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_file_and_line(load, tmp_path, name):
    mistake = MISTAKES[name]
    with pytest.raises(TableError, match=mistake["says"]) as caught:
        load(mistake["table"])
    assert str(caught.value).startswith(f"{tmp_path / 'mine.yaml'}:{mistake['line']}: ")


def test_the_words_of_older_tables_are_read(load):
    old = load("omit_inherited: true\nextends: default\nfree: [aten::mm]\nomitted: [aten::bmm]\nops:\n  aten::mv: free")
    rows = "zero_flop: [aten::mm]\nignored: [aten::bmm]\nops:\n  aten::mv: zero_flop"
    assert (
        old.rows == load(f"ignore_inherited: true\nextends: default\n{rows}").rows
        and old.row("aten::bmm").kind == "ignored"
    )
    with pytest.raises(TableError, match="free is an older name of zero_flop, which this table has too"):
        load("free: [aten::mm]\nzero_flop: [aten::bmm]")


def test_a_table_may_say_its_schema(load):
    assert load("schema: 1\nextends: default").rows == load("extends: default").rows


def test_aliases_are_refused_before_they_expand(load):
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    )
    with pytest.raises(TableError, match=":1: &a"):
        load(bomb)


def test_a_file_over_a_mebibyte_is_not_read_further(load, monkeypatch):
    asked = []
    opened = paths.open_text

    class Watched:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def read(self, size):
            asked.append(size)
            return self.file.read(size)

    monkeypatch.setattr(paths, "open_text", lambda path: Watched(opened(path)))
    with pytest.raises(TableError, match=r"mine.yaml:1: a file has at most 1,048,576 characters"):
        load("# " + "x" * (1 << 20))
    assert asked == [(1 << 20) + 1]


def test_an_unreadable_file_is_a_mistake(tmp_path):
    with pytest.raises(TableError, match=r"^nowhere.yaml:1: cannot be read: No such file"):
        load_table("nowhere.yaml")
    with pytest.raises(TableError, match=r"^fvflops ships no table named 'defualt', .*: did you mean 'default'"):
        load_table("defualt")
    with pytest.raises(TableError, match=":1: cannot be read: it is a folder"):
        load_table(str(tmp_path))
    with pytest.raises(TableError, match=r"^fvflops://nothing.yaml:1: cannot be read"):
        load_table("fvflops://nothing.yaml")
    with pytest.raises(TableError, match="cannot be read"):
        load_table("fvflops://../setup.cfg")
    (tmp_path / "latin.yaml").write_bytes(b"description: \xe9\xff")
    with pytest.raises(TableError, match=r"latin.yaml:1: this is not UTF-8"):
        load_table(str(tmp_path / "latin.yaml"))


def test_a_cycle_of_extends_is_told_with_its_steps(tmp_path):
    (tmp_path / "a.yaml").write_text("description: a\nextends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: ./a.yaml")
    with pytest.raises(TableError, match=r"b.yaml:1: extends: a cycle: .*a.yaml extends .*b.yaml extends .*a.yaml"):
        load_table(str(tmp_path / "a.yaml"))
    (tmp_path / "self.yaml").write_text("extends: self.yaml")
    with pytest.raises(TableError, match=r"self.yaml:1: extends: a cycle"):
        load_table(str(tmp_path / "self.yaml"))


def test_a_long_chain_of_extends_is_cut(tmp_path):
    for index in range(40):
        (tmp_path / f"{index}.yaml").write_text(f"extends: {index + 1}.yaml\nzero_flop: [aten::mm]")
    (tmp_path / "40.yaml").write_text("zero_flop: [aten::mm]")
    assert load_table(str(tmp_path / "25.yaml")).row("aten::mm").kind == "zero_flop"
    with pytest.raises(TableError, match=r"39.yaml:1: extends: a chain of more than 16 tables"):
        load_table(str(tmp_path / "24.yaml"))


def test_an_empty_name_and_names_that_no_file_can_have():
    for name in ("", "  "):
        with pytest.raises(TableError, match=r"the name of a table is empty: write one of .*default, .* or a path"):
            load_table(name)
    with pytest.raises(TableError, match=r"fvflops ships no table named 'x{60}…'"):
        load_table("x" * 300)
    with pytest.raises(TableError, match=":1: cannot be read: embedded null byte"):
        load_table("a\0b")


def test_a_mistake_in_the_extended_file_names_that_file(tmp_path):
    (tmp_path / "base.yaml").write_text("\nzero_flop: aten::mm")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml")
    with pytest.raises(TableError, match=r"base.yaml:2: zero_flop is"):
        load_table(str(tmp_path / "mine.yaml"))


def test_ranks_that_do_not_fit_replay_op_shapes_and_pattern(load, tmp_path):
    table = load("ops:\n  aten::mm: {shapes: 'b m k, k n', macs: b*m*k*n}")
    with pytest.raises(TableError) as caught:
        table.price(signature("aten::mm", (4, 5), (5, 6)))
    for part in (
        f"{tmp_path}/mine.yaml:2: aten::mm",
        "'b m k, k n'",
        "self [4, 5]",
        "mat2 [5, 6]",
        "aten::mm(Tensor self",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("macs", "message"),
    [
        ("numel(self)//(size(self, 0) - 4)", "division by zero"),
        ("numel(self) - 100", "negative: -80"),
        ("numel(self)/3", "20/3, which is not an integer"),
        ("size(self, 2)", "self is 2-D"),
        ("self", "the result is the tensor"),
    ],
)
def test_what_cannot_be_computed_is_told_when_counted(load, macs, message):
    table = load(f"ops:\n  aten::mm: {{macs: '{macs}'}}")
    with pytest.raises(TableError, match=f"mine.yaml:2: aten::mm: .*{message}.*the schema is aten::mm"):
        table.price(signature("aten::mm", (4, 5), (5, 6)))


def test_an_argument_that_one_overload_lacks_is_told_when_counted(load):
    table = load("ops:\n  aten::sum: {flops: numel(self) if keepdim else 0}")
    with pytest.raises(TableError, match="unknown name keepdim"):
        table.price(signature("aten::sum", (4,)))


def test_a_formula_that_raises_is_told_with_the_call(load):
    def test_broken(call):
        return call.shape("nothing")

    register_formula("test_broken", test_broken)
    table = load("ops:\n  aten::mm: {use: test_broken}")
    with pytest.raises(
        TableError, match=r"mine.yaml:2: aten::mm: the formula test_broken raised ValueError.*'nothing'"
    ):
        table.price(signature("aten::mm", (4, 5), (5, 6)))


@pytest.mark.parametrize("result", [None, 1.5, -1, True, "1", {"mm": 1}])
def test_a_formula_returns_a_cost_or_a_whole_number(load, result):
    name = f"test_result_{abs(hash(str(result)))}"
    register_formula(name, lambda call: result)
    with pytest.raises(TableError, match=f"the formula {name} raised"):
        load(f"ops:\n  aten::mm: {{use: {name}}}").price(signature("aten::mm", (4, 5), (5, 6)))


@pytest.mark.skipif(OLDER, reason="the tables are written for a newer torch, which has all their ops")
@pytest.mark.parametrize("name", (*shipped_tables(), *PARTS))
def test_a_shipped_table_passes_the_check_of_a_users(name):
    define_torchvision_schemas()
    path = str(ROOT / "configs" / f"{name}.yaml")
    fields, constants = _read_fields(path, path), load_table(name).constants
    for row, node in _read_ops(fields).values():
        if overloads_of(row.name) or not may_lack(row.name):
            check_op(row, node, constants)
    for row, node in _read_rows(fields, "modules").values():
        check_module(row, node, constants)


def test_loading_and_counting_run_nothing(load, tmp_path):
    flag = tmp_path / "flag"
    code = f"__import__('pathlib').Path('{flag}').touch()"
    for text in (
        f'ops:\n  aten::mm: {{macs: "{code}"}}',
        f'ops:\n  aten::mm: {{use: "{code}"}}',
        f'ops:\n  aten::mm: {{shapes: "{code}", macs: "1"}}',
        f'ops:\n  aten::mm: {{macs: "1", example: "{code}"}}',
        f'description: !!python/object/apply:eval ["{code}"]',
        f'extends: !!python/object/new:os.system ["touch {flag}"]',
        "ops:\n  aten::mm: !!python/name:os.system {macs: 1}",
    ):
        with pytest.raises(TableError):
            load(text)
    # The walk over an expression compiles no code: a code object would raise an audit event "exec" when it runs.
    events = []
    table = load("extends: default\nops:\n  aten::mm: {shapes: 'm k, k n', macs: 2*m*k*n if m else 0}")
    call = signature("aten::mm", (4, 5), (5, 6))
    watching = [True]
    sys.addaudithook(lambda event, args: events.append(event) if watching else None)
    price = table.price(call)
    watching.clear()
    assert price.macs == 240
    assert not {"exec", "os.system", "subprocess.Popen", "open", "import"} & set(events)
    assert not flag.exists()
