"""Layers of torch.nn, forward and in a training step."""

from functools import partial
from typing import Any

from tests.support.first_answers.counts import count, train

NAMES = (
    *("embedding bag", "conv transpose 3d", "batch norm 2d", "sync batch norm", "instance norm 2d", "relu6"),
    *("max pool 2d with indices", "adaptive avg pool 2d, uneven", "upsample bicubic", "lstm with a projection"),
    *("lstm, packed", "gru, deep", "rnn cell", "attention with weights and a mask", "cross attention"),
    *("encoder layer", "decoder layer", "shared"),
)


def _count(name: str) -> Any:
    from tests.support.models.layers import LAYERS

    model, inputs = LAYERS[name]()
    return count(model.eval(), *inputs)


def _train(name: str) -> Any:
    from tests.support.models.layers import LAYERS

    model, inputs = LAYERS[name]()
    return train(model.train(), *inputs)


CASES = {
    **{name: partial(_count, name) for name in NAMES},
    **{f"{name}, training": partial(_train, name) for name in NAMES},
}
