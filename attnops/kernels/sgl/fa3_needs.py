"""The needs of `fa3`: calls that FlashAttention-3 refuses, or answers wrongly."""

from __future__ import annotations

import torch

from attnops.core.kernel import Need, all_of, at_most, demand, multiple_of
from attnops.core.problem import Problem, Refusal

FLOAT8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
SINK_HEADS = 64
"""Sinks are copied to shared memory that has room for so many (mainloop_fwd_sm90_tma_gmma_ws.hpp:
SmemLayoutSink), unchecked."""

_float8 = (
    demand("kv_scales", "no", lambda p: p.dtype == FLOAT8 or not p.pages.kv_scales),
    demand(
        "dtype",
        "float16 | bfloat16 (but on sm90)",
        lambda p: p.dtype != FLOAT8 or p.target.arch == 90,
    ),
    demand(
        "head_dim", "a multiple of 16 (float8)", lambda p: p.dtype != FLOAT8 or p.head_dim % 16 == 0
    ),
    demand(
        "v_head_dim",
        "a multiple of 16 (float8)",
        lambda p: p.dtype != FLOAT8 or p.v_head_dim % 16 == 0,
    ),
    demand(
        "v_head_dim",
        "{p.head_dim}, the query's (float8)",
        lambda p: p.dtype != FLOAT8 or p.v_head_dim == p.head_dim,
    ),
)


def _units(p: Problem) -> bool:
    """Is there a unit of both head dims (flash_api.cpp)?

    The raw op also accepts any value of 512 or less for a query of 64 or less, and leaves 0 past
    the query's head dim in most of them: seen on an H200 with the 0.4.3 wheel.
    """
    d, dv = p.head_dim, p.v_head_dim
    return dv == d or (128 < d <= 192 and 96 < dv <= 128) or (d, dv) == (64, 512)


_value_dim = (
    demand(
        "v_head_dim",
        "{p.head_dim}, the query's (but on sm90)",
        lambda p: p.v_head_dim == p.head_dim or p.target.arch == 90,
    ),
    demand(
        "v_head_dim",
        "{p.head_dim}, the query's; or 97..128 for head_dim 129..192; or 512 for head_dim 64",
        _units,
    ),
)
UNITS: tuple[Need, ...] = (
    all_of(_float8),
    multiple_of("head_dim", 8),
    at_most("head_dim", 256),
    multiple_of("v_head_dim", 8),
    all_of(_value_dim),
)
"""The dtypes and head dims that there are units for."""

# Sinks are read as bfloat16, and lse has no room for their rounding.
_sinks = (
    demand(
        "q_heads",
        f"<= {SINK_HEADS} (sinks)",
        lambda p: not p.rules.sinks or p.q_heads <= SINK_HEADS,
    ),
    demand("dtype", "bfloat16 (sinks)", lambda p: not p.rules.sinks or p.dtype == torch.bfloat16),
    demand(
        "sinks_dtype",
        "bfloat16 (lse is exact to float32)",
        lambda p: not (p.rules.sinks and p.results.lse) or p.rules.sinks_dtype == torch.bfloat16,
    ),
)
bfloat16_sinks = all_of(_sinks)

# Chunks are counted from the first visible key, and a query before the first key is in one of them.
# Given a window as well, the kernel lets one of the two go: seen on an H200 with the 0.4.3 wheel.
_chunks = (
    demand(
        "kv_range",
        "no (attention_chunk)",
        lambda p: not (p.rules.attention_chunk and p.rules.kv_range),
    ),
    demand(
        "window",
        "(-1, -1) (attention_chunk)",
        lambda p: not (p.rules.attention_chunk and p.rules.windowed),
    ),
    demand(
        "causal", "True (attention_chunk)", lambda p: p.rules.causal or not p.rules.attention_chunk
    ),
)
chunk_rules = all_of(_chunks)


def steady_tiles(p: Problem) -> Refusal | None:
    """Under a deterministic policy: a tile must not follow from the longest request, nor from a
    window that reaches past its keys.

    Pages and dense calls tell how many those are by their shapes.
    """
    if p.head_dim <= 64 and p.op != "attention":
        # Seen on an H200: at head dim 64 one query beside a prompt of 2,100 tokens has other bits
        # than alone.
        return Refusal(
            "head_dim", p.head_dim, "> 64 for requests of several lengths (policy.deterministic)"
        )
    if not p.rules.windowed or not (p.page_size or p.rules.kv_range) or _same_tiles(p):
        return None
    where = "pages" if p.page_size else "kv_start, kv_end"
    return Refusal(
        "window",
        p.rules.window,
        f"none with {where}, head_dim={p.head_dim} on {p.target}: it may change the tiles",
    )


def _same_tiles(p: Problem) -> bool:
    """Are tiles with a window those without? See hopper/tile_size.h."""
    d, half = p.head_dim, p.dtype.itemsize == 2
    if p.target.arch != 90:
        return False
    if p.page_size:
        return d <= (192 if half else 128)
    return half and p.rules.causal and (d <= 64 or 96 < d <= 128)
