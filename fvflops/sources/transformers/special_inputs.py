"""Inputs of transformers models to which the rules in `inputs` do not apply, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fvflops.sources.transformers import audio_inputs, other_inputs, vision_inputs
from fvflops.sources.transformers.input_request import InputRequest

# Model type → the function that makes the arguments to which no rule in `inputs` applies.
SPECIAL: dict[str, Callable[[InputRequest], dict[str, Any]]] = {
    "autoformer": other_inputs.forecast_series,
    "informer": other_inputs.forecast_series,
    "time_series_transformer": other_inputs.forecast_series,
    "patchtsmixer": other_inputs.multivariate_series,
    "patchtst": other_inputs.multivariate_series,
    "timesfm": other_inputs.padded_series,
    "timesfm2_5": other_inputs.padded_series,
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
    "blt": other_inputs.without_cache,
    "bamba": other_inputs.without_cache,
    "granitemoehybrid": other_inputs.without_cache,
    "instructblip": vision_inputs.qformer_inputs,
    "instructblipvideo": vision_inputs.qformer_inputs,
    "kyutai_speech_to_text": audio_inputs.codebooks_last,
    "dia": audio_inputs.decoder_codebooks,
    "mllama": vision_inputs.aspect_ratio_tiles,
    "video_llama_3": vision_inputs.merged_patches,
    "video_llama_3_vision": vision_inputs.merged_patches,
    "mimi_decoder": audio_inputs.codec_latents,
    "pocket_tts_audio_tokenizer_decoder": audio_inputs.codec_latents,
    "decision_transformer": other_inputs.trajectory,
    "gemma3n": audio_inputs.features_mask,
    "inkling_mm_model": vision_inputs.temporal_patches_and_audio,
    "sam2_video": vision_inputs.video_session,
    "sam3_tracker_video": vision_inputs.video_session,
    "edgetam_video": vision_inputs.video_session,
    "pe_audio": vision_inputs.waveform_and_video,
    "pe_audio_encoder": vision_inputs.waveform_and_video,
    "pe_audio_video": vision_inputs.waveform_and_video,
    "pe_audio_video_encoder": vision_inputs.waveform_and_video,
    "vibevoice_acoustic_tokenizer": vision_inputs.waveform_and_video,
    "vibevoice_acoustic_tokenizer_encoder": audio_inputs.acoustic_tokenizer_states,
    "vibevoice_acoustic_tokenizer_decoder": audio_inputs.acoustic_tokenizer_states,
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
    "audio-spectrogram-transformer": audio_inputs.fixed_spectrogram,
    "speech_to_text": audio_inputs.frames_first,
    "univnet": audio_inputs.frames_first,
    "qwen3_omni_moe_thinker": audio_inputs.omni_spectrogram,
    "qwen2_5_omni_thinker": audio_inputs.omni_spectrogram,
    "qwen3_asr": audio_inputs.bins_first,
    "qwen3_asr_encoder": audio_inputs.bins_first,
    "fun_asr_nano": audio_inputs.stacked_frames,
    "fun_asr_nano_encoder": audio_inputs.stacked_frames,
    "voxtral_realtime": audio_inputs.token_per_frame,
    "musicflamingo": audio_inputs.audio_placeholders,
    "qwen2_audio": audio_inputs.audio_placeholders,
    "neucodec": audio_inputs.codec_waveform,
    "xcodec2": audio_inputs.codec_waveform,
    "speecht5": audio_inputs.projected_audio,
    "gemma3n_audio": audio_inputs.masked_spectrogram,
    "gemma4_audio": audio_inputs.spectrogram_of_128,
    "gemma4_vision": vision_inputs.patches_with_positions,
    "molmo2": vision_inputs.pooled_patches,
    "inkling2": vision_inputs.merged_square_patches,
    "inkling2_vision": vision_inputs.merged_square_patches,
    "fuyu": vision_inputs.projected_patches,
    "glm_image": vision_inputs.image_to_image,
    "musicgen": audio_inputs.codebooks_as_rows,
    "musicgen_decoder": audio_inputs.codebooks_as_rows,
    "musicgen_melody": audio_inputs.codebooks_as_rows,
    "musicgen_melody_decoder": audio_inputs.codebooks_as_rows,
    "emu3": vision_inputs.image_of_512,
    "idefics": vision_inputs.tile_with_text_mask,
    "blip_2_qformer": other_inputs.query_states,
    "jev": other_inputs.option_marks,
    "muse_glimmer_assistant": other_inputs.draft_states,
    "nemotron3_5_transcribe_word_timestamp": other_inputs.text_embeddings,
    "omdet-turbo": vision_inputs.tasks_and_classes,
    "oneformer": vision_inputs.task_tokens,
    "pi0": vision_inputs.image_and_actions,
    "perceiver": other_inputs.byte_embeddings,
    "pix2struct": vision_inputs.patches_with_coordinates,
    "idefics3_vision": vision_inputs.patch_mask,
    "smolvlm_vision": vision_inputs.patch_mask,
    "seggpt": vision_inputs.image_and_prompt,
    "neomme": vision_inputs.embedded_patches,
    "moss_transcribe_diarize": audio_inputs.padding_mask,
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
