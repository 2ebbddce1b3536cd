"""Inputs of single audio models of transformers: spectrograms, waveforms and codes."""

from __future__ import annotations

from typing import Any

import torch

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
