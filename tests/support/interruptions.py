"""Signals at random moments, and what they left of a model, of torch and of the process."""

import gc
import logging
import random
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _python_dispatch as python_dispatch
from torch.utils.checkpoint import checkpoint as checkpointed

from fvflops.capture.instrument.patching import Patch
from fvflops.torch_internals import top_saved_hooks
from tests.support.installed_patches import installed
from tests.support.models.layers import Swish

_PACKAGE = "/fvflops/"


class Block(nn.Module):
    """What a run can leave half done: statistics, random numbers, caches, modes, hooks and regions."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.calls = 0
        self.kept = []

    def forward(self, x):
        self.calls += 1
        x = self.dropout(self.norm(self.convolution(x)))
        with torch.no_grad():
            self.scale = x.detach().mean()
            self.kept.append(self.scale)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.convolution.weight.sum() + x
        x = x.flatten(2).transpose(1, 2)
        x = self.attention(x, x, x, need_weights=False)[0]
        if torch.is_grad_enabled():
            # It runs again in a backward pass; torch refuses it below autograd.
            x = checkpointed(self.head, x, use_reentrant=False)
        else:
            x = self.head(x)
        positions = torch.arange(x.shape[1]) % 2
        x = x + positions[:, None]
        return x.softmax(-1).mean() if x.requires_grad else x.softmax(-1)


class Plain(nn.Module):
    """One that enters no context of torch's, which would itself leave a thread's settings changed."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.norm(self.convolution(x)).flatten(2).transpose(1, 2)
        return Swish.apply(self.attention(x, x, x, need_weights=False)[0]).mean()


class Tiny(nn.Module):
    """One that is counted in a few thousand lines, so that a signal can be tried at each."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x).sum()


class Training(Block):
    """The same with an autograd.Function, which wants autograd."""

    def forward(self, x):
        return Swish.apply(super().forward(x)).mean()


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def reachable(root: Any, *, closures: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for all that can be reached from an object: attributes, items, gradients, closures."""
    seen = set()
    pending = [("", root)]
    while pending:
        path, item = pending.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, str, bytes, int, float, type(None))):
            continue
        seen.add(id(item))
        yield path, item
        if isinstance(item, Mapping):
            for key, value in item.items():
                name = key if isinstance(key, (str, int)) else type(key).__name__
                pending += [(f"{path}.key {name}", key), (f"{path}[{name!r}]", value)]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            pending += [(f"{path}[{index}]", value) for index, value in enumerate(item)]
        elif isinstance(item, MethodType):
            pending.append((f"{path}.__self__", item.__self__))
        elif isinstance(item, FunctionType) and closures:
            cells = zip(item.__code__.co_freevars, item.__closure__ or (), strict=True)
            pending += [(f"{path}.{name}", cell.cell_contents) for name, cell in cells]
        if isinstance(item, torch.Tensor) and item.is_leaf:
            pending.append((f"{path}.grad", item.grad))
        pending += [(f"{path}.{name}", value) for name, value in getattr(item, "__dict__", {}).items()]


def describe(root):
    """Return path → what can be seen of each object there: identity, and of tensors everything, bits included."""
    seen = {}
    for path, item in reachable(root, closures=False):
        if isinstance(item, torch.Tensor):
            bits = item.detach().cpu().contiguous().view(torch.uint8) if item.dim() and not item.is_meta else None
            seen[path] = (
                id(item),
                type(item),
                item.dtype,
                item.device,
                tuple(item.shape),
                item.stride(),
                item.storage_offset(),
                item.untyped_storage()._cdata,
                item.requires_grad,
                item.is_leaf,
                None if item.is_meta else item.tolist() if bits is None else bits.numpy().tobytes(),
            )
        elif isinstance(item, torch.Generator):
            seen[path] = id(item), item.get_state().tolist()
        elif isinstance(item, (dict, list, set, deque)):
            seen[path] = id(item), type(item), len(item)
        else:
            seen[path] = id(item)
        for name, value in getattr(item, "__dict__", {}).items():
            if isinstance(value, (bool, int, float, str)) or value is None:
                seen[f"{path}.{name}="] = value
    return seen


def describe_process():
    """Return what can be told of torch, of Python and of this thread."""
    keys = torch._C.DispatchKey.__members__
    told = {**installed(), "compile": torch.compile, "step": torch.optim.Optimizer.step}
    told["patches"] = [(patch._owner, patch._name) for patch in PATCHES if patch._wraps]
    told["dispatch mode flags"] = {
        name: value for name, value in vars(python_dispatch).items() if name.startswith("_is_in_")
    }
    told["function modes"] = torch._C._len_torch_function_stack()
    told["function state"] = str(torch._C._get_torch_function_state())
    told["grad"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    told["keys"] = [
        name
        for name, key in keys.items()
        if torch._C._dispatch_tls_is_dispatch_key_excluded(key) or torch._C._dispatch_tls_is_dispatch_key_included(key)
    ]
    told["autocast"] = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    ]
    told["autocast cache"] = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    told["saved tensors' hooks"] = top_saved_hooks(True)
    told["levels"] = torch._C._functorch.get_dynamic_layer_stack_depth()
    told["collector"] = gc.isenabled()
    told["warnings"] = id(warnings.filters), list(warnings.filters), warnings.showwarning
    told["logging"] = logging.getLogger("fvflops").level, list(logging.getLogger("fvflops").handlers)
    told["random"] = (
        _as_bytes(torch.get_rng_state()),
        random.getstate(),
        numpy.random.get_state()[1].tobytes(),
        numpy.random.get_state()[2],
    )
    told["handlers"] = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)]
    told["default dtype"] = torch.get_default_dtype()
    return told


PATCHES = [item for item in gc.get_objects() if isinstance(item, Patch)]


def is_free() -> bool:
    """Return whether another thread can count: no lock is held."""
    import fvflops

    done = []
    thread = threading.Thread(
        target=lambda: done.append(fvflops.FlopCountAnalysis(nn.Linear(2, 3), torch.ones(1, 2)).total()), daemon=True
    )
    thread.start()
    thread.join(20)
    return done == [6]


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in before.items() if after.get(name) != value] + sorted(after.keys() - before.keys())


def _forget(unraisable):
    """Let go of what was raised in a finalizer; pytest would keep it, with the frames around."""


class Storm:
    """Signals from a timer: the first after a delay, others right behind it while the first is cleaned up after.

    `inside` says whether the first was raised in the midst of what is interrupted, `where` in which function.
    """

    def __init__(self, *, error: type[BaseException] = KeyboardInterrupt) -> None:
        self._error = error
        self._left = 0
        self.raised = 0
        self.inside = False
        self.where = ""

    def run(self, call: Callable[[], Any], delay: float, burst: int, interval: float) -> tuple[bool, Any]:
        """Return whether a call was interrupted, and what it returned."""
        before = signal.signal(signal.SIGALRM, self._handle)
        self.raised, self.inside, self.where, self._left = 0, False, "", burst
        signal.setitimer(signal.ITIMER_REAL, delay, interval)
        hook, sys.unraisablehook = sys.unraisablehook, _forget
        try:
            result = call()
        except self._error:
            return True, None
        else:
            return False, result
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._left = 0
            sys.unraisablehook = hook
            signal.signal(signal.SIGALRM, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._left or (frame is not None and frame.f_code is Storm.run.__code__):
            return
        self._left -= 1
        self.raised += 1
        if self.raised == 1:
            while frame is not None and _PACKAGE not in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None:
                self.inside = True
                self.where = f"{frame.f_code.co_filename.rpartition(_PACKAGE)[2]}:{frame.f_code.co_name}"
        raise self._error


class Injection:
    """A signal at one exact moment: the n-th line, or bytecode, that a call runs in the frames of some files."""

    def __init__(self, files: tuple[str, ...], *, bytecodes: bool) -> None:
        self._files = files
        self._bytecodes = bytecodes
        self._left = 0
        self.seen = 0
        self.where = ""

    def run(self, call: Callable[[], Any], number: int) -> tuple[bool, Any]:
        """Return whether a call was interrupted, and what it returned; `seen` says how many moments there were."""
        self.seen, self._left = 0, number
        hook, sys.unraisablehook = sys.unraisablehook, _forget
        sys.settrace(self._trace)
        try:
            result = call()
            sys.settrace(None)
            if number:
                time.sleep(1)  # one that came in a finalizer comes again, on a busy machine later
            return False, result
        except KeyboardInterrupt:
            return True, None
        finally:
            sys.settrace(None)
            sys.unraisablehook = hook

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files) and _PACKAGE not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = self._bytecodes
        frame.f_trace_lines = not self._bytecodes
        return self._count

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "opcode"):
            self.seen += 1
            if self.seen == self._left:
                code = frame.f_code
                self.where = f"{code.co_filename.rpartition(_PACKAGE)[2]}:{code.co_name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._count
