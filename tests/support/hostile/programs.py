"""Saved programs of torch.export with one entry changed, so that torch would run code that the file contains."""

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.models.parts import Parts

MODEL, WEIGHTS, INPUTS = "models/model.json", "data/weights/model_weights_config.json", "data/sample_inputs/model.pt"
CONSTANTS = "data/constants/model_constants_config.json"
Entries = dict[str, bytes]


class Opens:
    """Opens a file for writing when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


class Net(Parts):
    """A layer, a constant, sizes that are expressions, and a keyword argument."""

    def forward(self, x, *, shift):
        return self.layer(x)[: x.shape[0] // 2] * self.scale + shift


@cache
def saved_entries() -> Mapping[str, bytes]:
    """Return the entries of a harmless program, without their folder."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = {"x": {0: torch.export.Dim.AUTO}, "shift": None}
        example = (torch.randn(6, 4),)
        program = torch.export.export(
            Net(layer=nn.Linear(4, 3), scale=torch.ones(3)), example, {"shift": torch.zeros(3)}, dynamic_shapes=shapes
        )
        torch.export.save(program, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_entries(path: Path, entries: Mapping[str, bytes], *, folder: str = "net/", more: Any = ()) -> None:
    """Write an archive; `more` are (full name, data) of entries outside of its folder, or with a duplicate name."""
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a duplicate
        for name, data in [*((folder + name, data) for name, data in entries.items()), *more]:
            archive.writestr(name, data)


def change_json(entries: Mapping[str, bytes], name: str, change: Callable[[Any], Any]) -> Entries:
    value = json.loads(entries[name])
    change(value)
    return {**entries, name: json.dumps(value).encode()}


def list_texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, str):
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from list_texts(item, (*path, key))


def put(value, path, text):
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = text


def hostile_programs(canary: Path) -> dict[str, Entries]:
    """Return name → the entries of a program that would open the canary for writing when it is loaded or runs."""
    good = saved_entries()
    opens = f"open({str(canary)!r}, 'w')"
    texts = {path[-1]: path for path in list_texts(json.loads(good[MODEL])) if path[-1] != "target"}
    nodes = ("graph_module", "graph", "nodes")
    calls = ("graph_module", "module_call_graph", 0, "signature")

    def model(path: tuple[Any, ...], text: Any) -> Entries:
        return change_json(good, MODEL, lambda value: put(value, path, text))

    def call(target: str, *arguments: Any) -> Entries:
        names = ("filename", "shared", "size") if "from_file" in target else ("",) * len(arguments)
        inputs = [{"name": name, "arg": item, "kind": 1} for name, item in zip(names, arguments, strict=True)]
        node = {"target": target, "inputs": inputs, "outputs": [{"as_tensor": {"name": "called"}}], "name": "called"}
        node |= {"metadata": {}, "is_hop_single_tensor_return": None}

        def change(value):
            graph = value["graph_module"]["graph"]
            graph["nodes"].insert(0, node)
            graph["tensor_values"]["called"] = graph["tensor_values"]["linear"]

        return change_json(good, MODEL, change)

    def replaced(old: str, new: str) -> Entries:
        return {name: data.replace(old.encode(), new.encode()) for name, data in good.items()}

    def weight(name: str, key: str, text: Any, **more: Any) -> Entries:
        return change_json(good, name, lambda value: next(iter(value["config"].values())).update({key: text, **more}))

    def tree(node: Any) -> Entries:
        return model((*calls, "out_spec"), json.dumps([1, node]))

    path_text, mode_text = {"as_string": str(canary)}, {"as_string": "w"}
    zipped, old = io.BytesIO(), io.BytesIO()
    torch.save((Opens(canary),), zipped)
    torch.save((Opens(canary),), old, _use_new_zipfile_serialization=False)
    factory = {"default_factory_module": "hostile_module", "default_factory_name": "x", "dict_context": []}
    return {
        "guard": model(("guards_code",), [f"{opens} is None"]),
        "guard in a message": model(("guards_code",), [f"L['x'].size()[0] != L['\" + str({opens}) + \"']"]),
        "guard by an attribute": model(("guards_code",), ["L['x'].__class__.__base__ is None"]),
        "size": model(texts["expr_str"], f"{opens} or 1"),
        "size of a lambda": model(texts["expr_str"], f"(lambda: {opens})() or Integer(1)"),
        "size inside of an object": model(texts["expr_str"], {"x": opens}),
        "hint of a size": replaced('"hint": {"as_int": 6}', f'"hint": {{"as_int": {json.dumps(opens)}}}'),
        "size of a tensor": replaced('{"as_int": 3}', f'{{"as_int": {json.dumps(opens)}}}'),
        "range": change_json(
            good, MODEL, lambda value: value["range_constraints"].update({opens: {"min_val": 1, "max_val": 9}})
        ),
        "target of os": call("torch.hub.os.open", path_text, {"as_int": 65}),
        "target of torch.load": call("torch.serialization.load", path_text),
        "target of torch.save": call("torch.save", {"as_int": 1}, path_text),
        "target that is a builtin": call("torch.functional.__builtins__.open", path_text, mode_text),
        "target of operator": call("_operator.methodcaller", path_text),
        "target that loads a library": call("torch.ops.load_library", path_text),
        "target that maps a file": call(
            "torch.ops.aten.from_file.default", path_text, {"as_bool": True}, {"as_int": 8}
        ),
        "target that saves": call("torch.ops.aten.save.default", {"as_int": 1}, path_text),
        "target that prints": call("torch.ops.aten._print.default", {"as_string": "::set-output"}),
        "target of an extension": call("#hostile:op"),
        "target of a loaded library": call("torch.ops.higher_order.aoti_call_delegate", path_text),
        "function as an argument": call("torch.ops.aten.relu.default", {"as_operator": "torch.hub.os.system"}),
        "name of an argument": model((*calls, "forward_arg_names"), ["x", f"shift={opens}"]),
        "name of a node": model((*nodes, 0, "name"), f"x; {opens}"),
        "name of an input": {**good, MODEL: replaced('"x"', json.dumps(f"x={opens}"))[MODEL]},
        "name of a weight": replaced('"layer.weight"', json.dumps(f'layer.w" + {opens} + "')),
        "tree of an enum": tree(
            {"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "hostile_module:X", "name": "a"}]'}
        ),
        "tree of a defaultdict": tree({"type": "collections.defaultdict", "context": factory}),
        "tree with an argument": model(
            (*calls, "in_spec"),
            json.loads(good[MODEL])["graph_module"]["module_call_graph"][0]["signature"]["in_spec"].replace(
                "shift", f"shift={opens}"
            ),
        ),
        "pickled inputs": {**good, INPUTS: zipped.getvalue()},
        "pickled inputs of the old format": {**good, INPUTS: old.getvalue()},
        "pickled inputs of protocol 0": {**good, INPUTS: pickle.dumps((Opens(canary),), protocol=0)},
        "pickled inputs after another header": {**good, INPUTS: b"\n" + pickle.dumps((Opens(canary),), protocol=0)},
        "pickled weight": {**weight(WEIGHTS, "use_pickle", True), "data/weights/weight_0": zipped.getvalue()},
        "opaque constant": {
            **weight(CONSTANTS, "path_name", "opaque_obj_0", use_pickle=True),
            "data/constants/opaque_obj_0": pickle.dumps(Opens(canary), protocol=0),
        },
        "object of a constant": {
            **weight(CONSTANTS, "path_name", "custom_obj_0", use_pickle=True),
            "data/constants/custom_obj_0": zipped.getvalue(),
        },
        "pickled constant": {**weight(CONSTANTS, "use_pickle", True), "data/constants/tensor_0": zipped.getvalue()},
        "old weights": {**good, "data/weights/model.pt": zipped.getvalue()},
        "old constants": {**good, "data/constants/model.pt": zipped.getvalue()},
        "another model": {**good, "models/x.json.bak": good[MODEL]},
        "compiled library": {**good, "data/aotinductor/model/x.so": b"\x7fELF"},
        "weights elsewhere": {**good, "xl_model_weights/weight_0": old.getvalue()},
    }
