"""Default inputs of transformers models: by rule and for single models, their sizes and configurations."""

import json
import math

import pytest
import torch

from fvflops import FlopCountAnalysis
from fvflops.sources import SourceOptions, load_model, load_source
from fvflops.sources.options import read_settings
from fvflops.sources.transformers.configurations import make_config, merge_settings, own_config, read_tables
from fvflops.sources.transformers.shrink_config import shrink
from fvflops.sources.transformers.transformers_inputs import make_inputs
from tests.support.library_versions import is_older, pinned_version
from tests.support.random_cases import long_except

transformers = pytest.importorskip("transformers")
auto = pytest.importorskip("transformers.models.auto.configuration_auto")
modeling = pytest.importorskip("transformers.models.auto.modeling_auto")

TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 300}
VISION = {name: value for name, value in TEXT.items() if name != "vocab_size"} | {"image_size": 56, "patch_size": 14}
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 300,
}
# Model types of several modalities and layouts, each with inputs of its own.
SPECIAL_TYPES = [
    "audio-spectrogram-transformer",
    "autoformer",
    "decision_transformer",
    "fuyu",
    "gemma4_vision",
    "instructblip",
    "llava_next",
    "mistral3",
    "minicpmv4_7_vision",
    "mllama",
    "musicgen",
    "patchtst",
    "perceiver",
    "seggpt",
    "siglip2",
    "speech_to_text",
    "timesformer",
    "timesfm",
]
# Model type → the first release of transformers whose default configuration of it can be built.
SINCE = {"kimi_k25_vision": "5.13", "minicpmv4_7_vision": "5.18", "musicgen": "5.20"}


def load(name, settings=None, **options):
    config = None if settings is None else json.dumps(settings)
    return load_model(f"transformers:{name}", SourceOptions(device="meta", config=config, **options))


def shapes(loaded):
    return {name: tuple(value.shape) for name, value in loaded.kwargs.items() if isinstance(value, torch.Tensor)}


def total(loaded):
    return cost(FlopCountAnalysis(loaded.model.eval(), None, kwargs=loaded.kwargs, warn=False))


def cost(analysis):
    """Return the total without the angles of rotary positions, which are computed once for all rows of a batch.

    Before transformers 5.19 that was a matrix product.
    """
    angles = (value for name, value in analysis.by_module().items() if name.endswith("rotary_emb"))
    return analysis.total() - sum(angles)


def build_base(model_type):
    """Return the base model of a type, on meta and with few layers."""
    if is_older("transformers", since := SINCE.get(model_type, "0")):
        pytest.skip(f"{model_type} needs transformers {since}")
    config, _ = make_config(model_type)
    shrink(config)
    mappings = [modeling.MODEL_MAPPING, modeling.MODEL_FOR_CAUSAL_LM_MAPPING]
    model_class = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    model_class = model_class[0] if isinstance(model_class, (list, tuple)) else model_class
    with torch.device("meta"):
        return model_class._from_config(own_config(model_class, config)).eval()


def test_model_types_in_tables_exist():
    if is_older("transformers", pinned := pinned_version("transformers")):
        pytest.skip(f"the tables have the model types of transformers {pinned}")
    tables = read_tables()
    special = {name for entry in tables["special"] for name in entry["models"]}
    names = special.union(*(tables[key] for key in ("fixed", "omitted", "batch_axes", "defaults")))
    assert not names - auto.CONFIG_MAPPING_NAMES.keys()


@pytest.mark.parametrize("model_type", SPECIAL_TYPES)
def test_cost_of_special_inputs_is_proportional_to_the_batch(model_type):
    model = build_base(model_type)
    costs = []
    for batch in (1, 3):
        inputs = make_inputs(model_type, model, options=SourceOptions(batch=batch))
        costs.append(cost(FlopCountAnalysis(model, None, kwargs=inputs, execution="shapes", warn=False)))
    # Pixtral attends to all images as one sequence; CLIP's similarities are of all pairs.
    assert costs[1] == 3 * costs[0] or (model_type in ("mistral3", "siglip2") and costs[1] > 3 * costs[0])


@pytest.mark.parametrize(
    ("model_type", "name", "shape"),
    [
        ("mistral3", "pixel_values", (1, 3, 56, 112)),
        ("siglip2", "pixel_values", (1, 3 * 7, 3 * 16 * 16)),
        ("gemma4_vision", "pixel_position_ids", (1, 3 * 7, 2)),
        ("kimi_k25_vision", "pixel_values", (4 * 8, 3, 14, 14)),
        ("timesformer", "pixel_values", (1, 8, 3, 56, 112)),
        ("seggpt", "prompt_pixel_values", (1, 3, 56, 112)),
    ],
)
def test_the_image_size_sets_the_number_of_patches(model_type, name, shape):
    model = build_base(model_type)
    inputs = make_inputs(model_type, model, options=SourceOptions(image_size=(56, 112)))
    assert tuple(inputs[name].shape) == shape


def test_a_grid_of_patches_has_a_placeholder_for_each_token():
    text = {
        **TEXT,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    }
    settings = {
        "text_config": text,
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
        "image_token_id": 299,
        "video_token_id": 298,
        "vision_start_token_id": 297,
        "vision_end_token_id": 296,
    }
    loaded = load("Qwen2VLForConditionalGeneration", settings, image_size=(448, 224), seq=10, batch=2)
    tokens = 32 * 16 // 4  # 2 × 2 patches of 14 × 14 pixels make a token
    assert shapes(loaded)["pixel_values"] == (2 * 32 * 16, 2 * 3 * 14 * 14)
    assert loaded.kwargs["image_grid_thw"].tolist() == [[1, 32, 16]] * 2
    assert shapes(loaded)["input_ids"] == (2, 10 + tokens)
    assert (loaded.kwargs["input_ids"] == 299).sum(dim=1).tolist() == [tokens] * 2
    assert total(loaded) > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SpeechT5ForTextToSpeech", {"input_ids", "attention_mask", "decoder_input_values"}),
        ("SpeechT5ForSpeechToText", {"input_values", "decoder_input_ids"}),
        ("SpeechT5ForSpeechToSpeech", {"input_values", "decoder_input_values"}),
        ("SeamlessM4TForTextToText", {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}),
        ("PerceiverForMaskedLM", {"input_ids", "attention_mask"}),
        ("PerceiverForImageClassificationLearned", {"pixel_values"}),
    ],
)
def test_classes_of_one_type_have_inputs_of_their_own(name, expected):
    loaded = load(name)
    assert {name for name, value in loaded.kwargs.items() if value is not None} == expected
    assert total(loaded)


# Of each family the first one or two by default.
CLASSES = [
    ("PPOCRV5MobileRecForTextRecognition", "pixel_values", (1, 3, 48, 320)),
    ("Sapiens2ForPoseEstimation", "pixel_values", (1, 3, 224, 224)),
    ("Dots3NoteAudioModel", "input_features", (1, 128, 3000)),
    ("PI0Model", "action_embeds", (1, 51, 1024)),
    ("PI0ForConditionalGeneration", "noise", (1, 50, 32)),
    *((f"PPOCRV{n}RecForTextRecognition", "pixel_values", (1, 3, 48, 320)) for n in ("5Server", "6Small", "6Tiny")),
    ("PPOCRV5ServerDetForObjectDetection", "pixel_values", (1, 3, 224, 224)),
    ("Sapiens2ForSemanticSegmentation", "pixel_values", (1, 3, 224, 224)),
]


@pytest.mark.parametrize(("name", "argument", "shape"), long_except(CLASSES[:5], CLASSES))
def test_cost_of_a_class_with_a_default_configuration_is_proportional_to_the_batch(name, argument, shape):
    if name not in load_source("transformers").list_names():
        pytest.skip(f"this transformers has no {name}")
    one, three = load(name), load(name, batch=3)
    assert shapes(one)[argument] == shape and shapes(three)[argument] == (3, *shape[1:])
    assert total(three) == 3 * total(one) > 0


def test_dots3_note_has_a_placeholder_token_for_each_audio_feature():
    if "Dots3NoteModel" not in load_source("transformers").list_names():
        pytest.skip("this transformers has no Dots3NoteModel")
    model = build_base("dots3_note")
    inputs = make_inputs("dots3_note", model)
    assert (inputs["input_ids"] == model.config.audio_token_id).sum() == 480000 // 1280
    assert cost(FlopCountAnalysis(model, None, kwargs=inputs, warn=False)) > 0


def test_position_embeddings_are_interpolated_to_another_image_size():
    loaded = load("ViTModel", VISION, image_size=(112, 56))
    assert loaded.kwargs["interpolate_pos_encoding"] is True
    assert total(loaded) > total(load("ViTModel", VISION))
    assert "interpolate_pos_encoding" not in load("ViTModel", VISION, image_size=(56, 56)).kwargs


def test_text_of_classes_with_special_inputs():
    choices = load("BertForMultipleChoice", TEXT, batch=2, seq=12)
    assert shapes(choices)["input_ids"] == shapes(choices)["attention_mask"] == (2, 2, 12)
    assert total(choices) == 2 * total(load("BertForMultipleChoice", TEXT, seq=12))
    classifier = load("BartForSequenceClassification", BART, batch=2)
    assert (classifier.kwargs["input_ids"][:, -1] == classifier.model.config.eos_token_id).all()
    assert total(classifier) > 0
    llama = load("LlamaForSequenceClassification", TEXT, batch=3)  # refuses a batch without a padding token
    assert total(llama) == 3 * total(load("LlamaForSequenceClassification", TEXT))


def test_text_is_at_most_as_long_as_the_position_embeddings():
    assert shapes(load("CLIPModel", {"text_config": TEXT, "vision_config": VISION}))["input_ids"] == (1, 77)
    with pytest.raises(ValueError, match="--seq 78: CLIPModel has positions for 77 tokens only"):
        load("CLIPModel", {"text_config": TEXT, "vision_config": VISION}, seq=78)
    with pytest.raises(ValueError, match="has positions for 448 tokens only"):  # the decoder's, not the encoder's 1,500
        load("WhisperModel", BART, seq=449)
    sinusoids = {**BART, "max_position_embeddings": 64}  # M2M-100 computes more positions when it needs them
    assert total(load("M2M100Model", sinusoids, seq=80)) > 0


def test_token_ids_are_in_the_vocabulary_and_not_special():
    loaded = load("LlamaModel", {**TEXT, "bos_token_id": 7, "eos_token_id": 11}, seq=200)
    ids = loaded.kwargs["input_ids"]
    assert ids.min() >= 3 and ids.max() < 300 and not {7, 11} & set(ids[0].tolist())


def test_an_inference_session_has_no_batch():
    model = build_base("sam2_video")
    assert "inference_session" in make_inputs("sam2_video", model, options=SourceOptions(batch=1))
    with pytest.raises(ValueError, match=r"--batch 2: input inference_session .* has no batch axis: omit --batch"):
        make_inputs("sam2_video", model, options=SourceOptions(batch=2))


def test_token_ids_have_values_and_pixels_are_on_meta():
    on_meta = load("BertModel", TEXT)
    assert {value.device.type for value in on_meta.kwargs.values()} == {"cpu"}  # control flow may read them
    vision = load("ViTModel", VISION)
    assert {value.device.type for value in vision.kwargs.values()} == {"meta"}


def test_settings_are_merged_into_the_default():
    model = load("CLIPModel", {"text_config": {"hidden_size": 16, "num_attention_heads": 2}}).model
    assert model.config.text_config.hidden_size == 16 and model.config.vision_config.hidden_size == 768
    assert merge_settings({"a": {"b": 1}, "c": 2}, {"a": 3}) == {"a": 3, "c": 2}


def test_infinity_is_read_as_transformers_writes_it(tmp_path):
    config = auto.CONFIG_MAPPING["mamba2"]()
    config.save_pretrained(tmp_path)
    assert read_settings(str(tmp_path), "--config")["time_step_limit"][1] == math.inf
    loaded = load_model(f"hf:{tmp_path}", SourceOptions(config='{"num_hidden_layers": 1}', seq=16))
    assert loaded.model.config.time_step_limit[1] == math.inf


def test_the_classes_are_listed():
    names = load_source("transformers").list_names()
    assert {"BertModel", "LlamaForCausalLM", "ViTForImageClassification", "WhisperForConditionalGeneration"} <= {*names}
    assert len(names) == len(set(names)) > 1000
    assert all(hasattr(transformers, name) for name in names[::40])


def test_shrinking_keeps_widths_and_a_layer_of_each_kind():
    config, _ = make_config("jamba")
    width, experts = config.hidden_size, config.num_experts
    changed = shrink(config)
    assert config.hidden_size == width and config.num_experts == min(16, experts)
    assert changed["num_hidden_layers"] == config.num_hidden_layers == 8  # one of 8 layers is attention


# Model type → why its language model does not count in shape execution.
NOT_COUNTED = {
    "blenderbot": "transformers gives the decoder a cache of as many layers as the encoder has",
    "blt": "control flow depends on the entropy of bytes",
    "dbrx": "routing selects tokens by value",
    "gemma4_assistant": "it reads the cache of another model",
    "gemma4_unified_assistant": "it reads the cache of another model",
    "granitemoehybrid": "the default configuration has no attention layer, whose cache the mask asks for",
    "jetmoe": "routing splits tokens by value",
    "longcat_flash": "routing selects tokens by value",
    "reformer": "the default configuration is an encoder's",
}


@pytest.mark.long
@pytest.mark.parametrize("model_type", sorted(modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_COUNTED.keys()))
def test_every_causal_language_model_counts_from_its_folder(model_type, tmp_path):
    names = modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    architecture = names if isinstance(names, str) else names[0]
    config, _ = make_config(model_type)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    costs = [total(load_model(f"hf:{tmp_path}", SourceOptions(batch=batch, seq=32))) for batch in (1, 2)]
    assert costs[1] > 1.9 * costs[0] > 0
