"""Ops that read or write files, print, or call other machines: no saved program or TorchScript may call one."""

from __future__ import annotations

from functools import cache
from typing import Any

# Those whose schema does not say it.
_NAMED = frozenset(
    ("aten::_print", "debugprims::load_tensor", "prim::Print", "prim::rpc_async", "prim::rpc_remote", "prim::rpc_sync")
)
_PATHS = ("filename", "file_name", "file", "path", "file_path", "filepath", "uri", "url", "src_path", "dst_path")


def is_io_op(schema: Any) -> bool:
    """Return whether the op of a schema takes a path, or is known to do input or output.

    >>> import torch
    >>> is_io_op(torch.ops.aten.from_file.default._schema), is_io_op(torch.ops.aten.mm.default._schema)
    (True, False)
    """
    takes_path = any(item.name in _PATHS and str(item.type) in ("str", "Optional[str]") for item in schema.arguments)
    return takes_path or schema.name in _NAMED


@cache
def io_words() -> frozenset[str]:
    """Return the names, without namespaces, by which TorchScript calls the registered ops that do input or output."""
    from fvflops.torch_internals import all_schemas

    names = {schema.name for schema in all_schemas() if is_io_op(schema)} | _NAMED
    return frozenset({name.partition("::")[2] for name in names} | {"print"})
