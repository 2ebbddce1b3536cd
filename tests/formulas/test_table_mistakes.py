"""The mistakes in a table: each is told with its file and line, and none of them runs anything."""

import sys

import pytest

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


# name → (the table, the line of the mistake, what the message says)
MISTAKES = {
    "unknown key of a table": ("multiply_add: 1\nrows: {}", 2, "unknown key 'rows'"),
    "unknown key of a row": ("ops:\n  aten::mm: {mac: 1}", 2, "aten::mm: unknown key 'mac': did you mean 'macs'"),
    "comma outside quotes": ("ops:\n  aten::mm: {macs: max(1, 2)}", 2, "in quotes"),
    "unknown op": ("zero_flop:\n- aten::view\n- aten::veiw", 3, "torch has no op aten::veiw: did you mean aten::view"),
    "unknown overload": ("ops:\n  aten::add.Tenser: zero_flop", 2, "did you mean aten::add.Tensor"),
    "unknown prims op": ("ops:\n  prims::ad: zero_flop", 2, "torch has no op prims::ad"),
    "an op without namespace": (
        "ops:\n  linear: zero_flop",
        2,
        "'linear' is not an op name: .* did you mean aten::linear",
    ),
    "an op as torch prints it": ("ops:\n  torch.ops.aten.mm: zero_flop", 2, "did you mean aten::mm"),
    "unknown argument": (
        "ops:\n  aten::mm:\n    shapes: m k, k n\n    macs: numel(mat3)",
        4,
        r"macs of aten::mm: unknown name mat3 in 'numel\(mat3\)': did you mean mat2.; the schema is aten::mm\(",
    ),
    "forbidden syntax": ("ops:\n  aten::mm: {macs: self.shape}", 2, "self.shape is not allowed"),
    "bad activations": ("ops:\n  aten::mm: {activations: numel(ou)}", 2, "activations of aten::mm: unknown name ou"),
    "division by zero": ("ops:\n  aten::mm: {macs: 1//0}", 2, "division by zero"),
    "unknown formula": ("ops:\n  aten::mm: {use: convolutoin}", 2, "unknown formula convolutoin: did you mean conv"),
    "use beside macs": ("ops:\n  aten::mm: {use: matmul, macs: 1}", 2, "use defines the macs, so omit macs"),
    "no cost": ("ops:\n  aten::mm: {label: product}", 2, "aten::mm has no cost"),
    "bad short form": ("ops:\n  aten::mm: zero_flo", 2, "the string 'zero_flo' is neither .*did you mean zero_flop"),
    "empty row": ("ops:\n  aten::mm:\n", 2, "empty is neither"),
    "bad pattern": ("ops:\n  aten::mm: {shapes: 'm-k, k', macs: m}", 2, "'m-k'"),
    "too many tensors": ("ops:\n  aten::mm: {shapes: 'm, k, n', macs: m}", 2, "more tensors than aten::mm"),
    "a pattern that hides an argument": (
        "ops:\n  aten::topk: {shapes: k n, flops: n}",
        2,
        "binds k, which is an argument of aten::topk",
    ),
    "a pattern for no argument": (
        "ops:\n  aten::mm: {shapes: {mat3: m k}, macs: m}",
        2,
        "no argument mat3: did you mean mat2",
    ),
    "bad example": ("ops:\n  aten::mm: {macs: 1, example: 4 5}", 2, "does not end in"),
    "decompose of a core op": ("ops:\n  aten::mm: decompose", 2, "aten::mm is not a composite op"),
    "decompose of an overload": ("ops:\n  aten::conv2d.padding: decompose", 2, "with all its overloads, aten::conv2d"),
    "decompose of a function": ("ops:\n  prim::PythonOp.Swish: decompose", 2, "decomposed anyway"),
    "a function's backward": (
        "ops:\n  prim::PythonOp.Swish.backward: {flops: 1}",
        2,
        "work in the backward of Swish that PyTorch does not dispatch is unseen::Swish.backward",
    ),
    "a function with its module": (
        "ops:\n  prim::PythonOp.nets.Swish: {flops: 1}",
        2,
        "write prim::PythonOp.Swish, with the name of its class alone",
    ),
    "decompose of a module": ("modules:\n  torch.nn.LSTM: decompose", 2, "decomposed anyway"),
    "a module that is no name": ("modules:\n  torch.nn::LSTM: {macs: 1}", 2, "is not a class name"),
    "a class that torch lacks": (
        "modules:\n  torch.nn.LSTMM: {macs: 1}",
        2,
        "no module class is named torch.nn.LSTMM: did you mean torch.nn.LSTM",
    ),
    "a class as Python names it": ("modules:\n  torch.nn.modules.rnn.LSTM: {macs: 1}", 2, "did you mean torch.nn.LSTM"),
    "a namespace in capitals": ("ops:\n  Aten::mm: {macs: 1}", 2, "did you mean aten::mm"),
    "a near namespace of a library": ("zero_flop: ['torchvison::nmz']", 1, "did you mean torchvision::nmz"),
    "an empty label": ("ops:\n  aten::mm: {macs: 1, label: ''}", 2, "label of aten::mm is empty"),
    "a label of two lines": (
        'ops:\n  aten::mm: {macs: 1, label: "a\\nb"}',
        2,
        r"label of aten::mm is the string 'a\\nb'",
    ),
    "a label that is too long": (f"ops:\n  aten::mm: {{macs: 1, label: {'x' * 201}}}", 2, "at most 200 are allowed"),
    "a pattern that hides the result": (
        "ops:\n  mylib::linear: {shapes: '*b k, out k', macs: numel(out)*k}",
        2,
        "binds out, which is the name of the results",
    ),
    "a row that is never reached": (
        "extends: fvcore\nops:\n  aten::conv2d.padding: zero_flop",
        3,
        r"never used: fvflops://fvcore.yaml:\d+ decomposes aten::conv2d",
    ),
    "the same op twice": (
        "zero_flop: [aten::mm]\nops:\n  aten::mm: zero_flop",
        3,
        "aten::mm is defined twice, first on line 1",
    ),
    "the same key twice": (
        "ops:\n  aten::mm: zero_flop\n  aten::bmm: zero_flop\n  aten::mm: ignored",
        4,
        "first on line 2",
    ),
    "multiply_add of 0": ("multiply_add: 0", 1, "multiply_add is '0'"),
    "multiply_add of a list": ("multiply_add: [1]", 1, "multiply_add is a list, not a string"),
    "a newer schema": ("new_key: 1\nschema: 4", 2, "has schema 4, but .* reads up to 3: update fvflops"),
    "a much newer schema": (f"schema: {'9' * 400}", 1, "reads up to 3: update fvflops"),
    "a schema that is no number": ("schema: one", 1, "schema is 'one': write an integer from 1 to 3, or omit it"),
    "opaque of yes": ("opaque: yes", 1, "write true or false"),
    "a constant that is no number": ("constants: {exp: many}", 1, "the constant exp is 'many': write an integer"),
    "a constant that hides a function": ("constants: {numel: 1}", 1, "'numel' cannot be used in an expression"),
    "a constant that is a word of Python": ("constants: {if: 1}", 1, "'if' cannot be used in an expression"),
    "a constant that is not there": (
        "constants: {exp: 8}\nops:\n  aten::exp: {flops: expp*numel(out)}",
        3,
        "unknown name expp in .*: did you mean exp",
    ),
    "a family without ops": ("families:\n- {flops: numel(out)}", 2, "a family has no ops"),
    "a family that is a text": ("families: [aten::exp]", 1, "a family is the string 'aten::exp'"),
    "an op of a family twice": (
        "families:\n- {flops: numel(out), ops: [aten::exp]}\n- flops: '1'\n  ops:\n  - aten::exp",
        5,
        "aten::exp is defined twice, first on line 2",
    ),
    "a mistake in a family": ("families:\n- flops: numel(outt)\n  ops: [aten::exp]", 2, "did you mean out"),
    "a row of an op that covers": ("ops:\n  aten::mm: {macs: 1, covers: false}", 2, "unknown key 'covers'"),
    "covers of maybe": ("modules:\n  torch.nn.LSTM: {macs: 1, covers: maybe}", 2, "write true or false"),
    "zero_flop that is a text": ("zero_flop: aten::view", 1, "zero_flop is the string 'aten::view', not a list"),
    "zero_flop that holds a list": ("zero_flop:\n- [aten::view]", 2, "an op of zero_flop is a list"),
    "ops that are a list": ("ops:\n- aten::view", 1, "ops is a list, not a mapping"),
    "an empty file": ("", 1, "has 0"),
    "two documents": ("a: 1\n---\nb: 2", 1, "has 2"),
    "no YAML": ("ops:\n  aten::mm: {macs: 1", 3, "this is not YAML"),
    "an anchor": ("ops:\n  aten::mm: &row {macs: 1}", 2, "&row: anchors and aliases"),
    "an alias": ("zero_flop: []\nops:\n  aten::mm: *row", 3, r"\*row: anchors and aliases|undefined alias"),
    "a merge": ("ops:\n  aten::mm: {macs: 1}\n  <<: {macs: 1}", 3, "'<<' is not an op name"),
    "a Python tag": ("description: !!python/object/apply:os.system ['true']", 1, "tag .*os.system is not supported"),
    "nested too deep": ("\n" + "ops: " + "[" * 50 + "]" * 50, 2, "levels of nesting"),
    "extends an empty name": ("extends: ' '", 1, "extends is empty: write one of .*default, .*fvcore, "),
    "extends a name that is too long": ("extends: " + "x" * 300, 1, "does not exist"),
    "extends a name with a NUL": ('extends: "a\\0b"', 1, "extends is .* control character"),
    "a description that rings": ('description: "\\a"', 1, r"description is the string .* control character '\\x07'"),
    "a dimension named by a word of Python": (
        "ops:\n  aten::linear: {shapes: '*b in, o in', macs: b*in*o}",
        2,
        "has 'in', a Python keyword",
    ),
    "an overload as torch prints it": ("zero_flop: [aten::mm.default]", 1, "did you mean aten::mm"),
    "extends nothing": ("\nextends: fvcor", 2, "does not exist: did you mean 'fvcore'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_file_and_line(load, tmp_path, name):
    text, line, message = MISTAKES[name]
    with pytest.raises(TableError, match=message) as caught:
        load(text)
    assert str(caught.value).startswith(f"{tmp_path / 'mine.yaml'}:{line}: ")


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
    with pytest.raises(TableError, match=r"mine.yaml:1: a table has at most 1,048,576 characters"):
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


# --- at count time ---------------------------------------------------------------------------------------------------


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
