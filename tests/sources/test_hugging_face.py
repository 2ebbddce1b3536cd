"""`hf:FOLDER` and `hf:ORG/NAME`: classes, tasks, timm's configurations, the model's own code, the hub's errors."""

import json
from types import SimpleNamespace

import pytest

from fvflops import FlopCountAnalysis
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model
from fvflops.sources.hugging_face import list_names
from fvflops.sources.transformers.configurations import read_tables
from tests.support.library_versions import is_older, pinned_version

transformers = pytest.importorskip("transformers")
hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")

BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
}
OWN_CONFIGURATION = """
from transformers import PreTrainedConfig


class OwnConfig(PreTrainedConfig):
    model_type = "own_of_a_repository"

    def __init__(self, width=8, **others):
        self.width = width
        self.vocab_size = 50
        super().__init__(**others)
"""
OWN_MODEL = """
from torch import nn
from transformers import PreTrainedModel

from .configuration_own import OwnConfig


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(50, config.width)
        self.project = nn.Linear(config.width, 3, bias=False)
        self.post_init()

    def forward(self, input_ids):
        return self.project(self.embed(input_ids))
"""


def write(folder, settings, name="config.json"):
    (folder / name).write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return f"hf:{folder}"


def class_of(name, **options):
    return type(load_model(name, SourceOptions(**options)).model).__name__


def total(name, **options):
    loaded = load_model(name, SourceOptions(**options))
    return FlopCountAnalysis(loaded.model.eval(), loaded.inputs, kwargs=loaded.kwargs, warn=False).total()


def test_the_class_is_the_first_architecture_or_that_of_the_task(tmp_path):
    name = write(tmp_path, BERT)
    assert class_of(name) == "BertForMaskedLM"
    assert class_of(name, task="text-classification") == "BertForSequenceClassification"
    assert class_of(name, task="sentiment-analysis") == "BertForSequenceClassification"
    assert class_of(name, task="feature-extraction") == "BertModel"
    write(tmp_path, {key: value for key, value in BERT.items() if key != "architectures"})
    assert class_of(name) == "BertModel"


@pytest.mark.parametrize(
    ("kind", "architecture"), [("wav2vec2", "Wav2Vec2ForCTC"), ("whisper", "WhisperForConditionalGeneration")]
)
def test_of_a_task_with_several_classes_the_one_that_has_the_model_type_is_built(tmp_path, kind, architecture):
    small = {"num_hidden_layers": 1} if kind == "wav2vec2" else {"encoder_layers": 1, "decoder_layers": 1}
    name = write(tmp_path, {"model_type": kind, **small})
    assert class_of(name, task="automatic-speech-recognition") == architecture


def test_tasks_are_those_of_pipelines():
    pipelines = pytest.importorskip("transformers.pipelines")
    if is_older("transformers", pinned := pinned_version("transformers")):
        pytest.skip(f"the tasks are of transformers {pinned}")
    classes = {task: [item.__name__ for item in entry["pt"]] for task, entry in pipelines.SUPPORTED_TASKS.items()}
    assert (read_tables()["tasks"], read_tables()["task_aliases"]) == (classes, pipelines.TASK_ALIASES)


def test_the_folder_s_dtype_is_that_of_the_weights(tmp_path):
    name = write(tmp_path, {**BERT, "dtype": "bfloat16"})
    assert {str(item.dtype) for item in load_model(name).model.parameters()} == {"torch.bfloat16"}
    loaded = load_model(name, SourceOptions(dtype="fp32"))
    assert {str(item.dtype) for item in loaded.model.parameters()} == {"torch.float32"}


def test_a_device_builds_weights(tmp_path):
    name = write(tmp_path, BERT)
    assert next(load_model(name).model.parameters()).is_meta
    assert not next(load_model(name, SourceOptions(device="cpu")).model.parameters()).is_meta
    assert total(name) == total(name, device="cpu")


def test_the_preprocessor_sets_the_sizes_that_the_configuration_leaves_open(tmp_path):
    small = {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}
    name = write(tmp_path, {"model_type": "resnet", **small})
    shapes = [load_model(name).kwargs["pixel_values"].shape]
    sizes = {"crop_size": {"height": 192, "width": 160}, "size": {"shortest_edge": 256}}
    write(tmp_path, sizes, "preprocessor_config.json")
    shapes += [load_model(name).kwargs["pixel_values"].shape]
    shapes += [load_model(name, SourceOptions(image_size=(64, 32))).kwargs["pixel_values"].shape]
    assert [tuple(shape) for shape in shapes] == [(1, 3, 224, 224), (1, 3, 192, 160), (1, 3, 64, 32)]
    audio = tmp_path / "audio"
    audio.mkdir()
    name = write(audio, {"model_type": "wav2vec2", "num_hidden_layers": 1})
    write(audio, {"feature_extractor": {"sampling_rate": 8000, "feature_size": 1}}, "processor_config.json")
    assert load_model(name).kwargs["input_values"].shape == (1, 8000)


def test_a_configuration_as_timm_writes_it(tmp_path):
    timm = pytest.importorskip("timm")
    settings = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 7,
        "model_args": {"depth": 2},
        "pretrained_cfg": {"input_size": [3, 96, 96], "fixed_input_size": True},
    }
    name = write(tmp_path, {**settings, "model_args": {"depth": 2, "img_size": 96}})
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, depth=2, img_size=96).eval()
    loaded = load_model(name, SourceOptions(batch=2))
    assert [tuple(item.shape) for item in loaded.inputs] == [(2, 3, 96, 96)]
    assert total(name, batch=2) == FlopCountAnalysis(model, loaded.inputs, warn=False).total()
    assert tuple(load_model(name, SourceOptions(image_size=(64, 64))).inputs[0].shape) == (1, 3, 64, 64)


def test_auto_classes_choose_by_the_configuration(capsys, tmp_path):
    write(tmp_path, BERT)
    for config in (str(tmp_path), str(tmp_path / "config.json"), json.dumps(BERT)):
        assert class_of("transformers:AutoModelForMaskedLM", config=config) == "BertForMaskedLM"
        assert class_of("transformers:BertModel", config=config) == "BertModel"
    assert main(["count", "transformers:AutoModelForCausalLM", "--config", str(tmp_path), "--format", "csv"]) == 0
    assert "bert.encoder.layer.0.attention" in capsys.readouterr().out


def test_a_class_of_a_part_takes_its_part_of_the_configuration(tmp_path):
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    write(tmp_path, {"model_type": "clip", "text_config": text})
    model = load_model("transformers:CLIPTextModel", SourceOptions(config=str(tmp_path))).model
    assert model.config.hidden_size == 32 and model.config.model_type == "clip_text_model"


def write_own_code(folder, **settings):
    (folder / "configuration_own.py").write_text(OWN_CONFIGURATION)
    (folder / "modeling_own.py").write_text(OWN_MODEL)
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    own = {"model_type": "own_of_a_repository", "architectures": ["OwnModel"], "auto_map": auto_map}
    return write(folder, own | settings)


def test_code_of_a_repository_runs_only_with_the_flag(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    name = write_own_code(folder, width=16)
    with pytest.raises(
        ValueError, match=r"the model's code is in the repository.*pass --trust-remote-code to run that code"
    ):
        load_model(name)
    assert not (tmp_path / "modules").exists()
    with pytest.raises(ValueError, match="--task fill-msk: there is no such task"):
        load_model(name, SourceOptions(trust_remote_code=True, task="fill-msk"))
    assert total(name, trust_remote_code=True, batch=2, seq=10) == 2 * 10 * 16 * 3
    assert total(name, trust_remote_code=True, seq=10, config='{"width": 4}') == 10 * 4 * 3


def test_an_architecture_in_the_repository_s_code_names_the_flag(tmp_path):
    name = write(tmp_path, {**BERT, "architectures": ["OwnBert"], "auto_map": {"AutoModel": "own.OwnBert"}})
    with pytest.raises(
        ValueError, match=r"no architecture 'OwnBert'.*pass --trust-remote-code to run the repository's code"
    ):
        load_model(name)
    assert class_of(name, task="fill-mask") == "BertForMaskedLM"  # transformers' own class needs no code


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ("{", {}, "Expecting property name"),
        ({}, {}, "there is no model_type"),
        ({"model_type": "brt"}, {}, "has no model_type 'brt': the nearest are 'bert'"),
        (
            {**BERT, "architectures": ["BertForMaskedML"]},
            {},
            "no architecture 'BertForMaskedML': the nearest are 'BertForMaskedLM'",
        ),
        (
            BERT,
            {"task": "text-generatoin"},
            "--task text-generatoin: there is no such task: the nearest are 'text-generation'",
        ),
        (
            BERT,
            {"task": "image-classification"},
            "AutoModelForImageClassification has no class for the model_type 'bert'; its architectures are BertFor",
        ),
        ({**BERT, "hidden_size": "wide"}, {}, "hidden_size"),
        ({**BERT, "hidden_size": 33, "auto_map": {"AutoModel": "own.OwnBert"}}, {}, "The hidden size"),
        ({"architecture": "resnet5o"}, {}, "has no architecture 'resnet5o': the nearest are 'resnet50"),
    ],
)
def test_a_broken_configuration_is_one_line(capsys, tmp_path, settings, options, message):
    name = write(tmp_path, settings)
    arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
    assert main(["count", name, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err


def test_folders_without_a_configuration(tmp_path):
    with pytest.raises(ValueError, match=r"there is no config.json and no model_index.json"):
        load_model(f"hf:{tmp_path}")
    write(tmp_path, {"base_model_name_or_path": "org/base", "peft_type": "LORA"}, "adapter_config.json")
    with pytest.raises(
        ValueError, match=r"is a PEFT adapter: pass its base model and the adapter: hf:org/base --adapter"
    ):
        load_model(f"hf:{tmp_path}")
    with pytest.raises(ValueError, match=r"hf:\./missing: there is no folder"):
        load_model("hf:./missing")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "zoo:lenet5",
            {"task": "fill-mask"},
            "--task applies to hf:FOLDER or hf:ORG/NAME; got 'zoo:lenet5': omit --task",
        ),
        ("transformers:AutoModel", {}, "needs a configuration with a model_type: add --config FOLDER"),
        (
            "transformers:AutoModelForCausalLM",
            {"config": '{"model_type": "vit"}'},
            "has no class for the model_type 'vit'",
        ),
        (
            "transformers:GPT2Model",
            {"config": '{"model_type": "bert"}'},
            "model_type 'bert' is not GPT2Model's, 'gpt2'",
        ),
        ("transformers:AutoConfig", {}, "has no configuration: name a model class such as BertModel"),
    ],
)
def test_options_that_do_not_fit_the_model(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_model(name, SourceOptions(**options))


# What the hub's errors read of a response.
RESPONSE = SimpleNamespace(status_code=403, headers={}, request=None, url="", json=dict)


def raise_error(kind):
    """Return a download that finds nothing in the cache, and fails at the hub."""

    def download(repository, **options):
        if options.get("local_files_only"):
            raise errors.LocalEntryNotFoundError("not in the cache")
        error_class = getattr(errors, kind, None)
        if error_class is None:
            raise ConnectionError("no route to host")
        if issubclass(error_class, errors.HfHubHTTPError):
            raise error_class("from the hub", response=RESPONSE)
        raise error_class("from the hub")

    return download


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "GatedRepoError",
            "hf:org/name is gated: accept its conditions at https://huggingface.co/org/name and log in by `hf auth",
        ),
        ("RepositoryNotFoundError", "there is no such folder, and no such repository on the hub: check the name"),
        ("RevisionNotFoundError", "the repository has no revision"),
        ("LocalEntryNotFoundError", "the hub cannot be reached .*: check the network, or pass a folder"),
        ("ConnectionError", "the hub cannot be reached .ConnectionError: no route to host.: check the network"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(monkeypatch, kind, message):
    monkeypatch.setattr(hub, "snapshot_download", raise_error(kind))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=message):
        load_model("hf:org/name")


def test_offline_mode_is_respected(monkeypatch, tmp_path):
    """The real client, which in offline mode refuses before it connects."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError, match="offline mode is on: unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or pass a folder"
    ):
        load_model("hf:org/name-that-is-nowhere")


def write_cache(cache, repository, settings):
    """Write a repository into a cache as the hub's client does."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    write(snapshot, settings)


def test_the_cache_is_read_first(monkeypatch, tmp_path):
    write_cache(tmp_path, "org/name", BERT)
    download = hub.snapshot_download

    def from_cache(repository, **options):
        assert options.get("local_files_only"), "the network is not asked for what is in the cache"
        return download(repository, **options, cache_dir=tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", from_cache)
    assert class_of("hf:org/name") == "BertForMaskedLM"
    assert class_of("hf:org/name@main") == "BertForMaskedLM"


def test_what_is_not_in_the_cache_is_downloaded_without_weights(monkeypatch, tmp_path):
    asked = []

    def download(repository, *, revision, allow_patterns, local_files_only=False):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not in the cache")
        asked.append((repository, revision, tuple(allow_patterns)))
        return str(tmp_path)

    write(tmp_path, BERT)
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert class_of("hf:org/name@v2") == "BertForMaskedLM"
    ((repository, revision, patterns),) = asked
    assert (repository, revision) == ("org/name", "v2")
    assert all(pattern.endswith(".json") for pattern in patterns)


def test_names_in_the_cache_are_listed(monkeypatch, tmp_path):
    write_cache(tmp_path, "org/name", BERT)
    scan = hub.scan_cache_dir
    monkeypatch.setattr(hub, "scan_cache_dir", lambda: scan(tmp_path))
    assert list_names() == ["org/name"]
    monkeypatch.setattr(hub, "scan_cache_dir", lambda: scan(tmp_path / "nowhere"))
    assert list_names() == []
