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

from fvflops.formulas import FormulaTable, load_table  # noqa: E402
from tests.support.torchvision_schemas import define_torchvision_schemas  # noqa: E402

CLASSES = ("counted", "zero_flop", "ignored", "decomposed", "script", "unsupported", "unclassified")

# What torch registers ops in, and what registers them where `import torch` alone does not.
NAMESPACES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "_inductor_test",
    "_native",
    "_quantized",
    "aten",
    "c10d",
    "c10d_functional",
    "debug_mode_ops",
    "debugprims",
    "export",
    "flex_gemm",
    "flex_lib",
    "fsdp",
    "inductor",
    "inductor_prims",
    "mkl",
    "mkldnn",
    "mkldnn_prepacked",
    "onednn",
    "pippy",
    "prims",
    "profiler",
    "quantization",
    "quantized",
    "quantized_decomposed",
    "rngprims",
    "sparse",
    "streams",
    "symm_mem",
    "torch_attn",
    "torchvision",
)
IMPORTS = (
    "torch._inductor.lowering",
    "torch.ao.quantization.fx._decomposed",
    "torch.distributed._functional_collectives",
    "torch.distributed._symmetric_memory",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.nn.attention.varlen",
)
# Namespaces whose ops no model runs.
SET_ASIDE = {
    "_native_aot": "questions about kernels",
    "_test": "torch's own tests of its dispatcher",
    "coor": "questions about the current device",
    "cplib": "gathers of an experimental context parallelism, whose custom ops torch 2.12 loads",
    "cuda": "TorchScript's streams and devices",
    "mempool": "marks in a graph that is compiled",
    "onnx": "marks in a graph that is exported",
    "onnx_symbolic": "marks in a graph that is exported",
    "prepacked": "kernels for mobile devices",
    "prim": "TorchScript's own statements",
    "static_runtime": "TorchScript's static runtime runs them, with no dispatcher between",
}

_TESTS = "one of torch's own tests of its dispatcher"
_POLAR = "its algorithm, a singular value decomposition or iterations of products, is the device's"
_SPARSE = "its weight is packed in an object, which hides how many blocks are not zero"
# What no table has a row for, and why.
UNSUPPORTED = {
    "aten::_cslt_sparse_mm_search": "it times kernels on the GPU, as many as the library has",
    "_native::linalg_polar_native_2": _POLAR,
    "_native::linalg_polar_out_native_3": _POLAR,
    "aten::_foobar": _TESTS,
    "aten::_slow_conv2d_backward": "its three outputs are there whether or not they were asked for",
    "aten::_spsolve": "it factorises a sparse matrix, at a cost that depends on where its elements stand",
    "aten::_test_autograd_multiple_dispatch": _TESTS,
    "aten::_test_autograd_multiple_dispatch_view": _TESTS,
    "aten::_test_autograd_multiple_dispatch_view_copy": _TESTS,
    "aten::_test_functorch_fallback": _TESTS,
    "aten::_test_optional_filled_intlist": _TESTS,
    "aten::_test_optional_floatlist": _TESTS,
    "aten::_test_optional_intlist": _TESTS,
    "aten::_test_parallel_materialize": _TESTS,
    "aten::_test_warn_in_autograd": _TESTS,
    "aten::linalg_matrix_sqrth": "its algorithm is the device's",
    "aten::linalg_polar": _POLAR,
    "mkldnn_prepacked::conv2d_run": "its weight is packed in an object, which hides the kernel's size",
    "sparse::qlinear": _SPARSE,
    "sparse::qlinear_dynamic": _SPARSE,
    "sparse::qlinear_relu": _SPARSE,
    "sparse::qlinear_relu_dynamic": _SPARSE,
    "torchvision::box_iou_rotated": "the corners of each intersection depend on the boxes' values",
}


def import_namespaces() -> None:
    """Let torch register what it has; torchvision's schemas stand in for its library where that does not load."""
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
    """Print how many overloads and packets there are of each class, those that are unknown, and those of no class."""
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
