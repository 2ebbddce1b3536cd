"""Inputs of transformers models to which the rules in `inputs` do not apply, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fvflops.sources.transformers import special_inputs, vision_inputs
from fvflops.sources.transformers.configurations import PLACEHOLDERS
from fvflops.sources.transformers.input_request import (
    BINS,
    SPECTROGRAM,
    InputRequest,
    floats,
    integers,
    make_token_ids,
    ones,
)


def codebooks_last(request: InputRequest) -> dict[str, Any]:
    """Text and the codes of audio, side by side (Moshi)."""
    codebooks = request.setting("num_codebooks") + 1
    return {"input_ids": integers([[[1] * codebooks] * 32]), "attention_mask": ones(1, 32)}


def codebooks_as_rows(request: InputRequest) -> dict[str, Any]:
    """Codes of audio, a row for each codebook (MusicGen), for the decoder of a model that also reads text."""
    if request.accepts("decoder_input_ids"):
        codes = ones(request.setting("num_codebooks"), 32)
        return {"decoder_input_ids": codes, "decoder_attention_mask": ones(1, 32)}
    codes = ones(request.setting("num_codebooks"), request.codes())
    return {"input_ids": codes, "attention_mask": ones(1, codes.shape[1])}


def decoder_codebooks(request: InputRequest) -> dict[str, Any]:
    """Nine codebooks for the decoder (Dia)."""
    return {"decoder_input_ids": integers([[[1] * 9] * 32]), "decoder_attention_mask": ones(1, 32)}


def codec_latents(request: InputRequest) -> dict[str, Any]:
    """Latents for a codec's decoder."""
    return {"latents": floats(request, 1, request.setting("hidden_size", "codebook_dim"), 25)}


def codec_waveform(request: InputRequest) -> dict[str, Any]:
    """Audio and its features at 16 kHz."""
    return {
        "input_values": floats(request, 1, 1, 16_000),
        "input_features": floats(request, 1, 50, 160),
        "input_features_mask": ones(1, 50),
    }


def acoustic_tokenizer_states(request: InputRequest) -> dict[str, Any]:
    """Audio for an encoder, or latents for a decoder (VibeVoice)."""
    if "decoder" in request.model_type:
        return {"hidden_states": floats(request, 1, request.setting("hidden_size", "latent_size"), 8)}
    return {"hidden_states": floats(request, 1, 1, 25_600)}


def fixed_spectrogram(request: InputRequest) -> dict[str, Any]:
    """A spectrogram of the length that the configuration names (AST)."""
    return {"input_values": floats(request, 1, request.config.max_length, request.config.num_mel_bins)}


def frames_first(request: InputRequest) -> dict[str, Any]:
    """A spectrogram of (frames, bins)."""
    bins = request.setting(*BINS, part="audio", default=80)
    return {"input_features": floats(request, 1, SPECTROGRAM, bins)}


def bins_first(request: InputRequest) -> dict[str, Any]:
    """A spectrogram of (bins, frames), and its mask."""
    bins = request.setting(*BINS, part="audio", default=80)
    return {"input_features": floats(request, 1, bins, SPECTROGRAM), "input_features_mask": ones(1, SPECTROGRAM)}


def stacked_frames(request: InputRequest) -> dict[str, Any]:
    """A spectrogram with several frames in one, and its mask."""
    bins = request.setting("input_size", part="audio")
    return {"input_features": floats(request, 1, 500, bins), "input_features_mask": ones(1, 500)}


def omni_spectrogram(request: InputRequest) -> dict[str, Any]:
    """A spectrogram of (128 bins, frames), and its mask (Qwen Omni)."""
    return {"input_features": floats(request, 1, 128, SPECTROGRAM), "feature_attention_mask": ones(1, SPECTROGRAM)}


def token_per_frame(request: InputRequest) -> dict[str, Any]:
    """One token of text for each 80 ms of audio (Voxtral Realtime)."""
    return {"input_ids": make_token_ids(request, SPECTROGRAM // 8)}


def audio_placeholders(request: InputRequest) -> dict[str, Any]:
    """Text and 750 placeholders, for 30 seconds; the model computes features of audio only together with them."""
    text = make_token_ids(request, request.tokens())
    token = request.setting(*PLACEHOLDERS["audio"])
    return {"input_ids": torch.cat([text, torch.full((1, SPECTROGRAM // 4), token, device="cpu")], dim=1)}


def projected_audio(request: InputRequest) -> dict[str, Any]:
    """States for encoder and decoder: the base model has no part that reads audio or text (SpeechT5)."""
    width = request.config.hidden_size
    return {"input_values": floats(request, 1, 100, width), "decoder_input_values": floats(request, 1, 50, width)}


def masked_spectrogram(request: InputRequest) -> dict[str, Any]:
    """A spectrogram and its mask, in which true is padding (Gemma 3n)."""
    return {
        "audio_mel": floats(request, 1, SPECTROGRAM, request.setting("input_feat_size")),
        "audio_mel_mask": torch.zeros(1, SPECTROGRAM, dtype=torch.bool, device="cpu"),
    }


def spectrogram_of_128(request: InputRequest) -> dict[str, Any]:
    """A spectrogram of (frames, 128 bins), and its mask (Gemma 4)."""
    return {
        "input_features": floats(request, 1, SPECTROGRAM, 128),
        "attention_mask": ones(1, SPECTROGRAM).bool(),
    }


def padding_mask(request: InputRequest) -> dict[str, Any]:
    """A mask of the spectrogram's frames."""
    return {"padding_mask": ones(1, SPECTROGRAM)}


def features_mask(request: InputRequest) -> dict[str, Any]:
    """A mask of the spectrogram's frames, as bool (Gemma 3n)."""
    return {"input_features_mask": ones(1, SPECTROGRAM).bool()}


def forecast_series(request: InputRequest) -> dict[str, Any]:
    """Past and future values of a time series with their features (Autoformer)."""
    config = request.config
    past = config.context_length + max(config.lags_sequence)
    features = config.num_time_features + config.num_dynamic_real_features
    future = config.prediction_length
    return {
        "past_values": floats(request, 1, past),
        "past_time_features": floats(request, 1, past, features),
        "past_observed_mask": floats(request, 1, past),
        "future_values": floats(request, 1, future),
        "future_time_features": floats(request, 1, future, features),
    }


def multivariate_series(request: InputRequest) -> dict[str, Any]:
    """Past values of several time series (PatchTST)."""
    return {"past_values": floats(request, 1, request.config.context_length, request.config.num_input_channels)}


def padded_series(request: InputRequest) -> dict[str, Any]:
    """512 past values with their padding mask and frequency (TimesFM)."""
    return {
        "past_values": floats(request, 1, 512),
        "past_values_padding": torch.zeros_like(ones(1, 512)),
        "freq": integers([[0]]),
    }


def without_cache(request: InputRequest) -> dict[str, Any]:
    """No cache: masks read its length from an attention layer, which the default configuration does not have."""
    return {"use_cache": False}


def query_states(request: InputRequest) -> dict[str, Any]:
    """Learned queries and an image's features (Q-Former)."""
    config = request.config
    return {
        "query_embeds": floats(request, 1, 32, config.hidden_size),
        "encoder_hidden_states": floats(request, 1, 257, config.encoder_hidden_size),
    }


def option_marks(request: InputRequest) -> dict[str, Any]:
    """Positions of two questions with two options each."""
    return {
        "marks": integers([[40, 80]]),
        "num_options": integers([[2, 2]]),
        "question_type_ids": integers([[0, 0]]),
    }


def draft_states(request: InputRequest) -> dict[str, Any]:
    """A block to denoise, and the target model's hidden states, for speculative decoding."""
    width = request.config.hidden_size
    return {
        "noise_embeds": floats(request, 1, request.config.block_size, width),
        "context_hidden_states": floats(request, 1, request.tokens(), width * len(request.config.target_layer_ids)),
    }


def text_embeddings(request: InputRequest) -> dict[str, Any]:
    """Embeddings in place of token ids."""
    return {"inputs_embeds": floats(request, 1, request.tokens(), request.config.hidden_size)}


def byte_embeddings(request: InputRequest) -> dict[str, Any]:
    """2,048 embedded bytes (Perceiver)."""
    return {"inputs": floats(request, 1, 2048, request.config.d_model), "attention_mask": ones(1, 2048)}


def trajectory(request: InputRequest) -> dict[str, Any]:
    """20 steps of states, actions and rewards (Decision Transformer)."""
    steps = 20
    return {
        "states": floats(request, 1, steps, request.config.state_dim),
        "actions": floats(request, 1, steps, request.config.act_dim),
        "rewards": floats(request, 1, steps, 1),
        "returns_to_go": floats(request, 1, steps, 1),
        "timesteps": torch.arange(steps, device="cpu")[None],
        "attention_mask": ones(1, steps),
    }


# Model type → the function that makes the arguments to which no rule in `inputs` applies.
SPECIAL: dict[str, Callable[[InputRequest], dict[str, Any]]] = {
    "autoformer": special_inputs.forecast_series,
    "informer": special_inputs.forecast_series,
    "time_series_transformer": special_inputs.forecast_series,
    "patchtsmixer": special_inputs.multivariate_series,
    "patchtst": special_inputs.multivariate_series,
    "timesfm": special_inputs.padded_series,
    "timesfm2_5": special_inputs.padded_series,
    "idefics2": vision_inputs.one_tile,
    "idefics3": vision_inputs.one_tile,
    "smolvlm": vision_inputs.one_tile,
    "modernvbert": vision_inputs.one_tile,
    "colmodernvbert": vision_inputs.one_tile,
    "ultravbert": vision_inputs.one_tile,
    "timesformer": vision_inputs.video_frames,
    "xclip": vision_inputs.video_frames,
    "llava_next": vision_inputs.anyres_tiles,
    "llava_next_video": vision_inputs.anyres_tiles,
    "llava_onevision": vision_inputs.anyres_tiles,
    "granite4_vision": vision_inputs.anyres_tiles,
    "mistral3": vision_inputs.image_with_size,
    "mistral_large4": vision_inputs.image_with_size,
    "lighton_ocr": vision_inputs.image_with_size,
    "siglip2": vision_inputs.padded_patches,
    "siglip2_vision_model": vision_inputs.padded_patches,
    "lfm2_vl": vision_inputs.padded_patches,
    "blt": special_inputs.without_cache,
    "bamba": special_inputs.without_cache,
    "granitemoehybrid": special_inputs.without_cache,
    "instructblip": vision_inputs.qformer_inputs,
    "instructblipvideo": vision_inputs.qformer_inputs,
    "kyutai_speech_to_text": special_inputs.codebooks_last,
    "dia": special_inputs.decoder_codebooks,
    "mllama": vision_inputs.aspect_ratio_tiles,
    "video_llama_3": vision_inputs.merged_patches,
    "video_llama_3_vision": vision_inputs.merged_patches,
    "mimi_decoder": special_inputs.codec_latents,
    "pocket_tts_audio_tokenizer_decoder": special_inputs.codec_latents,
    "decision_transformer": special_inputs.trajectory,
    "gemma3n": special_inputs.features_mask,
    "inkling_mm_model": vision_inputs.temporal_patches_and_audio,
    "sam2_video": vision_inputs.video_session,
    "sam3_tracker_video": vision_inputs.video_session,
    "edgetam_video": vision_inputs.video_session,
    "pe_audio": vision_inputs.waveform_and_video,
    "pe_audio_encoder": vision_inputs.waveform_and_video,
    "pe_audio_video": vision_inputs.waveform_and_video,
    "pe_audio_video_encoder": vision_inputs.waveform_and_video,
    "vibevoice_acoustic_tokenizer": vision_inputs.waveform_and_video,
    "vibevoice_acoustic_tokenizer_encoder": special_inputs.acoustic_tokenizer_states,
    "vibevoice_acoustic_tokenizer_decoder": special_inputs.acoustic_tokenizer_states,
    "vibevoice_asr": vision_inputs.waveform_and_video,
    "minicpm_ocr": vision_inputs.patches_in_a_row,
    "minicpm_ocr_vision": vision_inputs.patches_in_a_row,
    "minicpmv4_6": vision_inputs.patches_in_a_row,
    "minicpmv4_7": vision_inputs.patches_in_a_row,
    "minicpmv4_7_vision": vision_inputs.patches_in_a_row,
    "kimi_k25": vision_inputs.square_patches,
    "kimi_k25_vision": vision_inputs.square_patches,
    "paddleocr_vl": vision_inputs.square_patches,
    "nemotron_h_omni": vision_inputs.flat_patches,
    "colqwen2": vision_inputs.patches_of_a_batch,
    "granite_docling": vision_inputs.masked_tile,
    "kosmos-2": vision_inputs.latent_query_mask,
    "audio-spectrogram-transformer": special_inputs.fixed_spectrogram,
    "speech_to_text": special_inputs.frames_first,
    "univnet": special_inputs.frames_first,
    "qwen3_omni_moe_thinker": special_inputs.omni_spectrogram,
    "qwen2_5_omni_thinker": special_inputs.omni_spectrogram,
    "qwen3_asr": special_inputs.bins_first,
    "qwen3_asr_encoder": special_inputs.bins_first,
    "fun_asr_nano": special_inputs.stacked_frames,
    "fun_asr_nano_encoder": special_inputs.stacked_frames,
    "voxtral_realtime": special_inputs.token_per_frame,
    "musicflamingo": special_inputs.audio_placeholders,
    "qwen2_audio": special_inputs.audio_placeholders,
    "neucodec": special_inputs.codec_waveform,
    "xcodec2": special_inputs.codec_waveform,
    "speecht5": special_inputs.projected_audio,
    "gemma3n_audio": special_inputs.masked_spectrogram,
    "gemma4_audio": special_inputs.spectrogram_of_128,
    "gemma4_vision": vision_inputs.patches_with_positions,
    "molmo2": vision_inputs.pooled_patches,
    "inkling2": vision_inputs.merged_square_patches,
    "inkling2_vision": vision_inputs.merged_square_patches,
    "fuyu": vision_inputs.projected_patches,
    "glm_image": vision_inputs.image_to_image,
    "musicgen": special_inputs.codebooks_as_rows,
    "musicgen_decoder": special_inputs.codebooks_as_rows,
    "musicgen_melody": special_inputs.codebooks_as_rows,
    "musicgen_melody_decoder": special_inputs.codebooks_as_rows,
    "emu3": vision_inputs.image_of_512,
    "idefics": vision_inputs.tile_with_text_mask,
    "blip_2_qformer": special_inputs.query_states,
    "jev": special_inputs.option_marks,
    "muse_glimmer_assistant": special_inputs.draft_states,
    "nemotron3_5_transcribe_word_timestamp": special_inputs.text_embeddings,
    "omdet-turbo": vision_inputs.tasks_and_classes,
    "oneformer": vision_inputs.task_tokens,
    "pi0": vision_inputs.image_and_actions,
    "perceiver": special_inputs.byte_embeddings,
    "pix2struct": vision_inputs.patches_with_coordinates,
    "idefics3_vision": vision_inputs.patch_mask,
    "smolvlm_vision": vision_inputs.patch_mask,
    "seggpt": vision_inputs.image_and_prompt,
    "neomme": vision_inputs.embedded_patches,
    "moss_transcribe_diarize": special_inputs.padding_mask,
}

# Model type → the shapes of floating-point arguments that do not depend on the configuration.
FIXED_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "aria": {"pixel_values": (1, 3, 490, 490)},  # the model accepts images of 490 and 980
    "clap": {"input_features": (1, 1, 1001, 64)},  # 10 seconds
    "deepseek_vl_hybrid": {"high_res_pixel_values": (1, 3, 1024, 1024)},
    "depth_pro": {"pixel_values": (1, 3, 1536, 1536)},  # four times its patches of 384
    "efficientloftr": {"pixel_values": (1, 2, 3, 480, 640)},  # two images to match
    "granite_speech5_ctc": {"input_features": (1, 750, 320)},  # four stacked frames of 80 bins
    "granite_speech5_encoder": {"input_features": (1, 750, 320)},  # four stacked frames of 80 bins
    "lightglue": {"pixel_values": (1, 2, 3, 480, 640)},  # two images to match
    "lxmert": {"visual_feats": (1, 36, 2048), "visual_pos": (1, 36, 4)},  # regions of a detector
    "pe_video": {"pixel_values_videos": (1, 16, 3, 336, 336)},
    "pe_video_encoder": {"pixel_values_videos": (1, 16, 3, 336, 336)},
    "perception_lm": {"pixel_values": (1, 1, 3, 448, 448)},
    "pop2piano": {"input_features": (1, 300, 512)},  # a spectrogram as wide as the model
    "rf_detr": {"pixel_values": (1, 3, 560, 560)},  # a multiple of the windows, 4 × 14
    "superglue": {"pixel_values": (1, 2, 3, 480, 640)},  # two images to match
    "tvp": {"pixel_values": (1, 48, 3, 448, 448)},  # 48 frames
}

# Model type → arguments that are omitted: the model accepts either audio or text, or a mask is of the features.
OMITTED: dict[str, tuple[str, ...]] = {
    "csm": ("input_values", "input_features", "pixel_values"),
    "granite_speech": ("input_features_mask",),
    "granite_speech_plus": ("input_features_mask",),
    "pop2piano": ("input_ids", "attention_mask"),
    "seamless_m4t": ("input_ids", "attention_mask"),
    "seamless_m4t_v2": ("input_ids", "attention_mask"),
    "vibevoice": ("input_values", "input_features", "pixel_values"),
}

# Model type → arguments whose samples are concatenated along another axis than the first.
BATCH_AXES: dict[str, dict[str, int]] = {
    "minicpm_ocr": {"pixel_values": -1},
    "minicpm_ocr_vision": {"pixel_values": -1},
    "minicpmv4_6": {"pixel_values": -1},
    "minicpmv4_7": {"pixel_values": -1},
    "minicpmv4_7_vision": {"pixel_values": -1},
}
