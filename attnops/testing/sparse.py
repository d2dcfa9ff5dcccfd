"""Builders and problem grid of sparse latent attention and of the packed write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnops.reference.attention import compact
from attnops.reference.latent_format import GROUP, pack, packed_bytes
from attnops.testing.builders import WRITTEN, attend
from attnops.testing.inputs import Build, Call, Features, Source, points, table
from attnops.testing.latent import DEEPSEEK, MIXED, SMALL

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
PAST = 2**31 - 1
"""Fills a list past its length."""


def sparse(
    source: Source,
    counts: Sequence[int],
    topk: int,
    pool: tuple[int, int],
    f: Features,
    lengths: bool = False,
    packed: bool = False,
    twice: bool = False,
    whole: bool = False,
) -> Call:
    """`sparse_mla_attention`. Of `f.head_dim` numbers the first `f.v_dim` are the latent.

    counts: how many of its topk entries each token uses; at any position, the others are -1.
    pool: (pages, page_size).
    lengths: the used entries are at the front, `topk_length` says how many they are, and the others are no slots at all.
    twice: slots may repeat.
    whole: the query's two parts are views of one tensor.
    """
    pages, page_size = pool
    query = source.argument("query", (len(counts), f.q_heads, f.head_dim), f)
    assert query is not None
    parts = query.split([f.v_dim, f.head_dim - f.v_dim], -1)
    given: dict[str, Any] = dict(zip(("q_nope", "q_pe"), parts if whole else map(compact, parts), strict=True))
    if packed:
        rows = source.normal(pages * page_size, f.head_dim, dtype=f.dtype)
        bits = pack(rows[:, : f.v_dim], rows[:, f.v_dim :])
        given["latent_pages"] = bits.reshape(pages, page_size, bits.shape[1])
    lists, used = _lists(source, counts, topk, pages * page_size, lengths, twice)
    given["indices"] = source.ints(lists).reshape(len(counts), topk)
    if lengths:
        given["topk_length"] = source.ints(counts)
    sizes = {"T": len(counts), "P": pages, "page": page_size, "numbers": f.head_dim}
    arguments = attend(source, "sparse_mla_attention", f, sizes, **given)
    free = ~used.reshape(pages, page_size, 1).to(source.device)
    return Call("sparse_mla_attention", arguments, {"latent_pages": free}, WRITTEN)


def _lists(source: Source, counts: Sequence[int], topk: int, total: int, lengths: bool, twice: bool) -> tuple[list[int], Tensor]:
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


def write_packed(
    source: Source, slots: Sequence[int], pages: int, page_size: int, f: Features, slot_dtype: torch.dtype = torch.int64
) -> Call:
    """`write_latent_packed`. slots: one a token, negative to skip it; the latents of a skipped token are free."""
    at = source.ints(slots, slot_dtype)
    # Groups of every size: zeros, far below the smallest scale, far above the range of float8.
    groups = f.v_dim // GROUP
    sizes = torch.tensor([[1.0, 0.0, 2.0**-16, 2000.0, 7.0][i % 5] for i in range(len(slots) * groups)], device=source.device)
    latent = source.normal(len(slots), groups, GROUP, dtype=f.dtype) * sizes.reshape(len(slots), groups, 1).to(f.dtype)
    latent = latent.flatten(1)
    if f.loud:
        latent = latent.sign() * 448.0  # the top of float8: on the edge of the next scale
    size = packed_bytes(f.v_dim, f.head_dim - f.v_dim)
    arguments: dict[str, Any] = {
        "latent": latent,
        "k_pe": source.normal(len(slots), f.head_dim - f.v_dim, dtype=f.dtype),
        "latent_pages": torch.randint(0, 256, (pages, page_size, size), generator=source.generator, dtype=torch.uint8).to(source.device),
        "slots": at,
    }
    skipped = (at < 0)[:, None]
    return Call("write_latent_packed", arguments, {"latent": skipped, "k_pe": skipped})


PACKABLE = replace(SMALL, head_dim=136, v_head_dim=128, dtype=BF16)


def _sparse(counts: Sequence[int], topk: int, pages: int, page_size: int, **more: Any) -> Build:
    return lambda source, f: sparse(source, counts, topk, (pages, page_size), f, **more)


MAIN = _sparse((5, 0, 7, 1), 7, 4, 16)
LSE = replace(DEEPSEEK, lse=True)

SMALL_POINTS: dict[str, tuple[Build, Features]] = {
    "plain": (MAIN, SMALL),
    "lse": (MAIN, replace(SMALL, lse=True)),
    "sinks": (MAIN, replace(SMALL, sinks=F32)),
    "sinks_lse": (MAIN, replace(SMALL, sinks=F32, lse=True)),
    "sinks_bfloat16": (MAIN, replace(SMALL, sinks=BF16, dtype=BF16, lse=True)),
    "lengths": (_sparse((5, 0, 7, 1), 7, 4, 16, lengths=True), replace(SMALL, lse=True)),
    "twice": (_sparse((6, 3, 7), 8, 4, 16, twice=True), replace(SMALL, lse=True)),
    "whole": (_sparse((5, 2), 6, 4, 16, whole=True), SMALL),
    "loud": (MAIN, replace(SMALL, loud=True, lse=True)),
    "scale": (MAIN, replace(SMALL, scale=0.7)),
    "scale_negative": (MAIN, replace(SMALL, scale=-0.7, lse=True)),
    "one_head": (MAIN, replace(SMALL, q_heads=1)),
    "rope_1": (MAIN, replace(SMALL, head_dim=17)),
    "float16": (MAIN, replace(SMALL, dtype=F16, lse=True)),
    "float64": (MAIN, replace(SMALL, dtype=F64, lse=True)),
    "float8": (MAIN, replace(SMALL, dtype=BF16, kv_dtype=E4M3, lse=True)),
    "int8": (MAIN, replace(SMALL, kv_dtype=INT8)),
    "float8_query": (_sparse((5, 0, 7), 7, 4, 16), replace(SMALL, dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3)),
    "page_1": (_sparse((5, 0, 7), 9, 40, 1), SMALL),
    "page_3": (_sparse((5, 0, 7), 9, 9, 3), replace(SMALL, lse=True)),
    "one": (_sparse((1,), 1, 1, 1), SMALL),
    "no_entries": (_sparse((0, 0), 5, 4, 16), replace(SMALL, sinks=F32, lse=True)),
    "no_topk": (_sparse((0, 0), 0, 4, 16), replace(SMALL, sinks=F32, lse=True)),
    "no_tokens": (_sparse((), 5, 4, 16), replace(SMALL, lse=True)),
    "no_pages": (_sparse((0, 0), 5, 0, 16), replace(SMALL, lse=True)),
    "packed": (_sparse((5, 0, 7, 1), 7, 4, 16, packed=True), PACKABLE),
    "packed_lse": (_sparse((5, 0, 7, 1), 7, 4, 16, packed=True, lengths=True), replace(PACKABLE, lse=True, sinks=F32)),
    "packed_float32": (_sparse((5, 0, 7, 1), 7, 4, 16, packed=True), replace(PACKABLE, dtype=F32, lse=True)),
    "packed_float64": (_sparse((5, 0, 7, 1), 7, 9, 3, packed=True), replace(PACKABLE, dtype=F64, head_dim=129)),
    "packed_groups": (_sparse((5, 0, 7, 1), 7, 4, 16, packed=True), replace(PACKABLE, head_dim=272, v_head_dim=256)),
    "packed_no_pages": (_sparse((0, 0), 5, 0, 16, packed=True), PACKABLE),
}

# The head dims of DeepSeek, twice: bfloat16 and packed latents.
GPU_POINTS: dict[str, tuple[Build, Features]] = {}
for _name, _packed in (("bfloat16", False), ("packed", True)):
    GPU_POINTS |= {
        f"deepseek-{_name}-{label}": (_sparse(counts, topk, pages, page, packed=_packed, **more), f)
        for label, (counts, topk, pages, page, more, f) in {
            "plain": ((128, 100, 1), 128, 4, 64, {"whole": True}, replace(DEEPSEEK, q_heads=64)),
            "heads_128": ((128, 3), 128, 4, 64, {"whole": True}, replace(LSE, q_heads=128)),
            "heads_16": ((128, 64), 128, 4, 64, {}, DEEPSEEK),
            "heads_80": ((70,), 128, 4, 64, {}, replace(LSE, q_heads=80)),
            "heads_1": ((70, 2), 128, 4, 64, {}, replace(LSE, q_heads=1, sinks=BF16)),
            "apart": ((128, 64), 128, 4, 64, {}, replace(DEEPSEEK, q_heads=64)),
            "topk_1": ((1, 0), 1, 4, 64, {}, LSE),
            "topk_64": ((64, 5), 64, 4, 64, {}, LSE),
            "topk_100": ((100, 5), 100, 4, 64, {}, LSE),
            "topk_512": ((512, 300, 0, 1), 512, 10, 64, {}, replace(LSE, sinks=F32)),
            "empty": ((0, 5, 0), 128, 4, 64, {}, LSE),
            "sinks": ((100, 5), 128, 4, 64, {}, replace(DEEPSEEK, sinks=F32)),
            "sinks_empty": ((0, 5, 0), 128, 4, 64, {}, replace(LSE, sinks=F32, q_heads=64)),
            "sinks_bfloat16": ((90, 5), 128, 4, 64, {}, replace(LSE, sinks=BF16, q_heads=128)),
            "lengths": ((128, 0, 65, 1), 128, 4, 64, {"lengths": True}, LSE),
            "lengths_odd": ((77, 0, 65, 1), 90, 4, 64, {"lengths": True}, replace(LSE, sinks=F32)),
            "twice": ((100, 64), 128, 4, 64, {"twice": True}, LSE),
            "loud": ((100, 5), 128, 4, 64, {}, replace(LSE, loud=True)),
            "scale_negative": ((100, 5), 128, 4, 64, {}, replace(LSE, scale=-0.05)),
            "scale_zero": ((100, 0), 128, 4, 64, {}, replace(LSE, scale=0.0)),
            "page_1": ((100, 5), 128, 200, 1, {}, LSE),
            "page_16": ((100, 5), 128, 12, 16, {}, LSE),
            "page_128": ((100, 5), 128, 2, 128, {}, LSE),
            "no_topk": ((0, 0), 0, 4, 64, {}, replace(LSE, sinks=F32)),
            "no_tokens": ((), 128, 4, 64, {}, LSE),
            "no_pages": ((0, 0), 128, 0, 64, {}, LSE),
        }.items()
    }


WRITES: dict[str, tuple[Any, ...]] = {
    "plain": (MIXED, 4, 3, PACKABLE),
    "float32": (MIXED, 4, 3, replace(PACKABLE, dtype=F32), torch.int32),
    "float16": (MIXED, 4, 3, replace(PACKABLE, dtype=F16)),
    "float64": (MIXED, 4, 3, replace(PACKABLE, dtype=F64)),
    "edge": (MIXED, 4, 3, replace(PACKABLE, loud=True)),
    "groups": (MIXED, 4, 3, replace(PACKABLE, head_dim=384 + 6, v_head_dim=384)),
    "deepseek": ((70, -1, 3), 2, 64, DEEPSEEK, torch.int32),
    "page_1": ((3, 8, 1), 9, 1, DEEPSEEK),
    "rope_1": (MIXED, 4, 3, replace(PACKABLE, head_dim=129)),
    "all_skipped": ((-1, -1, -1), 4, 3, PACKABLE),
    "first_slot_skipped": ((-1, 5, -2), 4, 3, PACKABLE),
    "last_slot": ((11,), 4, 3, PACKABLE),
    "no_tokens": ((), 4, 3, PACKABLE),
    "no_pages": ((-1, -1), 0, 3, PACKABLE),
}
SPARSE_CASES = {
    "sparse_mla_attention": points("sparse_mla_attention", SMALL_POINTS | GPU_POINTS),
    "write_latent_packed": table("write_latent_packed", write_packed, WRITES),
}
