"""Settings that the default configurations of some transformers models lack."""

from __future__ import annotations

from typing import Any

_SERIES = {"prediction_length": 24, "context_length": 48}
_LAYER_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
_GEMMA_VISION = {"image_size": 896, "patch_size": 14}
_IDEFICS_VISION = {"image_size": 364, "patch_size": 14}  # pixel shuffle needs an even number of patches
_GLM_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_FOUR_AXIS_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [16, 16, 16, 16]}
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

# Model type → settings without which the default configuration builds no model, or one whose forward raises.
ADJUSTMENTS: dict[str, dict[str, Any]] = {
    # Lengths of a forecast, which have no default.
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    # Settings without a default, such as sizes of heads and numbers of experts: those of a checkpoint.
    "clvp": {"speech_config": {"vocab_size": 8194}},  # the decoder's codes
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
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": _FOUR_AXIS_ROPE}},
    "hunyuan_vl_text": {"head_dim": 128, "rope_parameters": _FOUR_AXIS_ROPE},
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
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}, "vision_config": _GEMMA_VISION},
    "timm_backbone": {"backbone": "resnet50"},
    "xmod": {"default_language": "en_XX"},
    # The configuration allows two forms, of which the model builds one.
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    # The tokens of an image and of its codes, which a checkpoint's vocabulary names.
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
    # Defaults of sub-configurations that contradict each other.
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
    "idefics3": {"vision_config": _IDEFICS_VISION},
    "smolvlm": {"vision_config": _IDEFICS_VISION},
    "modernvbert": {"vision_config": {"image_size": 512}},
    "colmodernvbert": {"vlm_config": {"vision_config": {"image_size": 512}}},
    "ultravbert": {"vision_config": {"image_size": 512}},
    "gemma3": {"vision_config": _GEMMA_VISION},
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
    "shieldgemma2": {"vision_config": _GEMMA_VISION},
    "t5gemma2": {"encoder": {"vision_config": _GEMMA_VISION}},
}
