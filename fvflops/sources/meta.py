"""Build models on the meta device, without initialisers: they would fill tensors that have no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from fvflops import torch_internals
from fvflops.garbage_collector import gc_paused
from fvflops.torch_internals import DeviceContext, device_constructors, is_torch

Built = TypeVar("Built")

_META = torch.device("meta")
_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
# Functions of torch.nn.init that a function mode sees. The others call methods of tensors.
_INITIALISERS = frozenset({init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_})
# In-place methods that initialisers call, of a tensor and numbers: they return the tensor.
_FILLS = frozenset({torch.Tensor.zero_, torch.Tensor.fill_})
_IN_PLACE = _FILLS | {
    getattr(torch.Tensor, name)
    for name in (
        *("uniform_", "normal_", "bernoulli_", "exponential_", "cauchy_", "log_normal_"),
        *("add_", "sub_", "mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "erfinv_"),
    )
}
_NUMBERS = frozenset({int, float, bool, type(None), torch.Generator})
# Values are all that they differ in from torch.empty.
_FILLED = frozenset({torch.zeros, torch.ones})


class _MetaContext(DeviceContext):
    """`torch.device("meta")` in which calls that only change the values of a meta tensor do nothing."""

    if not is_torch("2.11"):  # older ones go below a context that is around, which then decides
        __enter__, __exit__ = TorchFunctionMode.__enter__, TorchFunctionMode.__exit__

    def __init__(self) -> None:
        super().__init__(_META)
        self._constructors = device_constructors()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Without kwargs, tensor.shape and such: by far the most calls.
        kwargs = {} if kwargs is None else kwargs
        if func in self._constructors:
            if kwargs.get("device") is None:
                kwargs = {**kwargs, "device": _META}
                if func in _FILLED and "out" not in kwargs:
                    func = torch.empty
        elif func in _IN_PLACE or func in _INITIALISERS:
            tensor: Any = args[0] if args else kwargs.get("tensor")
            if type(tensor) in _TENSOR_TYPES and tensor.is_meta and _changes_only_values(func, tensor, args, kwargs):
                return tensor
        return func(*args, **kwargs)


def _changes_only_values(
    func: Callable[..., Any], tensor: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Return whether a call cannot raise, and autograd does not record it."""
    if func in _INITIALISERS:
        return func is not init.kaiming_uniform_ or tensor.ndim > 1
    if (tensor.requires_grad and torch.is_grad_enabled()) or (func not in _FILLS and not tensor.is_floating_point()):
        return False
    return _NUMBERS.issuperset(map(type, args[1:])) and (not kwargs or _NUMBERS.issuperset(map(type, kwargs.values())))


@contextmanager
def on_meta() -> Iterator[None]:
    """Build on the meta device, without initialisers, in this thread, while the context lasts."""
    if not is_torch("2.10"):  # there, its import fails with older ones, and most libraries import it
        assert torch_internals.compiler
    with gc_paused(), _MetaContext():
        yield


def building_on(device: str | None) -> AbstractContextManager[Any]:
    """Return the context in which models are built on a device, None being the default one."""
    if device is None:
        return nullcontext()
    return on_meta() if torch.device(device).type == "meta" else torch.device(device)


def build_on_meta(factory: Callable[[], Built]) -> Built:
    """Return the result of a factory on the meta device, where tensors have a shape and a dtype, but no values.

    The model is as from `with torch.device("meta"): factory()`, in about two thirds of the time, since initialisers do
    nothing. Tensors that the factory creates on another device, by name, have their values. Errors of the factory
    propagate. The default device is restored afterwards, and other threads keep theirs.

    >>> model = build_on_meta(lambda: torch.nn.Linear(3, 2))
    >>> model.weight.device, model.weight.shape
    (device(type='meta'), torch.Size([2, 3]))
    """
    with on_meta():
        return factory()
