"""Cases of single ops and small nets, of which CUDA has kernels of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.cuda_cases.case import BF16, FULL, HALF, Case, floats, image, of
from tests.support.models.parts import Applied


def others() -> dict[str, Callable[[], Case]]:
    """Return cases of other ops, each with kernels of CUDA's own."""
    x = (2, 8, 12, 12)
    square = lambda: (torch.rand(3, 6, 6) + 6 * torch.eye(6)).requires_grad_()  # noqa: E731
    ids = torch.randint(0, 10, (4, 6))
    logs = lambda: torch.rand(7, 2, 5).log_softmax(2).requires_grad_()  # noqa: E731
    linalg = torch.linalg
    cases: dict[str, Callable[[], Case]] = {
        "linear": lambda: Case(nn.Linear(16, 32), (floats(4, 3, 16),)),
        "linear then gelu": lambda: Case(nn.Sequential(nn.Linear(16, 32), nn.GELU()), (floats(4, 16),)),
        "linear then relu half": lambda: Case(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU()).half(), (floats(4, 16, dtype=HALF),)
        ),
        "addmm activation": lambda: of(
            lambda a, b, c: torch._addmm_activation(a, b, c), floats(8), floats(4, 16), floats(16, 8), train=(False,)
        ),
        "bilinear": lambda: Case(nn.Bilinear(4, 5, 6), (floats(3, 4), floats(3, 5))),
        "einsum": lambda: of(lambda a, b: torch.einsum("bij,bjk->bik", a, b), floats(2, 3, 4), floats(2, 4, 5)),
        "baddbmm": lambda: of(torch.baddbmm, floats(2, 3, 5), floats(2, 3, 4), floats(2, 4, 5)),
        "matmul broadcast": lambda: of(torch.matmul, floats(3, 1, 5, 4), floats(2, 4, 6)),
        "int_mm": lambda: of(
            torch._int_mm, torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8), train=(False,)
        ),
        "scaled_mm fp8": _scaled_mm,
        "grouped_mm bf16": lambda: of(
            torch._grouped_mm,
            floats(64, 32, dtype=BF16),
            floats(4, 32, 48, dtype=BF16),
            torch.tensor([16, 32, 48, 64], dtype=torch.int32),
        ),
        "dropout": lambda: Case(nn.Dropout(0.5), (floats(4, 16),)),
        "dropout2d": lambda: Case(nn.Dropout2d(0.5), (floats(*x),)),
        "dropout in place": lambda: Case(
            Applied(lambda self, x: self.m(x * 1), m=nn.Dropout(0.5, inplace=True)), (floats(4, 16),)
        ),
        "alpha_dropout": lambda: Case(nn.AlphaDropout(0.5), (floats(4, 16),)),
        "rrelu": lambda: Case(nn.RReLU(), (floats(4, 16),)),
        "softmax half to float": lambda: of(lambda a: F.softmax(a, -1, dtype=FULL), floats(4, 16, dtype=HALF)),
        "cross_entropy": lambda: of(
            lambda a: F.cross_entropy(a, torch.zeros(4, dtype=torch.long, device=a.device), label_smoothing=0.1),
            floats(4, 16),
        ),
        "nll_loss2d": lambda: of(
            lambda a: F.nll_loss(a, torch.zeros(2, 12, 12, dtype=torch.long, device=a.device)), floats(*x)
        ),
        "ctc_loss native": lambda: of(
            lambda a, t: torch.ctc_loss(a, t, (7, 7), (3, 3), reduction=1), logs(), torch.tensor([[1, 2, 3], [2, 1, 1]])
        ),
        "max_pool2d": lambda: Case(nn.MaxPool2d(2), (floats(*x),)),
        "max_pool2d channels_last": lambda: Case(nn.MaxPool2d(2), (image(*x),)),
        "max_pool2d indices": lambda: Case(nn.MaxPool2d(2, return_indices=True), (floats(*x),)),
        "avg_pool2d": lambda: Case(nn.AvgPool2d(2), (floats(*x),)),
        "adaptive_avg_pool2d": lambda: Case(nn.AdaptiveAvgPool2d(5), (floats(*x),)),
        "adaptive_avg_pool2d to 1": lambda: Case(nn.AdaptiveAvgPool2d(1), (floats(*x),)),
        "adaptive_max_pool2d": lambda: Case(nn.AdaptiveMaxPool2d(5), (floats(*x),)),
        "fractional_max_pool2d": lambda: Case(nn.FractionalMaxPool2d(3, 5), (floats(*x),)),
        "max_unpool2d": lambda: of(lambda a: F.max_unpool2d(*F.max_pool2d(a, 2, return_indices=True), 2), floats(*x)),  # type: ignore[arg-type]
        "grid_sample": lambda: of(lambda a, g: F.grid_sample(a, g, align_corners=True), floats(*x), floats(2, 5, 5, 2)),
        "grid_sample nearest": lambda: of(
            lambda a, g: F.grid_sample(a, g, mode="nearest", align_corners=False), floats(*x), floats(2, 5, 5, 2)
        ),
        "affine_grid": lambda: of(lambda a: F.affine_grid(a, [2, 8, 6, 6], align_corners=True), floats(2, 2, 3)),
        "pixel_shuffle": lambda: Case(nn.PixelShuffle(2), (floats(*x),)),
        "channel_shuffle": lambda: Case(nn.ChannelShuffle(2), (floats(*x),)),
        "embedding": lambda: Case(nn.Embedding(10, 8), (ids,)),
        "embedding padding, scaled": lambda: Case(nn.Embedding(10, 8, padding_idx=0, scale_grad_by_freq=True), (ids,)),
        "embedding max_norm": lambda: Case(nn.Embedding(10, 8, max_norm=1.0), (ids,)),
        "embedding_bag sum": lambda: Case(nn.EmbeddingBag(10, 8, mode="sum"), (ids,)),
        "embedding_bag mean": lambda: Case(nn.EmbeddingBag(10, 8, mode="mean"), (ids,)),
        "embedding_bag max": lambda: Case(nn.EmbeddingBag(10, 8, mode="max"), (ids,)),
        "silu": lambda: Case(nn.SiLU(), (floats(4, 16),)),
        "mish": lambda: Case(nn.Mish(), (floats(4, 16),)),
        "glu": lambda: Case(nn.GLU(), (floats(4, 16),)),
        "logsigmoid": lambda: Case(nn.LogSigmoid(), (floats(4, 16),)),
        "prelu": lambda: Case(nn.PReLU(16), (floats(4, 16),)),
        "cdist": lambda: of(torch.cdist, floats(2, 30, 4), floats(2, 40, 4)),
        "cumsum": lambda: of(lambda a: a.cumsum(1), floats(4, 16)),
        "sort": lambda: of(lambda a: a.sort(1)[0], floats(4, 16)),
        "topk": lambda: of(lambda a: a.topk(3)[0], floats(4, 16)),
        "median": lambda: of(lambda a: a.median(1)[0], floats(4, 16)),
        "std": lambda: of(lambda a: a.std(1), floats(4, 16)),
        "norm": lambda: of(lambda a: a.norm(), floats(4, 16)),
        "index": lambda: of(lambda a, i: a[i], floats(10, 4), torch.tensor([1, 3, 1])),
        "index_put": lambda: of(
            lambda a, i, b: a.clone().index_put((i,), b, accumulate=True),
            floats(10, 4),
            torch.tensor([1, 3, 1]),
            floats(3, 4),
        ),
        "scatter_add": lambda: of(
            lambda a, i: torch.zeros(10, 4, device=a.device).scatter_add(0, i, a),
            floats(3, 4),
            torch.ones(3, 4, dtype=torch.long),
        ),
        "gather": lambda: of(lambda a, i: a.gather(0, i), floats(10, 4), torch.ones(3, 4, dtype=torch.long)),
        "repeat_interleave": lambda: of(lambda a, r: a.repeat_interleave(r, 0), floats(3, 4), torch.tensor([1, 2, 3])),
        "where": lambda: of(lambda a, b: torch.where(a > 0.5, a, b), floats(4, 4), floats(4, 4)),
        "masked_fill": lambda: of(lambda a: a.masked_fill(a > 0.5, 0.0), floats(4, 4)),
        "cat, stack, split": lambda: of(
            lambda a, b: torch.stack(torch.cat([a, b]).split(2)), floats(4, 4), floats(4, 4)
        ),
        "roll, flip": lambda: of(lambda a: a.roll(1, 0).flip(1), floats(4, 4)),
        "pad": lambda: of(lambda a: F.pad(a, (1, 2)), floats(4, 4)),
        "pad reflect": lambda: of(lambda a: F.pad(a, (1, 2, 1, 1), mode="reflect"), floats(*x)),
        "unfold, fold": lambda: of(lambda a: F.fold(F.unfold(a, 3), (12, 12), 3), floats(*x)),
        "fft": lambda: of(lambda a: torch.fft.irfft2(torch.fft.rfft2(a)), floats(2, 8, 8)),
        "fft half": lambda: of(lambda a: torch.fft.fft(a).abs(), floats(2, 8, dtype=HALF)),
        "stft": lambda: of(lambda a: torch.stft(a, 16, return_complex=True).abs(), floats(2, 64)),
        "clip_grad_norm": lambda: Case(Applied(_clip, m=nn.Linear(8, 8)), (floats(4, 8),), (True,)),
        "autocast bf16": lambda: Case(Applied(_autocast(BF16), m=_small_net()), (floats(*x),)),
        "autocast half": lambda: Case(Applied(_autocast(HALF), m=_small_net()), (floats(*x),)),
        "autocast bf16 LSTM": lambda: Case(Applied(_autocast(BF16), m=nn.LSTM(8, 8)), (floats(5, 2, 8),)),
        "compiled": lambda: Case(torch.compile(_small_net()), (floats(*x),)),
        "tf32": lambda: Case(nn.Linear(16, 16), (floats(4, 16),), context=_tf32),
        "sparse mm": lambda: of(
            lambda a, b: torch.sparse.mm(a.to_sparse_csr(), b), torch.eye(8), floats(8, 4, grad=False), train=(False,)
        ),
        "to cpu and back": lambda: of(lambda a: (a.cpu() * 2).to(a.device), floats(4, 4)),
        "pin_memory": lambda: of(
            lambda a: a * torch.ones(4, 4).pin_memory().to(a.device, non_blocking=True), floats(4, 4)
        ),
        "bernoulli, randn": lambda: of(
            lambda a: a * torch.bernoulli(torch.full_like(a, 0.5)) + torch.randn_like(a), floats(4, 4)
        ),
        "item": lambda: of(lambda a: a * a.detach().max().item(), floats(4, 4), train=(False,)),
        "nonzero": lambda: of(lambda a: a[a > 0.5], floats(4, 4), train=(False,)),
        "unique": lambda: of(lambda a, i: a[torch.unique(i)], floats(10, 4), torch.tensor([1, 3, 1])),
        "bincount": lambda: of(lambda a, i: a * torch.bincount(i, minlength=4), floats(4, 4), torch.tensor([1, 3, 1])),
        "one_hot": lambda: of(lambda a, i: a * F.one_hot(i, 4), floats(3, 4), torch.tensor([1, 3, 1])),
        "arange mask on its device": lambda: of(_mask_by_lengths, floats(2, 5), torch.tensor([3, 5])),
    }
    for mode in ("nearest", "bilinear", "bicubic", "area"):
        cases[f"interpolate {mode}"] = partial(_interpolate, mode)
        cases[f"interpolate {mode} channels_last"] = partial(_interpolate, mode, image(*x))
    for name, call in {
        "svd": lambda a: linalg.svd(a)[1],
        "svd of vectors": lambda a: linalg.svd(a, full_matrices=False),
        "qr": linalg.qr,
        "eigh": lambda a: linalg.eigh(a @ a.mT),
        "eigvalsh": lambda a: linalg.eigvalsh(a @ a.mT),
        "cholesky": lambda a: linalg.cholesky(a @ a.mT),
        "inv": linalg.inv,
        "solve": lambda a: linalg.solve(a, a.mT),
        "solve_triangular": lambda a: linalg.solve_triangular(a, a, upper=True),
        "lu_factor": lambda a: linalg.lu_factor(a)[0],
        "det": linalg.det,
        "slogdet": lambda a: linalg.slogdet(a)[1],
        "lstsq": lambda a: linalg.lstsq(a, a)[0],
        "matrix_exp": linalg.matrix_exp,
        "pinv": linalg.pinv,
        "cholesky_solve": lambda a: torch.cholesky_solve(a, linalg.cholesky(a @ a.mT)),
    }.items():
        cases[f"linalg {name}"] = lambda call=call: of(call, square())  # type: ignore[misc]
    householder = lambda a: linalg.householder_product(*torch.geqrf(a))  # noqa: E731  has no derivative
    cases["linalg householder"] = lambda: of(householder, square(), train=(False,))
    return cases


def _interpolate(mode: str, x: torch.Tensor | None = None) -> Case:
    options: dict[str, Any] = {"align_corners": False, "antialias": True} if mode in ("bilinear", "bicubic") else {}
    return of(partial(F.interpolate, scale_factor=2, mode=mode, **options), floats(2, 8, 12, 12) if x is None else x)


def _scaled_mm() -> Case:
    def run(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        one = torch.ones((), device=a.device)
        kind = torch.float8_e4m3fn
        return torch._scaled_mm(a.to(kind), b.to(kind).t(), scale_a=one, scale_b=one, out_dtype=BF16)

    return Case(Applied(run), (floats(32, 64, grad=False), floats(48, 64, grad=False)), (False,))


def _clip(self: Any, x: torch.Tensor) -> torch.Tensor:
    loss = self.m(x).sum()
    loss.backward(retain_graph=True)
    nn.utils.clip_grad_norm_(self.m.parameters(), 1.0)
    return loss


def _small_net() -> nn.Module:
    convolution = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*convolution, nn.Linear(1600, 8), nn.LayerNorm(8), nn.Softmax(-1))


def _autocast(dtype: torch.dtype) -> Callable[..., Any]:
    def run(self: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cuda", dtype):
            return self.m(x)

    return run


class _tf32:
    def __enter__(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True

    def __exit__(self, *_: Any) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False


def _mask_by_lengths(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1], device=x.device)
    mask = positions[None] < lengths[:, None]
    if mask.all():
        return x
    return x * mask
