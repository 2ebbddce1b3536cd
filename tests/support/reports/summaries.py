"""Summaries for the tests of reports: read from a torch model and fvcore's own counts, or made by hand.

The reader of models is a small one of its own, so that a fault of fvflops.capture cannot hide one of a report.
"""

from collections.abc import Iterator
from typing import Any

from fvcore.nn import parameter_count
from torch import nn

from fvflops.trace import ModuleInfo, ModuleTree, ParameterInfo, Summary, TensorSpec


def walk_places(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (dotted path, module) for each place, a parent before its children, shared modules again."""
    yield name, model
    for key, child in model._modules.items():
        if child is not None:
            yield from walk_places(child, f"{name}.{key}" if name else key)


def read_modules(model: nn.Module) -> ModuleTree:
    canonical = {}
    identities = {}
    places = {}
    for name, module in walk_places(model):
        prefix = f"{name}." if name else ""
        places[name] = ModuleInfo(
            name=name,
            canonical=canonical.setdefault(module, name),
            class_name=module._get_name(),
            extra_repr=module.extra_repr(),
            parameters=tuple(
                ParameterInfo(
                    prefix + key,
                    TensorSpec(tuple(weight.shape)),
                    identities.setdefault(id(weight), len(identities)),
                    True,
                )
                for key, weight in module._parameters.items()
                if weight is not None
            ),
            children=tuple((key, None if child is None else prefix + key) for key, child in module._modules.items()),
        )
    return ModuleTree(places)


def summarise(flops: Any, activations: Any = None) -> Summary:
    """Return the summary of analyses of fvcore, or of things that answer like one."""
    analyses = {"flops": flops} if activations is None else {"flops": flops, "activations": activations}
    for analysis in analyses.values():
        analysis.unsupported_ops_warnings(False)
        analysis.uncalled_modules_warnings(False)
        analysis.tracer_warnings("none")
    return Summary(
        modules=read_modules(flops._model),
        columns={
            "parameters": dict(parameter_count(flops._model)),
            **{heading: analysis.by_module() for heading, analysis in analyses.items()},
        },
        uncalled={heading: frozenset(analysis.uncalled_modules()) for heading, analysis in analyses.items()},
    )


def make_wide(blocks: int, leaves: int = 9) -> Summary:
    """Return the summary of a made-up model of `blocks` blocks with `leaves` linear layers each."""
    paths = {"": [f"block{index}" for index in range(blocks)]}
    for block in paths[""]:
        paths[block] = [f"{block}.fc{index}" for index in range(leaves)]
    return _make(paths)


def make_deep(levels: int) -> Summary:
    """Return the summary of a made-up model of modules inside each other, with a layer beside each."""
    paths = {}
    name = ""
    for _ in range(levels):
        prefix = f"{name}." if name else ""
        paths[name] = [prefix + "a", prefix + "b"]
        name = prefix + "a"
    return _make(paths)


def _make(paths: dict[str, list[str]]) -> Summary:
    """Return a summary in which every module without children has one weight of 6 elements and 60 flops."""
    places = {}
    parameters = {"": 0}
    flops = {}
    waiting = [""]
    while waiting:
        name = waiting.pop()
        below = paths.get(name, [])
        leaf = not below
        key = f"{name}.weight"
        weights = (ParameterInfo(key, TensorSpec((2, 3)), len(places), True),) if leaf else ()
        places[name] = ModuleInfo(
            name,
            name,
            "Linear" if leaf else "Block",
            parameters=weights,
            children=tuple((path.rpartition(".")[2], path) for path in below),
        )
        parameters[name] = 6 if leaf else 12
        flops[name] = 60 if leaf else 120
        if leaf:
            parameters[key] = 6
        waiting += reversed(below)
    return Summary(
        modules=ModuleTree(places),
        columns={"parameters": parameters, "flops": flops},
        operators={"flops": {"linear": 60}},
        by_both={"flops": {name: {"linear": count} for name, count in flops.items()}},
        uncalled={"flops": frozenset()},
    )


def make_tree(*lines: tuple[str, str]) -> ModuleTree:
    """Return the tree of (name, class) lines; parents come first."""
    places = {}
    for name, class_name in lines:
        below = [other for other, _ in lines if other and other.rpartition(".")[0] == name]
        places[name] = ModuleInfo(
            name, name, class_name, children=tuple((path.rpartition(".")[2], path) for path in below)
        )
    return ModuleTree(places)


# fc1 is 10 -> 20 on 2 rows: 400 multiply-adds, 40 outputs; head.fc2 is 20 -> 5: 200 and 10; the gelu of 40 counts 320.
NET = Summary(
    modules=make_tree(
        ("", "Net"),
        ("fc1", "Linear"),
        ("head", "Head"),
        ("head.fc2", "Linear"),
        ("head.act", "GELU"),
        ("aux", "Linear"),
    ),
    columns={
        "parameters": {"": 337, "fc1": 220, "fc1.weight": 200, "fc1.bias": 20, "head": 105, "head.fc2": 105, "aux": 12},
        "flops": {"": 920, "fc1": 400, "head": 520, "head.fc2": 200, "head.act": 320, "aux": 0},
        "activations": {"": 50, "fc1": 40, "head": 10, "head.fc2": 10, "head.act": 0, "aux": 0},
    },
    operators={"flops": {"gelu": 320, "linear": 600}, "activations": {"linear": 50}},
    by_both={
        "flops": {
            "": {"gelu": 320, "linear": 600},
            "fc1": {"linear": 400},
            "head": {"linear": 200, "gelu": 320},
            "head.fc2": {"linear": 200},
            "head.act": {"gelu": 320},
            "aux": {},
        },
        "activations": {"": {"linear": 50}, "fc1": {"linear": 40}, "head": {"linear": 10}, "head.fc2": {"linear": 10}},
    },
    uncalled={"flops": frozenset({"aux"}), "activations": frozenset({"aux"})},
    ledger={
        "counted": {"aten::linear": 2, "aten::gelu": 1},
        "zero_flop": {"aten::view": 3},
        "ignored": {"aten::sigmoid": 2, "aten::add.Tensor": 4},
        "unsupported": {"mylib::scan": 2},
    },
    unsupported_elements={"mylib::scan": 4096},
    about={"model": "Net", "table": "default", "multiply_add": "1"},
)


def name_everything(name: str) -> Summary:
    return Summary(
        modules=make_tree(("", name), (name, name)),
        columns={"flops": {"": 5, name: 5}},
        operators={"flops": {name: 5}},
        by_both={"flops": {"": {name: 5}, name: {name: 5}}},
        ledger={"ignored": {name: 1}, "unsupported": {name: 1}},
        unsupported_elements={name: 1},
        about={"table": name},
    )
