"""The needs of `fa3`: calls that FlashAttention-3 refuses, or answers wrongly."""

from __future__ import annotations

import torch

from attnops.kernel import Need, at_most, multiple_of
from attnops.problem import Problem, Refusal

FLOAT8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
SINK_HEADS = 64
"""Sinks are copied to shared memory that has room for so many (mainloop_fwd_sm90_tma_gmma_ws.hpp: SmemLayoutSink), unchecked."""


def float8_rules(p: Problem) -> Refusal | None:
    """float8_e4m3fn takes SM90 and wider units; half types take no scales."""
    if p.dtype != FLOAT8:
        return Refusal("kv_scales", True, "no") if p.kv_scales else None
    if p.target.arch != 90:
        return Refusal("dtype", p.dtype, "float16 | bfloat16 (but on sm90)")
    for field in ("head_dim", "v_head_dim"):
        if getattr(p, field) % 16:
            return Refusal(field, getattr(p, field), "a multiple of 16 (float8)")
    return None if p.v_head_dim == p.head_dim else Refusal("v_head_dim", p.v_head_dim, f"{p.head_dim}, the query's (float8)")


def value_dim(p: Problem) -> Refusal | None:
    """The value head dims that its units are compiled for (flash_api.cpp)."""
    d, dv = p.head_dim, p.v_head_dim
    if dv == d:
        return None
    if p.target.arch != 90:
        return Refusal("v_head_dim", dv, f"{d}, the query's (but on sm90)")
    # The raw op also accepts any value of 512 or less for a query of 64 or less, and leaves 0 past the query's head dim in most
    # of them: seen on an H200 with the 0.4.3 wheel.
    if (128 < d <= 192 and 96 < dv <= 128) or (d, dv) == (64, 512):
        return None
    return Refusal("v_head_dim", dv, f"{d}, the query's; or 97..128 for head_dim 129..192; or 512 for head_dim 64")


def bfloat16_sinks(p: Problem) -> Refusal | None:
    """Sinks are read as bfloat16, and lse has no room for their rounding."""
    if not p.sinks:
        return None
    if p.q_heads > SINK_HEADS:
        return Refusal("q_heads", p.q_heads, f"<= {SINK_HEADS} (sinks)")
    if p.dtype != torch.bfloat16:
        return Refusal("dtype", p.dtype, "bfloat16 (sinks)")
    if p.lse and p.sinks_dtype != torch.bfloat16:
        return Refusal("sinks_dtype", p.sinks_dtype, "bfloat16 (lse is exact to float32)")
    return None


def chunk_rules(p: Problem) -> Refusal | None:
    """Chunks are counted from the first visible key, and a query before the first key is in one of them."""
    if p.attention_chunk and p.kv_range:
        return Refusal("kv_range", True, "no (attention_chunk)")
    if p.attention_chunk and p.windowed:
        # Given both, the kernel lets one of them go: seen on an H200 with the 0.4.3 wheel.
        return Refusal("window", p.window, "(-1, -1) (attention_chunk)")
    return Refusal("causal", False, "True (attention_chunk)") if p.attention_chunk and not p.causal else None


def steady_tiles(p: Problem) -> Refusal | None:
    """Under a deterministic policy: a tile must not follow from the longest request, nor from a window that reaches past its keys.

    Pages and dense calls tell how many those are by their shapes. Where tiles with and without a window differ: hopper/tile_size.h.
    """
    if p.head_dim <= 64 and p.op != "attention":
        # Seen on an H200: at head dim 64 one query beside a prompt of 2,100 tokens has other bits than alone.
        return Refusal("head_dim", p.head_dim, "> 64 for requests of several lengths (policy.deterministic)")
    if not p.windowed or not (p.page_size or p.kv_range):
        return None
    d, half = p.head_dim, p.dtype.itemsize == 2
    alike = p.target.arch == 90 and (d <= (192 if half else 128) if p.page_size else half and p.causal and (d <= 64 or 96 < d <= 128))
    where = "pages" if p.page_size else "kv_start, kv_end"
    return None if alike else Refusal("window", p.window, f"none with {where}, head_dim={d} on {p.target}: it may change the tiles")


UNITS: tuple[Need, ...] = (float8_rules, multiple_of("head_dim", 8), at_most("head_dim", 256), multiple_of("v_head_dim", 8), value_dim)
"""The dtypes and head dims that there are units for."""
