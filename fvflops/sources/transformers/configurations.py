"""Configurations of transformers' models: the defaults, what some of them lack, and how one is made small."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

_SERIES = {"prediction_length": 24, "context_length": 48}
_LAYER_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
_GEMMA_EYE = {"image_size": 896, "patch_size": 14}
_IDEFICS_EYE = {"image_size": 364, "patch_size": 14}  # the shuffle of pixels takes an even number of patches
_GLM_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_FOUR_AXES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [16, 16, 16, 16]}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_QWEN2_SMALL = {
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
}
_REPVIT = {
    "model_type": "timm_wrapper",
    "architecture": "repvit_m1",
    "num_classes": 2,
    "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
}
_PADDLE_BLOCK = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    "vertical_long_to_small_conv_longratio": [[7, 1], [1, 1], [3, 0]],
    "vertical_long_to_small_conv_midratio": [[5, 1], [1, 1], [2, 0]],
    "vertical_long_to_small_conv_shortratio": [[3, 1], [1, 1], [1, 0]],
    "horizontal_small_to_long_conv_longratio": [[1, 7], [1, 1], [0, 3]],
    "horizontal_small_to_long_conv_midratio": [[1, 5], [1, 1], [0, 2]],
    "horizontal_small_to_long_conv_shortratio": [[1, 3], [1, 1], [0, 1]],
    "symmetric_conv_long_longratio": [[7, 7], [1, 1], [3, 3]],
    "symmetric_conv_long_midratio": [[5, 5], [1, 1], [2, 2]],
    "symmetric_conv_long_shortratio": [[3, 3], [1, 1], [1, 1]],
}

# Model type → settings without which the default configuration builds no model, or none that runs.
ADJUSTMENTS: dict[str, dict[str, Any]] = {
    # A forecast needs a length.
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    # The default leaves out what only a checkpoint's configuration says: sizes of heads, counts of experts ...
    "clvp": {"speech_config": {"vocab_size": 8194}},  # its decoder's codes
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "diffusion_gemma": {"text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "granite4_vision": {
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[-8, 0], [-4, 4]],
        "vision_config": {"image_size": 336, "patch_size": 14},
    },
    "lw_detr": {"projector_scale_factors": [1.0]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": _FOUR_AXES}},
    "hunyuan_vl_text": {"head_dim": 128, "rope_parameters": _FOUR_AXES},
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
    "ministral": {"head_dim": 128},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {"embed_dim": 1024, "img_size": (448, 448)},
        }
    },
    "pp_ocrv5_server_det": {"intraclass_block_config": _PADDLE_BLOCK},
    "pp_ocrv6_medium_det": {"intraclass_block_config": _PADDLE_BLOCK},
    "pp_doclayout_v2": {"class_thresholds": 25 * [0.5], "class_order": list(range(25))},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "step3p7": {"text_config": {"sliding_window": 512}},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}, "vision_config": _GEMMA_EYE},
    "timm_backbone": {"backbone": "resnet50"},
    "xmod": {"default_language": "en_XX"},
    # The model is built only from one of the two forms that its configuration allows.
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    # Which token stands for an image, and which for each of its codes, is in the vocabulary.
    "chameleon": {
        "image_token_id": 8711,
        "vocabulary_map": {"<image>": 8711}
        | {f"IMGIMG{str(i).translate(str.maketrans('0123456789', 'ABCDEFGHIJ'))}Z": 4 + i for i in range(8192)},
    },
    "emu3": {
        "image_token_id": 151_600,
        "vocabulary_map": {"<image>": 151_600, "<|extra_200|>": 151_601}
        | {f"<|visual token {i:06}|>": 100 + i for i in range(32_768)},
    },
    # The parts' defaults do not fit each other.
    "aria": {"vision_config": {"image_size": 980, "patch_size": 14}},
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "cohere_compass": {"text_config": {"rope_parameters": _LAYER_ROPE}},
    "cohere_compass_text": {"rope_parameters": _LAYER_ROPE},
    "deepseek_ocr2": {
        "vision_config": {"encoder_config": _QWEN2_SMALL},
        "text_config": {"mlp_layer_types": ["dense"] + 31 * ["sparse"], "num_experts_per_tok": 6},
    },
    "edgetam": {"vision_config": {"backbone_config": _REPVIT}},
    "edgetam_video": {"vision_config": {"backbone_config": _REPVIT}},
    "edgetam_vision_model": {"backbone_config": _REPVIT},  # transformers misspells the architecture's key
    "granite_speech": {"projector_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": 1024}},
    "granite_speech_plus": {"projector_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": 1024}},
    "vitmatte": {"hidden_size": 768, "fusion_hidden_sizes": [256, 128, 64, 32]},  # a list is added to it
    "idefics3": {"vision_config": _IDEFICS_EYE},
    "smolvlm": {"vision_config": _IDEFICS_EYE},
    "modernvbert": {"vision_config": {"image_size": 512}},
    "colmodernvbert": {"vlm_config": {"vision_config": {"image_size": 512}}},
    "ultravbert": {"vision_config": {"image_size": 512}},
    "gemma3": {"vision_config": _GEMMA_EYE},
    "glm4v_moe_text": {"head_dim": 128, "rope_parameters": _GLM_ROPE},
    "glm4v_text": {"rope_parameters": _GLM_ROPE},
    "glm4v": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glm46v": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glm4v_moe": {"text_config": {"head_dim": 128, "rope_parameters": _GLM_ROPE}},
    "glm_image_text": {"rope_parameters": _GLM_ROPE},
    "glm_image": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "janus": {"vision_config": {"projection_dim": 4096}},
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "molmo2": {"adapter_config": {"text_hidden_size": 4096}},
    "ovis2": {"hidden_size": 4096},
    "pp_ocrv6_small_det": {
        "backbone_config": {
            "model_type": "pp_lcnet_v3",
            "scale": 0.75,
            "out_features": ["stage2", "stage3", "stage4", "stage5"],
            "divisor": 16,
        }
    },
    "shieldgemma2": {"vision_config": _GEMMA_EYE},
    "t5gemma2": {"encoder": {"vision_config": _GEMMA_EYE}},
}

# Depths; a text model of two layers, or of as many as show each kind of layer once, does what the deep one does.
_DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "speech_encoder_layers",
    "t2u_encoder_layers",
    "t2u_decoder_layers",
    "decoder_num_hidden_layers",
)
# The most of what else there may be: experts, layers before the first experts, layers that read the cache of others,
# tables of hashes.
_LOWERED = {
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "num_experts": 16,
    "moe_num_experts": 16,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "zero_expert_num": 16,
    "num_kv_shared_layers": 0,
    "encoder_hash_byte_group_vocab": 10_000,
}
_WIDTHS = {"vocab_size": 8192, "intermediate_size": 1024, "moe_intermediate_size": 256, "ffn_hidden_size": 1024}
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
# Settings that say after how many layers a kind of layer comes again.
_PERIODS = ("attn_layer_period", "expert_layer_period", "full_attention_interval", "hybrid_layer_period")

# The ids that a processor writes where an image, a clip or a sound stands.
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}


def make_config(name: str) -> tuple[Any, dict[str, Any]]:
    """Return the configuration of a model type, and what in it is not the default."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = ADJUSTMENTS.get(name, {})
    config = CONFIG_MAPPING[name](**copy.deepcopy(settings))
    return config, {**settings, **join_parts(config), **place_tokens(config)}


def own_config(model_class: Any, config: Any) -> Any:
    """Return the configuration that a model class is for: some base models are those of a part (MusicGen's decoder)."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in walk_configs(config) if isinstance(part, wanted)), config)


def join_parts(config: Any) -> dict[str, Any]:
    """Make what sees give features as wide as the text model takes them, and return what was changed."""
    width = getattr(config.get_text_config(), "hidden_size", None) if hasattr(config, "text_config") else None
    vision = config.__dict__.get("vision_config")
    given = getattr(vision, "out_hidden_size", None)
    if width is None or given is None or given == width:
        return {}
    vision.out_hidden_size = width
    return {"vision_config.out_hidden_size": width}


def place_tokens(config: Any) -> dict[str, Any]:
    """Give the placeholders ids that the vocabulary has, and return those that were changed.

    Defaults of a composite are often those of two checkpoints: a placeholder of 151,655 in a vocabulary of 32,000.
    """
    changed = {}
    vocabulary = read_vocabulary(config)
    for part in walk_configs(config):
        for offset, names in enumerate(PLACEHOLDERS.values(), start=1):
            for name in names:
                given = part.__dict__.get(name, 0)
                if (given is None or given >= vocabulary) and vocabulary > 100:
                    setattr(part, name, vocabulary - offset)
                    changed[name] = vocabulary - offset
        padding = part.__dict__.get("pad_token_id")
        own = part.__dict__.get("vocab_size")
        if isinstance(padding, int) and isinstance(own, int) and padding >= own:
            part.pad_token_id = changed["pad_token_id"] = 0
    return changed


def read_vocabulary(config: Any) -> int:
    """Return the number of tokens that the text model knows, 0 where there is none."""
    for part in (*_texts(config), *walk_configs(config)):
        for name in ("vocab_size", "text_vocab_size", "input_vocab_size", "src_vocab_size"):
            size = getattr(part, name, None)
            if isinstance(size, int):
                return size
    return 0


def _texts(config: Any) -> list[Any]:
    try:
        return [config.get_text_config()]
    except ValueError:  # it has two, an encoder's and a decoder's
        return []


def shrink(config: Any, *, more: bool = False, eyes: bool = False) -> dict[str, Any]:
    """Lower the depths and the numbers of experts of a configuration in place, and return what was changed.

    Widths stay, so that every shape but the number of layers and experts is that of the real model; with `more`, the
    vocabulary and the inner widths of feed-forward layers shrink too. Parts that see or hear stay whole without `eyes`:
    they are small, and name some of their layers by number.
    """
    changed: dict[str, Any] = {}
    for part in walk_configs(config):
        if not eyes and any(word in type(part).__name__ for word in ("Vision", "Audio", "Backbone")):
            continue
        changed |= _shrink_part(part)
        if more:
            changed |= _lower(part, _WIDTHS)
    return {**changed, **place_tokens(config)}


def _lower(config: Any, limits: Mapping[str, int]) -> dict[str, Any]:
    counts = {name: config.__dict__.get(name) for name in limits}
    changed = {name: limits[name] for name, count in counts.items() if isinstance(count, int) and count > limits[name]}
    for name, value in changed.items():
        setattr(config, name, value)
    return changed


def _shrink_part(config: Any) -> dict[str, Any]:
    changed = _lower(config, _LOWERED)
    depths = {name: config.__dict__.get(name) for name in _DEPTHS}
    depths = {name: depth for name, depth in depths.items() if isinstance(depth, int) and depth > 2}
    for name, depth in depths.items():
        few = min(depth, _count_layers(config, depth))
        changed[name] = few
        for key, value in list(config.__dict__.items()):
            if isinstance(value, (list, tuple)) and len(value) == depth and not key.startswith("_"):
                setattr(config, key, value[:few])
        setattr(config, name, few)
    return changed


def _count_layers(config: Any, depth: int) -> int:
    """Return how many of the first layers show each kind of layer once, at least 2."""
    needed = 2
    for name in _KINDS:
        kinds = config.__dict__.get(name)
        if isinstance(kinds, (list, tuple)) and len(kinds) == depth:
            needed = max(needed, 1 + max(kinds.index(kind) for kind in set(kinds)))
    for name in _PERIODS:
        period = config.__dict__.get(name)
        if isinstance(period, int):
            needed = max(needed, period)
    return needed


def walk_configs(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(config.__dict__.values()):
        if isinstance(value, PreTrainedConfig):
            yield from walk_configs(value)
