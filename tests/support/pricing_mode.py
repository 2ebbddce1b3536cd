"""A dispatch mode that prices every op that runs by the default table, to compare formulas with torch."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fvflops.capture.recorder.tensor_specs import describe_call, describe_op
from fvflops.formulas import load_table
from fvflops.trace import Status

DEFAULT = load_table("default")


class Products(TorchDispatchMode):
    """Sums multiply-adds, flops and activations by the table over every op that runs, composite ops taken apart."""

    def __init__(self, *, apart=True):
        super().__init__()
        self.apart, self.macs, self.flops, self.activations, self.unknown = apart, 0, 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.apart and describe_op(func).composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        price = DEFAULT.price(describe_call(func, args, kwargs, result))
        self.macs += price.macs
        self.flops += price.flops
        self.activations += price.activations or 0
        if price.status is Status.UNSUPPORTED:
            self.unknown.append(func.name())
        return result


def run(function, *args, apart=True, **kwargs):
    """Return what a function runs, below autograd, where composite ops can be seen."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), Products(apart=apart) as products:
        function(*args, **kwargs)
    return products


def price(name, table=DEFAULT, args=(), **kwargs):
    """Return what one call of an aten op costs."""
    overload = getattr(torch.ops.aten, name)
    overload = (
        getattr(overload, overload.overloads()[0]) if isinstance(overload, torch._ops.OpOverloadPacket) else overload
    )
    return table.price(describe_call(overload, args, kwargs, overload(*args, **kwargs)))


def meta(*shape):
    return torch.empty(shape, device="meta")
