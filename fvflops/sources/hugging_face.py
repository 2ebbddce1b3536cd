"""Models of Hugging Face repositories: `hf:FOLDER` or `hf:ORG/NAME[@REVISION]`, by their configuration alone."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fvflops.capture.model.input_specs import InputSpec
from fvflops.sources.call_arguments import call_library, parse_arguments
from fvflops.sources.diffusers.diffusers_pipeline import INDEX, build_pipeline, refuse_pipeline_options
from fvflops.sources.imports import import_library, offline
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions, read_settings
from fvflops.sources.timm import set_image_size
from fvflops.sources.transformers import build_auto, build_class
from fvflops.sources.transformers import list_names as list_classes
from fvflops.sources.transformers.configurations import (
    check_harmless,
    check_settings,
    has_model_type,
    make_config_of_type,
    merge_settings,
    read_changes,
    read_tables,
)
from fvflops.sources.weights.adapters import ADAPTER_CONFIG
from fvflops.text import list_nearest, truncate

CONFIG = "config.json"
_Settings = Mapping[str, Any]
# A folder with one of these is a model.
CONFIGURATIONS = (CONFIG, INDEX, ADAPTER_CONFIG)
# Small files: no weights, tokenizers or vocabularies.
_FILES = [*CONFIGURATIONS, "preprocessor_config.json", "processor_config.json", "*/*config.json"]


def list_names() -> Sequence[str]:
    """Return the repositories in the local cache of the hub, without network access."""
    import_library("transformers")
    hub = importlib.import_module("huggingface_hub")
    try:
        cache = hub.scan_cache_dir()
    except hub.CacheNotFound:
        return []
    return sorted(repository.repo_id for repository in cache.repos if repository.repo_type == "model")


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return the model of a folder or of a repository of the hub: its first architecture, or the class of a task.

    Only configuration files are read or downloaded; for a folder nothing is downloaded. Settings in `options.config`
    replace settings of config.json.
    """
    folder = os.path.expanduser(name)
    if os.path.basename(folder) == CONFIG and os.path.isfile(folder):
        folder = os.path.dirname(folder) or os.curdir
    if not os.path.isdir(folder):
        return _build_folder(_download(name, options.trust_remote_code), f"hf:{name}", options)
    with offline("transformers"):
        return _build_folder(folder, f"hf:{name}", options)


def _build_folder(folder: str, where: str, options: SourceOptions) -> BuiltModel:
    """Return the model of a folder with a configuration; errors begin with `where`."""
    if os.path.isfile(os.path.join(folder, INDEX)):
        if options.task is not None:
            raise ValueError(f"--task chooses the class of one model; {where} is a pipeline: omit --task")
        return build_pipeline(folder, options)
    refuse_pipeline_options(options, where)
    settings = _read_config(folder, where)
    if "architecture" in settings and "model_type" not in settings:
        return _build_timm(settings, options, where)
    changes = read_changes(options)
    own = settings.keys()
    settings = merge_settings(settings, changes)
    preprocessor = read_preprocessor(folder)
    remote = settings.get("auto_map") or {}
    if options.trust_remote_code and remote:
        check_harmless(settings, where)
        return _build_remote(folder, settings, changes, options.task, preprocessor)
    if remote and not has_model_type(settings):
        lacking = f"transformers has no model_type {settings.get('model_type')!r}"
        problem = f"the model's code is in the repository, and {lacking}"
        raise ValueError(f"{where}: {problem}: pass --trust-remote-code to run that code")
    config = make_config_of_type(settings, where)
    if "model_type" not in changes:
        check_settings(type(config), {name: value for name, value in changes.items() if name not in own}, where)
    if options.task is not None:
        return build_auto(_find_task_class(options.task, config), config, where, preprocessor=preprocessor)
    architectures = settings.get("architectures")
    if not architectures:
        return build_auto(import_library("transformers").AutoModel, config, where, preprocessor=preprocessor)
    return build_class(_find_class(architectures, where, bool(remote)), config, preprocessor=preprocessor)


def _read_config(folder: str, where: str) -> dict[str, Any]:
    path = os.path.join(folder, CONFIG)
    if os.path.isfile(path):
        return read_settings(path, f"{where}:")
    if os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)):
        base = read_settings(os.path.join(folder, ADAPTER_CONFIG), f"{where}:").get("base_model_name_or_path")
        remedy = f"pass its base model and the adapter: hf:{base} --adapter {folder}"
        raise ValueError(f"{where} is a PEFT adapter: {remedy}")
    raise ValueError(f"{where}: there is no {CONFIG} and no {INDEX}: name a folder or repository that has one")


def _find_class(architectures: Any, where: str, has_code: bool) -> Any:
    transformers = import_library("transformers")
    name = str(architectures[0] if isinstance(architectures, list) else architectures)
    found = getattr(transformers, name, None)
    if found is None or not hasattr(found, "config_class"):
        hint = "pass --trust-remote-code to run the repository's code" if has_code else "choose a class by --task"
        lacking = f"{name!r}{list_nearest(name, list(list_classes()))}"
        raise ValueError(f"{where}: transformers {transformers.__version__} has no architecture {lacking}: {hint}")
    return found


def check_task(task: str) -> None:
    """Raise ValueError for an unknown task."""
    tasks, aliases = read_tables()["tasks"], read_tables()["task_aliases"]
    if aliases.get(task, task) not in tasks:
        near = list_nearest(task, [*tasks, *aliases]) or f": use one of {', '.join(tasks)}"
        raise ValueError(f"--task {task}: there is no such task{near}")


def _name_task_classes(task: str) -> Sequence[str]:
    tables = read_tables()
    return list(tables["tasks"][tables["task_aliases"].get(task, task)])


def _find_task_class(task: str, config: Any) -> Any:
    """Return the Auto class of a task that has a model for a configuration, else the first."""
    names = _name_task_classes(task)
    transformers = import_library("transformers")
    classes = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    if not classes:
        raise ValueError(f"--task {task}: transformers {transformers.__version__} has no {' or '.join(names)}")
    return next((item for item in classes if type(config) in item._model_mapping), classes[0])


def _build_timm(settings: Mapping[str, Any], options: SourceOptions, where: str) -> BuiltModel:
    """Return a timm model from a configuration as timm writes it; `options.args` are arguments of its constructor."""
    if options.config is not None:
        settings = merge_settings(settings, read_settings(options.config, "--config"))
    timm = import_library("timm")
    name = str(settings["architecture"])
    if not timm.is_model(name):
        near = list_nearest(name, timm.list_models())
        raise ValueError(f"{where}: timm {timm.__version__} has no architecture {name!r}{near}")
    pretrained = settings.get("pretrained_cfg") or {}
    arguments = dict(settings.get("model_args") or {})
    for key in ("num_classes", "global_pool"):
        if settings.get(key) is not None:
            arguments.setdefault(key, settings[key])
    fixed = {"pretrained": False, "checkpoint_path": "", "pretrained_cfg_overlay": dict(pretrained)}
    given = parse_arguments(options.args)
    kept = {key: value for key, value in arguments.items() if key not in given}
    model = call_library(partial(timm.create_model, name, **kept), given, where, fixed=fixed)
    set_image_size(model, options)
    return BuiltModel(model, (InputSpec(None, (1, *model.pretrained_cfg["input_size"])),))


def _build_remote(
    folder: str, settings: _Settings, changes: _Settings, task: str | None, preprocessor: _Settings
) -> BuiltModel:
    """Return the model of a repository's own code, which runs; `changes` of its settings are the user's."""
    transformers = import_library("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, **changes)
    remote = settings["auto_map"]
    names = () if task is None else _name_task_classes(task)
    architecture = str((settings.get("architectures") or [""])[0])
    models = {key: value for key, value in remote.items() if key.startswith("AutoModel")}
    key = next(
        (key for key in names if key in models),
        next((key for key, value in models.items() if value.rpartition(".")[2] == architecture), "AutoModel"),
    )
    if key not in models:
        return build_auto(transformers.AutoModel, config, f"hf:{folder}", preprocessor=preprocessor)
    dynamic = importlib.import_module("transformers.dynamic_module_utils")
    return build_class(dynamic.get_class_from_dynamic_module(models[key], folder), config, preprocessor=preprocessor)


def _download(name: str, with_code: bool) -> str:
    """Return the cached folder of a repository's configuration, downloaded if missing; errors are ValueErrors."""
    found = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)(?:@(.+))?", name)
    if found is None or name.startswith("."):
        raise ValueError(f"hf:{name}: there is no folder {name!r}: name a folder with {CONFIG}, or ORG/NAME on the hub")
    repository, revision = found.groups()
    import_library("transformers")  # with the hub's client; if it is missing, the error names the extra
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    files = [*_FILES, *(["*.py"] if with_code else [])]
    try:
        cached: str = hub.snapshot_download(repository, revision=revision, allow_patterns=files, local_files_only=True)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError, ValueError):
        cached = ""
    if cached and _is_complete(cached, with_code):
        return cached
    page = f"https://huggingface.co/{repository}"
    try:
        folder: str = hub.snapshot_download(repository, revision=revision, allow_patterns=files)
    except errors.GatedRepoError as error:
        remedy = f"accept its conditions at {page} and log in by `hf auth login`, or pass a folder with its {CONFIG}"
        raise ValueError(f"hf:{name} is gated: {remedy}") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"hf:{name}: the repository has no revision {revision!r}: see {page}/tree/main") from error
    except errors.RepositoryNotFoundError as error:
        remedy = "check the name, or log in by `hf auth login` if it is private"
        raise ValueError(f"hf:{name}: there is no such folder, and no such repository on the hub: {remedy}") from error
    except errors.HFValidationError as error:
        raise ValueError(f"hf:{name}: there is no such folder, nor is it the name of a repository: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        if importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
            reason = "offline mode is on: unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"
        else:
            cause = error.__cause__ or error
            described = truncate(" ".join(f"{type(cause).__name__}: {cause}".split()), 120)
            reason = f"the hub cannot be reached ({described}): check the network"
        problem = f"hf:{name} is neither a folder nor in the local cache"
        raise ValueError(f"{problem}, and {reason}, or pass a folder with its {CONFIG}") from error
    return folder


def _is_complete(folder: str, with_code: bool) -> bool:
    """Return whether a cached snapshot has a configuration, and code where it is needed."""
    names = os.listdir(folder)
    has_code = not with_code or any(name.endswith(".py") for name in names)
    return has_code and any(name in names for name in CONFIGURATIONS)


# In the order in which they are read. Newer processors keep each preprocessor's settings below these keys.
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
_NESTED = ("image_processor", "feature_extractor", "audio_processor")
_BINS = ("num_mel_bins", "feature_size")
_MIN_BINS = 8  # the feature size of a waveform is 1


def read_preprocessor(folder: str) -> dict[str, Any]:
    """Return image_size (height, width), sampling_rate (samples/s) and bins that a folder's preprocessors name."""
    settings: list[Mapping[str, Any]] = []
    for name in _PREPROCESSORS:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            whole = read_settings(path, name)
            settings += [whole, *(whole[key] for key in _NESTED if isinstance(whole.get(key), Mapping))]
    found: dict[str, Any] = {}
    for part in settings:
        sides = _read_sides(part)
        bins = [part[name] for name in _BINS if isinstance(part.get(name), int) and part[name] >= _MIN_BINS]
        if sides is not None:
            found.setdefault("image_size", sides)
        if bins:
            found.setdefault("bins", bins[0])
        if isinstance(part.get("sampling_rate"), int):
            found.setdefault("sampling_rate", part["sampling_rate"])
    return found


def _read_sides(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the height and width to which images are cropped or resized; of a shortest edge alone, a square.

    >>> _read_sides({"size": {"shortest_edge": 800, "longest_edge": 1333}})
    (800, 800)
    >>> _read_sides({"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}})
    (224, 224)
    """
    names = ("size",) if settings.get("do_center_crop") is False else ("crop_size", "size")
    for name in names:
        size = settings.get(name)
        if isinstance(size, int):
            return size, size
        if isinstance(size, Mapping):
            edges = (size.get("height"), size.get("width"))
            if not all(isinstance(edge, int) for edge in edges):
                edges = (size.get("shortest_edge"),) * 2
            if isinstance(edges[0], int) and isinstance(edges[1], int):
                return edges[0], edges[1]
    return None
