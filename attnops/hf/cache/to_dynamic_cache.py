"""`unpaged`: the tokens of a cache of pages in a cache of transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from attnops.hf.cache.model_pages import EMPTY
from attnops.hf.cache.paged_cache import PagedModelCache
from attnops.ops import slot_mapping


def unpaged(cache: PagedModelCache, config: Any) -> DynamicCache:
    """A copy of the tokens of all rows that the last step had, with zeros for padding. The host
    waits for the device.

    config: of the text model. Layers without pages are not copied. Raises torch.OutOfMemoryError.
    """
    pages, made = cache.state.pages, DynamicCache(config=config)
    pages.use()
    pad, length = pages.pad[pages.pad < EMPTY], int(pages.seen)
    # Of each page table: the slots of the positions that its window keeps, and which of them hold a
    # token, `[B, positions]`.
    found = []
    for window, table in zip(pages.windows, pages.tables, strict=True):
        positions = (
            torch.arange(max(0, length - window + 1) if window else 0, length, device=pad.device)
            - pad[:, None]
        )
        rows = torch.arange(pad.shape[0], device=pad.device)[:, None].expand_as(positions)
        at = positions.clamp(min=0) % (table.shape[1] * pages.page_size)
        slots = slot_mapping(at.flatten(), rows.flatten(), table, page_size=pages.page_size)
        found.append((slots.view_as(positions), (positions >= 0)[..., None, None]))
    for layer, number in cache.numbers.items():
        slots, stored = found[pages.table_of[number]]
        kept = [x.flatten(0, 1)[slots] for x in pages.layers[number]]
        if len(kept) == 1:
            # Latents, with the rotated keys behind them. They have one head.
            kept = [
                x[:, :, None]
                for x in kept[0].split(
                    (config.kv_lora_rank, kept[0].shape[-1] - config.kv_lora_rank), -1
                )
            ]
        keys, values = (torch.where(stored, x, 0).transpose(1, 2) for x in kept)
        made.update(keys, values, layer)
        own: Any = made.layers[layer]
        if own.is_sliding:
            own.cumulative_length = length
    return made
