"""Short training steps on the CPU with a planted defect, each beside its clean twin, and their chrome traces."""

import gc
import io
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, Dataset

Step = Callable[[], None]
Maker = Callable[[], Step]


class CpuDefect(NamedTuple):
    """What makes a step with the defect, and the clean step; the code of the finding.

    Traces have stacks if the defect is known by Python functions.
    """

    name: str
    code: str
    make: Maker
    clean: Maker
    with_stack: bool = False


def run(make: Maker, path: Path, *, steps: int = 2, with_stack: bool = False) -> str:
    """Profile some steps and return the path of their trace."""
    torch.manual_seed(0)
    step = make()
    step()
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        with_stack=with_stack,
        schedule=schedule(wait=0, warmup=1, active=steps),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(steps + 1):
            step()
            profiler.step()
    return str(path)


class Block(nn.Module):
    """Attention and an MLP; how attention is computed is an argument."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = self.attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(y)
        return x + self.down(F.relu(self.up(self.norm(x))))


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def separate(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


def masked(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.softmax(scores + torch.full(scores.shape[-2:], -1e9).triu(1), -1) @ v


def looped(q, k, v):
    heads = [fused(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1]) for h in range(q.shape[1])]
    return torch.cat(heads, 1)


def train(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor] = fused,
    *,
    shape: tuple[int, int] = (2, 384),
    width: int = 256,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None,
    around: Callable[[Tensor], Tensor] = lambda x: x,
    before: Step = lambda: None,
    after: Callable[[nn.Module], None] = lambda model: None,
    autocast: bool = False,
) -> Step:
    model = nn.Sequential(*(Block(attention, width, 4) for _ in range(2))).to(dtype)
    optimize = (optimizer or (lambda parameters: torch.optim.AdamW(parameters, fused=True)))(list(model.parameters()))
    x = torch.randn(*shape, width, dtype=dtype)

    def step():
        before()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            y = around(x)
            for block in model:
                y = around(block(y))
            y.square().mean().backward()
        after(model)
        optimize.step()
        optimize.zero_grad()

    return step


def infer(work: Callable[[], object]) -> Step:
    def step():
        with torch.no_grad():
            work()

    return step


def _products(dtype: torch.dtype | None) -> Step:
    a, b = torch.randn(2, 512, 512, dtype=dtype)
    return infer(lambda: [a @ b for _ in range(20)])


def _tokens_one_by_one(loop: bool) -> Step:
    weight, x = torch.randn(64, 64), torch.randn(1024, 64)
    return infer(lambda: [x[i : i + 1] @ weight for i in range(1024)] if loop else [x @ weight for _ in range(60)])


def _experts(loop: bool) -> Step:
    weights, x = torch.randn(32, 128, 128), torch.randn(4096, 128)
    choice = torch.arange(4096).remainder(61).clamp(max=31)
    parts = [int((choice == expert).sum()) for expert in range(32)]
    equal = x.view(32, 128, 128)

    def route():
        for _ in range(4):
            for expert, part in enumerate(x.split(parts)):
                part[: part.shape[0] - expert] @ weights[0]

    return infer(route if loop else lambda: [torch.bmm(equal, weights) for _ in range(12)])


def _repeated(copy: Callable[[Tensor], Tensor], times: int = 50) -> Callable[[Tensor], Tensor]:
    def copies(x):
        for _ in range(times):
            x = copy(x)
        return x

    return copies


# Code of the finding → name → what copies.
_COPIES = {
    "copies": {
        "contiguous": _repeated(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2).contiguous()),
        "clone": _repeated(torch.clone, 150),
        "pad": _repeated(lambda x: F.pad(x, (0, 8))[..., :-8]),
        "repeat": _repeated(lambda x: x.repeat(1, 2, 1)[:, : x.shape[1]]),
    },
    "casts": {
        "casts": _repeated(lambda x: x.to(torch.float64).to(torch.float32)),
        "half casts": _repeated(lambda x: x.to(torch.bfloat16).to(torch.float32)),
    },
}


class _Samples(Dataset[Tensor]):
    """Samples that take long to load."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.zeros(16)

    def __len__(self) -> int:
        return 64


def _load(seconds: float, workers: int = 0, **options: Any) -> Maker:
    """Return a training step with a batch of two samples, loaded in the main process or by workers."""

    def make() -> Step:
        batches = iter(DataLoader(_Samples(seconds), batch_size=2, num_workers=workers))
        return train(before=lambda: next(batches), **options)

    return make


def _compile(rows: Iterable[int]) -> Maker:
    """Return a step of a compiled model, which is compiled anew for each number of rows."""

    def make() -> Step:
        torch._dynamo.reset()
        layers = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
        model = torch.compile(layers, backend="aot_eager", dynamic=False)
        numbers = iter(rows)
        return lambda: model(torch.ones(next(numbers), 256)).sum().backward()

    return make


def _collect(**options: Any) -> Step:
    held = [[number] for number in range(500_000)]
    return train(before=lambda: gc.collect() if held else None, **options)


def _busy(seconds: float) -> None:
    """Work in Python, which no op shows."""
    total = 0
    for number in range(int(seconds * 3e7)):
        total += number


def _named(name: str, seconds: float) -> Step:
    def step():
        with record_function(name):
            _busy(seconds)

    return step


def _read_items(model):
    for parameter in model.parameters():
        for row in parameter.reshape(-1)[:300]:
            row.item()


def _index(x):
    y = x.clone()
    rows = torch.arange(x.shape[1]).flip(0)
    for _ in range(20):
        y = y.index_select(1, rows)
    return y


def _zero(model):
    for _ in range(40):
        for parameter in model.parameters():
            torch.zeros_like(parameter)
            torch.full_like(parameter, 1.0)


def _adam(**options: bool) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, **options)


def _heads(loop: bool) -> Step:
    weights, x = torch.randn(64, 64, 64), torch.randn(64, 64, 64)
    if loop:
        return infer(lambda: [[x[i] @ weights[i] for i in range(64)] for _ in range(30)])
    return infer(lambda: [x @ weights for _ in range(300)])


def _save(model):
    for _ in range(6):
        torch.save(model.state_dict(), io.BytesIO())


of = partial(partial, train)  # options → what makes such a training step
_SMALL = {"shape": (1, 16), "width": 512}
# Code of the finding → name → what makes a step with the defect, and the clean step.
_DEFECTS: dict[str, dict[str, tuple[Maker, Maker]]] = {
    "unfused_attention": {
        "separate attention": (of(separate, shape=(2, 512), width=128), of(shape=(2, 512), width=128)),
        "masked attention": (of(masked, shape=(2, 512), width=128), of(shape=(4, 256))),
        "separate attention of long sequences": (
            of(separate, shape=(1, 1024), width=128),
            of(shape=(1, 1024), width=128),
        ),
    },
    "float64_products": {
        "float64 products": (partial(_products, torch.float64), partial(_products, torch.float32)),
        "float64 model": (of(dtype=torch.float64), of(width=320)),
    },
    "product_loop": {
        "token by token": (partial(_tokens_one_by_one, True), partial(_tokens_one_by_one, False)),
        "loop over experts": (partial(_experts, True), partial(_experts, False)),
        "8 rows, head by head": (partial(_heads, True), partial(_heads, False)),
    },
    "unfused_optimizer": {
        name: (of(optimizer=optimizer, **_SMALL), of(shape=(number, 400), width=512))
        for number, (name, optimizer) in enumerate(
            {
                "foreach optimizer off": _adam(foreach=False),
                "foreach optimizer": _adam(foreach=True),
                "RMSprop": lambda p: torch.optim.RMSprop(p, foreach=False),
            }.items(),
            1,
        )
    },
    "data_loading": {
        "data loading": (_load(0.05), _load(0, width=768, shape=(1, 300))),
        "data loading by a worker": (_load(0.2, workers=1), _load(0, workers=1, width=768, shape=(1, 320))),
    },
    "compilation": {"recompilation": (_compile(range(128, 1024, 8)), _compile(repeat(3072)))},
    "garbage_collection": {"garbage collection": (_collect, of(shape=(5, 128)))},
    "checkpoint_saving": {"saving": (of(after=_save, **_SMALL), of(shape=(6, 128)))},
    "host_work": {
        "Python work": (of(before=lambda: _busy(0.1)), of(shape=(7, 96))),
        "Python work in a range": (of(before=_named("make_batch", 0.1)), of(shape=(8, 96))),
    },
    "item_calls": {".item() of each value": (of(after=_read_items, shape=(1, 64)), of(shape=(1, 256)))},
    "indexing": {"index_select": (of(around=_index), of(shape=(2, 448)))},
    "zeroing": {"filling": (of(after=_zero, width=512, shape=(1, 32)), of(shape=(1, 512)))},
    **{code: {name: (of(around=copies), train) for name, copies in kinds.items()} for code, kinds in _COPIES.items()},
}
# Found by Python functions.
_WITH_STACK = ("garbage_collection", "checkpoint_saving")
CPU_DEFECTS = [
    CpuDefect(name, code, *makers, with_stack=code in _WITH_STACK)
    for code, defects in _DEFECTS.items()
    for name, makers in defects.items()
]
