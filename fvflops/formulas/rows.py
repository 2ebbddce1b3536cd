"""Row of a table for one op, module class or autograd.Function, and the cost of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fvflops import paths
from fvflops.formulas import registry
from fvflops.formulas.cost import Cost, OpCost
from fvflops.formulas.language.call import Call
from fvflops.formulas.language.expression import Expression, ExpressionError, UnknownValuesError
from fvflops.formulas.language.pattern import Pattern, PatternError
from fvflops.formulas.yaml_document import Node, make_error
from fvflops.text import record_repr, suggest, truncate
from fvflops.trace import Status, Value, tensors_in

SHORT_FORMS = ("zero_flop", "ignored", "decompose")
# Words of older tables, for keys of a table and for short forms, and their replacements.
OLD_WORDS = {"free": "zero_flop", "omitted": "ignored", "omit_inherited": "ignore_inherited"}
MODULE_KEYS = ("shapes", "macs", "flops", "activations", "use", "label", "source", "example", "covers")
KEYS = (*MODULE_KEYS[:-1], "values")
COMPLEX_MULTIPLY_ADD = "complex_multiply_add"
_FLAGS = {"true": True, "false": False}
_STATUSES = {"zero_flop": Status.ZERO_FLOP, "ignored": Status.IGNORED, "decompose": Status.UNSUPPORTED}


@dataclass(frozen=True, slots=True, repr=False)
class Row:
    """A row of a table.

    `name` is an op (`aten::add`, for all its overloads, or `aten::add.Tensor`), a function (`prim::PythonOp.NAME`) or a
    module class. `kind` is "counted", "zero_flop", "ignored" or "decompose" (count the ops inside). `file` and `line`
    are its location, `label` its name in reports. The rest are the texts of the row: expressions `macs`, `flops` and
    `activations`, a pattern `shapes`, the name of a formula `use`, the `source` of the formula and an `example`. If
    `covers`, the ops inside a module are not counted in addition to its row. `values` are the arguments whose values
    the cost depends on.

    A row with only `activations` counts no FLOPs: its cost has activations, and the status IGNORED.
    """

    name: str
    kind: str
    file: str
    line: int
    label: str
    shapes: str | Mapping[str, str] | None = None
    macs: str | None = None
    flops: str | None = None
    activations: str | None = None
    use: str | None = None
    source: str = ""
    example: str = ""
    covers: bool = True
    values: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return record_repr(self)

    @property
    def status(self) -> Status:
        """Status of the op; UNSUPPORTED if the table decomposes it but it was recorded undecomposed."""
        if self.kind in _STATUSES:
            return _STATUSES[self.kind]
        if self.macs is None and self.flops is None and self.use is None:
            return Status.IGNORED
        return Status.COUNTED

    @property
    def is_shipped(self) -> bool:
        """Whether the row is in a table that fvflops ships, not in a user's."""
        return self.file.startswith(paths.SCHEME)


def default_label(name: str) -> str:
    """Return the name that an op, a function or a module class is reported under.

    >>> default_label("aten::add.Tensor"), default_label("prim::PythonOp.Swish"), default_label("torch.nn.LSTM")
    ('add', 'PythonOp.Swish', 'LSTM')
    """
    namespace, separator, rest = name.partition("::")
    if not separator:
        return name.rpartition(".")[2]
    return rest if namespace == "prim" else rest.partition(".")[0]


def read_row(name: str, node: Node, keys: tuple[str, ...] = KEYS) -> Row:
    """Return the row in a node of a table, which may have `keys`; a structural error raises TableError.

    Its expressions, pattern and example are not parsed here: `row_validation` does that for user tables.
    """
    label = default_label(name)
    if isinstance(node.value, str):
        kind = OLD_WORDS.get(node.value, node.value)
        if kind not in SHORT_FORMS:
            near = suggest(node.value, SHORT_FORMS, quote=False)
            raise node.error(f"{name}: {node.form} is neither {', '.join(SHORT_FORMS)} nor a mapping{near}")
        return Row(name, kind, node.file, node.line, label)
    fields = node.fields(name)
    for key, field in fields.items():
        if key not in keys:
            raise field.error(f"{name}: unknown key {truncate(key)!r}{_near_key(key, keys)}")
    if "label" in fields:
        _check_label(name, fields["label"])
    texts = {key: field.text(f"{key} of {name}") for key, field in fields.items() if key not in ("shapes", "values")}
    if not texts.keys() & {"macs", "flops", "activations", "use"}:
        raise node.error(f"{name} has no cost: write macs, flops, activations or use, or one of {SHORT_FORMS}")
    if "use" in texts and "macs" in texts:
        raise fields["use"].error(f"{name}: use defines the macs, so omit macs (flops are added to its flops)")
    return Row(
        name,
        "counted",
        node.file,
        node.line,
        texts.get("label", label),
        _read_shapes(name, fields["shapes"]) if "shapes" in fields else None,
        texts.get("macs"),
        texts.get("flops"),
        texts.get("activations"),
        texts.get("use"),
        texts.get("source", ""),
        texts.get("example", ""),
        read_flag(fields["covers"], f"covers of {name}") if "covers" in fields else True,
        (*_read_values(name, fields), *registry.VALUES.get(texts.get("use", ""), ())),
    )


def read_flag(node: Node, what: str) -> bool:
    """Return the bool in a node; anything else raises TableError."""
    text = node.text(what)
    if text not in _FLAGS:
        raise node.error(f"{what} is {truncate(text)!r}: write true or false")
    return _FLAGS[text]


def cost_of_call(row: Row, call: Call, multiply_add: int = 1) -> OpCost:
    """Return the cost of a call by a row, with `multiply_add` FLOPs for one multiply-add.

    A complex multiply-add counts as one of `macs`, like a real one; the table's constant `complex_multiply_add` is its
    number of real ones, of which all but one are added to the FLOPs. A call is UNSUPPORTED if its cost depends on
    values that are unknown. A row that does not match the call raises TableError, which quotes both.
    """
    if row.kind != "counted":
        return OpCost(row.label, row.status)
    try:
        cost = _cost(row, call)
    except UnknownValuesError:
        return OpCost(row.label, Status.UNSUPPORTED)
    except (ExpressionError, PatternError) as error:
        raise make_error(row.file, row.line, f"{call.op}: {error}; the schema is {call.schema}") from None
    except Exception as error:  # a registered formula is user code and may raise anything: name the row
        subject = "the row" if row.use is None else f"the formula {row.use}"
        text = f"{call.op}: {subject} raised {type(error).__name__}: {error}; called as {show_call(call)}"
        raise make_error(row.file, row.line, text) from error
    flops, extra = cost.flops, cost.macs * multiply_add * (call.constants.get(COMPLEX_MULTIPLY_ADD, 1) - 1)
    if extra and any(spec.is_complex for spec in tensors_in(tuple(call.arguments.values()))):
        flops += extra
    return OpCost.in_flops(row.label, row.status, multiply_add, cost.macs, flops, cost.activations, cost.recomputed)


def show_call(call: Call) -> str:
    """Return a call as text: its op, with the value of each argument.

    >>> show_call(Call("aten::t", {"self": None}, ()))
    'aten::t(self=None)'
    """
    return f"{call.op}({', '.join(f'{name}={_show(value)}' for name, value in call.arguments.items())})"


def _cost(row: Row, call: Call) -> Cost:
    names: dict[str, Value] = {**call.constants, **call.attributes, **call.arguments, "outputs": call.outputs}
    if call.outputs:
        names["out"] = call.outputs[0]
    if row.shapes is not None:
        names.update(Pattern.parse(row.shapes).match(call))
    macs, flops, activations = (
        None if text is None else Expression.parse(text).evaluate(names)
        for text in (row.macs, row.flops, row.activations)
    )
    if row.use is not None:
        cost = registry.find_formula(row.use)(call)
        if isinstance(cost, int) and not isinstance(cost, bool):
            cost = Cost(flops=cost)
        if not isinstance(cost, Cost):
            raise TypeError(f"it returned {cost!r}, neither a Cost nor an integer number of FLOPs")
        activations = cost.activations if activations is None else activations
        return Cost(cost.macs, cost.flops + (flops or 0), activations, cost.recomputed)
    return Cost(macs or 0, flops or 0, activations)


def _check_label(name: str, node: Node) -> None:
    label = node.name(f"label of {name}")
    if not label.strip() or not label.isprintable():
        raise node.error(f"label of {name} is {node.form}: write a name on one line, or omit the label")


def _read_shapes(name: str, node: Node) -> str | Mapping[str, str]:
    if isinstance(node.value, str):
        return node.value
    return {key: field.text(f"the shape of {key} of {name}") for key, field in node.fields(f"shapes of {name}").items()}


def _read_values(name: str, fields: Mapping[str, Node]) -> list[str]:
    items = fields["values"].items(f"values of {name}", "[offsets]") if "values" in fields else ()
    return [item.name(f"values of {name}") for item in items]


def _near_key(key: str, keys: tuple[str, ...]) -> str:
    if not key.isidentifier():
        return ": write a text that contains a comma or a colon in quotes"
    return suggest(key, keys) or f": a row has {', '.join(keys)}"


def _show(value: Value) -> str:
    return f"[{', '.join(_show(item) for item in value)}]" if isinstance(value, tuple) else str(value)
