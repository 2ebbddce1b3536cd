"""Small pipelines of diffusers, as folders with configurations only."""

import json
from pathlib import Path
from typing import Any

_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "projection_dim": 32,
    "max_position_embeddings": 77,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
_VAE = {
    "block_out_channels": [32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
}
_UNET = {
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "sample_size": 16,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
_TEXT_ENCODER = ("transformers", "CLIPTextModel", _CLIP)
_PROJECTION = ("transformers", "CLIPTextModelWithProjection", _CLIP)
_T5_ENCODER = ("transformers", "T5EncoderModel", _T5)
_IMAGE_VAE = ("diffusers", "AutoencoderKL", _VAE)
_DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "patch_size": 2}

# Pipeline → component → (library, class, configuration).
PIPELINES: dict[str, dict[str, tuple[str, str, dict[str, Any]]]] = {
    "StableDiffusionPipeline": {
        "vae": _IMAGE_VAE,
        "text_encoder": _TEXT_ENCODER,
        "unet": ("diffusers", "UNet2DConditionModel", _UNET),
    },
    "StableDiffusionXLPipeline": {
        "vae": _IMAGE_VAE,
        "text_encoder": _TEXT_ENCODER,
        "text_encoder_2": _PROJECTION,
        "unet": (
            "diffusers",
            "UNet2DConditionModel",
            _UNET
            | {
                "cross_attention_dim": 64,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 80,
                "use_linear_projection": True,
            },
        ),
    },
    "StableDiffusion3Pipeline": {
        "transformer": (
            "diffusers",
            "SD3Transformer2DModel",
            _DIT
            | {
                "sample_size": 16,
                "in_channels": 8,
                "joint_attention_dim": 32,
                "caption_projection_dim": 16,
                "pooled_projection_dim": 64,
                "out_channels": 8,
            },
        ),
        "vae": ("diffusers", "AutoencoderKL", _VAE | {"latent_channels": 8, "shift_factor": 0.06}),
        "text_encoder": _PROJECTION,
        "text_encoder_2": _PROJECTION,
        "text_encoder_3": _T5_ENCODER,
    },
    "FluxPipeline": {
        "vae": ("diffusers", "AutoencoderKL", _VAE | {"shift_factor": 0.06}),
        "text_encoder": _TEXT_ENCODER,
        "text_encoder_2": _T5_ENCODER,
        "transformer": (
            "diffusers",
            "FluxTransformer2DModel",
            {
                "patch_size": 1,
                "in_channels": 16,
                "num_layers": 1,
                "num_single_layers": 1,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "pooled_projection_dim": 32,
                "axes_dims_rope": [4, 4, 8],
                "guidance_embeds": True,
            },
        ),
    },
    "PixArtAlphaPipeline": {
        "vae": _IMAGE_VAE,
        "text_encoder": _T5_ENCODER,
        "transformer": (
            "diffusers",
            "PixArtTransformer2DModel",
            _DIT
            | {
                "sample_size": 16,
                "in_channels": 4,
                "out_channels": 8,
                "cross_attention_dim": 16,
                "caption_channels": 32,
                "norm_type": "ada_norm_single",
            },
        ),
    },
    "DiTPipeline": {
        "vae": _IMAGE_VAE,
        "transformer": (
            "diffusers",
            "DiTTransformer2DModel",
            _DIT | {"sample_size": 16, "in_channels": 4, "out_channels": 8, "num_embeds_ada_norm": 1000},
        ),
    },
    "CogVideoXPipeline": {
        "vae": (
            "diffusers",
            "AutoencoderKLCogVideoX",
            {
                "down_block_types": ["CogVideoXDownBlock3D"] * 4,
                "up_block_types": ["CogVideoXUpBlock3D"] * 4,
                "block_out_channels": [8, 8, 8, 8],
                "latent_channels": 4,
                "layers_per_block": 1,
                "norm_num_groups": 2,
                "temporal_compression_ratio": 4,
            },
        ),
        "text_encoder": _T5_ENCODER,
        "transformer": (
            "diffusers",
            "CogVideoXTransformer3DModel",
            {
                "num_attention_heads": 4,
                "attention_head_dim": 16,
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 2,
                "text_embed_dim": 32,
                "num_layers": 1,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 9,
                "patch_size": 2,
                "temporal_compression_ratio": 4,
                "max_text_seq_length": 226,
                "use_rotary_positional_embeddings": True,
            },
        ),
    },
    "WanPipeline": {
        "vae": (
            "diffusers",
            "AutoencoderKLWan",
            {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        ),
        "text_encoder": ("transformers", "UMT5EncoderModel", _T5),
        "transformer": (
            "diffusers",
            "WanTransformer3DModel",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "in_channels": 16,
                "out_channels": 16,
                "text_dim": 32,
                "freq_dim": 256,
                "ffn_dim": 32,
                "num_layers": 2,
            },
        ),
    },
    "LTXPipeline": {
        "vae": (
            "diffusers",
            "AutoencoderKLLTXVideo",
            {
                "latent_channels": 8,
                "block_out_channels": [8, 8, 8, 8],
                "decoder_block_out_channels": [8, 8, 8, 8],
                "layers_per_block": [1, 1, 1, 1, 1],
                "decoder_layers_per_block": [1, 1, 1, 1, 1],
                "spatio_temporal_scaling": [True, True, False, False],
                "decoder_spatio_temporal_scaling": [True, True, False, False],
                "decoder_inject_noise": [False] * 5,
                "upsample_residual": [False] * 4,
                "upsample_factor": [1] * 4,
                "timestep_conditioning": False,
                "patch_size": 1,
                "patch_size_t": 1,
            },
        ),
        "text_encoder": _T5_ENCODER,
        "transformer": (
            "diffusers",
            "LTXVideoTransformer3DModel",
            {
                "in_channels": 8,
                "out_channels": 8,
                "num_attention_heads": 4,
                "attention_head_dim": 8,
                "cross_attention_dim": 32,
                "num_layers": 1,
                "caption_channels": 32,
            },
        ),
    },
    "StableVideoDiffusionPipeline": {
        "vae": (
            "diffusers",
            "AutoencoderKLTemporalDecoder",
            {
                "block_out_channels": [32, 64],
                "down_block_types": ["DownEncoderBlock2D"] * 2,
                "latent_channels": 4,
            },
        ),
        "image_encoder": (
            "transformers",
            "CLIPVisionModelWithProjection",
            {
                "hidden_size": 32,
                "intermediate_size": 37,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "projection_dim": 32,
                "image_size": 224,
                "patch_size": 32,
            },
        ),
        "unet": (
            "diffusers",
            "UNetSpatioTemporalConditionModel",
            {
                "block_out_channels": [32, 64],
                "layers_per_block": 1,
                "sample_size": 16,
                "in_channels": 8,
                "out_channels": 4,
                "down_block_types": ["CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"],
                "up_block_types": ["UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"],
                "cross_attention_dim": 32,
                "num_attention_heads": 4,
                "projection_class_embeddings_input_dim": 96,
                "addition_time_embed_dim": 32,
                "num_frames": 3,
            },
        ),
    },
}


def write_pipeline(folder: Path, name: str) -> Path:
    """Write a pipeline's model_index.json and its components' configurations; return the folder."""
    index: dict[str, Any] = {"_class_name": name, "_diffusers_version": "0.42.1", "feature_extractor": [None, None]}
    for component, (library, class_name, settings) in PIPELINES[name].items():
        index[component] = [library, class_name]
        path = folder / component / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"_class_name": class_name, **settings}))
    index["scheduler"] = ["diffusers", "DDIMScheduler"]
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
