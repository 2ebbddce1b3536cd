"""Masks too large to be stored have the same number of unmasked entries as in real execution."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from fvflops import record_call
from fvflops.capture.shapes import concrete_tensors
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.formulas import load_table
from fvflops.trace import TensorSpec

STOPS_AT = load_table("default").stops_at


@pytest.fixture
def small_limit(monkeypatch):
    """Keep the values of tensors up to 64 elements, so that small masks are expressions."""
    monkeypatch.setattr(concrete_tensors, "CONCRETE_LIMIT", 64)
    monkeypatch.setattr(concrete_tensors, "EXPANDED", 2)
    clear_cache()
    yield
    clear_cache()


def unmasked(model, inputs, execution="shapes", **options):
    """Return the number of unmasked entries of each mask of a model, None where it is unknown."""
    trace = record_call(model, inputs, execution=execution, stops_at=STOPS_AT, **options)
    return [
        None if value.values is None else value.values[0]
        for signature in trace.signatures
        for name, value in zip(signature.names, signature.inputs, strict=True)
        if name == "attn_mask" and isinstance(value, TensorSpec)
    ]


class Program:
    """A random program that makes a mask of `queries` x `keys` in `steps` steps."""

    def __init__(self, seed, queries=24, keys=20, steps=7):
        self.seed, self.queries, self.keys, self.steps = seed, queries, keys, steps

    def __call__(self, query, key):
        return F.scaled_dot_product_attention(query, key, key, attn_mask=self.mask())

    def mask(self):
        rng = random.Random(self.seed)
        masks = [self.leaf(rng) for _ in range(2)]
        for _ in range(self.steps):
            masks.append(self.step(rng, rng.choice(masks), rng.choice(masks)))
        mask = masks[-1]
        if rng.random() < 0.4:
            lowest = rng.choice([-torch.inf, torch.finfo(torch.float32).min])
            if rng.random() < 0.5:
                mask = torch.where(mask, torch.tensor(0.0), lowest)
            else:
                mask = torch.zeros(mask.shape).masked_fill_(~mask, lowest)
            if rng.random() < 0.3:
                mask = mask + torch.arange(self.keys) * 0.5
        return mask[None, None].expand(rng.choice([1, 2]), -1, -1, -1) if rng.random() < 0.5 else mask

    def leaf(self, rng):
        q, k = torch.arange(self.queries), torch.arange(self.keys)
        q, k = q[:, None] + rng.randrange(3), k[None]
        documents = (torch.arange(40) % rng.randrange(3, 9) == 0).cumsum(0)
        size = rng.randrange(1, 9)
        return rng.choice(
            [
                lambda: k <= q,
                lambda: (k > q - size) & (k <= q),
                lambda: (q - k).abs() <= size,
                lambda: k // size == q // size,
                lambda: (q * 3 - k) % size == 0,
                lambda: documents[: self.queries, None] == documents[None, : self.keys],
                lambda: torch.ones(self.queries, self.keys, dtype=torch.bool).tril(rng.randrange(-3, 4)),
                lambda: torch.full((self.queries, self.keys), -torch.inf).triu(rng.randrange(-3, 4)) == 0,
                lambda: torch.cat([k[:, :5] <= q, k[:, 5:] < q], dim=1),
                lambda: F.pad(k[:, 3:] >= q[2:], (2, 1, 1, 1), value=rng.random() < 0.5),
                lambda: torch.maximum(q, k) % 2 == torch.minimum(q, k) % 2,
                lambda: (k.to(torch.int8) - q.to(torch.int8)) * 5 > -1,
                lambda: (k[None, None] <= q.view(1, 2, -1, 1)).reshape(self.queries, self.keys),
            ]
        )()

    def step(self, rng, mask, other):
        rows, columns = sorted(rng.sample(range(self.queries), 2)), sorted(rng.sample(range(self.keys), 2))

        def write(target):
            target = target.clone()
            target[rows[0] : rows[1], columns[0] : columns[1]] = other[rows[0] : rows[1], columns[0] : columns[1]]
            return target

        def fill(target):
            target = target.clone()
            target[:: rng.randrange(1, 3), columns[0]] = rng.random() < 0.5
            target.T[columns[1]].logical_not_()
            return target

        return rng.choice(
            [
                lambda: mask & other,
                lambda: mask | other,
                lambda: mask ^ other,
                lambda: ~mask,
                lambda: mask.masked_fill(other, rng.random() < 0.5),
                lambda: torch.where(mask, other, ~other),
                lambda: mask.float() * 2 - other.float() > 0.5,
                lambda: mask.T.contiguous().T.logical_and(other),
                lambda: mask.unflatten(0, (4, -1)).flatten(0, 1),
                lambda: write(mask),
                lambda: fill(mask),
            ]
        )()


def count_random_masks(seeds):
    """Compare with real execution; return how many masks were known of how many."""
    inputs = torch.empty(2, 3, 24, 8), torch.empty(2, 3, 20, 8)
    known = 0
    for seed in seeds:
        (expected,) = unmasked(Program(seed), inputs, "real")
        (found,) = unmasked(Program(seed), inputs)
        assert found in (expected, None), seed
        known += found is not None
    return known, len(seeds)


def test_random_masks_are_counted_exactly(small_limit):
    known, count = count_random_masks(range(30))
    assert known == count


@pytest.mark.long
def test_many_random_masks_are_counted_exactly(small_limit):
    known, count = count_random_masks(range(30, 3000))
    assert known >= 0.98 * count


@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask.scatter_(1, torch.tensor([[3]]), True),
        lambda mask: mask.index_fill_(0, torch.tensor([1]), True),
        lambda mask: mask.fill_diagonal_(True),
        lambda mask: mask.bernoulli_(0.5),
        lambda mask: mask.masked_scatter_(mask, torch.ones(600, dtype=torch.bool)),
        lambda mask: mask[2].copy_(torch.rand(20) > 0.5),
        lambda mask: mask.T[2:4].zero_(),
        lambda mask: mask.unfold(1, 4, 4)[:, 1].fill_(True),
        lambda mask: mask.view(-1)[7:19].fill_(True),
        lambda mask: mask.diagonal().fill_(True),
        lambda mask: torch.logical_not(mask, out=mask),
    ],
)
def test_what_is_written_to_a_mask_is_counted_or_unknown(small_limit, write):
    """Also where another tensor, made before, shares its memory."""

    def model(query, key):
        mask = torch.arange(20) <= torch.arange(24)[:, None]
        alias = mask.view(1, 1, 24, 20)
        write(mask)
        return F.scaled_dot_product_attention(query, key, key, attn_mask=alias)

    inputs = torch.empty(2, 3, 24, 8), torch.empty(2, 3, 20, 8)
    torch.manual_seed(0)
    (expected,) = unmasked(model, inputs, "real")
    (found,) = unmasked(model, inputs)
    assert found in (expected, None)


def test_masks_of_another_thread_are_counted(small_limit):
    seeds = range(8)
    inputs = torch.empty(2, 3, 24, 8), torch.empty(2, 3, 20, 8)
    expected = [unmasked(Program(seed), inputs, "real") for seed in seeds]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda seed: unmasked(Program(seed), inputs), seeds)) == expected
