#!/usr/bin/env python3
"""How a table sees each op of the installed torch: tools/op_coverage.py [TABLE] [--namespace NAME ...] [--list CLASS].

Each overload of each op is counted, zero_flop, ignored (its arithmetic), decomposed (its row says so, or torch runs it
as other ops), script (TorchScript's own, on Python's numbers, texts and lists: no dispatch mode ever sees it), or
unsupported with a reason. One that is none of these is unclassified, and the exit status 1: a new torch has brought an
op that a table must learn. So has one with a namespace that is neither listed here nor set aside.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402

from fvflops.formulas import FormulaTable, load_table  # noqa: E402
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas  # noqa: E402

CLASSES = ("counted", "zero_flop", "ignored", "decomposed", "script", "unsupported", "unclassified")

_KNOWN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
NAMESPACES: tuple[str, ...] = tuple(_KNOWN["namespaces"])
IMPORTS: list[str] = _KNOWN["imports"]
SET_ASIDE: dict[str, str] = _KNOWN["set_aside"]
UNSUPPORTED: dict[str, str] = _KNOWN["unsupported"]


def import_namespaces() -> None:
    """Let torch register its ops; torchvision's schemas stand in for its library where that does not load."""
    for name in IMPORTS:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    define_torchvision_schemas()


def list_overloads(namespace: str = "aten") -> list[str]:
    """Return the full name of each overload that torch knows in a namespace."""
    schemas = torch._C._jit_get_all_schemas()
    names = {f"{item.name}.{item.overload_name}" if item.overload_name else item.name for item in schemas}
    return sorted(name for name in names if name.startswith(f"{namespace}::"))


def list_new_namespaces() -> list[str]:
    """Return the namespaces that are neither listed nor set aside; another library's is one too where it is loaded."""
    namespaces = {schema.name.partition("::")[0] for schema in torch._C._jit_get_all_schemas()}
    return sorted(namespaces.difference(NAMESPACES, SET_ASIDE))


def classify(table: FormulaTable, name: str) -> str:
    """Return how a table sees one overload: one of CLASSES."""
    row = table.row(name)
    if row is not None:
        return "decomposed" if row.kind == "decompose" else row.kind
    packet = name.partition(".")[0]
    try:
        decomposes = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    except RuntimeError:  # the dispatcher has no such op
        return "script"
    if decomposes:
        return "decomposed"
    return "unsupported" if packet in UNSUPPORTED else "unclassified"


def main() -> int:
    """Print how many overloads and packets there are of each class, the unknown ones, and the ones of no class."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] + ".")
    parser.add_argument("table", nargs="?", default="default", help="a shipped table, or a path (default: default)")
    parser.add_argument("--namespace", nargs="+", default=NAMESPACES, metavar="NAME", help="not all, but these alone")
    parser.add_argument("--list", choices=CLASSES, help="print the ops of one class too")
    arguments = parser.parse_args()
    table = load_table(arguments.table)
    if arguments.namespace != ["aten"]:  # the rest takes seconds to import
        import_namespaces()
    found = {name: classify(table, name) for namespace in arguments.namespace for name in list_overloads(namespace)}
    packets = {kind: {name.partition(".")[0] for name, other in found.items() if other == kind} for kind in CLASSES}
    new = list_new_namespaces()
    _show_counts(f"torch {torch.__version__}, table {table.name}", found)
    for packet in sorted(packets["unsupported"]):
        print(f"unsupported: {packet}: {UNSUPPORTED[packet]}")
    for kind in dict.fromkeys(["unclassified", *([arguments.list] if arguments.list else [])]):
        for packet in sorted(packets[kind]):
            print(f"{kind}: {packet}")
    for namespace in new:
        print(f"new namespace: {namespace}: list it in NAMESPACES, or set it aside with a reason")
    return 1 if packets["unclassified"] or new else 0


def _show_counts(title: str, found: Mapping[str, str]) -> None:
    """Print a line for each class, and one for each namespace of more than one."""
    print(f"{title}: {len(found)} overloads")
    for kind in CLASSES:
        names = [name for name, other in found.items() if other == kind]
        print(f"{kind:>12} {len(names):5} overloads of {len({name.partition('.')[0] for name in names}):4} ops")
    namespaces = dict.fromkeys(name.partition("::")[0] for name in found)
    for namespace in namespaces if len(namespaces) > 1 else ():
        kinds = Counter(kind for name, kind in found.items() if name.startswith(f"{namespace}::"))
        print(f"{namespace:>25} " + ", ".join(f"{kinds[kind]} {kind}" for kind in CLASSES if kinds[kind]))


if __name__ == "__main__":
    sys.exit(main())
