"""Kinds of places in which a model keeps tensors, each as a module's source, and the comparison of twins."""

from __future__ import annotations

import array
import functools
import io
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fvflops.capture.restore.namespaces import dict_getter_of

# `set_up` prepares a model, `keep` returns what its forward adds to its result and keeps tensors while at that.
_FRAME = """
import array, collections, contextvars, dataclasses, enum, functools, io, itertools, queue, random, sys, threading
import types, weakref
import numpy as np
import torch
from torch import nn

def set_up(self): pass

{body}

class Net(nn.Module):
    {inside}
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        set_up(self)

    def forward(self, x, fails=False):
        y = self.fc(x)
        y = y + keep(self, y)
        if fails:
            raise LookupError("in the middle")
        return self.drop(y)
"""


_NAME = "a_twin"


class Kind(NamedTuple):
    """One kind of place: its name, the source of `set_up` and `keep`, and of what stands in the model's class."""

    name: str
    body: str
    inside: str = "pass"


@contextmanager
def twin(kind: Kind) -> Iterator[tuple[ModuleType, nn.Module]]:
    """Make a model of a kind, in a module of its own whose globals no other twin shares."""
    module = sys.modules[_NAME] = ModuleType(_NAME)
    source = _FRAME.format(body=kind.body, inside=kind.inside)
    exec(compile(source, f"<{kind.name}>", "exec"), module.__dict__)
    first, RemovableHandle.next_id = RemovableHandle.next_id, 0
    seed(1)
    try:
        yield module, module.Net()
    finally:
        RemovableHandle.next_id = first
        del sys.modules[_NAME]


def seed(number: int) -> None:
    """Seed all random generators that belong to nobody."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def picture(module: ModuleType, model: nn.Module) -> list[Any]:
    """Return what is in a module's globals and in a model, in plain values that can be compared."""
    seen: dict[int, int] = {}
    kept: list[Any] = []

    def draw(item: Any) -> Any:
        kind = type(item)
        if item is None or kind in (bool, int, float, complex, str, bytes, bytearray):
            return item
        if id(item) in seen:
            return f"again {seen[id(item)]}"
        seen[id(item)] = len(seen)
        kept.append(item)
        if issubclass(kind, (ModuleType, type)):
            own = kind is not ModuleType and item.__module__ == _NAME
            return (
                [(name, draw(value)) for name, value in vars(item).items() if name[:2] != "__"] if own else "a module"
            )
        return kind.__qualname__, draw_contents(item, kind), draw_attributes(item, kind)

    def draw_contents(item: Any, kind: type) -> Any:
        if issubclass(kind, torch.Tensor):
            dense = item.detach().to_dense() if item.layout is not torch.strided else item.detach()
            return dense.tolist(), item.requires_grad, draw(item.grad) if item.is_leaf else None
        for base in (dict, list, deque, tuple, set, frozenset):
            if issubclass(kind, base):
                items: Any = dict.items(item) if base is dict else base.__iter__(item)
                return [tuple(map(draw, value)) if base is dict else draw(value) for value in items]
        if kind is MethodType:
            return draw(item.__self__), draw(item.__func__)
        if kind is FunctionType:
            cells = [draw(cell.cell_contents) for cell in item.__closure__ or ()]
            return cells, draw(item.__defaults__), draw(item.__kwdefaults__)
        show = _SHOWN.get(kind)
        return None if show is None else show(item)

    def draw_attributes(item: Any, kind: type) -> Any:
        slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ()) if base.__module__ == _NAME]
        found = [(name, draw(getattr(item, name, None))) for name in slots]
        if kind.__module__.startswith((_NAME, "torch.nn", "types", "weakref", "queue", "enum")) or kind in _OPEN:
            attributes = dict_getter_of(kind)
            found += draw(attributes(item))[1] if attributes is not None and not slots else []
        return found

    own = {name: value for name, value in vars(module).items() if name not in _PRELUDE}
    return [draw(own), draw(model)]


_OPEN = (FunctionType, torch.Tensor, nn.Parameter)
_SHOWN: dict[type, Callable[[Any], Any]] = {
    np.ndarray: lambda item: str(item.tolist()),
    torch.Generator: lambda item: item.get_state().tolist(),
    np.random.Generator: lambda item: str(item.bit_generator.state),
    np.random.RandomState: lambda item: str(item.get_state()),
    random.Random: lambda item: item.getstate(),
    io.StringIO: lambda item: item.getvalue(),
    array.array: lambda item: item.tolist(),
    type(functools.cache(len)): lambda item: item.cache_info().currsize,
}
_PRELUDE = {"__builtins__"}


# Each kind: its name, the source of `set_up` and `keep`, and what is in the model's class, if anything.
_SOURCES = """
# Globals, closures, caches: places outside of the model.
## a dict in a global
TABLES = {}
def keep(self, y):
    if "table" not in TABLES: TABLES["table"] = torch.randn(4)
    return TABLES["table"]

## a list in a global that grows
HISTORY = []
def keep(self, y):
    HISTORY.append(y.detach())
    return sum(HISTORY)

## a global that is None at first
MASK = None
def keep(self, y):
    global MASK
    if MASK is None: MASK = torch.rand(8, 4)
    return MASK[:len(y)]

## a global that is not there at first
def keep(self, y):
    global GRID
    if "GRID" not in globals(): GRID = torch.rand(4)
    return GRID

## a flag beside a global tensor
READY, TABLE = False, torch.zeros(4)
def keep(self, y):
    global READY, TABLE
    if not READY: READY, TABLE = True, torch.rand(4)
    return TABLE

## a global of another module
other = types.ModuleType("a_twin_beside")
other.table = None
def keep(self, y):
    if other.table is None: other.table = torch.rand(4)
    return other.table

## a global that a name does not tell
def keep(self, y):
    names = globals()
    if "the_" + "table" not in names: names["the_" + "table"] = torch.rand(4)
    return names["the_" + "table"]

## a class attribute
def keep(self, y):
    if Net.table is None: Net.table = torch.rand(4)
    return Net.table
-- in the class
table = None

## a class attribute that is not there at first
def keep(self, y):
    if not hasattr(Net, "table"): Net.table = torch.rand(4)
    return Net.table

## a dict in a base class
class Keeps:
    kept = {}
def keep(self, y):
    return Keeps.kept.setdefault(len(y), torch.rand(4))

## a closure
def make():
    table = None
    def inner(y):
        nonlocal table
        if table is None: table = torch.rand(4)
        return table
    return inner
inner = make()
def keep(self, y): return inner(y)

## a list in a closure
def make():
    kept = []
    def inner(y):
        kept.append(y.detach())
        return torch.stack(kept).mean(0)
    return inner
inner = make()
def keep(self, y): return inner(y)

## functools.lru_cache
@functools.lru_cache(8)
def table(size): return torch.rand(size)
def keep(self, y): return table(4)

## functools.cache that had an entry
@functools.cache
def table(size, which): return torch.full((size,), float(which)) + torch.rand(1)
def set_up(self): self.first = table(4, 1)
def keep(self, y): return table(4, 1) + table(4, 2)

## a cached method
def keep(self, y): return self.table(4)
-- in the class
@functools.lru_cache
    def table(self, size): return torch.rand(size)

## a default argument
def keep(self, y, kept={}):
    return kept.setdefault("table", torch.rand(4))

## a keyword's default argument
def keep(self, y, *, kept=[]):
    kept.append(y.detach())
    return kept[0]

## a function's attribute
def keep(self, y):
    if not hasattr(keep, "table"): keep.table = torch.rand(4)
    return keep.table

## a context variable
VARIABLE = contextvars.ContextVar("variable")
def keep(self, y):
    if VARIABLE.get(None) is None: VARIABLE.set(torch.rand(4))
    return VARIABLE.get()

## a list in a context variable
VARIABLE = contextvars.ContextVar("variable", default=[])
def keep(self, y):
    VARIABLE.get().append(y.detach())
    return VARIABLE.get()[0]

## a thread's own
LOCAL = threading.local()
def keep(self, y):
    if not hasattr(LOCAL, "table"): LOCAL.table = torch.rand(4)
    return LOCAL.table

## a weak dictionary of modules
TABLES = weakref.WeakKeyDictionary()
def keep(self, y):
    if self not in TABLES: TABLES[self] = torch.rand(4)
    return TABLES[self]

## a weak dictionary of objects
class Holder: pass
TABLES = weakref.WeakValueDictionary()
def keep(self, y):
    if not hasattr(self, "holder"):
        self.holder = Holder()
        self.holder.table = torch.rand(4)
        TABLES["holder"] = self.holder
    return TABLES["holder"].table

## members of an enumeration
class Way(enum.Enum):
    ONE = 1
def keep(self, y):
    if not hasattr(Way.ONE, "table"): Way.ONE.table = torch.rand(4)
    return Way.ONE.table

## a global object with slots
class Store:
    __slots__ = ("table", "count")
STORE = Store()
def keep(self, y):
    if not hasattr(STORE, "table"): STORE.table, STORE.count = torch.rand(4), 0
    STORE.count += 1
    return STORE.table * STORE.count

## a global deque in a namespace
STORE = types.SimpleNamespace(last=collections.deque(maxlen=2))
def keep(self, y):
    STORE.last.append(y.detach())
    return STORE.last[0]

## a global ordered dict that moves
STORE = collections.OrderedDict(a=torch.ones(4), b=torch.zeros(4))
def keep(self, y):
    STORE.move_to_end("a")
    STORE["c"] = y.detach()
    return next(iter(STORE.values()))

## a global queue
QUEUE = queue.Queue()
def keep(self, y):
    QUEUE.put(y.detach())
    return QUEUE.queue[0]

## a global array of objects
STORE = np.array([None, None], dtype=object)
def keep(self, y):
    if STORE[0] is None: STORE[0] = torch.rand(4)
    return STORE[0]

## a partial function
def remember(kept, y): return kept.setdefault("table", torch.rand(4))
remembers = functools.partial(remember, {})
def keep(self, y): return remembers(y)

## a bound method
class Store:
    def __init__(self): self.kept = []
    def add(self, y):
        self.kept.append(y.detach())
        return self.kept[0]
add = Store().add
def keep(self, y): return add(y)

## a method of a built-in type
add = [].append
def keep(self, y):
    add(y.detach())
    return add.__self__[0]

## a module that is not of the model
BESIDE = nn.BatchNorm1d(4)
BESIDE.seen = []
def keep(self, y):
    BESIDE.seen.append(y.detach())
    return BESIDE(y) + BESIDE.seen[0]

## a decorator's closure
def once(function):
    kept = []
    @functools.wraps(function)
    def call(*args):
        if not kept: kept.append(function(*args))
        return kept[0]
    return call
@once
def table(size): return torch.rand(size)
def keep(self, y): return table(4)

## a named tuple in a list
Entry = collections.namedtuple("Entry", "key value")
STORE = []
def keep(self, y):
    STORE.append(Entry("y", y.detach()))
    return STORE[0].value

## keys that are tensors
STORE = {}
def keep(self, y):
    STORE[y.detach()] = len(STORE)
    return next(iter(STORE)) + len(STORE)

## a set of tensors
STORE = set()
def keep(self, y):
    STORE.add(y.detach())
    return sum(STORE)

## a property of a class
class Store:
    kept = None
    @property
    def table(self):
        if self.kept is None: self.kept = torch.rand(4)
        return self.kept
STORE = Store()
def keep(self, y): return STORE.table

## a cached property
class Store:
    @functools.cached_property
    def table(self): return torch.rand(4)
STORE = Store()
def keep(self, y): return STORE.table

## a single instance that a metaclass keeps
class Single(type):
    made = {}
    def __call__(cls, *args):
        if cls not in Single.made: Single.made[cls] = super().__call__(*args)
        return Single.made[cls]
class Store(metaclass=Single):
    def __init__(self): self.table = torch.rand(4)
def keep(self, y): return Store().table
# Objects that hang on modules.
## a cache object on the module
class Cache:
    def __init__(self): self.keys, self.length = [], 0
    def update(self, y):
        self.keys.append(y)
        self.length += len(y)
        return torch.cat(self.keys).mean(0) * self.length
def set_up(self): self.cache = Cache()
def keep(self, y): return self.cache.update(y.detach())

## a data class on the module
@dataclasses.dataclass
class State:
    steps: int = 0
    last: object = None
    kept: list = dataclasses.field(default_factory=list)
def set_up(self): self.state = State()
def keep(self, y):
    self.state.steps += 1
    self.state.kept.append(self.state.last)
    self.state.last = y.detach()
    return self.state.last * self.state.steps

## slots of an object on the module
@dataclasses.dataclass(slots=True)
class State:
    steps: int = 0
    last: object = None
def set_up(self): self.state = State()
def keep(self, y):
    self.state.steps += 1
    self.state.last = y.detach() if self.state.last is None else self.state.last
    return self.state.last * self.state.steps

## a NumPy array on the module
class State: pass
def set_up(self):
    self.state = State()
    self.state.counts = np.zeros(4)
def keep(self, y):
    self.state.counts += 1
    return torch.from_numpy(self.state.counts.astype("float32"))

## random generators on the module
def set_up(self):
    self.numpy, self.legacy = np.random.default_rng(3), np.random.RandomState(4)
    self.python, self.torch = random.Random(5), torch.Generator().manual_seed(6)
    self.kept = {"generators": [random.Random(7)]}
def keep(self, y):
    number = self.numpy.random() + self.legacy.rand() + self.python.random() + self.kept["generators"][0].random()
    return number + torch.rand(4, generator=self.torch)

## random generators in globals
NUMPY, PYTHON, TORCH = np.random.default_rng(3), random.Random(5), torch.Generator().manual_seed(6)
def keep(self, y): return NUMPY.random() + PYTHON.random() + torch.rand(4, generator=TORCH)

## iterators on the module
class State: pass
def set_up(self):
    self.steps, self.items, self.turns = itertools.count(), iter([1, 2, 3]), itertools.cycle((1, 2))
    self.state = State()
    self.state.pairs = [zip(itertools.count(1), iter((5, 6, 7)))]
def keep(self, y): return next(self.steps) + next(self.items) + 2 * next(self.turns) + sum(next(self.state.pairs[0]))

## an iterator in a global beside tensors
STEPS, KEPT = itertools.count(1), []
def keep(self, y):
    KEPT.append(y.detach())
    return next(STEPS) + KEPT[0]

## bytes, numbers and text on the module
def set_up(self):
    self.bytes, self.numbers, self.text = bytearray(2), array.array("d", [1.0]), io.StringIO()
    self.counter, self.defaults = collections.Counter(), collections.defaultdict(list)
def keep(self, y):
    self.bytes[0] += 1
    self.numbers.append(2.0)
    self.text.write("step ")
    self.counter["steps"] += 1
    self.defaults["y"].append(y.detach())
    return self.bytes[0] + sum(self.numbers) + len(self.text.getvalue()) + self.counter["steps"] + self.defaults["y"][0]

## an error that is kept
def keep(self, y):
    try:
        raise ValueError("kept")
    except ValueError as error:
        self.error = error
    return len(str(self.error))

## a hook's closure
def set_up(self):
    kept = []
    self.fc.register_forward_hook(lambda module, args, out: kept.append(out.detach()))
    self.kept = lambda: kept
def keep(self, y): return self.kept()[0]

## a hook's object
class Recorder:
    def __init__(self): self.seen = {}
    def __call__(self, module, args, out): self.seen[len(self.seen)] = out.detach()
def set_up(self):
    self.recorder = Recorder()
    self.fc.register_forward_hook(self.recorder)
def keep(self, y): return self.recorder.seen[0]

## an attribute of a parameter
def keep(self, y):
    if not hasattr(self.fc.weight, "table"): self.fc.weight.table = torch.rand(4)
    return self.fc.weight.table

## a module in a plain list
def set_up(self): self.beside = [nn.BatchNorm1d(4)]
def keep(self, y):
    self.beside[0].last = y.detach()
    return self.beside[0](y)

## a model that is an attribute of an object
class Teacher:
    def __init__(self): self.net = nn.BatchNorm1d(4)
def set_up(self): self.teacher = Teacher()
def keep(self, y): return self.teacher.net(y).detach()
# Objects whose special methods mislead or raise.
## containers whose methods raise
class Irreps(tuple):
    def __len__(self): raise NotImplementedError
    def __iter__(self): raise NotImplementedError
class Items(list):
    def __iter__(self): raise ValueError
    def __len__(self): raise ValueError
class Table(dict):
    def items(self): raise ValueError
    def values(self): raise ValueError
    def __iter__(self): raise ValueError
    def __bool__(self): raise ValueError
def set_up(self):
    self.irreps, self.items, self.table = Irreps((1, torch.zeros(1))), Items([torch.zeros(4)]), Table(a=1)
def keep(self, y):
    self.items[0] = self.items[0] + y.detach()
    self.table["a"] += 1
    list.append(self.items, torch.ones(1))
    return self.items[0] * self.table["a"]

## objects that say yes to all, or raise
class Agrees:
    kept = 0
    def __eq__(self, other): return True
    def __hash__(self): return 1
class Refuses:
    kept = 0
    def __eq__(self, other): raise ValueError
    def __hash__(self): raise ValueError
    def __bool__(self): raise ValueError
    def __len__(self): raise ValueError
class MakesUp:
    def __getattr__(self, name): return lambda *args: name
class Lies:
    kept = 0
    @property
    def __class__(self): return dict
    @property
    def value(self): raise ValueError
def set_up(self):
    self.objects = [Agrees(), Refuses(), MakesUp(), Lies()]
    self.one, self.two, self.three, self.four = self.objects
    self.same = [Agrees()]
def keep(self, y):
    for item in (self.one, self.two, self.four): item.kept = item.kept + 1
    self.same[0] = Agrees()
    self.same[0].kept = y.detach()
    return self.one.kept + self.two.kept + self.four.kept
# Tensors that are written where no dispatch mode sees it, or that are not strided.
## a buffer that is written through NumPy
def set_up(self): self.register_buffer("steps", torch.zeros(4))
def keep(self, y):
    self.steps.numpy()[:] += 1
    return self.steps

## a buffer that is written by its address
import ctypes
def set_up(self): self.register_buffer("steps", torch.zeros(4))
def keep(self, y):
    numbers = (ctypes.c_float * 4).from_address(self.steps.data_ptr())
    numbers[0] += 1
    return self.steps

## a buffer that shares its memory with an array
def set_up(self):
    self.register_buffer("steps", torch.zeros(4))
    self.array = self.steps.numpy()
def keep(self, y):
    self.array += 1
    return self.steps
"""


def _read_kinds(text: str) -> Iterator[Kind]:
    for section in text.split("\n## ")[1:]:
        name, _, source = section.partition("\n")
        body, _, inside = source.partition("-- in the class\n")
        yield Kind(name, body, inside or "pass")


KINDS = tuple(_read_kinds(_SOURCES))
