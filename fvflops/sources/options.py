"""Options of a MODEL argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a model is built and what its inputs are, as plain values that a worker process can be sent.

    `inputs` are texts such as `1,3,224,224` or `ids=1,128:int64`; without them the source's default inputs are used.
    `config` is JSON, or the path of a JSON file, for transformers. `device` is where the model is built, such as
    `meta`. `unpickle` allows to load a pickled module, which runs code that the file names.
    """

    inputs: tuple[str, ...] = ()
    config: str | None = None
    device: str | None = None
    unpickle: bool = False


DEFAULT_OPTIONS = SourceOptions()
