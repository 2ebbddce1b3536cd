"""Breakdowns for the tests of the HTML report, made by hand so that every figure in them is known."""

from __future__ import annotations

import re

from fvflops.trace import ModuleInfo, ModuleTree
from fvflops.views.breakdown import Breakdown, Cell, Measure

# What a model may be called by somebody who means ill, or well; a module's name holds no dot.
HOSTILE = (
    "</script><script>HACKED=1</script>",
    "<img src=x onerror=HACKED=2>",
    "\x1b[31mred\x1b[0m",
    "line\nbreak",
    "\u202eleft",
    "שלום",
    "{{data}}",
    "&lt;",
    "x" * 10_000,
)


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
            "flops": Measure("FLOPs", flops, unknown={Cell("encoder.attn", "forward", "scan"): 2}),
            "parameters": Measure("Parameters", parameters),
            "bytes": Measure("Bytes", {Cell("head", "forward", "linear"): 2**60 + 1}, unit="B"),
            "time": Measure("Time", time, unit="ns"),
        },
        ledger={
            "counted": {"aten::mm": 2, "aten::linear": 2, "aten::add": 1},
            "free": {"aten::view": 3},
            "omitted": {},
            "unknown": {"mylib::scan": 2},
        },
        unknown_elements={"mylib::scan": 4096},
        about={"model": "Net", "table": "default", "multiply_add": "1", "torch": "2"},
    )


def break_hostile_down() -> Breakdown:
    """Return a net in which modules, classes, operators and all else have hostile names."""
    tree = ModuleTree(
        {
            "": ModuleInfo("", "", HOSTILE[0]),
            **{name: ModuleInfo(name, name, name, extra_repr=name) for name in HOSTILE},
        }
    )
    cells = {Cell(name, "forward", name): 10 for name in HOSTILE}
    return Breakdown(
        tree,
        {"flops": Measure("FLOPs", cells), "calls": Measure("Op calls", cells)},
        ledger={"unknown": dict.fromkeys(HOSTILE, 1)},
        unknown_elements=dict.fromkeys(HOSTILE, 1),
        about={name: name for name in HOSTILE},
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
