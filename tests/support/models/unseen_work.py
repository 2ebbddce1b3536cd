"""Functions that compute outside torch's dispatcher, and the name that the work of each is reported under."""

import array
import ctypes
import io
import pickle
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_LIBC = ctypes.CDLL(None)


class Kind(NamedTuple):
    """A function that computes a tensor like its argument, unseen, and the name that its work is reported under."""

    compute: Callable[[torch.Tensor], torch.Tensor]
    op: str


def _copy_memory(target, source):
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    return target


def _double_memory(tensor):
    numbers = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    numbers[:] = [2 * number for number in numbers]
    return tensor


def from_numpy(x):
    return torch.from_numpy(np.tanh(x.numpy()))


def ufunc_into_empty(x):
    out = torch.empty_like(x)
    np.tanh(x.numpy(), out=out.numpy())
    return out


def ufunc_into_zeros(x):
    out = torch.zeros_like(x)
    np.tanh(x.numpy(), out=out.numpy())
    return out


def numpy_in_place(x):
    y = x.clone()
    y.numpy()[...] *= 2
    return y


def numpy_in_place_on_the_argument(x):
    np.multiply(x, 2, out=x.numpy())
    return x


def scipy_filter(x):
    return torch.from_numpy(ndimage.gaussian_filter(x.numpy(), sigma=1))


def saved_and_loaded(x):
    file = io.BytesIO()
    np.save(file, np.tanh(x.numpy()))
    file.seek(0)
    return torch.from_numpy(np.load(file))


def frombuffer_of_array(x):
    numbers = array.array("f", [2 * number for row in x.tolist() for number in row])
    return torch.frombuffer(numbers, dtype=torch.float32).view_as(x)


def dlpack_capsule(x):
    copy = torch.zeros(x.shape)
    view = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(copy))
    _copy_memory(view, x)
    return copy


def ctypes_in_place(x):
    return _double_memory(x + 1)


def ctypes_in_place_on_the_argument(x):
    return _double_memory(x)


def libc_memcpy(x):
    out = torch.empty(x.shape)
    pointers = ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(x.data_ptr())
    _LIBC.memcpy(*pointers, ctypes.c_size_t(x.nbytes))
    return out


def storage_pointer(x):
    out = torch.empty_like(x)
    ctypes.memmove(out.untyped_storage().data_ptr(), x.untyped_storage().data_ptr(), x.nbytes)
    return out


def dispatch_disabled(x):
    with _disable_current_modes():
        return x * 2 + 1


def worker_that_waits(x):
    _TASKS.put(x)
    result = _RESULTS.get(timeout=30)
    if isinstance(result, Exception):
        raise result
    return result


_TASKS = queue.Queue()
_RESULTS = queue.Queue()


def _work():
    while True:
        try:
            _RESULTS.put(_TASKS.get() * 2)
        except Exception as error:
            _RESULTS.put(error)


threading.Thread(target=_work, daemon=True).start()


class NumpyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(2 * grad.numpy())


class PointerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _copy_memory(torch.empty_like(x), x)

    @staticmethod
    def backward(ctx, grad):
        return _copy_memory(torch.empty_like(grad), grad)


class InPlaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _double_memory(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad


class PythonFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.tensor([[2 * number for number in row] for row in x.tolist()])

    @staticmethod
    def backward(ctx, grad):
        return grad


_PLAIN = (
    *(from_numpy, scipy_filter, ufunc_into_empty, ufunc_into_zeros, numpy_in_place, numpy_in_place_on_the_argument),
    *(saved_and_loaded, frombuffer_of_array),
)
_SHORT = {
    "as_tensor": lambda x: torch.as_tensor(np.tanh(np.asarray(x))),
    "tensor_of_array": lambda x: torch.tensor(np.tanh(x.detach().cpu().numpy())),
    "tensor_class_of_array": lambda x: torch.FloatTensor(np.tanh(x.numpy())),
    "ufunc_on_tensor": lambda x: torch.as_tensor(np.einsum("ij,ij->ij", x, x)),
    "copied_from_numpy": lambda x: torch.zeros_like(x).copy_(torch.from_numpy(np.tanh(x.numpy()))),
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "frombuffer": lambda x: torch.frombuffer(bytearray(np.tanh(x.numpy()).tobytes()), dtype=torch.float32).view_as(x),
    "python_list": lambda x: torch.tensor([[2 * number for number in row] for row in x.tolist()]),
    "dlpack_to_numpy_and_back": lambda x: torch.from_dlpack(np.tanh(np.from_dlpack(x))),
}
# Functions that compute in a function of this file that several of them share.
_SHARED = {
    "dlpack_capsule": dlpack_capsule,
    "ctypes_into_empty": lambda x: _copy_memory(torch.empty_like(x), x),
    "ctypes_into_new_empty": lambda x: _copy_memory(x.new_empty(x.shape), x),
    "ctypes_into_strided": lambda x: _copy_memory(torch.empty_strided(x.shape, x.stride()), x),
    "ctypes_into_zeros": lambda x: _copy_memory(torch.zeros_like(x), x),
    "ctypes_into_full": lambda x: _copy_memory(torch.full_like(x, 7.0), x),
}
KINDS = {
    **{function.__name__: Kind(function, f"unseen::{function.__name__}") for function in _PLAIN},
    **{name: Kind(compute, "unseen::lambda") for name, compute in _SHORT.items()},
    **{name: Kind(compute, "unseen::_copy_memory") for name, compute in _SHARED.items()},
    "ctypes_in_place": Kind(ctypes_in_place, "unseen::_double_memory"),
    "ctypes_in_place_on_the_argument": Kind(ctypes_in_place_on_the_argument, "unseen::_double_memory"),
    "libc_memcpy": Kind(libc_memcpy, "unseen::libc_memcpy"),
    "storage_pointer": Kind(storage_pointer, "unseen::storage_pointer"),
    "dispatch_disabled": Kind(dispatch_disabled, "unseen::Unseen.forward"),
    "worker_that_waits": Kind(worker_that_waits, "unseen::Unseen.forward"),
    **{
        function.__name__: Kind(function.apply, f"prim::PythonOp.{function.__name__}")
        for function in (NumpyFunction, PointerFunction, InPlaceFunction, PythonFunction)
    },
}


class Unseen(nn.Module):
    """A module that computes by one of the kinds."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x):
        return self.compute(x)


class Net(nn.Module):
    """Two layers of 8 x 8, 512 multiply-adds on 4 rows, with unseen work between them."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scan = Unseen(compute)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.scan(self.first(x)))
