"""Options of a MODEL argument."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fvflops.text import shown_by_fields


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
