"""The cases of attention over lists of latents, of packed writes, and of vertical-slash
attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnops.ops.case_data import (
    BF16,
    E4M3,
    EDGES,
    F16,
    F32,
    F64,
    INT8,
    Given,
    Grid,
    Rows,
    Scene,
    Source,
    at,
    crossed,
)
from attnops.ops.latent.cases import (
    DEEPSEEK,
    FAR,
    I32_SLOTS,
    LSE,
    SLOTS,
    SMALL,
    deepseek,
    parts,
    small,
)
from attnops.ops.sparse.packed_format import GROUP, pack, packed_bytes
from attnops.ops.sparse.vertical_slash_cases import INDEXES, SLASHES, index, seen

PACKABLE = replace(SMALL, head_dim=136, v_head_dim=128, dtype=BF16)
packable = partial(replace, PACKABLE)

PACKED_WRITES: Rows = (
    at(
        SLOTS,
        {
            "plain": PACKABLE,
            "float16": packable(dtype=F16),
            "float64": packable(dtype=F64),
            "edge": packable(loud=True),
            "groups": packable(head_dim=384 + 6, v_head_dim=384),
            "rope_1": packable(head_dim=129),
        },
    )
    | crossed(EDGES, {"plain": PACKABLE, "deepseek": DEEPSEEK})
    | {
        "float32": (*SLOTS, packable(dtype=F32), I32_SLOTS),
        "deepseek": (*FAR, DEEPSEEK, I32_SLOTS),
    }
)

PACKED, LENGTHS, WHOLE, TWICE = ({name: True} for name in ("packed", "lengths", "whole", "twice"))
LISTS, SMALL_LSE = ((5, 0, 7, 1), 7, (4, 16)), small(lse=True)
SPARSE: Rows = {
    **at(
        LISTS,
        {
            "plain": SMALL,
            "lse": SMALL_LSE,
            "sinks": small(sinks=F32),
            "sinks_lse": small(sinks=F32, lse=True),
            "sinks_bfloat16": small(sinks=BF16, dtype=BF16, lse=True),
            "loud": small(loud=True, lse=True),
            "scale": small(scale=0.7),
            "scale_negative": small(scale=-0.7, lse=True),
            "one_head": small(q_heads=1),
            "rope_1": small(head_dim=17),
            "float16": small(dtype=F16, lse=True),
            "float64": small(dtype=F64, lse=True),
            "float8": small(dtype=BF16, kv_dtype=E4M3, lse=True),
            "int8": small(kv_dtype=INT8),
        },
    ),
    "lengths": (*LISTS, LENGTHS, SMALL_LSE),
    "twice": ((6, 3, 7), 8, (4, 16), TWICE, SMALL_LSE),
    "whole": ((5, 2), 6, (4, 16), WHOLE, SMALL),
    "float8_query": ((5, 0, 7), 7, (4, 16), small(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3)),
    "page_1": ((5, 0, 7), 9, (40, 1), SMALL),
    "page_3": ((5, 0, 7), 9, (9, 3), SMALL_LSE),
    "one": ((1,), 1, (1, 1), SMALL),
    "no_entries": ((0, 0), 5, (4, 16), small(sinks=F32, lse=True)),
    "no_topk": ((0, 0), 0, (4, 16), small(sinks=F32, lse=True)),
    "no_tokens": ((), 5, (4, 16), SMALL_LSE),
    "no_pages": ((0, 0), 5, (0, 16), SMALL_LSE),
    **at(
        (*LISTS, PACKED),
        {
            "packed": PACKABLE,
            "packed_float32": packable(dtype=F32, lse=True),
            "packed_groups": packable(head_dim=272, v_head_dim=256),
        },
    ),
    "packed_lse": (*LISTS, PACKED, LENGTHS, packable(lse=True, sinks=F32)),
    "packed_float64": ((5, 0, 7, 1), 7, (9, 3), PACKED, packable(dtype=F64, head_dim=129)),
    "packed_no_pages": ((0, 0), 5, (0, 16), PACKED, PACKABLE),
}

# The head dims of DeepSeek, twice: bfloat16 and packed latents.
lse, POOL = partial(replace, LSE), (128, (4, 64))
GPU_SPARSE: Rows = {
    "apart": ((128, 64), *POOL, deepseek(q_heads=64)),
    "heads_16": ((128, 64), *POOL, DEEPSEEK),
    "heads_80": ((70,), *POOL, lse(q_heads=80)),
    **at(
        ((100, 5), *POOL),
        {
            "heads_1": lse(q_heads=1, sinks=BF16),
            "sinks": deepseek(sinks=F32),
            "sinks_bfloat16": lse(sinks=BF16, q_heads=128),
            "loud": lse(loud=True),
            "scale_negative": lse(scale=-0.05),
        },
    ),
    "plain": ((128, 100, 1), *POOL, WHOLE, deepseek(q_heads=64)),
    "heads_128": ((128, 3), *POOL, WHOLE, lse(q_heads=128)),
    "topk_1": ((1, 0), 1, (4, 64), LSE),
    "topk_64": ((64, 5), 64, (4, 64), LSE),
    "topk_100": ((100, 5), 100, (4, 64), LSE),
    "topk_512": ((512, 300, 0, 1), 512, (10, 64), lse(sinks=F32)),
    "empty": ((0, 5, 0), *POOL, LSE),
    "sinks_empty": ((0, 5, 0), *POOL, lse(sinks=F32, q_heads=64)),
    "lengths": ((128, 0, 65, 1), *POOL, LENGTHS, LSE),
    "lengths_odd": ((77, 0, 65, 1), 90, (4, 64), LENGTHS, lse(sinks=F32)),
    "twice": ((100, 64), *POOL, TWICE, LSE),
    "scale_zero": ((100, 0), *POOL, lse(scale=0.0)),
    "page_1": ((100, 5), 128, (200, 1), LSE),
    "page_16": ((100, 5), 128, (12, 16), LSE),
    "page_128": ((100, 5), 128, (2, 128), LSE),
    "no_topk": ((0, 0), 0, (4, 64), lse(sinks=F32)),
    "no_tokens": ((), *POOL, LSE),
    "no_pages": ((0, 0), 128, (0, 64), LSE),
    # FlashMLA's own tests have a row between pages.
    "gaps": ((100, 5), *POOL, {"gap": 1}, lse(q_heads=64)),
    "gaps_lengths": ((90, 0, 5), 128, (9, 16), {"gap": 3, "lengths": True}, lse(sinks=F32)),
    "gaps_page_61": ((100, 64), 128, (4, 61), {"gap": 1}, lse(q_heads=128)),
    "gaps_one_page": ((9, 0), 64, (1, 64), {"gap": 2}, LSE),
}
SPARSE |= {
    f"deepseek-{name}-{label}": (*row, {"packed": packed})
    for name, packed in (("bfloat16", False), ("packed", True))
    for label, row in GPU_SPARSE.items()
}

PAST = 2**31 - 1
"""Fills a list of slots past its length."""


def _packed(scene: Scene) -> Given:
    """Groups of every size: zeros, far below the smallest scale, far above the range of float8."""
    f, tokens, device = scene.f, scene.sizes["T"], scene.source.device
    scene.sizes["bytes"] = packed_bytes(f.v_dim, f.rope_dim)
    groups = scene.source.normal(tokens, f.v_dim, dtype=f.dtype).unflatten(1, (-1, GROUP))
    sizes = torch.tensor([1.0, 0.0, 2.0**-16, 2000.0, 7.0], dtype=f.dtype, device=device)
    at = torch.arange(tokens * groups.shape[1], device=device).reshape(*groups.shape[:2], 1) % 5
    latent = (groups * sizes[at]).flatten(1)
    return {
        "latent": latent.sign() * 448.0 if f.loud else latent
    }  # the top of float8: on the edge of the next scale


def _listed(
    scene: Scene,
    counts: Sequence[int],
    pool: tuple[int, int],
    lengths: bool = False,
    packed: bool = False,
    twice: bool = False,
    whole: bool = False,
    gap: int = 0,
) -> Given:
    """counts: how many of its topk entries each token uses; at any position, the others are -1.

    pool: (pages, page_size).
    lengths: the used entries are at the front, `topk_length` says how many they are, and the others
    are no slots at all.
    twice: slots may repeat.
    whole: the query's two parts are views of one tensor. gap: rows of NaN between pages.
    """
    source = scene.source
    f = scene.f
    topk = scene.sizes["topk"]
    tokens = len(counts)
    pages, page = pool
    query = source.query((tokens, f.q_heads, f.head_dim), f)
    given: Given = dict(zip(("q_nope", "q_pe"), parts(query, f, whole), strict=True))
    if packed:
        rows = pack(*parts(source.normal(pages * page, f.head_dim, dtype=f.dtype), f, views=True))
        given["latent_pages"] = rows.reshape(pages, page, rows.shape[1])
    lists, used = _lists(source, counts, topk, pages * page, lengths, twice)
    given["indices"] = source.ints(lists).reshape(tokens, topk)
    if lengths:
        given["topk_length"] = source.ints(counts)
    if not packed:
        given["latent_pages"] = source.stored(pages, page, f.head_dim, dtype=f.kv_dtype or f.dtype)
    if gap:
        given["latent_pages"] = _apart(given["latent_pages"], gap)
    scene.sizes["T"], scene.free["pages"] = tokens, ~used.reshape(pages, page).to(source.device)
    return given


def _apart(pages: Tensor, gap: int) -> Tensor:
    """The pages with `gap` rows of NaN between them, of any width of numbers."""
    count, page, width = pages.shape
    room = torch.full(
        (count, page + gap, width * pages.itemsize), 0xFF, dtype=torch.uint8, device=pages.device
    )
    apart = room.view(pages.dtype)[:, :page]
    apart.copy_(pages)
    return apart


def _lists(
    source: Source, counts: Sequence[int], topk: int, total: int, lengths: bool, twice: bool
) -> tuple[list[int], Tensor]:
    """(every token's list, end to end; bool `[total]`, the slots that are in one)."""
    used = torch.zeros(total, dtype=torch.bool)
    lists: list[int] = []
    # Some slots are in no list, so that reading them shows.
    pool = source.permutation(total)[: max(total - 2, 1)]
    for count in counts:
        order = source.permutation(len(pool))
        order = order[: max(count // 2, 1)] if twice else order
        picked = [pool[order[i % len(order)]] for i in range(count)]
        used[picked] = True
        row = picked + [PAST if lengths else -1] * (topk - count)
        lists += row if lengths else [row[i] for i in source.permutation(topk)]
    return lists, used


CASES = {
    "sparse_mla_attention": Grid("counts topk pool", SPARSE, _listed),
    "write_latent_packed": Grid("slots P page index", PACKED_WRITES, _packed),
    "vertical_slash_indexes": Grid("q_lens k_lens H V S counted slack", INDEXES, index),
    "vertical_slash_attention": Grid(
        "q_lens k_lens verticals slashes padding slack", SLASHES, seen
    ),
}
