"""State that a count restores: a model that keeps tensors in some place, before and after it is counted."""

from functools import partial
from typing import Any

import torch

from tests.support.first_answers.counts import count, train
from tests.support.models.kept_tensors import KINDS, Kind, picture, twin


def _restore(kind: Kind, **options: Any) -> Any:
    with twin(kind) as (module, model):
        before = picture(module, model)
        counted = count(model, torch.rand(3, 4), **options)
        return {"counted": counted, "restored": picture(module, model) == before}


def _train(kind: Kind) -> Any:
    with twin(kind) as (_, model):
        return train(model, torch.rand(3, 4), optimizer=torch.optim.AdamW)


CASES = {
    **{kind.name: partial(_restore, kind) for kind in KINDS},
    **{f"{kind.name}, real": partial(_restore, kind, execution="real") for kind in KINDS[::8]},
    **{f"{kind.name}, training": partial(_train, kind) for kind in KINDS[::16]},
}
