"""Find the module that each backward op belongs to, without a recording: walk autograd's graph around module calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fvflops import Trace
from tests.support.old_torch import REPEATS_DETACH


class Witness(TorchDispatchMode):
    """Notes each op with the autograd node that it runs for, and the module in whose call each node was made.

    When a module is called, the nodes that its inputs come from are given to the module that is open around it; when it
    returns, what is new behind its outputs is given to itself. A node that was made by another's backward belongs to
    that one's owner: anomaly mode writes down which that was. What a module does that is called inside a backward pass
    is its own. Nodes that it cannot reach are what a write through a view wrapped, and those that no module returned.
    """

    def __init__(self, model):
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._homes = {}
        for module, name in self._names.items():
            for parameter in module.parameters(recurse=False):
                self._homes.setdefault(id(parameter), name)
        self._owners = {}
        self._open = []
        self._hooks = []
        self.ops = []  # op, owner, and the node's name

    def __enter__(self) -> Witness:
        for module in self._names:
            self._hooks.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._end, with_kwargs=True, always_call=True))
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *error):
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = torch._C._current_autograd_node()
        owner = None
        if node is not None:
            called_here = self._open and self._open[-1][1] is node
            owner = self._open[-1][0] if called_here else self._owner_of(node)
        self.ops.append((func.name(), owner, "" if node is None else node.name()))
        return func(*args, **(kwargs or {}))

    def disagreements(self, trace: Trace) -> list[tuple[str, str, str]]:
        """Return (op, owner in the trace, owner) of each op of the backward pass that they give to two modules."""
        return [(op, told, owner) for op, told, owner, _ in self._both(trace) if owner is not None and told != owner]

    def unreached(self, trace: Trace) -> set[tuple[str, str]]:
        """Return (owner in the trace, node's name) of the ops of the backward pass whose nodes it did not reach."""
        return {(told, node) for _, told, owner, node in self._both(trace) if owner is None}

    def give(self, tensors: Any, owner: str) -> None:
        """Let the nodes behind tensors that have no owner yet have this one."""
        waiting = [item.grad_fn for item in tree_leaves(tensors) if isinstance(item, torch.Tensor)]
        while waiting:
            node = waiting.pop()
            made_by_another = node is not None and "parent_" in node.metadata
            if node is not None and node not in self._owners and not made_by_another:
                self._owners[node] = owner
                waiting += [below for below, _ in node.next_functions]

    def _both(self, trace: Trace) -> list[tuple[str, str, str | None, str]]:
        assert trace.events is not None
        scopes = trace.scopes()
        ops = [event for event in trace.events if event.kind == "op"]
        mine = self.ops
        if REPEATS_DETACH:
            ops = [event for event in ops if trace.signatures[event.item].op != "aten::detach"]
            mine = [item for item in mine if item[0] != "aten::detach"]
        assert [trace.signatures[event.item].op for event in ops] == [op for op, _, _ in mine]
        told = [(scopes[event.stack] or ("",))[-1] for event in ops]
        found = [
            (op, name, owner, node)
            for event, name, (op, owner, node) in zip(ops, told, mine, strict=True)
            if event.phase == "backward"
        ]
        assert found
        return found

    def _begin(self, module, args, kwargs):
        self.give((args, kwargs), self._open[-1][0] if self._open else "")
        self._open.append((self._names[module], torch._C._current_autograd_node()))

    def _end(self, module, args, kwargs, result):
        name, _ = self._open.pop()
        self.give(result, name)

    def _owner_of(self, node: Any) -> str | None:
        if type(node).__name__ == "AccumulateGrad":
            return self._homes.get(id(node.variable), "")
        if node in self._owners:
            return self._owners[node]
        parent = node.metadata.get("parent_")
        return None if parent is None else self._owner_of(parent)
