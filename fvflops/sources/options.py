"""Options of a MODEL argument, and configurations: JSON text, a JSON file, or a folder with config.json."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from fvflops import paths
from fvflops.text import parse_json, shown_by_fields


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class SourceOptions:
    """How a model is built, and its inputs, as plain values that a worker process can be sent.

    `inputs` are texts such as `1,3,224,224` or `ids=1,128:int64`; without them the source's default inputs are used.
    `batch`, `seq` (tokens) and `image_size` (height, width) are sizes of these default inputs; `dtype`, such as `bf16`,
    applies to floating-point weights and inputs. `config` is JSON, or the path of a JSON file or of its folder, for
    Hugging Face models. `device` is where the model is built, such as `meta`. `args` are texts such as `width=64`,
    arguments of the factory or constructor, and `paths` folders that are added to `sys.path`. `task` chooses the class
    of a Hugging Face repository, `trust_remote_code` allows the modelling code in it to run, and `adapter` is the
    folder of a PEFT adapter, which is added to the model. `denoising_steps` is the number of steps of a diffusers
    pipeline, `guidance` whether each runs on a doubled batch, for classifier-free guidance. `trust` says that a file is
    trusted that can run code when it is loaded: a program of torch.export, TorchScript or a pickled module. `unpickle`
    is its name of version 1.0.
    """

    inputs: tuple[str, ...] = ()
    config: str | None = None
    device: str | None = None
    args: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    batch: int | None = None
    seq: int | None = None
    image_size: tuple[int, int] | None = None
    dtype: str | None = None
    task: str | None = None
    adapter: str | None = None
    trust_remote_code: bool = False
    denoising_steps: int | None = None
    guidance: bool = False
    unpickle: bool = False
    trust: bool = False

    @property
    def trusts_file(self) -> bool:
        """Whether a file is loaded that can run code."""
        return self.trust or self.unpickle


DEFAULT_OPTIONS = SourceOptions()
# Field → its option on the command line, where it has another name.
_OPTIONS = {"inputs": "--input", "args": "--arg", "paths": "--path", "trust": "--trust-file", "device": "--build-on"}


def option_of(field: str) -> str:
    """Return the option of the command line that sets a field of SourceOptions.

    >>> option_of("image_size"), option_of("args")
    ('--image-size', '--arg')
    """
    return _OPTIONS.get(field) or f"--{field.replace('_', '-')}"


def chosen_fields(options: SourceOptions) -> list[str]:
    names = [field.name for field in fields(SourceOptions)]
    return [name for name in names if getattr(options, name) != getattr(DEFAULT_OPTIONS, name)]


_MAX_CONFIG = 1 << 22  # characters: label maps of some checkpoints have 21,000 entries


def read_settings(text: str, option: str, *, file: str = "config.json") -> dict[str, Any]:
    """Return the JSON object in a text, a file, or the file of that name in a folder.

    A mistake raises ValueError that begins with `option`.

    >>> read_settings('{"num_layers": 2}', "--config")
    {'num_layers': 2}
    """
    name = f"{option} {text}".strip()
    if os.path.isdir(text):
        if not os.path.isfile(os.path.join(text, file)):
            raise ValueError(f"{name}: this folder has no {file}")
        text = os.path.join(text, file)
    try:
        content = text if text.lstrip()[:1] in ("{", "[") else paths.read_text(text, _MAX_CONFIG)
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{name}: this is not UTF-8 text ({error})") from error
    if content is None:
        raise ValueError(f"{name}: a configuration has at most {_MAX_CONFIG:,} characters")
    try:
        settings = parse_json(content.removeprefix("\ufeff"), object_hook=_decode_float)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f'{name}: a configuration is a JSON object, such as {{"num_hidden_layers": 2}}')
    return settings


def _decode_float(value: dict[str, Any]) -> Any:
    """Return the float of {"__float__": "Infinity"}, as transformers writes values that are not numbers in JSON."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value
