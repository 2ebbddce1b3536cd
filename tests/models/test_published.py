"""Figures that timm's authors published: a dozen of them here; `tools/published.py` compares all."""

from functools import partial

import pytest
from timm.layers import set_fused_attn

from fvflops import count_many
from tests.support.checkout import ROOT
from tests.support.tools import load_tool

published = load_tool("published.py")

CASES = {case.model: case for case in published.read_published(ROOT / "tests" / "data" / "timm_published_sample.csv")}
NAMES = (
    "adv_inception_v3",
    "coatnet_0_rw_224",
    "convnextv2_atto",
    "crossvit_15_dagger_240",
    "deit_base_patch16_224",
    "dla46_c",
    "dpn98",
    "caformer_s36",
)


@pytest.fixture(autouse=True)
def fused_attention_as_before():
    yield
    set_fused_attn(True)


@pytest.mark.parametrize(("table", "fused"), published.CASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_published_figure_is_reproduced(name, table, fused):
    case = CASES[name]
    (row,) = count_many([(name, partial(published.build, name, case.size, fused))], table=table)
    assert not row.error and published.matches(published.round_as_published(row), case.figures), (row, case.figures)
    assert not row.unsupported or table == "fvcore"


def test_the_comparison_sees_a_miss():
    figures = ((4.11, 11.11), (4.2, 12.0))
    assert published.matches((4.11, 11.11), figures) and published.matches((4.2, 12.0), figures)
    assert not published.matches((4.12, 11.11), figures)
    assert not published.matches((4.11, 12.0), figures)


def test_every_known_cause_is_of_a_published_model():
    assert published.KNOWN_CAUSES.keys() <= CASES.keys()
