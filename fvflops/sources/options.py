"""Options of a MODEL argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a model is built and what its inputs are, as plain values that a worker process can be sent.

    `inputs` are texts such as `1,3,224,224` or `ids=1,128:int64`; without them the source's default inputs are used.
    `config` is JSON, or the path of a JSON file or its folder, for transformers and diffusers. `device` is where the
    model is built, such as `meta`. `args` are texts such as `width=64`, arguments of the factory or constructor, and
    `paths` folders that are added to `sys.path`. `batch`, `seq` and `image_size` (height, width) are sizes of the
    default inputs. `denoising_steps` is the number of steps of a diffusers pipeline, `guidance` whether each runs on
    a doubled batch, for classifier-free guidance. `unpickle` allows to load a pickled module, which runs code that the
    file names.
    """

    inputs: tuple[str, ...] = ()
    config: str | None = None
    device: str | None = None
    args: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    batch: int | None = None
    seq: int | None = None
    image_size: tuple[int, int] | None = None
    denoising_steps: int | None = None
    guidance: bool = False
    unpickle: bool = False


DEFAULT_OPTIONS = SourceOptions()
