"""How sgl-kernel's FlashAttention-3 is found and called: the raw op `sgl_kernel::fwd`, by position, without its Python package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.kernels import _sgl
from attnops.problem import Problem, Refusal, Target
from attnops.reference.attention import compact

PACKAGE = _sgl.package("0.4.2")
LIBRARY = "flash_ops.abi3.so"
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
    rules: tuple[bool, int, int, float],
    out: Tensor | None = None,
    cu: tuple[Tensor | None, Tensor | None] = (None, None),
    longest: tuple[int | None, int | None] = (None, None),
    ends: Tensor | None = None,
    starts: Tensor | None = None,
    table: Tensor | None = None,
    q_v: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, lse with the heads first). rules: causal, left, right, softcap. q_v: the query's part against the value."""
    fwd, tail = raw_op()
    causal, left, right, softcap = rules
    sinks = None if sinks is None else sinks.to(torch.bfloat16).contiguous()
    cu_q, cu_k = (None if x is None else x.contiguous() for x in cu)
    found = fwd(
        query, key, value, None, None, q_v, out, cu_q, cu_k, None, None, ends, *longest, table, None, starts, None, None, None,
        None, None, None, scale, causal, left, right, 0, softcap, False, None, 1 if deterministic(policy) else 0, None, 0, sinks, *tail,
    )  # fmt: skip
    return found[0], found[1]


def deterministic(policy: str) -> bool:
    """Does the policy ask for results that do not depend on batch mates?"""
    # The number of splits follows from the whole batch's size, and with it the order of summation.
    return "deterministic" in policy.split(";")


def with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """lse `[..., Hq]`: the kernel says -inf for a query that sees no key, where the contract wants the sink."""
    return lse if sinks is None else torch.where(lse == float("-inf"), sinks.float(), lse)


def past(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """bool `[T, 1, 1]`: the tokens of no request."""
    return (torch.arange(tokens, device=cu_seqlens.device) >= cu_seqlens[-1])[:, None, None]


def packed_lse(lse: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor) -> Tensor:
    """`[Hq, T]` of the kernel -> `[T, Hq]`, -inf for tokens of no request."""
    return compact(with_sinks(lse.transpose(0, 1), sinks).masked_fill(past(cu_seqlens_q, lse.shape[1])[..., 0], float("-inf")))


def value_dim(p: Problem) -> Refusal | None:
    """Which value head dims its units are compiled for (flash_api.cpp)."""
    d, dv = p.head_dim, p.v_head_dim
    if dv == d:
        return None
    if p.target.arch != 90:
        return Refusal("v_head_dim", dv, f"{d}, the query's (but on sm90)")
    if (128 < d <= 192 and 96 < dv <= 128) or (d <= 64 and dv <= 512):
        return None
    return Refusal("v_head_dim", dv, f"{d}, the query's; or 97..128 for head_dim 129..192; or <= 512 for head_dim <= 64")


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
