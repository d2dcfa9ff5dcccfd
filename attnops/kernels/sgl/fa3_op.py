"""How sgl-kernel's FlashAttention-3 is found and called: the raw op `sgl_kernel::fwd`, by position. Read from hopper/flash_api.cpp.

It has 35 arguments in wheels 0.4.2 and 0.4.3, and 37 in 0.4.4 and later. The wheel's Python package is not imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.kernels.sgl import wheel
from attnops.problem import Refusal, Target

# get_scheduler_metadata is there since 0.4.1; no wheel before 0.4.2 fits the torch that attnops asks for.
PACKAGE = wheel.package("0.4.2")
LIBRARY = "flash_ops.abi3.so"


def missing(target: Target) -> Refusal | None:
    """The probe: the package may be there without this library (a CPU build, a wheel cut down)."""
    return wheel.lacks(target, LIBRARY)


@functools.cache
def raw_op() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`sgl_kernel::fwd` and the arguments that its version takes after the 35 we give. Raises OSError or RuntimeError."""
    wheel.load("fwd", LIBRARY)
    fwd = torch.ops.sgl_kernel.fwd.default
    count = len(fwd._schema.arguments)
    if count not in (35, 37):
        raise RuntimeError(f"sgl_kernel::fwd: got {count} arguments, want 35 (sglang-kernel 0.4.2, 0.4.3) or 37 (0.4.4 and later)")
    return fwd, (None, False) if count == 37 else ()


Requests = tuple[Tensor | None, int | None, Tensor | None, int | None, Tensor | None, Tensor | None, Tensor | None]
"""cu_q `[B + 1]`, max_q, cu_k `[B + 1]`, max_k: of packed queries and keys. starts, ends `[B]`: the keys of each request. table: the page
table. All tensors are int32 and contiguous, the page table only within a row. A plain tuple, for a call of fa3 makes one each time."""


def forward(
    call: Any,
    given: tuple[Tensor, Tensor, Tensor],
    requests: Requests,
    steady: bool,
    out: Tensor | None = None,
    q_v: Tensor | None = None,
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, lse with the heads first).

    call: gives rules, sinks and scales. given: query, key and value. q_v: the query's part against the value, of latents.
    steady: under a deterministic policy. used: int32 `[B]`, how many of its tokens each request is served for; None for all.
    """
    fwd, tail = raw_op()
    query, key, value = given
    cu_q, max_q, cu_k, max_k, starts, ends, table = requests
    sinks, right, chunk, q_scale, k_scale, v_scale = call.sinks, -1, 0, None, None, None
    if sinks is not None:
        sinks = sinks.to(torch.bfloat16).contiguous()
    if q_v is None:
        right, chunk, q_scale = call.window_right, call.attention_chunk, call.q_scale
    if q_scale is not None:
        # [1] or [Hkv] as [B, Hkv], which the kernel reads through its strides, without a copy.
        shape = (query.shape[0] if cu_q is None else cu_q.shape[0] - 1, key.shape[-2])
        q_scale, k_scale, v_scale = (None if s is None else s.expand(shape) for s in (q_scale, call.k_scale, call.v_scale))
    # The number of splits follows from the whole batch's size, and with it the order of summation; 0 leaves it to the kernel.
    splits = 1 if steady else 0
    found = fwd(
        query, key, value, None, None, q_v, out, cu_q, cu_k, None, used, ends, max_q, max_k, table, None, starts, None, None, None,
        q_scale, k_scale, v_scale, call.scale, call.causal, call.window_left, right, chunk, call.softcap, False, None, splits, None, 0,
        sinks, *tail,
    )  # fmt: skip
    return found[0], found[1]


def left_padding(page_size: int, rows: int, steady: bool, like: Tensor, unit: int = 16) -> Tensor | None:
    """int32 zeros `[B]` for a paged call that must keep off TMA, else None.

    rows: query rows of a key head and request, at most. unit: tokens that tiles are multiples of; they have 64 or more.
    Pages of whole tiles are loaded by TMA when the queries fill a tile, stale NaN with them; the other path, which a left padding
    selects, zeroes the keys past the end. It also has one tile size, hence one order of summation.
    """
    whole = page_size >= 64 and page_size % unit == 0 and rows > 64
    return torch.zeros_like(like, memory_format=torch.contiguous_format) if whole or steady else None


def longest_query(steady: bool, max_seqlen_q: int, right: int = -1) -> int:
    """The `max_seqlen_q` for the kernel. steady: under a deterministic policy.

    A tile's keys follow from whether it is 1, and from whether a window's right side reaches past it (hopper/flash_api.cpp). Under a
    deterministic policy neither is ever so.
    """
    return max(max_seqlen_q, 2, right + 2) if steady else max_seqlen_q
