"""The models that command lines name: copied into the folder in which commands run, and imported from there."""

import torch
from torch import nn


class Net(nn.Module):
    """Convolutions, a norm, a layer that is called twice, one that is never called, attention, and a recurrence."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=2), nn.GELU()) for _ in range(3)
        )
        self.shared = nn.Linear(width, width)
        self.unused = nn.Linear(width, 2)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.rnn = nn.LSTM(width, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        x = x.flatten(2).transpose(1, 2)
        x = self.shared(torch.tanh(self.shared(x)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.rnn(x)[0][:, -1])


class Routed(nn.Module):
    """A linear layer on the rows whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x[x[:, 0] > 0])


class Experts(nn.Module):
    """A mixture of four experts, of which each token takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            y[rows] += expert(x[rows]) * weights[rows, place, None]
        return y


def build():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())


def with_inputs():
    return build(), (torch.ones(2, 4),)


def net():
    return Net(), (torch.ones(2, 3, 12, 12),)


def wide_net():
    return Net(24), (torch.ones(2, 3, 12, 12),)


def sized(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)), torch.ones(3, 4)


def narrow():
    return sized(8)


def wide():
    return sized(16)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3), (torch.ones(2, 6, 16),)


def routed():
    generator = torch.Generator().manual_seed(0)
    return Routed(), torch.randn(8, 4, generator=generator)


def experts():
    return Experts(), torch.linspace(-1, 1, 64).reshape(8, 8)


def unknown():
    @torch.library.custom_op("fvflops_golden::scan", mutates_args=())
    def scan(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    class Scanning(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return scan(self.fc(x))

    return Scanning(), torch.ones(2, 4)


def with_names():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, *, x):
            return self.fc(x)

    return Named(), {"x": torch.ones(5, 4)}


def hostile():
    """Return a model whose modules are called what does harm in a terminal, in Markdown, in a page."""
    model = nn.Sequential()
    for name in ("a|b`c`*d*", "<b>&amp;", "\x1b[31mred", "=1+1", "one\ntwo", "שלום", "$x_{1}%"):
        model.add_module(name, nn.Linear(4, 4))
    return model, torch.ones(2, 4)


def raising():
    class Raising(nn.Module):
        def forward(self, x):
            return {}["missing_key"]  # type: ignore[index]

    return Raising(), torch.ones(2)


def failing():
    class Failing(nn.Module):
        def forward(self, x):
            raise RuntimeError("no more")

    return Failing(), torch.ones(2)


def broken():
    raise ZeroDivisionError("in the factory\nsecond line")


def number():
    return 3


def exiting():
    raise SystemExit(0)


def on_meta():
    return nn.Linear(8, 4, device="meta"), torch.ones(2, 8)


def column_rows(model, mesh):
    """Split the two linear layers of `sized` over the ranks of a mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
