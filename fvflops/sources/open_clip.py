"""Models of open_clip: `open_clip:NAME`, on one image and one text of the model's own sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fvflops.capture.model.input_specs import InputSpec
from fvflops.sources.call_arguments import call_library, parse_arguments
from fvflops.sources.imports import describe_unknown_model, import_library
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions


def list_names() -> Sequence[str]:
    return list(import_library("open_clip").list_models())


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return a model without pretrained weights; `options.args` are arguments of `open_clip.create_model`.

    A model whose text tower is one of the Hugging Face hub needs its configuration in the local cache; without it
    ValueError is raised, since nothing is downloaded.
    """
    open_clip = import_library("open_clip")
    if name not in open_clip.list_models():
        raise ValueError(describe_unknown_model("open_clip", name, list_names()))
    tower = open_clip.get_model_config(name)["text_cfg"].get("hf_model_name")
    if tower is not None:
        _check_cached(name, tower)
    fixed = {"pretrained": None, "load_weights": False, "pretrained_text": False, "pretrained_image": False}
    create = partial(open_clip.create_model, name, device=options.device or "cpu")
    sized = {} if options.image_size is None else {"force_image_size": options.image_size}
    with _without_root_warnings():
        model = call_library(create, parse_arguments(options.args), f"open_clip:{name}", fixed=fixed, image_size=sized)
    size = model.visual.image_size
    sides = (size, size) if isinstance(size, int) else tuple(size)
    positions = int((model if "context_length" in dir(model) else model.text).context_length)
    return BuiltModel(model, (InputSpec("image", (1, 3, *sides)), InputSpec("text", (1, positions), "int64")))


@contextmanager
def _without_root_warnings() -> Iterator[None]:
    """Keep open_clip's warning that no weights are loaded off standard error, unless the program handles logs."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _check_cached(name: str, tower: str) -> None:
    """Raise ValueError unless the configuration of a text tower is in the local cache of the Hugging Face hub."""
    transformers = import_library("transformers")
    try:
        transformers.AutoConfig.from_pretrained(tower, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"open_clip:{name} has the text tower {tower}, whose configuration is not in the local cache: download it "
            f"first by 'hf download {tower} config.json', or choose another model"
        ) from error
