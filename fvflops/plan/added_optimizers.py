"""Optimizers that plans add: in 8 bits, with float32 copies of parameters, and Muon."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from fvflops.text import explaining_arguments, short_repr

# Elements that share a scale, the fewest elements with a state of 8 bits, and the fewest in paged memory.
# Source: bitsandbytes 0.50.2, optim/optimizer.py.
_BLOCK, _SMALLEST, _PAGED = 256, 4096, 100_000
# By an explicit index the host, where "cpu" may be the emulated device.
_HOST = torch.device("cpu", 0)
_NAME = re.compile(r"(paged)?(adamw?|lion)(?:bnb)?(8|32)?(?:bit)?")
_CLASSES = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion"}


def _refuse(closure: Any, optimizer: Optimizer) -> None:
    if closure is not None:
        raise ValueError(f"{type(optimizer).__name__} takes no closure: call backward before step()")


class BlockwiseOptimizer(Optimizer):
    """Adam, AdamW or Lion by bitsandbytes' kernels; a subclass sets the kind, the bits of the state, and where it is.

    A state of 8 bits is codes, a float32 scale for each 256 elements, and a table of 256 values for all parameters;
    parameters of fewer than 4,096 elements have float32. State in paged memory, of 100,000 elements or more, is on the
    host as long as it is not used: on an accelerator it is created there, outside of its allocator.
    """

    kind: ClassVar[str] = "adamw"
    bits: ClassVar[int] = 8
    is_paged: ClassVar[bool] = False

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 1e-3, weight_decay: float | None = None) -> None:
        from bitsandbytes import functional

        self._has_two = self.kind != "lion"
        decay = (1e-2 if self.kind == "adamw" else 0.0) if weight_decay is None else weight_decay
        super().__init__([item for item in parameters if item.requires_grad], {"lr": lr, "weight_decay": decay})
        signs = (True, False) if self._has_two else (True,)
        self._tables = [functional.create_dynamic_map(signed=sign) for sign in signs] if self.bits == 8 else []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients, each by one kernel."""
        _refuse(closure, self)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    local = local_part(parameter)
                    if not state:
                        state.update(self._create_state(local))
                    state["step"] += 1
                    self._update(local, local_part(parameter.grad, parameter), state, group)

    def _create_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        elements = parameter.numel()
        is_small = self.bits == 32 or elements < _SMALLEST
        is_paged = self.is_paged and elements >= _PAGED and parameter.device.type != "cpu"
        options: dict[str, Any] = {"dtype": torch.float32 if is_small else torch.uint8}
        if is_paged:
            options["device"] = _HOST
        numbers = (1, 2) if self._has_two else (1,)
        state = {f"state{number}": torch.zeros_like(parameter, **options) for number in numbers}
        if not is_small:
            self._tables = [table.to(parameter.device) for table in self._tables]
            blocks = -(-elements // _BLOCK)
            for number in numbers:
                state[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
                state[f"qmap{number}"] = self._tables[number - 1]
        return {"step": 0, **state}

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        kernels: Any = torch.ops.bitsandbytes
        name = "adam" if self._has_two else "lion"
        betas = (0.9, 0.999 if self._has_two else 0.99, 0.0)
        states = state["state1"], state.get("state2")
        step, rate, decay = state["step"], group["lr"], group["weight_decay"]
        if "qmap1" not in state:
            limits = (None, 0.0, 0.0)  # no norm of updates
            arguments = (name, gradient, parameter, *states, *limits, *betas, 0.0, 1e-8, decay, step, rate, 1.0)
            kernels.optimizer_update_32bit(*arguments)
            return
        tables = state["qmap1"], state.get("qmap2"), state["absmax1"], state.get("absmax2")
        kernels.optimizer_update_8bit_blockwise(
            *(name, gradient, parameter, *states, *betas, 0.0, 1e-8, step, rate, *tables, decay, 1.0)
        )


def find_blockwise(name: str) -> type[BlockwiseOptimizer] | None:
    """Return the class of one of bitsandbytes' optimizers, by its name there or as transformers spells it.

    >>> find_blockwise("paged_adamw_8bit").__name__, find_blockwise("AdamW8bit").__name__, find_blockwise("adamw")
    ('PagedAdamW8bit', 'AdamW8bit', None)
    """
    found = _NAME.fullmatch(name.lower().replace("_", ""))
    if found is None or not (found[1] or found[3]):
        return None
    bits = int(found[3] or 32)
    title = f"{'Paged' if found[1] else ''}{_CLASSES[found[2]]}{f'{bits}bit' if bits == 8 or not found[1] else ''}"
    return type(title, (BlockwiseOptimizer,), {"kind": found[2], "bits": bits, "is_paged": bool(found[1])})


BLOCKWISE_NAMES = tuple(
    f"{paged}{kind}{bits}"
    for paged, bits in (("", "8bit"), ("Paged", "8bit"), ("Paged", ""))
    for kind in _CLASSES.values()
)


@explaining_arguments
class MasterWeights(Optimizer):
    """Updates float32 copies ("master weights") of parameters, then copies them back.

    In each step the gradients are copied to float32, their norm, of this rank or of the ranks of `group` together, is
    clipped to `max_norm`, and the optimizer that `make` creates from the copies runs. A parameter's gradient is its
    attribute `main_grad`, as Megatron-LM names it, if it has one. Source: Micikevicius et al., "Mixed Precision
    Training" (arXiv:1710.03740); in the order of Megatron-LM's Float16OptimizerWithFloat16Params.

    >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    >>> optimizer = MasterWeights([weight], lambda copies: torch.optim.SGD(copies, lr=2**-10), max_norm=10.0)
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> weight.dtype, optimizer.copies[0].dtype, float(optimizer.copies[0][0])
    (torch.bfloat16, torch.float32, 0.9990234375)
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        make: Callable[[list[torch.Tensor]], Optimizer],
        *,
        max_norm: float = 1.0,
    ) -> None:
        super().__init__([parameter for parameter in parameters if parameter.requires_grad], {})
        self._parameters: list[torch.Tensor] = self.param_groups[0]["params"]
        self.copies: list[torch.Tensor] = []
        self.group: Any = None
        self._make = make
        self._inner: Optimizer | None = None
        self._max_norm = max_norm

    def __repr__(self) -> str:
        kind = type(self._inner).__name__
        return short_repr(self, kind, f"float32 copies of {len(self.copies):,} parameters")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the copies of parameters with gradients, and the parameters from them."""
        from fvflops.torch_internals import foreach_copy

        _refuse(closure, self)
        if self._inner is None:  # as other state, the copies are made in the first step
            local = [local_part(parameter) for parameter in self._parameters]
            self.copies = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in local]
            foreach_copy(self.copies, local)
            self._inner = self._make(self.copies)
        for parameter, copy in zip(self._parameters, self.copies, strict=True):
            gradient = getattr(parameter, "main_grad", parameter.grad)
            copy.grad = None if gradient is None else local_part(gradient, parameter).to(torch.float32)
        self._clip()
        self._inner.step()
        foreach_copy([local_part(parameter) for parameter in self._parameters], self.copies)
        for copy in self.copies:
            copy.grad = None

    def _clip(self) -> None:
        """Clip the norm of the gradients, to which each rank of the group contributes its square."""
        gradients = [copy.grad for copy in self.copies if copy.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if self.group is not None:
            norm = norm.square()
            torch.distributed.all_reduce(norm, group=self.group)
            norm = norm.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.copies, self._max_norm, norm, foreach=True)


def local_part(tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor itself, of a DTensor this rank's part, placed as `parameter`: ranks update their parts alone."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(parameter, DTensor):
        tensor = tensor.redistribute(placements=parameter.placements)
    return tensor.to_local()


class Muon(Optimizer):
    """torch.optim.Muon for matrices, AdamW for all other parameters, as its authors train.

    `by_adamw` are the shapes of further matrices for AdamW, such as an embedding's. Source: K. Jordan et al., "Muon: An
    optimizer for hidden layers in neural networks" (2024): hidden matrices by Muon; embeddings, heads, gains and biases
    by AdamW.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], by_adamw: Collection[tuple[int, ...]] = ()) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        super().__init__(trained, {})
        matrices = [item for item in trained if item.ndim == 2 and tuple(item.shape) not in by_adamw]
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in trained if id(parameter) not in chosen]
        self.inner: list[Optimizer] = [torch.optim.Muon(matrices)] if matrices else []
        self.inner += [torch.optim.AdamW(others)] if others else []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        _refuse(closure, self)
        for optimizer in self.inner:
            optimizer.step()
