"""Inputs for any model of transformers: what its forward asks for, in a size that eager accepts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

ROWS, LENGTH = 3, 9
PADDINGS = ("none", "left", "right", "hole", "row", "packed")
"""No mask at all; zeros on the left, on the right, in the middle; a row of zeros; two requests in
one row, told by positions."""

MASKS = ("attention_mask", "decoder_attention_mask", "padding_mask")

Inputs = dict[str, Any]


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int) -> torch.Tensor:
    """The same normal numbers in each call."""
    return torch.randn(*shape, generator=seeded())


def tokens(rows: int = ROWS, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    """Ordinary tokens: none of the special ones, which are the lowest and the highest."""
    return torch.randint(5, 60, (rows, length), generator=seeded(seed))


def padding(kind: str, length: int = LENGTH, rows: int = ROWS) -> torch.Tensor | None:
    """int64 `[rows, length]`; of several rows the last one is not padded. None where no mask is
    given."""
    if kind in ("none", "packed"):
        return None
    mask = torch.ones(rows, length, dtype=torch.int64)
    third, first, second = max(1, length // 3), mask[0], mask[1 : 2 if rows > 2 else 1]
    if kind == "left":
        first[:third] = 0
        second[:, :1] = 0
    elif kind == "right":
        first[-third:] = 0
        second[:, -1:] = 0
    elif kind == "hole":
        first[third : third + 2] = 0
        second[:, [0, third + 1]] = 0
    elif kind == "row":
        first[:] = 0
        second[:, :third] = 0
    return mask


def packed_positions(length: int = LENGTH, rows: int = ROWS) -> torch.Tensor:
    first = length // 2 + 1
    row = torch.cat([torch.arange(first), torch.arange(length - first)])
    return row.expand(rows, length).contiguous()


def parameters(model: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(type(model).forward).parameters)


def parts(config: Any) -> Iterator[Any]:
    """The config, and those below it."""
    from transformers import PreTrainedConfig

    yield config
    for below in vars(config).values():
        if isinstance(below, PreTrainedConfig):
            yield from parts(below)


def size_of(config: Any, *names: str, default: int) -> int:
    """The first of these fields that the config, or one below it, has."""
    for value in (getattr(part, name, None) for part in parts(config) for name in names):
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, int):
            return first
    return default


def _pixels(config: Any) -> Iterator[torch.Tensor]:
    channels = size_of(config, "num_channels", "in_channels", "in_chans", default=3)
    side = size_of(config, "image_size", "img_size", "input_size", default=32)
    frames = size_of(config, "num_frames", default=2)
    for edge in dict.fromkeys((side, 32, 64, 128, 224)):
        yield noise(ROWS, channels, edge, edge)
        yield noise(ROWS, frames, channels, edge, edge)


def _flat_patches(config: Any) -> torch.Tensor:
    """Images as rows of flat patches."""
    patch = size_of(config, "patch_size", default=8)
    count = (size_of(config, "image_size", "img_size", default=32) // patch) ** 2
    return noise(ROWS, count, size_of(config, "num_channels", default=3) * patch * patch)


def _features(config: Any) -> Iterator[torch.Tensor]:
    mels = size_of(
        config,
        "num_mel_bins",
        "feature_size",
        "num_mel_bands",
        "n_mels",
        "input_feat_per_channel",
        "input_size",
        default=16,
    )
    frames = 2 * size_of(config, "max_source_positions", default=32)
    for length in dict.fromkeys((frames, 64, 128, 200)):
        yield noise(ROWS, mels, length)
        yield noise(ROWS, length, mels)
    yield noise(ROWS, 64, size_of(config, "input_size", default=mels))


def _patches(model: Any) -> Iterator[Inputs]:
    """Vision towers that take flat patches, with the grid of each image."""
    config = model.config
    patch = size_of(config, "patch_size", default=8)
    channels = size_of(config, "in_channels", "num_channels", "in_chans", default=3)
    times = size_of(config, "temporal_patch_size", "patch_temporal", default=1)
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    count = int(grid.prod(1).sum())
    names = parameters(model)
    first = "hidden_states" if "hidden_states" in names else "pixel_values"
    for width in (channels * times * patch * patch, channels * patch * patch):
        flat = noise(count, width)
        for name in ("grid_thw", "image_grid_thw", "grid_hws"):
            if name in names:
                yield {first: flat, name: grid}
                if width % channels == 0:
                    yield {first: flat.view(count, channels, -1, patch), name: grid}


def _padded_patches(config: Any) -> Inputs:
    """Flat patches of images of several sizes, padded to the largest."""
    patch, shapes = size_of(config, "patch_size", default=8), torch.tensor([[2, 2], [4, 4], [4, 2]])
    count = shapes.prod(1)
    mask = (torch.arange(int(count.max())) < count[:, None]).int()
    return {
        "pixel_values": noise(*mask.shape, 3 * patch * patch),
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


def candidates(model: Any) -> Iterator[Inputs]:
    """Inputs to try, most telling first. Masks come later."""
    config, names = model.config, parameters(model)
    decodes = "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False)
    base: Inputs = {"decoder_input_ids": tokens(length=LENGTH - 2, seed=2)} if decodes else {}
    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in names and main in ("input_ids", "pixel_values"):
        yield {"input_ids": tokens(), **base}
        if "pixel_values" in names:
            for pixels in _pixels(config):
                yield {"input_ids": tokens(), "pixel_values": pixels, **base}
        if "bbox" in names:
            yield {
                "input_ids": tokens(),
                "bbox": torch.randint(0, 30, (ROWS, LENGTH, 4), generator=seeded()).sort(-1).values,
                **base,
            }
    yield from _of_parts(config, names)
    if "spatial_shapes" in names:
        yield {
            **({"input_ids": tokens()} if "input_ids" in names else {}),
            **_padded_patches(config),
        }
    if any(name in names for name in ("grid_thw", "image_grid_thw", "grid_hws")):
        yield from _patches(model)
    if "pixel_values" in names:
        yield from ({"pixel_values": pixels, **base} for pixels in _pixels(config))
        yield {"pixel_values": _flat_patches(config)}
    if "pixel_values_videos" in names:
        yield from (
            {"pixel_values_videos": pixels, **base}
            for pixels in _pixels(config)
            if pixels.dim() == 5
        )
    for name in (
        name for name in ("input_features", "audio_features", "input_values") if name in names
    ):
        if name == "input_values":
            yield {name: noise(ROWS, 1600), **base}
            yield {name: noise(ROWS, 1, 1600), **base}
        yield from ({name: features, **base} for features in _features(config))
        if f"{name}_mask" in names:
            yield from (
                {name: x, f"{name}_mask": torch.ones(x.shape[:2], dtype=torch.int64), **base}
                for x in _features(config)
            )
    for name in ("inputs_embeds", "hidden_states"):
        if name in names:
            yield {
                name: noise(
                    ROWS, LENGTH, size_of(config, "hidden_size", "d_model", "n_embd", default=32)
                ),
                **base,
            }
    if "past_values" in names:
        yield from _series(model)
    if "context_input_ids" in names:
        found = size_of(config, "n_docs", default=5)
        context, scores = tokens(ROWS * found, seed=4), noise(ROWS, found)
        asked = {"context_input_ids": context, "context_attention_mask": torch.ones_like(context)}
        yield {"input_ids": tokens(), **asked, "doc_scores": scores, **base}


def _of_parts(config: Any, names: dict[str, Any]) -> Iterator[Inputs]:
    """What models hand to their parts, or take in few families."""
    width = size_of(config, "hidden_size", "d_model", default=32)
    if "latents" in names:
        width = size_of(config, "latent_dim", "hidden_size", default=32)
        yield {"latents": noise(ROWS, width, LENGTH)}
        yield {"latents": noise(ROWS, LENGTH, width)}
    if "chunk_sample_lengths" in names:
        lengths = torch.full((ROWS,), 64 * size_of(config, "hop_length", default=160))
        yield from (
            {"input_features": x, "chunk_sample_lengths": lengths} for x in _features(config)
        )
    if "target_sizes" in names:
        patch = size_of(config, "patch_size", default=8)
        for rows in (ROWS, 1):
            strips = noise(rows, 3, patch, ROWS // rows * 16 * patch)
            yield {
                "pixel_values": strips,
                "target_sizes": torch.full((ROWS, 2), 4, dtype=torch.int32),
            }
    if "pooled_patches_idx" in names:
        wide = width * len(getattr(config, "vision_feature_layer", None) or [0])
        pooled = torch.randint(0, 32, (6, 4), generator=seeded())
        yield {"image_features": noise(2, 16, wide), "pooled_patches_idx": pooled}
    if "box_embeddings" in names:
        boxes = {
            "box_embeddings": torch.rand(2, 3, 4, generator=seeded()),
            "box_mask": torch.ones(2, 3, dtype=torch.bool),
        }
        features = (noise(2, width, 8, 8),)
        yield {**boxes, "box_labels": torch.tensor([[0, 1, 1]] * 2), "img_feats": features}
    if "dense_prompt_embeddings" in names:
        yield _prompts(width)
    if "question_type_ids" in names:
        asked = {"marks": torch.tensor([[3, 6]]), "num_options": torch.tensor([[2, 2]])}
        yield {"input_ids": tokens(1), **asked, "question_type_ids": torch.tensor([[0, 0]])}
    if {"input_ids", "pixel_values_videos", "input_values"} <= names.keys():
        yield from (
            {"input_ids": tokens(), "pixel_values_videos": x}
            for x in _pixels(config)
            if x.dim() == 5
        )
    if {"hidden_states", "mask"} <= names.keys():
        for size in (width, size_of(config, "input_size", default=width)):
            yield {"hidden_states": noise(ROWS, 64, size), "mask": None}
    if {"input_ids", "last_hidden_state"} <= names.keys():
        length = size_of(config, "num_codebooks", default=4)
        state = noise(ROWS, 1, size_of(config, "input_size", "hidden_size", default=32))
        yield {"input_ids": tokens(length=length), "last_hidden_state": state}
    if {"input_features", "input_values"} <= names.keys():
        sound = noise(ROWS, 1, 1280)
        yield from ({"input_values": sound, "input_features": x} for x in _features(config))


def _prompts(width: int) -> Inputs:
    """A mask decoder of the SAM family: an image and two points."""
    draw = seeded()
    image, positions, dense = (torch.randn(1, width, 8, 8, generator=draw) for _ in range(3))
    given = {
        "image_embeddings": image,
        "image_positional_embeddings": positions,
        "dense_prompt_embeddings": dense,
    }
    features = [
        torch.randn(1, width // 8, 32, 32, generator=draw),
        torch.randn(1, width // 4, 16, 16, generator=draw),
    ]
    points = {
        "sparse_prompt_embeddings": torch.randn(1, 1, 2, width, generator=draw),
        "multimask_output": False,
    }
    return {**given, **points, "high_resolution_features": features}


def _series(model: Any) -> Iterator[Inputs]:
    config, names = model.config, parameters(model)
    length = size_of(config, "context_length", default=16) + max(
        getattr(config, "lags_sequence", None) or [0]
    )
    wide = size_of(config, "num_input_channels", "input_size", default=1)
    shape = (ROWS, length) if wide == 1 else (ROWS, length, wide)
    ahead = size_of(config, "prediction_length", default=4)
    given: Inputs = {"past_values": noise(*shape)}
    if "past_time_features" in names:
        times = size_of(config, "num_time_features", default=0)
        given |= {
            "past_time_features": torch.randn(ROWS, length, times),
            "past_observed_mask": torch.ones(shape),
        }
        given |= {
            "future_time_features": torch.randn(ROWS, ahead, times),
            "future_values": torch.randn(ROWS, ahead),
        }
    yield given


def without_masks(given: Inputs) -> Inputs:
    return {name: value for name, value in given.items() if name not in MASKS}


def first_that_runs(model: Any, given: Inputs | None = None) -> Inputs:
    """The first candidate that eager accepts, `given` before all others, without its masks if that
    will do.

    Raises ValueError with the first error when it accepts none.
    """
    errors = []
    brought = () if given is None else (without_masks(given), given)
    for given in (*brought, *candidates(model)):
        try:
            with torch.no_grad():
                model(**given)
            return given
        except Exception as error:
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    if not errors:
        needed = [
            p
            for p in parameters(model).values()
            if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD
        ]
        wanted = ", ".join(p.name for p in needed[1:])
        raise ValueError(f"no input is known for it: its forward takes {wanted}")
    raise ValueError(f"eager accepts none of {len(errors)} inputs: {errors[0]}")


def padded(model: Any, given: Inputs, kind: str) -> Inputs | None:
    """The inputs with this padding, or None where the model takes none of that kind."""
    names = parameters(model)
    if kind == "none":
        return given
    main = next(
        (given[name] for name in ("input_ids", "inputs_embeds", "input_values") if name in given),
        None,
    )
    if main is None or main.dim() == 1:
        return None
    rows, length = main.shape[:2]
    if kind == "packed":
        if "position_ids" not in names or "input_ids" not in given or "decoder_input_ids" in given:
            return None
        return (
            {**given, "position_ids": packed_positions(length, rows), "use_cache": False}
            if "use_cache" in names
            else None
        )
    if "attention_mask" not in names or ("input_values" in given and main.dim() != 2):
        return None
    mask = padding(kind, length, rows)
    assert mask is not None
    made = {**given, "attention_mask": mask}
    if kind != "row" and "decoder_attention_mask" in names and "decoder_input_ids" in given:
        made["decoder_attention_mask"] = padding(kind, given["decoder_input_ids"].shape[1], rows)
    if (
        kind == "left"
        and "position_ids" in names
        and "input_ids" in given
        and "decoder_input_ids" not in given
        and _counts(model)
    ):
        made["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return made


def _counts(model: Any) -> bool:
    """Does the model take plain positions `[B, S]`? Some take three axes, or none."""
    return not any("mrope" in str(vars(c)) for c in (model.config, model.config.get_text_config()))
