"""GMACs and MActivations that timm's authors published; `tools/test -m long` compares all of the sample.

Each model is built on the meta device twice: with timm's fused attention, counted by `default`, and without it,
counted by `fvcore`. A model of several rows at one size (measured with several versions of timm) matches if one does.
"""

import csv
from contextlib import suppress
from functools import partial

import pytest
import timm
import torch
from timm.layers import set_fused_attn

from fvflops import ModelCount, count_many
from tests.support.checkout import ROOT

NAMES = (
    *("adv_inception_v3", "coatnet_0_rw_224", "convnextv2_atto", "crossvit_15_dagger_240"),
    *("deit_base_patch16_224", "dla46_c", "dpn98", "caformer_s36"),
)
# Looked into one by one: model → why today's count differs from the published one.
KNOWN_CAUSES = {
    "convmixer_768_32": "fvcore leaves out padding='same' convolutions, and `default` counts them",
    "ecaresnext50t_32x4d": "another network: 15.41 M parameters were published, today's timm builds 25.05 M",
    "vit_base_patch16_rope_mixed_ape_224": "timm made rotary angles by matmul, 1.8 M activations; now it multiplies",
}
LEAST = 0.97  # of the sample's models match

Figures = tuple[float, float]


def read_published():
    """Return (model, image size) → GMACs and MActivations of each row."""
    figures = {}
    with (ROOT / "tests" / "data" / "timm_published_sample.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["model"], int(row["img_size"])
            figures.setdefault(key, []).append((float(row["gmacs"]), float(row["macts"])))
    return figures


PUBLISHED = read_published()


def build(name, size, fused):
    """Build a timm model for a square image, with fused attention or without, and the image."""
    set_fused_attn(fused)
    model = timm.create_model(name, pretrained=False)
    if model.pretrained_cfg["input_size"][-1] != size:
        with suppress(TypeError):  # a convolutional network takes images of any size
            model = timm.create_model(name, pretrained=False, img_size=size)
    return model, torch.empty(1, 3, size, size)


def matches(row, figures):
    """Return whether one row is matched in both published digits."""
    gmacs, macts = round((row.flops or 0) / 1e9, 2), round((row.activations or 0) / 1e6, 2)
    return any(abs(gmacs - one[0]) < 0.001 and abs(macts - one[1]) < 0.001 for one in figures)


@pytest.fixture(autouse=True)
def fused_attention_as_before():
    yield
    set_fused_attn(True)


def count(keys, table, fused):
    candidates = [(name, partial(build, name, size, fused)) for name, size in keys]
    return dict(zip(keys, count_many(candidates, table=table), strict=True))


@pytest.mark.parametrize(("table", "fused"), [("default", True), ("fvcore", False)])
@pytest.mark.parametrize("name", NAMES)
def test_a_published_figure_is_reproduced(name, table, fused):
    for key, row in count([key for key in PUBLISHED if key[0] == name], table, fused).items():
        assert not row.error and matches(row, PUBLISHED[key]), (row, PUBLISHED[key])
        assert not row.unsupported or table == "fvcore"


@pytest.mark.long
@pytest.mark.parametrize(("table", "fused"), [("default", True), ("fvcore", False)])
def test_most_published_figures_are_reproduced(table, fused):
    rows = count([key for key in PUBLISHED if timm.is_model(key[0])], table, fused)
    missed = [
        f"{name}@{size}: {KNOWN_CAUSES.get(name, 'cause not found')}: {row.error} {row.unsupported} counted "
        f"{row.flops}/{row.activations}, published {PUBLISHED[name, size]}"
        for (name, size), row in rows.items()
        if not matches(row, PUBLISHED[name, size])
    ]
    assert len(missed) <= (1 - LEAST) * len(rows), "\n".join(missed)


def test_a_miss_is_seen():
    row = ModelCount("model", flops=4_110_000_000, activations=11_110_000)
    assert matches(row, [(4.11, 11.11), (4.2, 12.0)]) and matches(row, [(4.2, 12.0), (4.11, 11.11)])
    assert not matches(row, [(4.12, 11.11)]) and not matches(row, [(4.11, 12.0)])
