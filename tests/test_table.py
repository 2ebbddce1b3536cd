"""The table: every mistake with its file and line, what extends what, which row wins, and that loading runs nothing."""

import sys
from pathlib import Path

import pytest
import torch

from fvflops import paths
from fvflops.capture.signature import describe_call
from fvflops.formulas import Cost, FormulaTable, TableError, load_table, register_formula
from fvflops.formulas.loading import _read_fields, _read_ops
from fvflops.formulas.check import check_op
from fvflops.trace import ModuleInfo, ParameterInfo, RegionSignature, Signature, Status, TensorSpec
from tests.torchvision_schemas import define_torchvision_schemas


@pytest.fixture
def load(tmp_path):
    """Return a function that writes a table to a file and loads it."""

    def write_and_load(text: str, name: str = "mine.yaml") -> FormulaTable:
        path = tmp_path / name
        path.write_text(text)
        return load_table(str(path))

    return write_and_load


def signature(op, *shapes, out=(1,)):
    """Return the signature of a call of a default overload on tensors of these shapes, other arguments being None."""
    packet = op.split("::")[1].split(".")
    overload = getattr(getattr(torch.ops.aten, packet[0]), packet[1] if len(packet) > 1 else "default")
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    return describe_call(overload, tensors, {}, torch.empty(out, device="meta"))


# name → (the table, the line of the mistake, what the message says)
MISTAKES = {
    "unknown key of a table": ("multiply_add: 1\nrows: {}", 2, "unknown key 'rows'"),
    "near key of a table": ("\nmultiply_ad: 1", 2, "did you mean 'multiply_add'"),
    "unknown key of a row": ("ops:\n  aten::mm: {mac: 1}", 2, "aten::mm: unknown key 'mac': did you mean 'macs'"),
    "comma outside quotes": ("ops:\n  aten::mm: {macs: max(1, 2)}", 2, "in quotes"),
    "unknown op": ("free:\n- aten::view\n- aten::veiw", 3, "torch has no op aten::veiw: did you mean aten::view"),
    "unknown op of a row": ("ops:\n\n  aten::addm: free", 3, "torch has no op aten::addm: did you mean aten::addm"),
    "unknown overload": ("ops:\n  aten::add.Tenser: free", 2, "did you mean aten::add.Tensor"),
    "unknown prims op": ("ops:\n  prims::ad: free", 2, "torch has no op prims::ad"),
    "an op without namespace": ("ops:\n  linear: free", 2, "'linear' is no op: .* did you mean aten::linear"),
    "an op as torch prints it": ("ops:\n  torch.ops.aten.mm: free", 2, "did you mean aten::mm"),
    "unknown argument": (
        "ops:\n  aten::mm:\n    shapes: m k, k n\n    macs: numel(mat3)",
        4,
        r"macs of aten::mm: unknown name mat3 in 'numel\(mat3\)': did you mean mat2; the schema is aten::mm\(",
    ),
    "unknown dimension": ("ops:\n  aten::mm: {shapes: 'm k, k n', macs: m*k*q}", 2, "unknown name q"),
    "unknown function": ("ops:\n  aten::mm: {macs: numl(self)}", 2, "unknown function numl .* did you mean numel"),
    "forbidden syntax": ("ops:\n  aten::mm: {macs: self.shape}", 2, "self.shape is not allowed"),
    "bad activations": ("ops:\n  aten::mm: {activations: numel(ou)}", 2, "activations of aten::mm: unknown name ou"),
    "division by zero": ("ops:\n  aten::mm: {macs: 1//0}", 2, "division by zero"),
    "negative": ("ops:\n  aten::mm: {macs: 1 - 2}", 2, "the result is negative: -1"),
    "not whole": ("ops:\n  aten::mm: {macs: 1/2}", 2, "not whole"),
    "unknown formula": ("ops:\n  aten::mm: {use: convolutoin}", 2, "unknown formula convolutoin: did you mean conv"),
    "use beside macs": ("ops:\n  aten::mm: {use: matmul, macs: 1}", 2, "cannot stand beside it"),
    "no cost": ("ops:\n  aten::mm: {label: product}", 2, "aten::mm says no cost"),
    "bad short form": ("ops:\n  aten::mm: fre", 2, "the text 'fre' is neither .*did you mean free"),
    "empty row": ("ops:\n  aten::mm:\n", 2, "empty is neither"),
    "bad pattern": ("ops:\n  aten::mm: {shapes: 'm-k, k', macs: m}", 2, "'m-k'"),
    "too many tensors": ("ops:\n  aten::mm: {shapes: 'm, k, n', macs: m}", 2, "more tensors than there are in aten::mm"),
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
    "decompose of a core op": ("ops:\n  aten::mm: decompose", 2, "aten::mm is no composite op"),
    "decompose of an overload": ("ops:\n  aten::conv2d.padding: decompose", 2, "with all its overloads, aten::conv2d"),
    "decompose of a function": ("ops:\n  prim::PythonOp.Swish: decompose", 2, "looked into anyway"),
    "decompose of a module": ("modules:\n  torch.nn.LSTM: decompose", 2, "looked into anyway"),
    "a module that is no name": ("modules:\n  torch.nn::LSTM: {macs: 1}", 2, "is no class"),
    "a row that is never reached": (
        "extends: fvcore\nops:\n  aten::conv2d.padding: free",
        3,
        r"never reached: fvflops://fvcore.yaml:\d+ looks inside aten::conv2d",
    ),
    "the same op twice": ("free: [aten::mm]\nops:\n  aten::mm: free", 3, "aten::mm stands twice, first on line 1"),
    "the same key twice": ("ops:\n  aten::mm: free\n  aten::bmm: free\n  aten::mm: omitted", 4, "first on line 2"),
    "multiply_add of 0": ("multiply_add: 0", 1, "multiply_add is '0'"),
    "multiply_add of 1.5": ("\nmultiply_add: 1.5", 2, "multiply_add is '1.5'"),
    "multiply_add of a list": ("multiply_add: [1]", 1, "multiply_add is a list, not a text"),
    "opaque of yes": ("opaque: yes", 1, "write true or false"),
    "a description that is a mapping": ("description: {a: b}", 1, "description is a mapping"),
    "free that is a text": ("free: aten::view", 1, "free is the text 'aten::view', not a list"),
    "free that holds a list": ("free:\n- [aten::view]", 2, "an op of free is a list"),
    "ops that are a list": ("ops:\n- aten::view", 1, "ops is a list, not a mapping"),
    "macs that are a list": ("ops:\n  aten::mm: {macs: [1]}", 2, "macs of aten::mm is a list"),
    "a table that is a list": ("- a", 1, "a table is a list"),
    "an empty file": ("", 1, "has 0"),
    "two documents": ("a: 1\n---\nb: 2", 1, "has 2"),
    "no YAML": ("ops:\n  aten::mm: {macs: 1", 3, "this is not YAML"),
    "a tab": ("ops:\n\taten::mm: free", 2, "this is not YAML"),
    "an anchor": ("ops:\n  aten::mm: &row {macs: 1}", 2, "&row: a table has no anchors"),
    "an alias": ("free: []\nops:\n  aten::mm: *row", 3, r"\*row: a table has no anchors|undefined alias"),
    "a merge": ("ops:\n  aten::mm: {macs: 1}\n  <<: {a: b}", 3, "'<<' is no op"),
    "a Python tag": ("description: !!python/object/apply:os.system ['true']", 1, "the tag .*os.system is refused"),
    "a plain tag": ("multiply_add: !!int 1", 1, "the tag .* is refused"),
    "nested too deep": ("\n" + "ops: " + "[" * 50 + "]" * 50, 2, "levels of nesting"),
    "extends nothing": ("\nextends: fvcor", 2, "there is no table .* did you mean 'fvcore'"),
    "extends a list": ("extends: [default]", 1, "extends is a list"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_file_and_line(load, tmp_path, name):
    text, line, message = MISTAKES[name]
    with pytest.raises(TableError, match=message) as caught:
        load(text)
    assert str(caught.value).startswith(f"{tmp_path / 'mine.yaml'}:{line}: ")


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
    with pytest.raises(TableError, match="mine.yaml:1: a table has at most 1,048,576 characters"):
        load("# " + "x" * (1 << 20))
    assert asked == [(1 << 20) + 1]


def test_an_unreadable_file_is_a_mistake(tmp_path):
    with pytest.raises(TableError, match="^nowhere.yaml:1: cannot be read: No such file"):
        load_table("nowhere.yaml")
    with pytest.raises(TableError, match="^defualt:1: .*did you mean 'default'"):
        load_table("defualt")
    with pytest.raises(TableError, match=":1: cannot be read: Is a directory"):
        load_table(str(tmp_path))
    with pytest.raises(TableError, match="^fvflops://nothing.yaml:1: cannot be read"):
        load_table("fvflops://nothing.yaml")
    with pytest.raises(TableError, match="cannot be read"):
        load_table("fvflops://../setup.cfg")
    (tmp_path / "latin.yaml").write_bytes(b"description: \xe9\xff")
    with pytest.raises(TableError, match="latin.yaml:1: this is not UTF-8"):
        load_table(str(tmp_path / "latin.yaml"))


def test_a_cycle_of_extends_is_told_with_its_steps(tmp_path):
    (tmp_path / "a.yaml").write_text("description: a\nextends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: ./a.yaml")
    with pytest.raises(TableError, match=r"b.yaml:1: extends: a cycle: .*a.yaml extends .*b.yaml extends .*a.yaml"):
        load_table(str(tmp_path / "a.yaml"))
    (tmp_path / "self.yaml").write_text("extends: self.yaml")
    with pytest.raises(TableError, match="self.yaml:1: extends: a cycle"):
        load_table(str(tmp_path / "self.yaml"))


def test_a_mistake_in_the_extended_file_names_that_file(tmp_path):
    (tmp_path / "base.yaml").write_text("\nfree: aten::mm")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml")
    with pytest.raises(TableError, match=r"base.yaml:2: free is"):
        load_table(str(tmp_path / "mine.yaml"))


# --- at count time ---------------------------------------------------------------------------------------------------


def test_ranks_that_do_not_fit_replay_op_shapes_and_pattern(load, tmp_path):
    table = load("ops:\n  aten::mm: {shapes: 'b m k, k n', macs: b*m*k*n}")
    with pytest.raises(TableError) as caught:
        table.price(signature("aten::mm", (4, 5), (5, 6)))
    for part in (f"{tmp_path}/mine.yaml:2: aten::mm", "'b m k, k n'", "self [4, 5]", "mat2 [5, 6]", "aten::mm(Tensor self"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("macs", "message"),
    [
        ("numel(self)//(size(self, 0) - 4)", "division by zero"),
        ("numel(self) - 100", "negative: -80"),
        ("numel(self)/3", "20/3, which is not whole"),
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
    with pytest.raises(TableError, match=r"mine.yaml:2: aten::mm: the formula test_broken raised ValueError: .*'nothing'"):
        table.price(signature("aten::mm", (4, 5), (5, 6)))


@pytest.mark.parametrize("result", [None, 1.5, -1, True, "1", {"mm": 1}])
def test_a_formula_returns_a_cost_or_a_whole_number(load, result):
    name = f"test_result_{abs(hash(str(result)))}"
    register_formula(name, lambda call: result)
    with pytest.raises(TableError, match=f"the formula {name} raised"):
        load(f"ops:\n  aten::mm: {{use: {name}}}").price(signature("aten::mm", (4, 5), (5, 6)))


# --- what a table says -----------------------------------------------------------------------------------------------


def test_a_row_is_counted_free_omitted_or_unknown(load):
    table = load(
        "free: [aten::view]\nomitted: [aten::relu]\nmultiply_add: 2\nops:\n"
        "  aten::mm: {shapes: 'm k, k n', macs: m*k*n, flops: numel(out), activations: 3, label: product, source: me}\n"
        "  aten::bmm: free\n  aten::addmm: {activations: numel(out)}"
    )
    price = table.price(signature("aten::mm", (4, 5), (5, 6), out=(4, 6)))
    assert (price.status, price.label, price.macs, price.flops, price.activations) == (
        Status.COUNTED,
        "product",
        120,
        24,
        3,
    )
    assert table.price(signature("aten::bmm", (1, 1, 1), (1, 1, 1))).status is Status.FREE
    assert table.price(signature("aten::relu", (1,))).status is Status.OMITTED
    unknown = table.price(Signature("mylib::scan", ("u",), (1,), ()))
    assert (unknown.status, unknown.label, unknown.macs, unknown.activations) == (Status.UNKNOWN, "scan", 0, None)
    only = table.price(signature("aten::addmm", (6,), (4, 5), (5, 6), out=(4, 6)))
    assert (only.status, only.activations, only.macs) == (Status.OMITTED, 24, 0)
    assert table.multiply_add == 2
    assert table.row("aten::mm").source == "me"
    assert (table.row("aten::mm").line, Path(table.row("aten::mm").file).name) == (5, "mine.yaml")


def test_names_in_an_expression(load):
    table = load(
        "ops:\n  aten::cat: {flops: sum(numel(tensors)) + len(tensors) + len(outputs)}\n"
        "  aten::addmm: {shapes: {mat1: m k, self: '*n'}, macs: m*k*n, flops: 1 if beta == 1 else 2}\n"
    )
    tensors = [torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta")]
    cat = describe_call(torch.ops.aten.cat.default, (tensors,), {}, torch.empty(6, 3, device="meta"))
    assert table.price(cat).flops == 18 + 2 + 1
    price = table.price(signature("aten::addmm", (6,), (4, 5), (5, 6)))
    assert (price.macs, price.flops) == (120, 1)


def test_the_exact_overload_wins_then_the_packet_then_the_functional_form(load):
    table = load(
        "ops:\n  aten::add: {flops: 1}\n  aten::add.Tensor: {flops: 2}\n  aten::mul_: {flops: 3}\n  aten::mul: {flops: 4}"
    )
    flops = {
        op: int(table.row(op).flops)
        for op in ("aten::add.Scalar", "aten::add.Tensor", "aten::add_.Tensor", "aten::add_.Scalar", "aten::mul_.Tensor")
    }
    assert flops == {
        "aten::add.Scalar": 1,
        "aten::add.Tensor": 2,
        "aten::add_.Tensor": 2,
        "aten::add_.Scalar": 1,
        "aten::mul_.Tensor": 3,
    }
    assert table.row("aten::__iand__.Tensor") is None


def test_the_nearer_entry_wins_and_a_nearer_packet_removes_inherited_overloads(tmp_path, load):
    (tmp_path / "base.yaml").write_text(
        "description: base\nmultiply_add: 2\nopaque: true\nfree: [aten::relu_, aten::add.Tensor, aten::mul]\n"
        "ops:\n  aten::sub: {flops: 1}\nmodules:\n  a.B: {macs: 1}\n  a.C: {macs: 1}"
    )
    table = load(
        "extends: base.yaml\nops:\n  aten::add: {flops: 1}\n  aten::relu: {flops: 2}\n"
        "  aten::mul.Tensor: {flops: 3}\nmodules:\n  a.B: {macs: 2}"
    )
    assert table.row("aten::add.Tensor").flops == "1"
    assert table.row("aten::relu_").flops == "2"
    assert table.row("aten::mul.Tensor").flops == "3"
    assert table.row("aten::mul.Scalar").kind == "free"
    assert table.row("aten::sub.Tensor").flops == "1"
    assert (table.multiply_add, table.opaque, table.description) == (2, True, "")
    assert [table.modules[name].macs for name in ("a.B", "a.C")] == ["2", "1"]
    again = load("extends: base.yaml\nmultiply_add: 1\nopaque: false")
    assert (again.multiply_add, again.opaque) == (1, False)


def test_a_table_extends_a_shipped_one(load):
    table = load("extends: default\nomitted: [aten::mm]")
    assert table.row("aten::mm").kind == "omitted"
    assert table.row("aten::bmm").file == "fvflops://default.yaml"
    assert load("extends: fvflops://fvcore.yaml").opaque


def test_a_uri_with_a_handler_of_the_users(tmp_path):
    from iopath.common.file_io import NativePathHandler, g_pathmgr

    class Handler(NativePathHandler):
        def _get_supported_prefixes(self):
            return ["fvflopstest://"]

        def _open(self, path, mode="r", buffering=-1, **kwargs):
            return super()._open(path.replace("fvflopstest:/", str(tmp_path)), mode, buffering, **kwargs)

        def _isfile(self, path, **kwargs):
            return super()._isfile(path.replace("fvflopstest:/", str(tmp_path)))

    g_pathmgr.register_handler(Handler(), allow_override=True)
    (tmp_path / "base.yaml").write_text("free: [aten::mm]")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml")
    assert load_table("fvflopstest://mine.yaml").row("aten::mm").file == "fvflopstest://base.yaml"
    with paths.path_manager().open("fvflops://default.yaml") as file:
        assert file.readline().startswith("#")


def test_shipped_tables_are_read_once():
    assert load_table("default") is load_table("fvflops://default.yaml")
    assert load_table("default").name == "default"


def test_a_users_table_is_read_each_time(load):
    assert load("multiply_add: 1").multiply_add == 1
    assert load("multiply_add: 2").multiply_add == 2


@pytest.mark.parametrize("uri", paths.shipped_files())
def test_a_shipped_table_passes_the_check_of_a_users(uri):
    define_torchvision_schemas()
    path = str(Path(__file__).parent.parent / "configs" / uri.removeprefix(paths.SCHEME))
    for row, node in _read_ops(_read_fields(path, path), None).values():
        check_op(row, node)


def test_loading_runs_nothing(load, tmp_path, monkeypatch):
    flag = tmp_path / "flag"
    code = f"__import__('pathlib').Path('{flag}').touch()"
    events = []
    sys.addaudithook(lambda event, args: events.append(event) if watching else None)
    watching = True
    for text in (
        f"ops:\n  aten::mm: {{macs: \"{code}\"}}",
        f"ops:\n  aten::mm: {{use: \"{code}\"}}",
        f"description: !!python/object/apply:eval [\"{code}\"]",
        f"ops:\n  aten::mm: !!python/name:os.system {{macs: 1}}",
        f"extends: !!python/object/new:os.system [\"touch {flag}\"]",
    ):
        with pytest.raises(TableError):
            load(text)
    table = load("extends: default\nops:\n  aten::mm: {shapes: 'm k, k n', macs: 2*m*k*n}")
    assert table.price(signature("aten::mm", (4, 5), (5, 6))).macs == 240
    watching = False
    assert not flag.exists()
    assert not {event for event in events if event in ("exec", "os.system", "subprocess.Popen")} - {"exec"}


# --- what a recorder stops at ----------------------------------------------------------------------------------------


def test_a_table_stops_at_its_ops_and_their_in_place_forms(load):
    stops = load("free: [aten::dropout, aten::add.Tensor]\nops:\n  aten::conv2d: decompose").stops_at
    assert {"aten::dropout", "aten::dropout_", "aten::add.Tensor", "aten::add_.Tensor"} <= stops.names
    assert "aten::conv2d" not in stops
    assert "aten::linear" not in stops


def test_an_opaque_table_stops_at_all_but_decomposed_ops():
    stops = load_table("fvcore").stops_at
    assert "aten::conv2d.padding" not in stops
    assert "aten::conv2d" not in stops
    assert "aten::lstm.input" in stops
    assert "prim::PythonOp.Swish" in stops
    assert "mylib::composite" in stops


def test_an_op_that_is_decomposed_and_ran_whole_is_unknown():
    assert load_table("fvcore").price(Signature("aten::conv2d", (), (), ())).status is Status.UNKNOWN


# --- functions and modules -------------------------------------------------------------------------------------------


def test_a_function_is_priced_by_its_class_name(load):
    table = load("ops:\n  prim::PythonOp.Swish: {flops: 4*numel(out) + numel(input_1)}")
    spec = TensorSpec((2, 3))
    price = table.price_function("Swish", RegionSignature(0, (spec, TensorSpec((5,))), (spec,)))
    assert (price.status, price.label, price.flops) == (Status.COUNTED, "PythonOp.Swish", 29)
    assert table.price_function("Other", RegionSignature(0, (), ())).status is Status.UNKNOWN


def lstm():
    weight = ParameterInfo("encoder.rnn.weight_ih_l0", TensorSpec((12, 2)), 0, True)
    classes = ("mine.LSTM", "torch.nn.modules.rnn.LSTM", "torch.nn.modules.rnn.RNNBase")
    return ModuleInfo(
        "encoder.rnn", "encoder.rnn", "LSTM", classes, parameters=(weight,), attributes={"hidden_size": 3, "mode": "LSTM"}
    )


def test_a_module_is_priced_by_attributes_parameters_and_inputs(load):
    table = load(
        "modules:\n  torch.nn.LSTM:\n    shapes: t b i\n    macs: t*b*numel(weight_ih_l0) + hidden_size\n"
        "    flops: numel(input) + numel(out) if mode == 'LSTM' else 0\n    activations: len(outputs)"
    )
    call = RegionSignature(0, (TensorSpec((5, 1, 2)),), (TensorSpec((5, 1, 3)), TensorSpec((1, 1, 3))))
    row = table.module_row(lstm().classes)
    price = table.price_module(row, lstm(), call)
    assert (price.label, price.macs, price.flops, price.activations) == ("LSTM", 5 * 24 + 3, 25, 2)


def test_the_nearest_class_has_the_row_and_inner_packages_may_be_left_out(load):
    table = load("modules:\n  torch.nn.RNNBase: {macs: 1}\n  torch.LSTM: {macs: 2}\n  nn.LSTM: {macs: 3}")
    assert table.module_row(lstm().classes).macs == "2"
    assert table.module_row(("torch.nn.modules.rnn.RNNBase",)).macs == "1"
    assert table.module_row(("torch.nn.modules.conv.Conv2d",)) is None
    assert load("modules:\n  mine.LSTM: {macs: 4}\n  torch.nn.LSTM: {macs: 5}").module_row(lstm().classes).macs == "4"
    assert load("free: []").module_row(lstm().classes) is None


def test_a_mistake_in_a_module_row_is_told(load):
    row = load("modules:\n  torch.nn.LSTM: {macs: hidden_siz}")
    with pytest.raises(TableError, match="mine.yaml:2: torch.nn.LSTM: unknown name hidden_siz .did you mean hidden_size"):
        row.price_module(row.modules["torch.nn.LSTM"], lstm(), RegionSignature(0, (), ()))


# --- formulas of the program's own -----------------------------------------------------------------------------------


def test_a_program_registers_a_formula(load):
    def test_scan(call):
        return Cost(macs=2 * call.out.numel, activations=1)

    register_formula("test_scan", test_scan)
    register_formula("test_scan", test_scan)
    price = load("ops:\n  mylib::scan: {use: test_scan}").price(
        Signature("mylib::scan", ("u",), (TensorSpec((2,)),), (TensorSpec((4,)),), "mylib::scan(Tensor u) -> Tensor")
    )
    assert (price.macs, price.activations) == (8, 1)
    row = load("ops:\n  mylib::scan: {use: test_scan, activations: numel(out) + 1}")
    assert row.price(Signature("mylib::scan", ("u",), (1,), (TensorSpec((4,)),))).activations == 5
    register_formula("test_number", lambda call: 7)
    assert load("ops:\n  aten::mm: {use: test_number}").price(signature("aten::mm", (4, 5), (5, 6))).flops == 7


def test_a_taken_name_is_refused():
    register_formula("test_taken", max)
    with pytest.raises(ValueError, match="'test_taken' is registered already"):
        register_formula("test_taken", min)
    with pytest.raises(ValueError, match="'convolution' is shipped"):
        register_formula("convolution", max)
    with pytest.raises(ValueError, match="named by a word"):
        register_formula("a b", max)
    with pytest.raises(TypeError, match="cannot be called"):
        register_formula("test_number_5", 5)


@pytest.mark.parametrize("cost", [{"macs": -1}, {"flops": 1.5}, {"macs": True}, {"activations": -1}, {"macs": None}])
def test_a_cost_is_whole_and_not_negative(cost):
    with pytest.raises(ValueError, match="a Cost has"):
        Cost(**cost)
