"""Inputs of single transformers models that read neither images nor audio: time series, bytes, states."""

from __future__ import annotations

from typing import Any

import torch

from fvflops.sources.transformers.input_request import InputRequest, floats, integers, ones


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
