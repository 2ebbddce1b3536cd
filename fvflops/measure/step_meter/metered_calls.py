"""Calls of a step's models: observed by hooks of the models alone, so that nothing inside is instrumented."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fvflops.capture.model.read_module_tree import unwrap_compiled
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.shapes.concrete_tensors import CONCRETE_LIMIT, INTEGRAL
from fvflops.text import shown
from fvflops.torch_internals import pytree

# Attributes of an unknown object are compared down to this depth.
_DEPTH = 4


class ModelModes:
    """Which modules of a model train and which parameters are trainable, as they are now."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        self._flags: list[tuple[Any, str, bool]] = [(module, "training", module.training) for module in model.modules()]
        self._flags += [(parameter, "requires_grad", parameter.requires_grad) for parameter in parameters]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the model to these modes within a with block."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self._flags]
        try:
            _set_flags(self._flags)
            yield
        finally:
            _set_flags(before)


def _set_flags(flags: Iterable[tuple[Any, str, bool]]) -> None:
    for owner, name, value in flags:
        if getattr(owner, name) is not value:
            setattr(owner, name, value)


@dataclass(slots=True)
class ModelCall:
    """One call of a model in a step.

    `key` is equal for calls of equal cost: its first part contains the model, the modes and the trainable parameters,
    its second the shapes of the inputs. `gradients` are the indexes of the outputs
    whose gradients were computed, `samples` and `tokens` the sizes of the inputs, 0 if not known. `inputs` are the
    arguments of a call that has to be counted, None otherwise, and `modes` the modes of its modules then.
    """

    model: nn.Module
    key: tuple[Hashable, Hashable]
    with_grad: bool
    autocast: tuple[str, torch.dtype] | None
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    modes: ModelModes | None = None
    gradients: set[int] = field(default_factory=set)
    samples: int = 0
    tokens: int = 0

    @property
    def kind(self) -> Hashable:
        """Key of calls that differ in shapes alone."""
        return self.key[0], frozenset(self.gradients)

    @property
    def full_key(self) -> Hashable:
        """The key of the call with its backward pass."""
        return self.key, frozenset(self.gradients)

    def without_values(self) -> ModelCall:
        """Return the call to be counted later, without the values of inputs that shape execution does not have."""
        assert self.inputs is not None
        return replace(self, inputs=pytree.tree_map(_drop_values, self.inputs), gradients=set(self.gradients))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs with tensors that share their storage, or have no values, and have no autograd history."""
        args, kwargs = pytree.tree_map(_materialise, self.inputs)
        return args, kwargs


class _ValuelessTensor(partial[torch.Tensor]):
    """Makes an empty tensor in place of one whose values shape execution does not have."""


def _drop_values(value: Any) -> Any:
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return value
    if value.dtype in INTEGRAL and value.numel() <= CONCRETE_LIMIT:
        return value.clone()
    options = {"dtype": value.dtype, "device": value.device, "requires_grad": value.requires_grad}
    return _ValuelessTensor(torch.empty_strided, tuple(value.shape), value.stride(), **options)


def _materialise(value: Any) -> Any:
    if isinstance(value, _ValuelessTensor):
        return value()
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


class CallObserver:
    """Observe the calls of models, from `start` to `stop`; a model that another one calls is part of that call.

    `is_known` says of a call's key whether such a call was counted, or its inputs kept, so that they are not needed.
    """

    def __init__(self, models: tuple[nn.Module, ...], is_known: Callable[[Hashable], bool]) -> None:
        self._is_known = is_known
        self._active = False
        self._inside: nn.Module | None = None
        self._calls: list[ModelCall] = []
        self._kinds: dict[Hashable, Hashable] = {}
        self._modes: dict[Hashable, ModelModes] = {}
        self._handles: list[RemovableHandle] = []
        self._compiled: list[tuple[nn.Module, Any]] = []
        self._parameters = {model: list(unwrap_compiled(model).parameters()) for model in models}
        for model in models:
            self._attach(model)

    def start(self) -> None:
        self._calls, self._inside, self._active = [], None, True

    def stop(self) -> list[ModelCall]:
        """Return the calls since `start`."""
        self._active = False
        calls, self._calls = self._calls, []
        return calls

    def remove(self) -> None:
        self._active = False
        for handle in self._handles:
            handle.remove()
        for module, call in self._compiled:
            module._compiled_call_impl = call
        self._handles, self._compiled = [], []

    def _attach(self, model: nn.Module) -> None:
        if (compiled := model._compiled_call_impl) is not None:
            # After `model.compile()` hooks of the model would be compiled too: the compiled call is wrapped instead.

            def call(*args: Any, **kwargs: Any) -> Any:
                self._enter(model, args, kwargs)
                result = None
                try:
                    result = compiled(*args, **kwargs)
                    return result
                finally:
                    self._exit(model, args, result)

            self._compiled.append((model, compiled))
            model._compiled_call_impl = call
            return
        self._handles += [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._exit, always_call=True),
        ]

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # In a compiled function this is compiled away: the call is not seen.
        if torch.compiler.is_compiling() or not self._active or self._inside is not None:
            return
        self._inside = model
        with_grad = torch.is_grad_enabled()
        parameters = self._parameters[model]
        device = parameters[0].device.type if parameters else "cpu"
        autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        trainable = tuple([parameter.requires_grad for parameter in parameters]) if with_grad else ()
        kind: Hashable = id(model), model.training, with_grad, autocast, trainable
        kind = self._kinds.setdefault(kind, kind)  # one object for all calls
        key = kind, (describe(args), describe(kwargs))
        call = ModelCall(model, key, with_grad, autocast)
        if not self._is_known(key):
            call.inputs = args, dict(kwargs)
            if kind not in self._modes:
                self._modes[kind] = ModelModes(unwrap_compiled(model), parameters)
            call.modes = self._modes[kind]
        call.samples, call.tokens = sizes_of(args, kwargs)
        self._calls.append(call)

    def _exit(self, model: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling() or not self._active or self._inside is not model:
            return
        self._inside = None
        call = self._calls[-1]
        if call.with_grad and result is not None:
            gradients = call.gradients  # the hook must not keep the call's inputs alive
            for index, tensor in enumerate(tensors_of(result)):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, index=index: gradients.add(index))


def sizes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows of the first tensor, and its elements if they are token ids: integers of two dimensions."""
    named = args[0] if not kwargs and len(args) == 1 and isinstance(args[0], Mapping) else kwargs
    first = named.get("input_ids")
    if first is None:
        first = next(tensors_of((args, kwargs)), None)
    if not isinstance(first, torch.Tensor) or not first.dim():
        return 0, 0
    is_ids = first.dim() == 2 and first.dtype in (torch.int64, torch.int32)
    return first.shape[0], first.numel() if is_ids else 0


def describe(value: Any, depth: int = 0) -> Hashable:
    """Return the properties of an argument that determine a call's cost: shapes, dtypes and small values, not contents.

    >>> describe((torch.ones(2, 3), {"labels": None, "scale": 0.5}))
    (((2, 3), torch.float32, False), (('labels', None), ('scale', 'float')))
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple([describe(item, depth) for item in value])
    if isinstance(value, Mapping):
        return tuple([(key, describe(item, depth)) for key, item in value.items()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple([describe(getattr(value, item.name, None), depth) for item in dataclasses.fields(value)])
    shape, attributes = getattr(value, "shape", None), getattr(value, "__dict__", None)
    if isinstance(shape, tuple):  # an array
        return type(value).__qualname__, shape
    if attributes and depth < _DEPTH and not callable(value):
        return type(value).__qualname__, tuple([(name, describe(item, depth + 1)) for name, item in attributes.items()])
    return type(value).__qualname__


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model that a data-parallel wrapper calls: its own hooks run for each call."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    return model


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer in Accelerate's wrapper, which has no hooks of its own."""
    inner = getattr(optimizer, "optimizer", None)
    inner = inner if isinstance(inner, Optimizer) else optimizer
    if not isinstance(inner, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, or several; got {shown(optimizer)}")
    return inner
