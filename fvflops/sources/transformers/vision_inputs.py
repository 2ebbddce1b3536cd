"""Inputs of single transformers models that see: tiles, packed patches, videos and their sizes."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fvflops.sources.transformers.configurations import PLACEHOLDERS
from fvflops.sources.transformers.input_request import (
    FRAMES,
    IMAGE,
    InputRequest,
    floats,
    image_channels,
    image_sides,
    integers,
    make_token_ids,
    ones,
    patch_grid,
)


def make_images(request: InputRequest, *leading: int) -> torch.Tensor:
    """Return images with the given leading axes, such as (batch, tiles) or (batch, frames)."""
    return floats(request, *leading, image_channels(request), *image_sides(request))


def one_tile(request: InputRequest) -> dict[str, Any]:
    """An image that is not cut into tiles."""
    return {"pixel_values": make_images(request, 1, 1)}


def video_frames(request: InputRequest) -> dict[str, Any]:
    """The frames of a video as pixel_values."""
    return {"pixel_values": make_images(request, 1, request.setting("num_frames", part="vision", default=8))}


def anyres_tiles(request: InputRequest) -> dict[str, Any]:
    """An image of 2 × 2 tiles, and a downscaled one of the whole (LLaVA-NeXT)."""
    height, width = image_sides(request)
    sizes = integers([[2 * height, 2 * width]])
    return {"pixel_values": make_images(request, 1, 5), "image_sizes": sizes}


def image_with_size(request: InputRequest) -> dict[str, Any]:
    """An image of any size, and its size (Pixtral)."""
    chosen = request.chosen_image()
    side = min(image_sides(request)[0], 448)
    height, width = chosen or (side, side)
    return {"pixel_values": floats(request, 1, 3, height, width), "image_sizes": integers([[height, width]])}


def image_of_512(request: InputRequest) -> dict[str, Any]:
    """An image of 512 × 512 pixels or the chosen size, and its size."""
    height, width = request.chosen_image() or (512, 512)
    return {"pixel_values": floats(request, 1, 3, height, width), "image_sizes": integers([[height, width]])}


def padded_patches(request: InputRequest) -> dict[str, Any]:
    """Flattened patches with a mask, and their grid (SigLIP 2)."""
    patch = request.setting("patch_size", part="vision")
    limit = request.setting("num_patches", "max_num_patches", part="vision", default=256)
    rows, columns = patch_grid(request, patch, int(limit**0.5))
    return {
        "pixel_values": floats(request, 1, rows * columns, 3 * patch * patch),
        "pixel_attention_mask": ones(1, rows * columns),
        "spatial_shapes": integers([[rows, columns]]),
    }


def patches_in_a_row(request: InputRequest) -> dict[str, Any]:
    """Patches side by side, and their grid (MiniCPM-V)."""
    patch = request.setting("patch_size", part="vision")
    rows, columns = patch_grid(request, patch, 16)
    return {
        "pixel_values": floats(request, 1, 3, patch, rows * columns * patch),
        "target_sizes": integers([[rows, columns]]),
    }


def square_patches(request: InputRequest) -> dict[str, Any]:
    """Patches that are not flattened, and their grid."""
    patch = request.setting("patch_size", part="vision")
    rows, columns = patch_grid(request, patch, 16)
    grid = integers([[1, rows, columns]])
    return {
        "pixel_values": floats(request, rows * columns, 3, patch, patch),
        "grid_thw": grid,
        "image_grid_thw": grid,
    }


def flat_patches(request: InputRequest) -> dict[str, Any]:
    """Flattened patches, and their grid without an axis of time."""
    patch = request.setting("patch_size", part="vision")
    rows, columns = patch_grid(request, patch, 16)
    return {
        "pixel_values": floats(request, rows * columns, 3 * patch * patch),
        "image_grid_hw": integers([[rows, columns]]),
    }


def patches_of_a_batch(request: InputRequest) -> dict[str, Any]:
    """Flattened patches with an axis for the batch (ColQwen2)."""
    rows, columns = patch_grid(request, 14, 16)
    return {
        "pixel_values": floats(request, 1, rows * columns, 1176),
        "image_grid_thw": integers([[1, rows, columns]]),
    }


def patches_with_positions(request: InputRequest) -> dict[str, Any]:
    """Flattened patches with the column and row of each (Gemma 4)."""
    patch = request.config.patch_size
    rows, columns = patch_grid(request, patch, 24)
    positions = [[[index % columns, index // columns] for index in range(rows * columns)]]
    return {
        "pixel_values": floats(request, 1, rows * columns, 3 * patch * patch),
        "pixel_position_ids": integers(positions),
    }


def merged_patches(request: InputRequest) -> dict[str, Any]:
    """The merge factor of the patches (VideoLLaMA 3)."""
    return {"merge_sizes": integers([1]), "image_merge_sizes": integers([1])}


def qformer_inputs(request: InputRequest) -> dict[str, Any]:
    """An image or 4 frames, and the instruction that the Q-Former reads (InstructBLIP)."""
    image = make_images(request, 1, 4) if "video" in request.model_type else make_images(request, 1)
    return {"pixel_values": image, "qformer_input_ids": make_token_ids(request, 16)}


def aspect_ratio_tiles(request: InputRequest) -> dict[str, Any]:
    """Four tiles, with the id of their aspect ratio and the mask of cross-attention (Llama 3.2 Vision)."""
    return {
        "pixel_values": make_images(request, 1, 1, 4),
        "aspect_ratio_ids": integers([[1]]),
        "aspect_ratio_mask": ones(1, 1, 4),
        "cross_attention_mask": ones(1, request.tokens(), 1, 4),
    }


def masked_tile(request: InputRequest) -> dict[str, Any]:
    """One tile, and a mask of tiles."""
    return {"pixel_values": make_images(request, 1, 1), "pixel_attention_mask": ones(1, 1).bool()}


def latent_query_mask(request: InputRequest) -> dict[str, Any]:
    """The positions of the image's latent queries in the text (KOSMOS-2)."""
    queries = request.setting("latent_query_num")
    mask = torch.zeros_like(ones(1, request.tokens()))
    mask[:, 1 : 1 + queries] = 1
    return {"image_embeds_position_mask": mask}


def pooled_patches(request: InputRequest) -> dict[str, Any]:
    """An image as one crop and the whole, 27 × 27 patches each, of which 2 × 2 are pooled into a token (Molmo)."""
    patches, tokens = 729, 196
    pooled = torch.arange(2 * tokens * 4, device="cpu").reshape(2 * tokens, 4) % (2 * patches)
    return {
        "pixel_values": floats(request, 2, patches, 588),
        "image_token_pooling": pooled,
        "image_grids": integers([[14, 14, 14, 14]]),
        "image_num_crops": integers([2]),
    }


def merged_square_patches(request: InputRequest) -> dict[str, Any]:
    """Patches with their merged neighbours, channels last, and their grid."""
    merge = request.setting("spatial_merge_size", part="vision", default=1)
    side = request.setting("patch_size", part="vision") * merge
    return {"pixel_values": floats(request, 64, side, side, 3), "image_grid_thw": integers([[1, 8, 8]])}


def temporal_patches_and_audio(request: InputRequest) -> dict[str, Any]:
    """Patches of several frames, and a discretised spectrogram."""
    vision = request.config.vision_config
    side = vision.patch_size
    bins = request.setting("n_mel_bins", "num_mel_bins", part="audio", default=80)
    return {
        "pixel_values": floats(request, 16, vision.temporal_patch_size, side, side, vision.num_channels),
        "audio_input_ids": ones(1, 50, bins),
    }


def video_session(request: InputRequest) -> dict[str, Any]:
    """A session of one frame, with a point on one object (SAM 2)."""
    module = inspect.getmodule(type(request.model))
    session_class = next(item for name, item in vars(module).items() if name.endswith("VideoInferenceSession"))
    side = image_sides(request)[0]
    frames = floats(request, 1, 3, side, side)
    session = session_class(
        video=frames,
        video_height=side,
        video_width=side,
        dtype=frames.dtype,
        inference_device=frames.device,
        inference_state_device=frames.device,
        video_storage_device=frames.device,
    )
    index = session.obj_id_to_idx(1)
    points = {"point_coords": torch.full((1, 1, 1, 2), side / 2, device="cpu"), "point_labels": ones(1, 1, 1)}
    session.add_point_inputs(index, 0, points)
    session.obj_with_new_inputs = [1]
    return {"inference_session": session, "frame_idx": 0}


def image_to_image(request: InputRequest) -> dict[str, Any]:
    """One image, with its grid and that of the image to generate (GLM-Image)."""
    patch = request.setting("patch_size", part="vision")
    rows, columns = patch_grid(request, patch, IMAGE // patch)
    token = request.setting(*PLACEHOLDERS["image"])
    placeholders = torch.full((1, rows * columns), token, device="cpu")
    return {
        "pixel_values": floats(request, rows * columns, 3 * patch * patch),
        "image_grid_thw": integers([[1, rows, columns]] * 2),
        "images_per_sample": integers([2]),
        "input_ids": torch.cat([make_token_ids(request, request.tokens()), placeholders], dim=1),
    }


def projected_patches(request: InputRequest) -> dict[str, Any]:
    """64 flattened patches (Fuyu)."""
    return {"pixel_values": floats(request, 1, 64, 3 * request.config.patch_size**2)}


def tile_with_text_mask(request: InputRequest) -> dict[str, Any]:
    """One tile, which every token attends to (IDEFICS)."""
    return {"pixel_values": make_images(request, 1, 1), "image_attention_mask": ones(1, request.tokens(), 1)}


def tasks_and_classes(request: InputRequest) -> dict[str, Any]:
    """The text of a task and of two classes (OmDet)."""
    text = make_token_ids(request, 16)
    return {
        "classes_input_ids": torch.cat([text, text]),
        "classes_attention_mask": ones(2, 16),
        "tasks_input_ids": text,
        "tasks_attention_mask": ones(1, 16),
        "classes_structure": integers([2]),
    }


def task_tokens(request: InputRequest) -> dict[str, Any]:
    """The text of the task (OneFormer)."""
    return {"task_inputs": ones(1, request.config.task_seq_len)}


def image_and_actions(request: InputRequest) -> dict[str, Any]:
    """An image, an instruction and 51 actions (π0)."""
    token = request.config.vlm_config.image_token_id
    text = make_token_ids(request, 64)
    return {
        "action_embeds": floats(request, 1, 51, request.config.dit_config.hidden_size),
        "pixel_values": make_images(request, 1, 1),
        "pixel_attention_mask": ones(1, 1).bool(),
        "input_ids": torch.cat([torch.full((1, 256), token, device="cpu"), text], dim=1),
    }


def patches_with_coordinates(request: InputRequest) -> dict[str, Any]:
    """Flattened patches of 16 × 16 pixels, each after its row and column (Pix2Struct)."""
    return {"flattened_patches": floats(request, 1, 2048, 2 + 3 * 16 * 16), "attention_mask": ones(1, 2048)}


def patch_mask(request: InputRequest) -> dict[str, Any]:
    """A mask of patches."""
    height, width = (side // request.config.patch_size for side in image_sides(request))
    return {"patch_attention_mask": ones(1, height, width).bool()}


def image_and_prompt(request: InputRequest) -> dict[str, Any]:
    """An image, a prompt image and its mask (SegGPT)."""
    chosen = request.chosen_image()
    # The configuration's height is that of the prompt above the image.
    height, width = chosen or (image_sides(request)[1],) * 2
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return {name: floats(request, 1, 3, height, width) for name in names}


def embedded_patches(request: InputRequest) -> dict[str, Any]:
    """49 patches of the width that the configuration names."""
    return {"pixel_values": floats(request, 49, request.config.patch_dim)}


def waveform_and_video(request: InputRequest) -> dict[str, Any]:
    """Audio with an axis for its one channel, and a video where the model accepts one (Perception Encoder)."""
    made: dict[str, Any] = {"input_values": floats(request, 1, 1, 19_200)}
    if request.accepts("pixel_values_videos"):
        made["pixel_values_videos"] = floats(request, 1, FRAMES, 3, 336, 336)
    return made
