"""Blocks of functions: products, norms, activations, indexing, in-place ops, and torch's ways of calling functions."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.support.fuzz.block import Function, Kind, Made, kinds, weight


def _chain(draw, *functions):
    """Return a function that calls two or three of several one after the other."""
    chosen = draw.rng.sample(functions, draw.size(2, 3))

    def forward(x):
        for function in chosen:
            x = function(x)
        return x

    return Function(forward)


# ---- products


def matmul(draw):
    """Products of matrices, vectors and batches of them, of which some broadcast."""
    n, t, c = draw.shape
    out = draw.size(1, 6)
    relu, whole = (torch.relu, (), None), n * t * c * out
    # Name → function, shapes of its weights, multiply-adds forward, and perhaps backward.
    function, shapes, *macs = {
        "matmul": (torch.matmul, [(c, out)], whole),
        "broadcast": (lambda x, w: (x.unsqueeze(1) @ w).sum(1), [(3, c, out)], 3 * whole),
        "bmm": (lambda x: torch.bmm(torch.bmm(x, x.mT), x), (), 2 * n * t * t * c),
        "baddbmm": (lambda x, w: torch.baddbmm(w, x.mT, x, beta=0.5, alpha=2), [(c, c)], n * t * c * c),
        "addmm": (lambda x, b, w: torch.addmm(b, x.flatten(0, 1), w).unflatten(0, (n, t)), [(out,), (c, out)], whole),
        # The gradient of the matrix is an outer product, in which nothing is added up.
        "mv": (lambda x, v: x * torch.mv(x.flatten(0, 1), v).view(n, t, 1), [(c,)], n * t * c, (n * t * c,)),
        # A product of which the sum has one term.
        "outer": (lambda x, v: x + torch.outer(v, v), [(c,)], None) if t == c else relu,
        "dot": (lambda x: x * torch.dot(x.flatten(), x.flatten()), (), n * t * c, None),
        # The cheaper order of the two.
        "chain": (
            lambda x, v, w: torch.linalg.multi_dot([x.flatten(0, 1), v, w]).unflatten(0, (n, t)),
            [(c, 1), (1, out)],
            min(n * t * c + n * t * out, c * out + whole),
            None,
        ),
    }[draw.of("matmul", "broadcast", "bmm", "baddbmm", "addmm", "mv", "outer", "dot", "chain")]
    return Made(Function(function, *(weight(*shape) for shape in shapes)), *macs)


def einsum(draw):
    n, t, c = draw.shape
    o = draw.size(1, 6)
    equation, shapes, macs = draw.of(
        ("btc,co->bto", [(c, o)], n * t * c * o),
        ("btc,bsc->bts", None, n * t * t * c),
        ("btc,cod->btod", [(c, o, 2)], n * t * c * o * 2),
        ("btc,tco->bto", [(t, c, o)], n * t * c * o),
        ("btc,bdc->bdt", None, n * t * t * c),
    )
    if shapes is None:
        return Made(Function(lambda x: torch.einsum(equation, x, x)), macs)
    return Made(Function(lambda x, w: torch.einsum(equation, x, w).flatten(2), *[weight(*s) for s in shapes]), macs)


class Product(torch.autograd.Function):
    """A product with a backward pass of its own."""

    @staticmethod
    def forward(context, x, kernel):
        context.save_for_backward(x, kernel)
        return x @ kernel

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, kernel = context.saved_tensors
        return gradient @ kernel.mT, x.flatten(0, -2).mT @ gradient.flatten(0, -2)


def autograd_function(draw):
    c, out = draw.shape[-1], draw.size(1, 6)
    return Made(Function(Product.apply, weight(c, out)), draw.positions * c * out)


@torch.jit.script
def _scripted(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = torch.tanh(torch.matmul(x, kernel)) + x
    return x


def scripted(draw):
    c = draw.shape[-1]
    return Made(Function(_scripted, weight(c, c)), 2 * draw.positions * c * c)


def vmap(draw):
    c, out = draw.shape[-1], draw.size(1, 6)
    return Made(
        Function(torch.vmap(lambda row, w: row @ w, in_dims=(0, None)), weight(c, out)), draw.positions * c * out
    )


def loop_over_shape(draw):
    """Control flow on shapes: one product a token, with one of two weights by the token's parity."""
    n, t, c = draw.shape

    def forward(x, even, odd):
        rows = [x[:, place] @ (odd if place % 2 else even) for place in range(x.shape[1])]
        return torch.stack(rows, 1) if x.size(0) > 1 else torch.stack(rows[::-1], 1)

    return Made(Function(forward, weight(c, c), weight(c, c)), n * t * c * c)


def autocast(draw):
    c, out = draw.shape[-1], draw.size(1, 6)
    layer = nn.Linear(c, out)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).float()

    module = Function(forward)
    module.layer = layer
    return Made(module, draw.positions * c * out)


def complex_numbers(draw):
    def forward(x):
        z = torch.view_as_complex(torch.stack([x, x.flip(1)], -1))
        return torch.view_as_real(z * z.conj() + torch.polar(x.abs(), x)).flatten(2)

    return Made(Function(forward), backward=None)


def fourier(draw):
    _, t, c = draw.shape
    function = {
        "rfft": lambda x, w: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=t, dim=1),
        "fft": lambda x, w: torch.fft.fft(x, dim=-1).abs(),
        "fft2": lambda x, w: torch.fft.ifft2(torch.fft.fft2(x, dim=(1, 2)), dim=(1, 2)).real,
        "filter": lambda x, w: torch.fft.irfft(torch.fft.rfft(x, dim=1) * w, n=t, dim=1),
    }[draw.of("rfft", "fft", "fft2", "filter")]
    return Made(Function(function, weight(t // 2 + 1, c)), None)


def distances(draw):
    function, *shapes = draw.of(
        (lambda x: x * F.cosine_similarity(x, x.flip(0), dim=-1).unsqueeze(-1),),
        (torch.cdist, (4, draw.shape[-1])),
        (lambda x: F.pairwise_distance(x, x.roll(1, 1), keepdim=True) * x,),
    )
    return Made(Function(function, *(weight(*shape) for shape in shapes)), None)


def bilinear(draw):
    c = draw.shape[-1]
    layer = nn.Bilinear(c, c, draw.size(1, 4))
    module = Function(lambda x: layer(x, x.flip(0).contiguous()))
    module.layer = layer
    return Made(module, None)


# ---- norms and activations


def batch_norm(draw):
    options = {"affine": draw.flag(), "track_running_stats": draw.flag(), "momentum": draw.of(0.1, None)}
    return Made({2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(draw.shape)](draw.shape[1], **options))


def other_norm(draw):
    c = draw.shape[1]
    return Made(
        draw.of(
            lambda: nn.GroupNorm(draw.divisor(c), c, affine=draw.flag()),
            lambda: nn.InstanceNorm2d(c, affine=draw.flag(), track_running_stats=draw.flag()),
            lambda: nn.LocalResponseNorm(2),
            lambda: nn.LayerNorm(list(draw.shape[1:]), elementwise_affine=draw.flag()),
        )()
    )


def norm_of_tokens(draw):
    c = draw.shape[-1]
    return Made(
        draw.of(
            lambda: nn.LayerNorm(c, bias=draw.flag()),
            lambda: nn.RMSNorm(c),
            lambda: Function(lambda x: F.normalize(x, dim=-1)),
        )()
    )


_ACTIVATIONS = (
    *("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "SELU", "CELU", "Mish", "Softplus", "Softsign", "Hardswish"),
    *("Hardsigmoid", "Hardtanh", "LeakyReLU", "LogSigmoid", "PReLU", "RReLU", "ReLU6", "Tanhshrink", "Softshrink"),
    "Hardshrink",
)


def activation(draw):
    return Made(nn.Sequential(*[getattr(nn, name)() for name in draw.rng.sample(_ACTIVATIONS, 2)]))


def softmax(draw):
    dim = draw.of(1, 2)
    glu = draw.shape[dim] % 2 == 0 and draw.flag()
    return Made(nn.GLU(dim) if glu else draw.of(nn.Softmax, nn.LogSoftmax, nn.Softmin)(dim))


def dropout(draw):
    return Made(draw.of(nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)(draw.of(0.1, 0.5)))


# ---- indexing, sorting, shapes, in-place


def sorting(draw):
    dim = draw.of(1, -1)
    size = draw.shape[dim]
    return Made(
        _chain(
            draw,
            lambda x: x.cumsum(dim),
            lambda x: x.sort(dim, descending=True).values,
            lambda x: x.topk(max(1, size // 2), dim).values.mean(dim, keepdim=True) + x,
            lambda x: x.gather(dim, x.argsort(dim)),
            lambda x: x.cummax(dim).values,
            lambda x: x.median(dim, keepdim=True).values - x,
            lambda x: x.logcumsumexp(dim),
            lambda x: x.kthvalue(1, dim, keepdim=True).values * x,
        )
    )


def indexing(draw):
    n, t, c = draw.shape
    rows = torch.arange(t).flip(0)
    return Made(
        _chain(
            draw,
            lambda x: x[:, rows],
            lambda x: x.index_select(1, rows),
            lambda x: x.scatter(1, rows.view(1, t, 1).expand(n, t, c), x * 2),
            lambda x: torch.zeros_like(x).index_add(1, rows, x),
            lambda x: x.scatter_add(1, rows.view(1, t, 1).expand(n, t, c), x),
            lambda x: torch.take_along_dim(x, rows.view(1, t, 1), 1),
            lambda x: x.masked_fill(x > 0, 0.5),
            lambda x: torch.where(x.isnan(), torch.zeros_like(x), x),
            lambda x: x.index_fill(1, rows[:1], 0.0),
        )
    )


def reshaping(draw):
    return Made(
        _chain(
            draw,
            lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
            lambda x: x.roll(1, 1).flip(2),
            lambda x: F.pad(x, (1, 0), mode=draw_mode),
            lambda x: torch.stack(x.unbind(1), 1),
            lambda x: x.unfold(1, 2, 1).mean(-1),
            lambda x: x.tril() + x.triu(1),
            lambda x: x.repeat_interleave(2, 1)[:, ::2],
            lambda x: x.expand(2, *x.shape).sum(0),
            lambda x: torch.meshgrid(x[0, 0], x[0, 0], indexing="ij")[0].sum() + x,
        )
        if (draw_mode := draw.of("constant", "reflect", "replicate", "circular"))
        else nn.Identity()
    )


def in_place(draw):
    def assign(x):
        x[:, 0] = x[:, -1] * 2
        return x

    def write(x):
        x[:, :1].mul_(3)
        return x

    return Made(
        _chain(
            draw,
            lambda x: (x * 0.5).add_(1),
            lambda x: F.relu(x * 0.5, inplace=True),
            lambda x: assign(x * 0.5),
            lambda x: write(x * 0.5),
            lambda x: (x * 0.5).copy_(x.flip(1)),
            lambda x: (x * 0.5).clamp_(-3, 3),
            lambda x: (x * 0.5).addcmul_(x, x, value=0.1),
        )
    )


def reduction(draw):
    return Made(
        _chain(
            draw,
            lambda x: x - x.mean(1, keepdim=True),
            lambda x: x / (1 + x.std(-1, keepdim=True)),
            lambda x: x + x.logsumexp(-1, keepdim=True),
            lambda x: x * x.amax((0, 1)),
            lambda x: x + x.var(dim=1, keepdim=True),
            lambda x: x + x.prod(1, keepdim=True),
            lambda x: x - torch.linalg.vector_norm(x, dim=-1, keepdim=True),
            lambda x: x + torch.aminmax(x, dim=1, keepdim=True).max,
        )
    )


# ---- parametrised weights


def weight_norm(draw):
    c, out = draw.shape[-1], draw.size(1, 6)
    return Made(parametrizations.weight_norm(nn.Linear(c, out), dim=draw.of(0, 1)), draw.positions * c * out)


def spectral_norm(draw):
    """A weight by its largest singular value: two products a step of the power method; one and a dot for the value."""
    c, out = draw.shape[-1], draw.size(2, 6)
    steps = draw.of(1, 2)
    power = 2 * steps * c * out if draw.training else 0
    made = parametrizations.spectral_norm(nn.Linear(c, out), n_power_iterations=steps)
    return Made(made, draw.positions * c * out + power + c * out + out, backward=None)


_CALLS = (matmul, einsum, autograd_function, scripted, vmap, loop_over_shape, autocast, complex_numbers, fourier)
KINDS = {
    **kinds("sequence", *_CALLS, distances, bilinear),
    "batch_norm1d": Kind("vector", batch_norm),
    "batch_norm2d": Kind("image", batch_norm),
    "batch_norm3d": Kind("volume", batch_norm),
    **kinds("image", other_norm),
    **kinds("sequence", norm_of_tokens, activation, softmax),
    **kinds("image", dropout),
    **kinds("sequence", sorting, indexing, reshaping, in_place, reduction, weight_norm, spectral_norm),
}
