"""How sgl-kernel's FlashAttention-3 is found and called: the raw ops `sgl_kernel::fwd` and `get_scheduler_metadata`, by position.

Read from hopper/flash_api.cpp. Its Python package is not imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernel import deterministic, dtypes
from attnops.kernels.sgl import package as _sgl
from attnops.problem import Problem, Refusal, Target

# get_scheduler_metadata is there since 0.4.1; no wheel before 0.4.2 fits the torch that attnops asks for.
PACKAGE = _sgl.package("0.4.2")
LIBRARY = "flash_ops.abi3.so"
FLOAT8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
SINK_HEADS = 64
"""Sinks are copied to shared memory that has room for so many (mainloop_fwd_sm90_tma_gmma_ws.hpp: SmemLayoutSink), unchecked."""


def missing(target: Target) -> Refusal | None:
    """The probe: the package may be there without this library (a CPU build, a wheel cut down)."""
    return _sgl.lacks(target, LIBRARY)


@functools.cache
def raw_op() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`sgl_kernel::fwd` and the arguments that its version takes after the 35 we give. Raises OSError or RuntimeError."""
    _sgl.load("fwd", LIBRARY)
    fwd = torch.ops.sgl_kernel.fwd.default
    count = len(fwd._schema.arguments)
    if count not in (35, 37):
        raise RuntimeError(f"sgl_kernel::fwd: got {count} arguments, want 35 (sglang-kernel 0.4.2, 0.4.3) or 37 (0.4.4 and later)")
    return fwd, (None, False) if count == 37 else ()


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    policy: str,
    scale: float,
    rules: tuple[bool, int, int, float, int],
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    out: Tensor | None = None,
    cu: tuple[Tensor | None, Tensor | None] = (None, None),
    longest: tuple[int | None, int | None] = (None, None),
    ends: Tensor | None = None,
    starts: Tensor | None = None,
    table: Tensor | None = None,
    plan: Tensor | None = None,
    q_v: Tensor | None = None,
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, lse with the heads first).

    rules: causal, left, right, softcap, chunk. scales: of query, key and value. q_v: the query's part against the value.
    used: int32 `[B]`, how many of its tokens each request is served for; None for all.
    """
    fwd, tail = raw_op()
    causal, left, right, softcap, chunk = rules
    if sinks is not None:
        sinks = sinks.to(torch.bfloat16).contiguous()
    cu_q, cu_k = cu
    max_q, max_k = longest
    q_scale = k_scale = v_scale = None
    if scales is not None:
        batch = query.shape[0] if cu_q is None else cu_q.shape[0] - 1
        q_scale, k_scale, v_scale = (_expanded(s, batch, key.shape[-2]) for s in scales)
    # The number of splits follows from the whole batch's size, and with it the order of summation; 0 leaves it to the kernel.
    splits = 1 if deterministic(policy) else 0
    found = fwd(
        query, key, value, None, None, q_v, out, None if cu_q is None else cu_q.contiguous(), None if cu_k is None else cu_k.contiguous(),
        None, used, ends, max_q, max_k, table, None, starts, None, None, None,
        q_scale, k_scale, v_scale, scale, causal, left, right, chunk, softcap, False, plan, splits, None, 0,
        sinks, *tail,
    )  # fmt: skip
    return found[0], found[1]


def _expanded(scale: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """`[1]` or `[Hkv]` as `[B, Hkv]`, which the kernel reads through its strides: nothing is copied."""
    return None if scale is None else scale.expand(batch, heads)


def left_padding(page_size: int, rows: int, policy: str, like: Tensor) -> Tensor | None:
    """int32 zeros `[B]` for a paged call that must keep off TMA, else None. rows: query rows of a key head and request, at most.

    Pages of whole tiles are loaded by TMA when the queries fill a tile, stale NaN with them; the other path, which a left padding
    selects, zeroes what lies past the end. It also has one tile size, hence one order of summation.
    """
    whole = page_size >= 64 and page_size % 16 == 0 and rows > 64
    return torch.zeros_like(like, memory_format=torch.contiguous_format) if whole or deterministic(policy) else None


def longest_query(policy: str, max_seqlen_q: int, right: int) -> int:
    """The `max_seqlen_q` that the wrap passes to the kernel.

    A tile's keys follow from whether it is 1, and from whether a window's right side reaches past it (hopper/flash_api.cpp). Under a
    deterministic policy neither is ever so.
    """
    return max(max_seqlen_q, 2, right + 2) if deterministic(policy) else max_seqlen_q


def longest_keys(policy: str, max_seqlen_k: int, left: int) -> int:
    """The same of a packed call's keys: a window that reaches past all of them is none to the kernel."""
    return max(max_seqlen_k, left + 2) if deterministic(policy) else max_seqlen_k


def steady_tiles(p: Problem) -> Refusal | None:
    """Under a deterministic policy: a tile must not follow from the longest request, nor from a window that reaches past its keys.

    Pages and dense calls say how many those are by their shapes. Where tiles with and without a window differ: hopper/tile_size.h.
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


def schedule_size(batch: int, queries: int, keys: int, head_dim: int, rules: tuple[bool, int, int, int]) -> int:
    """int32 words that a paged call of these sizes on SM90 takes for its schedule. rules: causal, left, right, chunk.

    Two words a request, one more where the requests are sorted (no window), one more where heads are swizzled (causal or window);
    requests are rounded up to 4, and the last word of all is the counter of tiles.
    """
    causal, left, right, chunk = rules
    left, right = (-1 if left >= keys - 1 else left), (-1 if right >= queries - 1 else right)
    if queries == 1 and left == right == -1 and not chunk and not 64 < head_dim <= 128:
        causal = False
    right = 0 if causal else right
    plain = left < 0 and right == 0 and not chunk
    local = (left >= 0 or right >= 0 or chunk > 0) and not plain
    return -(-batch // 4) * 4 * (2 + (not local) + (plain or local)) + 1


def part_of_plan(
    plan: Tensor | None, batch: int, queries: int, keys: int, head_dim: int, rules: tuple[bool, int, int, int]
) -> Tensor | None:
    """What `fwd` is given of `fa3_schedule`'s plan; None for a plan of the host's. Raises InvalidInput on a plan of another batch."""
    if plan is None or plan.dtype != torch.int32:
        return None
    want = -(-batch // 4) * 16 + 1
    if plan.dim() != 1 or plan.shape[0] != want or not plan.is_contiguous():
        raise InvalidInput("plan", f"shape {tuple(plan.shape)}", f"[{want}] contiguous, what fa3_schedule makes of {batch} requests")
    return plan[: schedule_size(batch, queries, keys, head_dim, rules)]


def dtype_rules(p: Problem) -> Refusal | None:
    """Half types all through, or float8_e4m3fn all through with scales on SM90."""
    if p.dtype != FLOAT8:
        return dtypes(*HALF)(p) or (Refusal("kv_scales", True, "no") if p.kv_scales else None)
    if p.target.arch != 90:
        return Refusal("dtype", p.dtype, "float16 | bfloat16 (but on sm90)")
    for field in ("head_dim", "v_head_dim"):
        if getattr(p, field) % 16:
            return Refusal(field, getattr(p, field), "a multiple of 16 (float8)")
    if p.v_head_dim != p.head_dim:
        return Refusal("v_head_dim", p.v_head_dim, f"{p.head_dim}, the query's (float8)")
    return None if p.kv_dtype == FLOAT8 else Refusal("kv_dtype", p.kv_dtype, "the query's float8_e4m3fn")


def with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """lse `[..., Hq]`: the kernel says -inf for a query that sees no key, where the contract wants the sink."""
    return lse if sinks is None else torch.where(lse == float("-inf"), sinks.float(), lse)


def past(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """bool `[T, 1, 1]`: the tokens of no request."""
    return (torch.arange(tokens, device=cu_seqlens.device) >= cu_seqlens[-1])[:, None, None]


def packed_lse(lse: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor, padded: bool = True) -> Tensor:
    """`[Hq, T]` of the kernel -> `[T, Hq]`, -inf for tokens of no request."""
    lse = with_sinks(lse.transpose(0, 1), sinks)
    return lse.masked_fill(past(cu_seqlens_q, lse.shape[0])[..., 0], float("-inf")) if padded else lse


def value_dim(p: Problem) -> Refusal | None:
    """Which value head dims its units are compiled for (flash_api.cpp)."""
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
    """Chunks are counted from the first visible key, and a query before the first key lies in one of them."""
    if p.attention_chunk and p.kv_range:
        return Refusal("kv_range", True, "no (attention_chunk)")
    if p.attention_chunk and p.windowed:
        # Given both, the kernel lets one of them go: seen on an H200 with the 0.4.3 wheel.
        return Refusal("window", p.window, "(-1, -1) (attention_chunk)")
    return Refusal("causal", False, "True (attention_chunk)") if p.attention_chunk and not p.causal else None


def plan_rules(p: Problem) -> Refusal | None:
    """Schedules are made for SM90."""
    return Refusal("plan", p.plan, "none | host (but on sm90)") if p.plan == "device" and p.target.arch != 90 else None
