"""Folders as on the hub, counted by `hf:FOLDER --seq --batch`: equal to the class built and fed by hand."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from fvflops import FlopCountAnalysis
from fvflops.sources import SourceOptions, load_model
from fvflops.sources.transformers.configurations import fix_special_tokens

transformers = pytest.importorskip("transformers")

BATCH, SEQ = 2, 16
TEXT = {"input_ids": (BATCH, SEQ), "attention_mask": (BATCH, SEQ)}
IDS = {"input_ids": (BATCH, SEQ)}
DECODED = {**TEXT, "decoder_input_ids": (BATCH, SEQ), "decoder_attention_mask": (BATCH, SEQ)}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
ENCODER = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
VISION = {name: value for name, value in ENCODER.items() if name != "vocab_size"} | {"image_size": 56, "patch_size": 14}
EXPERTS = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 500,
}
IMAGE = {"pixel_values": (BATCH, 3, 56, 56)}
AUDIO = {"input_values": (BATCH, 16_000)}
WAVEFORM = {**ENCODER, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16}


class Case(NamedTuple):
    """A class, its configuration's settings, the shapes of its inputs, and the placeholders in each sample's text."""

    architecture: str
    settings: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    placeholders: int = 0
    extra: Callable[[], dict[str, Any]] = dict


def grid(rows, columns):
    """Return what makes the grid of each sample's patches and the types of its tokens, of which a 1 is the image's."""
    types = torch.zeros(BATCH, SEQ + rows * columns // 4, dtype=torch.int64)
    types[:, 1 : 1 + rows * columns // 4] = 1
    return lambda: {"image_grid_thw": torch.tensor([[1, rows, columns]] * BATCH), "mm_token_type_ids": types}


CASES = [
    # decoders
    Case("LlamaForCausalLM", SMALL, TEXT),
    Case("MistralForCausalLM", SMALL, TEXT),
    Case("Qwen3ForCausalLM", {**SMALL, "head_dim": 8}, TEXT),
    Case("Gemma2ForCausalLM", {**SMALL, "head_dim": 8}, TEXT),
    Case("Phi3ForCausalLM", {**SMALL, "pad_token_id": 0}, TEXT),
    Case("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 500}, TEXT),
    Case("GPTNeoXForCausalLM", ENCODER, TEXT),
    Case("OPTForCausalLM", {**ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 32}, TEXT),
    Case("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 500}, TEXT),
    Case("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 500}, TEXT),
    # mixtures of experts
    Case("MixtralForCausalLM", {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}, TEXT),
    Case("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 8}, TEXT),
    Case("OlmoeForCausalLM", EXPERTS, TEXT),
    # encoders
    Case("BertForMaskedLM", ENCODER, TEXT),
    Case("RobertaForSequenceClassification", ENCODER, TEXT),
    Case("DistilBertForQuestionAnswering", {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}, TEXT),
    Case("DebertaV2ForTokenClassification", {**ENCODER, "pos_att_type": ["p2c", "c2p"]}, TEXT),
    Case("ModernBertForMaskedLM", {**ENCODER, "pad_token_id": 0}, TEXT),
    # encoder-decoders
    Case(
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 500},
        DECODED,
    ),
    Case("BartForConditionalGeneration", BART, DECODED),
    Case("MarianMTModel", {**BART, "decoder_vocab_size": 500, "pad_token_id": 0}, DECODED),
    # vision
    Case("ViTForImageClassification", VISION, IMAGE),
    Case("Dinov2ForImageClassification", VISION, IMAGE),
    Case("BeitForImageClassification", VISION, IMAGE),
    Case(
        "SwinForImageClassification", {"image_size": 56, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 4]}, IMAGE
    ),
    Case(
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
        {"pixel_values": (BATCH, 3, 224, 224)},
    ),
    Case(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        {"pixel_values": (BATCH, 3, 224, 224)},
    ),
    Case(
        "SegformerForSemanticSegmentation",
        {"image_size": 56, "hidden_sizes": [8, 16, 40, 64], "depths": [1] * 4, "decoder_hidden_size": 16},
        IMAGE,
    ),
    Case(
        "DPTForDepthEstimation",
        {
            **VISION,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8] * 4,
            "fusion_hidden_size": 8,
        },
        IMAGE,
    ),
    Case(
        "YolosForObjectDetection",
        {**VISION, "image_size": [56, 56], "num_detection_tokens": 5, "use_mid_position_embeddings": False},
        IMAGE,
    ),
    # vision and language
    Case(
        "CLIPModel",
        {"text_config": {**ENCODER, "max_position_embeddings": 32}, "vision_config": VISION},
        {**TEXT, **IMAGE},
    ),
    Case("SiglipModel", {"text_config": ENCODER, "vision_config": VISION}, {**TEXT, **IMAGE}),
    Case(
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **SMALL},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": 499,
            "vision_feature_layer": -1,
        },
        {"input_ids": (BATCH, SEQ + 16), "attention_mask": (BATCH, SEQ + 16), **IMAGE},
        16,
    ),
    Case(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma", **SMALL, "head_dim": 8},
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "projection_dim": 32},
            "image_token_index": 499,
            "projection_dim": 32,
            "hidden_size": 32,
        },
        {"input_ids": (BATCH, SEQ + 16), "attention_mask": (BATCH, SEQ + 16), **IMAGE},
        16,
    ),
    Case(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {
                **SMALL,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
            "image_token_id": 499,
            "video_token_id": 498,
            "vision_start_token_id": 497,
            "vision_end_token_id": 496,
        },
        # 16 × 16 patches of 2 × 3 × 14 × 14, of which 2 × 2 make a token
        {"input_ids": (BATCH, SEQ + 64), "attention_mask": (BATCH, SEQ + 64), "pixel_values": (BATCH * 256, 1176)},
        64,
        grid(16, 16),
    ),
    Case(
        "BlipForConditionalGeneration",
        {"text_config": {**ENCODER, "encoder_hidden_size": 32}, "vision_config": VISION, "projection_dim": 16},
        {**TEXT, **IMAGE},
    ),
    # speech
    Case(
        "WhisperForConditionalGeneration",
        {**BART, "max_source_positions": 1500},
        {"input_features": (BATCH, 80, 3000), "decoder_input_ids": (BATCH, SEQ)},
    ),
    Case(
        "Speech2TextForConditionalGeneration",
        {**BART, "conv_channels": 16},
        {"input_features": (BATCH, 3000, 80), "decoder_input_ids": (BATCH, SEQ)},
    ),
    Case("Wav2Vec2ForCTC", WAVEFORM, AUDIO),
    Case("HubertForCTC", WAVEFORM, AUDIO),
    Case(
        "ASTForAudioClassification",
        {**ENCODER, "max_length": 128, "num_mel_bins": 32},
        {"input_values": (BATCH, 128, 32)},
    ),
    Case("UniSpeechForCTC", WAVEFORM, AUDIO),
    # series and trajectories
    Case(
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 32,
            "d_model": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 16,
        },
        {"past_values": (BATCH, 32, 2)},
    ),
]


def write_folder(case, folder):
    """Write config.json as `save_pretrained` does, and return the configuration."""
    model_class = getattr(transformers, case.architecture)
    config = model_class.config_class(**json.loads(json.dumps(case.settings)))
    fix_special_tokens(config)
    config.architectures = [case.architecture]
    config.save_pretrained(folder)
    return config


def make_hand_inputs(case, config):
    """Return inputs on the CPU: ones for text and masks, and placeholders after the first token."""
    made = {}
    for name, shape in case.shapes.items():
        is_integer = name.endswith(("_ids", "_mask"))
        made[name] = torch.ones(shape, dtype=torch.int64) if is_integer else torch.rand(shape)
    if "input_ids" in made:
        made["input_ids"] += 4
    if case.placeholders:
        token = getattr(config, "image_token_id", None) or config.image_token_index
        made["input_ids"][:, 1 : 1 + case.placeholders] = token
    return {**made, **case.extra()}


@pytest.mark.parametrize("case", CASES, ids=[case.architecture for case in CASES])
def test_a_folder_counts_as_the_class_built_by_hand(case, tmp_path):
    config = write_folder(case, tmp_path)
    options = SourceOptions(batch=BATCH, seq=SEQ if any("ids" in name for name in case.shapes) else None)
    loaded = load_model(f"hf:{tmp_path}", options)
    assert type(loaded.model).__name__ == case.architecture
    assert any(parameter.is_meta for parameter in loaded.model.parameters())
    inputs = make_hand_inputs(case, config)
    assert {name: tuple(value.shape) for name, value in loaded.kwargs.items() if name in inputs} == {
        name: tuple(value.shape) for name, value in inputs.items()
    }
    by_folder = analyse(loaded.model, loaded.kwargs)
    model = getattr(transformers, case.architecture)(config)
    by_hand = analyse(model, inputs)
    assert by_folder.total() == by_hand.total() > 0
    assert by_folder.by_module() == by_hand.by_module()


def analyse(model, inputs):
    return FlopCountAnalysis(model.eval(), None, kwargs=dict(inputs), warn=False)


@pytest.mark.parametrize("name", ["", "/config.json"])
def test_a_folder_may_be_named_by_its_config(tmp_path, name):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL})
    )
    assert type(load_model(f"hf:{tmp_path}{name}", SourceOptions()).model).__name__ == "LlamaForCausalLM"
