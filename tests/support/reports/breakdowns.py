"""Breakdowns for the tests of the HTML report, made by hand so that every figure in them is known."""

import re
from collections.abc import Sequence
from typing import Any

from fvflops.trace import Event, ModuleInfo, ModuleTree
from fvflops.trace.timeline import Callee, Frame, Span, Timeline
from fvflops.views.breakdown import Breakdown, Cell, Measure, Peaks
from tests.support.reports.hostile_names import NAMES


def build_tree(*names: str, class_name: str = "Layer") -> ModuleTree:
    """Return a tree of modules with these names below a root of the class Net."""
    return ModuleTree({name: ModuleInfo(name, name, class_name if name else "Net") for name in ("", *names)})


def break_net_down() -> Breakdown:
    """Return a net of 1000 FLOPs: 850 in the encoder, of which it does 50 itself, and 150 in the head."""
    places = {
        "": ModuleInfo("", "", "Net"),
        "encoder": ModuleInfo("encoder", "encoder", "Block"),
        "encoder.attn": ModuleInfo("encoder.attn", "encoder.attn", "Attention"),
        "encoder.mlp": ModuleInfo("encoder.mlp", "encoder.mlp", "Linear", extra_repr="in_features=4"),
        "head": ModuleInfo("head", "head", "Linear"),
    }
    flops = {
        Cell("encoder.attn", "forward", "mm"): 300,
        Cell("encoder.attn", "backward", "mm"): 100,
        Cell("encoder.mlp", "forward", "linear"): 400,
        Cell("encoder", "forward", "add"): 50,
        Cell("head", "forward", "linear"): 150,
    }
    parameters = {Cell("encoder.mlp", operator="weight"): 30, Cell("head", operator="weight"): 70}
    time = {cell: 1000 * (index + 1) for index, cell in enumerate(flops)}
    return Breakdown(
        ModuleTree(places),
        {
            "flops": Measure("FLOPs", flops, unsupported={Cell("encoder.attn", "forward", "scan"): 2}),
            "parameters": Measure("Parameters", parameters),
            "bytes": Measure("Bytes", {Cell("head", "forward", "linear"): 2**60 + 1}, unit="B"),
            "time": Measure("Time", time, unit="ns"),
        },
        ledger={
            "counted": {"aten::mm": 2, "aten::linear": 2, "aten::add": 1},
            "zero_flop": {"aten::view": 3},
            "ignored": {},
            "unsupported": {"mylib::scan": 2},
        },
        unsupported_elements={"mylib::scan": 4096},
        about={"model": "Net", "table": "default", "multiply_add": "1", "torch": "2"},
    )


def break_hostile_down() -> Breakdown:
    """Return a net in which modules, classes, operators and all else have hostile names."""
    tree = ModuleTree(
        {"": ModuleInfo("", "", NAMES[0]), **{name: ModuleInfo(name, name, name, extra_repr=name) for name in NAMES}}
    )
    cells = {Cell(name, "forward", name): 10 for name in NAMES}
    return Breakdown(
        tree,
        {"flops": Measure("FLOPs", cells), "calls": Measure("Op calls", cells)},
        ledger={"unsupported": dict.fromkeys(NAMES, 1)},
        unsupported_elements=dict.fromkeys(NAMES, 1),
        about={name: name for name in NAMES},
    )


def break_large_down(blocks: int = 100, layers: int = 499, *, equal: bool = False) -> Breakdown:
    """Return a net of blocks of layers, 50,000 modules below the root unless other numbers are given.

    Unless they are to be `equal`, each block and each layer differs from the next.
    """
    names = [
        name for block in range(blocks) for name in (f"b{block}", *(f"b{block}.l{layer}" for layer in range(layers)))
    ]
    odd = (lambda name: 0) if equal else (lambda name: sum(int(number) % 2 for number in re.findall(r"\d+", name)))
    flops = {Cell(name, "forward", "linear"): 7 + odd(name) for name in names if "." in name}
    return Breakdown(build_tree(*names), {"flops": Measure("FLOPs", flops)})


def break_stack_down(layers: int = 126, *, odd: int | None = None) -> Breakdown:
    """Return a net of equal layers of 100 FLOPs and 300M parameters; the head has 400 FLOPs, layer `odd` 60 more."""
    places = {"": ModuleInfo("", "", "Net"), "layers": ModuleInfo("layers", "layers", "ModuleList")}
    flops, parameters = {}, {}
    for layer in range(layers):
        for name, class_name, value in (("", "Block", 0), (".attn", "Attention", 25), (".mlp", "MLP", 75)):
            path = f"layers.{layer}{name}"
            places[path] = ModuleInfo(path, path, class_name)
            more = 60 if layer == odd and name == ".mlp" else 0
            flops |= {Cell(path, "forward", "linear"): value + more} if value else {}
            parameters |= {Cell(path, operator="weight"): 150_000_000} if value else {}
    places["head"] = ModuleInfo("head", "head", "Linear")
    flops[Cell("head", "forward", "linear")] = 400
    measures = {"flops": Measure("FLOPs", flops), "parameters": Measure("Parameters", parameters)}
    return Breakdown(ModuleTree(places), measures, name="zoo:stack", about={"table": "default", "multiply_add": "1"})


def break_run_down() -> Breakdown:
    """Return a profile of 100 µs: mm takes 60, relu 20 for hardly a FLOP, mm_backward 20; the peak is 900 bytes."""
    places = {name: ModuleInfo(name, name, "Linear" if name else "Net") for name in ("", "fc1", "act")}
    mm, relu, back = (
        Cell("fc1", "forward", "mm"),
        Cell("act", "forward", "relu"),
        Cell("fc1", "backward", "mm_backward"),
    )
    frames = (Frame("module", "", "Net"), Frame("module", "fc1", "Linear"), Frame("module", "act", "Linear"))
    callees = (
        *(Callee("module", frame.name, index) for index, frame in enumerate(frames)),
        Callee("op", "aten::mm.default"),
        Callee("op", "aten::relu"),
        Callee("op", "aten::mm_backward"),
    )
    # Callee, depth, stack, start and duration in µs, bytes after an op.
    rows = ((0, 0, 0, 1, 80, None), (1, 1, 1, 1, 60, None), (3, 2, 1, 1, 60, 500), (2, 1, 2, 61, 20, None))
    rows = (*rows, (4, 2, 2, 61, 20, 900), (5, 0, 1, 81, 20, 300))
    spans = [
        Span(
            callee,
            Event(
                "op" if nbytes else "exit",
                0,
                stack,
                "backward" if callee == 5 else "forward",
                start_ns=1000 * start,
                duration_ns=1000 * duration,
                memory_after=nbytes,
            ),
            depth,
        )
        for callee, depth, stack, start, duration, nbytes in rows
    ]
    timeline = Timeline(frames, ((0,), (0, 1), (0, 2)), callees, {}, spans, weights=("time",))
    measures = {
        "flops": Measure("FLOPs", {mm: 60_000, relu: 100, back: 20_000}),
        "macs": Measure("MACs", {mm: 30_000, back: 10_000}),
        "bytes": Measure("Bytes", {mm: 1000, relu: 4000, back: 1000}, unit="B"),
        "time": Measure("Time", {mm: 60_000, relu: 20_000, back: 20_000}, unit="ns"),
    }
    return Breakdown(
        ModuleTree(places),
        measures,
        name="<b>net</b>",
        about={"table": "exact", "multiply_add": "2"},
        timeline=timeline,
        peaks=Peaks("Device 1", 10**9, {"fp32": 10**10}),
    )


def unpack_columns(data):
    """Return the data of a page with its columns unpacked."""
    for columns in (data["modules"], data["rows"], *data["measures"]):
        columns.update({key: unpack(value) for key, value in columns.items() if isinstance(value, dict)})
    return data


def unpack(column: Sequence[Any] | dict[str, Any]) -> list[Any]:
    if not isinstance(column, dict):
        return list(column)
    values = []
    for times, pattern, *steps in column["runs"]:
        for repetition in range(times):
            for index, value in enumerate(pattern):
                values.append(value + repetition * steps[0][index] if steps and steps[0][index] else value)
    return values


def column(page: Any, table: str, index: int) -> list[str]:
    """Return the texts of a column of a table in a browser's page."""
    return page.eval_on_selector_all(
        f"#{table} tbody tr", f"(rows) => rows.map((row) => row.children[{index}].textContent)"
    )
