"""The inputs of transformers' models that no rule tells: model type → the arguments whose form is its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fvflops.sources.transformers.configurations import PLACEHOLDERS
from fvflops.sources.transformers.input_request import (
    BINS,
    FRAMES,
    IMAGE,
    SOUND,
    Asked,
    floats,
    image_channels,
    image_sides,
    integers,
    make_words,
    ones,
)


def _image(asked: Asked, *leading: int) -> torch.Tensor:
    """Return images with the given leading axes: (batch, tiles), (batch, frames) ..."""
    return floats(asked, *leading, image_channels(asked), *image_sides(asked))


def _tiles(asked: Asked) -> dict[str, Any]:
    return {"pixel_values": _image(asked, 1, 1)}


def _frames(asked: Asked) -> dict[str, Any]:
    return {"pixel_values": _image(asked, 1, asked.read("num_frames", part="vision", default=8))}


def _anyres(asked: Asked) -> dict[str, Any]:
    """An image cut into 2 × 2 tiles, and the whole of it made small."""
    height, width = image_sides(asked)
    sizes = integers([[2 * height, 2 * width]])
    return {"pixel_values": _image(asked, 1, 5), "image_sizes": sizes}


def _sized(asked: Asked) -> dict[str, Any]:
    """An image of any size, which is told beside it: Pixtral's."""
    side = min(image_sides(asked)[0], 448)
    return {"pixel_values": floats(asked, 1, 3, side, side), "image_sizes": integers([[side, side]])}


def _flat_patches(asked: Asked) -> dict[str, Any]:
    """SigLIP 2's patches, with the grid that they lie in."""
    patch = asked.read("patch_size", part="vision")
    limit = asked.read("num_patches", "max_num_patches", part="vision", default=256)
    side = int(limit**0.5)
    return {
        "pixel_values": floats(asked, 1, side * side, 3 * patch * patch),
        "pixel_attention_mask": ones(1, side * side),
        "spatial_shapes": integers([[side, side]]),
    }


def _series(asked: Asked) -> dict[str, Any]:
    config = asked.config
    past = config.context_length + max(config.lags_sequence)
    features = config.num_time_features + config.num_dynamic_real_features
    future = config.prediction_length
    return {
        "past_values": floats(asked, 1, past),
        "past_time_features": floats(asked, 1, past, features),
        "past_observed_mask": floats(asked, 1, past),
        "future_values": floats(asked, 1, future),
        "future_time_features": floats(asked, 1, future, features),
    }


def _patch_series(asked: Asked) -> dict[str, Any]:
    return {"past_values": floats(asked, 1, asked.config.context_length, asked.config.num_input_channels)}


def _times_fm(asked: Asked) -> dict[str, Any]:
    return {
        "past_values": floats(asked, 1, 512),
        "past_values_padding": torch.zeros_like(ones(1, 512)),
        "freq": integers([[0]]),
    }


def _no_cache(asked: Asked) -> dict[str, Any]:
    """Leave the cache out: the default configuration has no layer that its masks could ask about the past."""
    return {"use_cache": False}


def _qformer(asked: Asked) -> dict[str, Any]:
    video = "video" in asked.name
    image = _image(asked, 1, 4) if video else _image(asked, 1)
    return {"pixel_values": image, "qformer_input_ids": make_words(asked, 16)}


def _codes(asked: Asked) -> dict[str, Any]:
    """Text and the codes of a sound, side by side."""
    codebooks = asked.read("num_codebooks") + 1
    return {"input_ids": integers([[[1] * codebooks] * 32]), "attention_mask": ones(1, 32)}


def _dia(asked: Asked) -> dict[str, Any]:
    return {"decoder_input_ids": integers([[[1] * 9] * 32]), "decoder_attention_mask": ones(1, 32)}


def _mllama(asked: Asked) -> dict[str, Any]:
    return {
        "pixel_values": _image(asked, 1, 1, 4),
        "aspect_ratio_ids": integers([[1]]),
        "aspect_ratio_mask": ones(1, 1, 4),
        "cross_attention_mask": ones(1, asked.text, 1, 4),
    }


def _merges(asked: Asked) -> dict[str, Any]:
    return {"merge_sizes": integers([1]), "image_merge_sizes": integers([1])}


def _codec_code(asked: Asked) -> dict[str, Any]:
    width = asked.read("hidden_size", "codebook_dim")
    return {"latents": floats(asked, 1, width, 25)}


def _samples(asked: Asked) -> dict[str, Any]:
    """Sound with an axis for its one channel, and, for those that watch too, a clip."""
    made: dict[str, Any] = {"input_values": floats(asked, 1, 1, 19_200)}
    if asked.wants("pixel_values_videos"):
        made["pixel_values_videos"] = floats(asked, 1, FRAMES, 3, 336, 336)
    return made


def _navit(asked: Asked) -> dict[str, Any]:
    """MiniCPM's patches, all in one row, with the grid that they lie in."""
    patch = asked.read("patch_size", part="vision")
    return {"pixel_values": floats(asked, 1, 3, patch, 16 * 16 * patch), "target_sizes": integers([[16, 16]])}


def _square_patches(asked: Asked) -> dict[str, Any]:
    """Patches that are not flattened, and their grid."""
    patch = asked.read("patch_size", part="vision")
    grid = integers([[1, 16, 16]])
    return {"pixel_values": floats(asked, 256, 3, patch, patch), "grid_thw": grid, "image_grid_thw": grid}


def _flat_grid(asked: Asked) -> dict[str, Any]:
    patch = asked.read("patch_size", part="vision")
    return {"pixel_values": floats(asked, 256, 3 * patch * patch), "image_grid_hw": integers([[16, 16]])}


def _padded_patches(asked: Asked) -> dict[str, Any]:
    return {"pixel_values": floats(asked, 1, 256, 1176), "image_grid_thw": integers([[1, 16, 16]])}


def _docling(asked: Asked) -> dict[str, Any]:
    return {"pixel_values": _image(asked, 1, 1), "pixel_attention_mask": ones(1, 1).bool()}


def _kosmos(asked: Asked) -> dict[str, Any]:
    queries = asked.read("latent_query_num")
    mask = torch.zeros_like(ones(1, asked.text))
    mask[:, 1 : 1 + queries] = 1
    return {"image_embeds_position_mask": mask}


def _ast(asked: Asked) -> dict[str, Any]:
    return {"input_values": floats(asked, 1, asked.config.max_length, asked.config.num_mel_bins)}


def _frames_first(asked: Asked) -> dict[str, Any]:
    bins = asked.read(*BINS, part="audio", default=80)
    return {"input_features": floats(asked, 1, SOUND, bins)}


def _bins_first(asked: Asked) -> dict[str, Any]:
    bins = asked.read(*BINS, part="audio", default=80)
    return {"input_features": floats(asked, 1, bins, SOUND), "input_features_mask": ones(1, SOUND)}


def _stacked(asked: Asked) -> dict[str, Any]:
    bins = asked.read("input_size", part="audio")
    return {"input_features": floats(asked, 1, 500, bins), "input_features_mask": ones(1, 500)}


def _omni(asked: Asked) -> dict[str, Any]:
    return {"input_features": floats(asked, 1, 128, SOUND), "feature_attention_mask": ones(1, SOUND)}


def _words_per_frame(asked: Asked) -> dict[str, Any]:
    """One token of text for each 80 ms of sound."""
    return {"input_ids": make_words(asked, SOUND // 8)}


def _sound_places(asked: Asked) -> dict[str, Any]:
    """750 placeholders, for 30 seconds; the model makes its features only with them at hand."""
    words = make_words(asked, asked.text)
    token = asked.read(*PLACEHOLDERS["audio"])
    return {"input_ids": torch.cat([words, torch.full((1, SOUND // 4), token, device="cpu")], dim=1)}


def _codec_16k(asked: Asked) -> dict[str, Any]:
    return {
        "input_values": floats(asked, 1, 1, 16_000),
        "input_features": floats(asked, 1, 50, 160),
        "input_features_mask": ones(1, 50),
    }


def _speech_t5(asked: Asked) -> dict[str, Any]:
    width = asked.config.hidden_size  # the base model is without the parts that take sound or text
    return {"input_values": floats(asked, 1, 100, width), "decoder_input_values": floats(asked, 1, 50, width)}


def _gemma_audio(asked: Asked) -> dict[str, Any]:
    return {
        "audio_mel": floats(asked, 1, SOUND, asked.read("input_feat_size")),
        "audio_mel_mask": torch.zeros(1, SOUND, dtype=torch.bool, device="cpu"),
    }


def _gemma4_audio(asked: Asked) -> dict[str, Any]:
    return {"input_features": floats(asked, 1, SOUND, 128), "attention_mask": ones(1, SOUND).bool()}


def _gemma4_vision(asked: Asked) -> dict[str, Any]:
    patch = asked.config.patch_size
    side = 24
    places = [[[index % side, index // side] for index in range(side * side)]]
    return {"pixel_values": floats(asked, 1, side * side, 3 * patch * patch), "pixel_position_ids": integers(places)}


def _molmo(asked: Asked) -> dict[str, Any]:
    """An image as one crop and the whole, 27 × 27 patches each, of which 2 × 2 make a token."""
    patches, tokens = 729, 196
    pooled = torch.arange(2 * tokens * 4, device="cpu").reshape(2 * tokens, 4) % (2 * patches)
    return {
        "pixel_values": floats(asked, 2, patches, 588),
        "image_token_pooling": pooled,
        "image_grids": integers([[14, 14, 14, 14]]),
        "image_num_crops": integers([2]),
    }


def _inkling(asked: Asked) -> dict[str, Any]:
    side = asked.read("patch_size", part="vision") * asked.read("spatial_merge_size", part="vision", default=1)
    return {"pixel_values": floats(asked, 64, side, side, 3), "image_grid_thw": integers([[1, 8, 8]])}


def _padded_sound(asked: Asked) -> dict[str, Any]:
    return {"padding_mask": ones(1, SOUND)}


def _gemma3n(asked: Asked) -> dict[str, Any]:
    return {"input_features_mask": ones(1, SOUND).bool()}


def _inkling_mm(asked: Asked) -> dict[str, Any]:
    vision = asked.config.vision_config
    side = vision.patch_size
    bins = asked.read("n_mel_bins", "num_mel_bins", part="audio", default=80)
    return {
        "pixel_values": floats(asked, 16, vision.temporal_patch_size, side, side, vision.num_channels),
        "audio_input_ids": ones(1, 50, bins),
    }


def _video_session(asked: Asked) -> dict[str, Any]:
    """One frame in which one object is pointed at."""
    module = inspect.getmodule(type(asked.model))
    session = next(item for name, item in vars(module).items() if name.endswith("VideoInferenceSession"))
    side = image_sides(asked)[0]
    frames = floats(asked, 1, 3, side, side)
    home = frames.device
    state = session(
        video=frames,
        video_height=side,
        video_width=side,
        dtype=frames.dtype,
        inference_device=home,
        inference_state_device=home,
        video_storage_device=home,
    )
    index = state.obj_id_to_idx(1)
    points = {"point_coords": torch.full((1, 1, 1, 2), side / 2, device="cpu"), "point_labels": ones(1, 1, 1)}
    state.add_point_inputs(index, 0, points)
    state.obj_with_new_inputs = [1]
    return {"inference_session": state, "frame_idx": 0}


def _glm_image(asked: Asked) -> dict[str, Any]:
    """One image, and the grid of the one that is to be made from it."""
    patch = asked.read("patch_size", part="vision")
    side = IMAGE // patch
    token = asked.read(*PLACEHOLDERS["image"])
    image = torch.full((1, side * side), token, device="cpu")
    return {
        "pixel_values": floats(asked, side * side, 3 * patch * patch),
        "image_grid_thw": integers([[1, side, side]] * 2),
        "images_per_sample": integers([2]),
        "input_ids": torch.cat([make_words(asked, asked.text), image], dim=1),
    }


def _fuyu(asked: Asked) -> dict[str, Any]:
    return {"pixel_values": floats(asked, 1, 64, 3 * asked.config.patch_size**2)}


def _codebook_rows(asked: Asked) -> dict[str, Any]:
    rows = asked.read("num_codebooks")
    return {"input_ids": ones(rows, 32), "attention_mask": ones(1, 32)}


def _sized_512(asked: Asked) -> dict[str, Any]:
    return {"pixel_values": floats(asked, 1, 3, 512, 512), "image_sizes": integers([[512, 512]])}


def _idefics(asked: Asked) -> dict[str, Any]:
    return {"pixel_values": _image(asked, 1, 1), "image_attention_mask": ones(1, asked.text, 1)}


def _queries(asked: Asked) -> dict[str, Any]:
    config = asked.config
    return {
        "query_embeds": floats(asked, 1, 32, config.hidden_size),
        "encoder_hidden_states": floats(asked, 1, 257, config.encoder_hidden_size),
    }


def _jev(asked: Asked) -> dict[str, Any]:
    return {
        "marks": integers([[40, 80]]),
        "num_options": integers([[2, 2]]),
        "question_type_ids": integers([[0, 0]]),
    }


def _assistant(asked: Asked) -> dict[str, Any]:
    width = asked.config.hidden_size
    return {
        "noise_embeds": floats(asked, 1, asked.config.block_size, width),
        "context_hidden_states": floats(asked, 1, asked.text, width * len(asked.config.target_layer_ids)),
    }


def _embeds(asked: Asked) -> dict[str, Any]:
    return {"inputs_embeds": floats(asked, 1, asked.text, asked.config.hidden_size)}


def _omdet(asked: Asked) -> dict[str, Any]:
    words = make_words(asked, 16)
    return {
        "classes_input_ids": torch.cat([words, words]),
        "classes_attention_mask": ones(2, 16),
        "tasks_input_ids": words,
        "tasks_attention_mask": ones(1, 16),
        "classes_structure": integers([2]),
    }


def _oneformer(asked: Asked) -> dict[str, Any]:
    return {"task_inputs": ones(1, asked.config.task_seq_len)}


def _pi0(asked: Asked) -> dict[str, Any]:
    token = asked.config.vlm_config.image_token_id
    words = make_words(asked, 64)
    return {
        "action_embeds": floats(asked, 1, 51, asked.config.dit_config.hidden_size),
        "pixel_values": _image(asked, 1, 1),
        "pixel_attention_mask": ones(1, 1).bool(),
        "input_ids": torch.cat([torch.full((1, 256), token, device="cpu"), words], dim=1),
    }


def _bytes(asked: Asked) -> dict[str, Any]:
    return {"inputs": floats(asked, 1, 2048, asked.config.d_model), "attention_mask": ones(1, 2048)}


def _flattened(asked: Asked) -> dict[str, Any]:
    """Patches of 16 × 16 pixels, each after its row and column."""
    return {"flattened_patches": floats(asked, 1, 2048, 2 + 3 * 16 * 16), "attention_mask": ones(1, 2048)}


def _masked_patches(asked: Asked) -> dict[str, Any]:
    side = image_sides(asked)[0] // asked.config.patch_size
    return {"patch_attention_mask": ones(1, side, side).bool()}


def _seggpt(asked: Asked) -> dict[str, Any]:
    side = image_sides(asked)[1]  # the configuration's size is that of image and prompt, one above the other
    return {name: floats(asked, 1, 3, side, side) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")}


def _neomme(asked: Asked) -> dict[str, Any]:
    return {"pixel_values": floats(asked, 49, asked.config.patch_dim)}


def _acoustic(asked: Asked) -> dict[str, Any]:
    """The sound of an encoder, or a decoder's code of it."""
    if "decoder" in asked.name:
        return {"hidden_states": floats(asked, 1, asked.read("hidden_size", "latent_size"), 8)}
    return {"hidden_states": floats(asked, 1, 1, 25_600)}


def _decisions(asked: Asked) -> dict[str, Any]:
    steps = 20
    return {
        "states": floats(asked, 1, steps, asked.config.state_dim),
        "actions": floats(asked, 1, steps, asked.config.act_dim),
        "rewards": floats(asked, 1, steps, 1),
        "returns_to_go": floats(asked, 1, steps, 1),
        "timesteps": torch.arange(steps, device="cpu")[None],
        "attention_mask": ones(1, steps),
    }


# Model type → the arguments whose form no rule tells, or that are to be left out (None).
OWN: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "autoformer": _series,
    "informer": _series,
    "time_series_transformer": _series,
    "patchtsmixer": _patch_series,
    "patchtst": _patch_series,
    "timesfm": _times_fm,
    "timesfm2_5": _times_fm,
    "idefics2": _tiles,
    "idefics3": _tiles,
    "smolvlm": _tiles,
    "modernvbert": _tiles,
    "colmodernvbert": _tiles,
    "ultravbert": _tiles,
    "timesformer": _frames,
    "xclip": _frames,
    "llava_next": _anyres,
    "llava_next_video": _anyres,
    "llava_onevision": _anyres,
    "granite4_vision": _anyres,
    "mistral3": _sized,
    "mistral_large4": _sized,
    "lighton_ocr": _sized,
    "siglip2": _flat_patches,
    "siglip2_vision_model": _flat_patches,
    "lfm2_vl": _flat_patches,
    "blt": _no_cache,
    "bamba": _no_cache,
    "granitemoehybrid": _no_cache,
    "instructblip": _qformer,
    "instructblipvideo": _qformer,
    "kyutai_speech_to_text": _codes,
    "dia": _dia,
    "mllama": _mllama,
    "video_llama_3": _merges,
    "video_llama_3_vision": _merges,
    "mimi_decoder": _codec_code,
    "pocket_tts_audio_tokenizer_decoder": _codec_code,
    "decision_transformer": _decisions,
    "gemma3n": _gemma3n,
    "inkling_mm_model": _inkling_mm,
    "sam2_video": _video_session,
    "sam3_tracker_video": _video_session,
    "edgetam_video": _video_session,
    "pe_audio": _samples,
    "pe_audio_encoder": _samples,
    "pe_audio_video": _samples,
    "pe_audio_video_encoder": _samples,
    "vibevoice_acoustic_tokenizer": _samples,
    "vibevoice_acoustic_tokenizer_encoder": _acoustic,
    "vibevoice_acoustic_tokenizer_decoder": _acoustic,
    "vibevoice_asr": _samples,
    "minicpm_ocr": _navit,
    "minicpm_ocr_vision": _navit,
    "minicpmv4_6": _navit,
    "minicpmv4_7": _navit,
    "minicpmv4_7_vision": _navit,
    "kimi_k25": _square_patches,
    "kimi_k25_vision": _square_patches,
    "paddleocr_vl": _square_patches,
    "nemotron_h_omni": _flat_grid,
    "colqwen2": _padded_patches,
    "granite_docling": _docling,
    "kosmos-2": _kosmos,
    "audio-spectrogram-transformer": _ast,
    "speech_to_text": _frames_first,
    "univnet": _frames_first,
    "qwen3_omni_moe_thinker": _omni,
    "qwen2_5_omni_thinker": _omni,
    "qwen3_asr": _bins_first,
    "qwen3_asr_encoder": _bins_first,
    "fun_asr_nano": _stacked,
    "fun_asr_nano_encoder": _stacked,
    "voxtral_realtime": _words_per_frame,
    "musicflamingo": _sound_places,
    "qwen2_audio": _sound_places,
    "neucodec": _codec_16k,
    "xcodec2": _codec_16k,
    "speecht5": _speech_t5,
    "gemma3n_audio": _gemma_audio,
    "gemma4_audio": _gemma4_audio,
    "gemma4_vision": _gemma4_vision,
    "molmo2": _molmo,
    "inkling2": _inkling,
    "inkling2_vision": _inkling,
    "fuyu": _fuyu,
    "glm_image": _glm_image,
    "musicgen": _codebook_rows,
    "musicgen_melody": _codebook_rows,
    "emu3": _sized_512,
    "idefics": _idefics,
    "blip_2_qformer": _queries,
    "jev": _jev,
    "muse_glimmer_assistant": _assistant,
    "nemotron3_5_transcribe_word_timestamp": _embeds,
    "omdet-turbo": _omdet,
    "oneformer": _oneformer,
    "pi0": _pi0,
    "perceiver": _bytes,
    "pix2struct": _flattened,
    "idefics3_vision": _masked_patches,
    "smolvlm_vision": _masked_patches,
    "seggpt": _seggpt,
    "neomme": _neomme,
    "moss_transcribe_diarize": _padded_sound,
}

# Model type → the shapes of floating-point arguments that are always the same.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "aria": {"pixel_values": (1, 3, 490, 490)},  # it knows images of 490 and 980
    "clap": {"input_features": (1, 1, 1001, 64)},  # 10 seconds
    "deepseek_vl_hybrid": {"high_res_pixel_values": (1, 3, 1024, 1024)},
    "depth_pro": {"pixel_values": (1, 3, 1536, 1536)},  # four times its patches of 384
    "efficientloftr": {"pixel_values": (1, 2, 3, 480, 640)},  # two images, to be matched
    "granite_speech5_ctc": {"input_features": (1, 750, 320)},  # four frames of 80 bins in one
    "granite_speech5_encoder": {"input_features": (1, 750, 320)},  # four frames of 80 bins in one
    "lightglue": {"pixel_values": (1, 2, 3, 480, 640)},  # two images, to be matched
    "lxmert": {"visual_feats": (1, 36, 2048), "visual_pos": (1, 36, 4)},  # regions that a detector found
    "pe_video": {"pixel_values_videos": (1, 16, 3, 336, 336)},
    "pe_video_encoder": {"pixel_values_videos": (1, 16, 3, 336, 336)},
    "perception_lm": {"pixel_values": (1, 1, 3, 448, 448)},
    "pop2piano": {"input_features": (1, 300, 512)},  # a spectrogram that its extractor made as wide as the model
    "rf_detr": {"pixel_values": (1, 3, 560, 560)},  # whole windows of 4 × 14
    "superglue": {"pixel_values": (1, 2, 3, 480, 640)},  # two images, to be matched
    "tvp": {"pixel_values": (1, 48, 3, 448, 448)},  # 48 frames
}

# Model type → arguments that are left out: it takes either sound or text, or reads an image another way.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "csm": ("input_values", "input_features", "pixel_values"),
    "pop2piano": ("input_ids", "attention_mask"),
    "seamless_m4t": ("input_ids", "attention_mask"),
    "seamless_m4t_v2": ("input_ids", "attention_mask"),
    "vibevoice": ("input_values", "input_features", "pixel_values"),
}
