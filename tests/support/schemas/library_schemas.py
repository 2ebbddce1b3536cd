"""The schemas of libraries' operators, which are not installed: their argument names are what a table's rows speak of.

Taken from the sources of flash-attn 2.8.3, xFormers 0.0.35 and 0.0.28.post3 (the last with its own cutlass kernels),
causal-conv1d 1.7.0, bitsandbytes 0.50.2, torchao 0.18.0, spikingjelly 2.0.0, optimum-quanto 0.2.7, transformers 5.23
and DeepGEMM. The ops have no kernels; a test that runs one gives it a kernel. A library that is installed defines its
own first: it could not after this.
"""

import contextlib
import importlib
import importlib.util
from pathlib import Path

import torch
import yaml

from fvflops.sources.weights.packed_weight import define_ops

# torch's own, which it registers when something imports them.
_LATE = (
    "torch.nn.attention.varlen",
    "torch.distributed._symmetric_memory",
    "torch.ao.quantization.fx._decomposed",
    "torch._inductor.lowering",
)

# Libraries that may be installed.
_INSTALLED = ("bitsandbytes", "torchao", "transformers")
_MODULES = {"torchao": "torchao.ops", "transformers": "transformers.integrations.moe"}

# Namespace → schemas.
SCHEMAS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

_libraries = []


def define_library_schemas():
    """Define what no installed library has registered, once, and let torch register what it has itself."""
    if _libraries:
        return
    for name in _LATE:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    for name in _INSTALLED:
        if importlib.util.find_spec(name) is not None:
            with contextlib.suppress(ImportError, OSError):  # made for another torch, or another machine
                importlib.import_module(_MODULES.get(name, name))
    define_ops()
    for namespace, schemas in SCHEMAS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for schema in schemas:
            if not hasattr(getattr(torch.ops, namespace), schema.partition("(")[0]):
                library.define(schema)
        # A library that is collected takes its schemas with it.
        _libraries.append(library)
