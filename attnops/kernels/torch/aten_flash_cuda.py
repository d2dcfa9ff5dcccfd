"""How `aten_flash` calls FlashAttention-2 on CUDA: torch's `_flash_attention_forward` and `_flash_attention_backward`.

Both take tokens first, strided, and fewer key heads than query heads; causal and windows are bottom-right aligned. Read from torch's
flash_api.cpp: lse comes heads first, natural, +inf for a query that sees no key; rows of no request are not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnops.call import changed
from attnops.kernel import demand, deterministic, device
from attnops.kernels.shared.tokens import past
from attnops.measured import Roofline
from attnops.package import _installed
from attnops.problem import Problem
from attnops.reference.attention import compact, no_lse

if TYPE_CHECKING:
    from attnops.ops.dense import Attention, AttentionBackward
    from attnops.ops.varlen import VarlenAttention, VarlenAttentionBackward

INF = float("inf")
PACK, HALVES = 16, 8
"""Bytes that are moved at a time, and numbers."""


class Lengths(NamedTuple):
    """The lengths of a call as aten takes them.

    cu_q, cu_k: cumulative lengths of packed requests, None for a dense call. max_q, max_k: queries and keys of the longest request.
    right: the window's right side.
    """

    cu_q: Tensor | None
    cu_k: Tensor | None
    max_q: int
    max_k: int
    right: int


def dense(call: Attention | AttentionBackward) -> Lengths:
    """Of `[B, S, H, D]`."""
    return Lengths(None, None, call.query.shape[1], call.key.shape[1], call.window_right)


def varlen(call: VarlenAttention | VarlenAttentionBackward) -> Lengths:
    """Of `[T, H, D]`."""
    return _packed(call, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k)


def _packed(call: Attention | VarlenAttention | VarlenAttentionBackward, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Lengths:
    left, right = call.window_left, call.window_right
    if deterministic(call.policy):
        max_k = max(max_k, left + 2)  # a window that reaches past all keys is none to the kernel, which has other tiles then
    if right >= 0 and not call.causal:
        # aten takes a window as wide as the longest request for none, but a query before the first key does not see through it.
        right = -1 if right >= max_q + max_k else right
        max_k = max(max_k, right + 1)
    if left >= 0 and right < 0 and not call.causal:
        # aten takes an open right side for a window of the longest request's keys, which ends early for a query before the first key.
        max_k += max_q
    # With one query a request aten counts the requests instead of the tokens, and some may have none.
    return Lengths(cu_q.contiguous(), cu_k.contiguous(), max(max_q, 2), max_k, right)


def attention(call: Attention) -> tuple[Tensor, Tensor]:
    """See `attnops.attention`.

    A deterministic call goes as packed requests, whose keys are never split; the splits of a dense call follow from its rows.
    """
    if not deterministic(call.policy):
        return forward(call, dense(call))
    query, key = call.query, call.key
    at = torch.arange(query.shape[0] + 1, device=query.device, dtype=torch.int32)
    lengths = _packed(call, at * query.shape[1], at * key.shape[1], query.shape[1], key.shape[1])
    flat = changed(call, query=query.flatten(0, 1), key=key.flatten(0, 1), value=call.value.flatten(0, 1))
    output, lse = forward(flat, lengths)
    return output.view(*query.shape[:3], -1), lse.view(query.shape[:3]) if call.return_lse else lse


def forward(call: Attention | VarlenAttention, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """(output, lse), contiguous."""
    q, k, v = _in_packs(call.query), _in_packs(call.key), _in_packs(call.value)
    output, lse = torch.ops.aten._flash_attention_forward.default(
        q, k, v, *lengths[:4], 0.0, call.causal, False, scale=call.scale, window_size_left=call.window_left,
        window_size_right=lengths.right,
    )[:2]  # fmt: skip
    return _plain(output), _turned(lse, -INF) if call.return_lse else no_lse(call.query)


def backward(call: AttentionBackward | VarlenAttentionBackward, lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous."""
    given = (call.grad_output.to(call.query.dtype), call.query, call.key, call.value, call.output)
    seed = torch.empty(2, dtype=torch.uint64, device=call.query.device)  # read only where dropout is on
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward.default(
        *map(_in_packs, given), _turned(call.lse, INF), *lengths[:4], 0.0, call.causal, seed, seed, scale=call.scale,
        window_size_left=call.window_left, window_size_right=lengths.right,
    )  # fmt: skip
    return _plain(grad_q), _plain(grad_k), _plain(grad_v)


def _plain(x: Tensor) -> Tensor:
    """`compact`, at less cost for a tensor that is so already."""
    return x if x.is_contiguous() and min(x.shape) > 1 else compact(x)


def _turned(lse: Tensor, unseen: float) -> Tensor:
    """`[..., Hq, S]` of the kernel to or from `[..., S, Hq]`, contiguous, `unseen` for a query without keys."""
    turned = lse.transpose(-1, -2)
    return torch.nan_to_num(turned, nan=float("nan"), posinf=unseen, neginf=unseen, out=lse.new_empty(turned.shape))


def clear(*parts: tuple[Tensor, Tensor, float]) -> None:
    """Set the rows of no request in place, of up to three (cu_seqlens, rows, fill): those from `cu_seqlens[B]` on. rows: contiguous."""
    if parts[0][1].is_cuda and _installed("triton"):
        from attnops.kernels.triton.launch.data import clear_rows

        clear_rows(parts)
        return
    for cu_seqlens, x, fill in parts:
        x.masked_fill_(past(cu_seqlens, x.shape[0]).view(-1, *[1] * (x.dim() - 1)), fill)


def _in_packs(x: Tensor) -> Tensor:
    """`x`, or a copy where its rows do not start at multiples of 16 bytes: the kernels move as many at a time and do not look."""
    if x.is_contiguous():  # the head dim is a multiple of 8
        odd: bool | int = x.data_ptr() % PACK
    else:
        *steps, last = x.stride()
        odd = last != 1 or x.data_ptr() % PACK or any(n % HALVES for n in steps)
    return x.clone(memory_format=torch.contiguous_format) if odd else x


# Under a deterministic policy tiles do not follow from the longest request.
STEADY = (device("cuda"), demand("window", "none, or causal (policy.deterministic)", lambda p: p.causal or not p.windowed))
LIMITS = (
    demand("target", ">= sm80", lambda p: p.target.arch >= 80, on="cuda"),
    demand("dtype", "float16 | bfloat16 (CUDA)", lambda p: p.dtype in (torch.float16, torch.bfloat16), on="cuda"),
    demand("head_dim", "a multiple of 8, <= 256 (CUDA)", lambda p: p.head_dim % 8 == 0 and p.head_dim <= 256, on="cuda"),
    demand("mask", "none (CUDA)", lambda p: p.mask == "none", on="cuda"),
    demand(
        "window",
        "no window with more queries than keys (CUDA)",
        lambda p: p.op.startswith("varlen") or p.window == (-1, -1) or p.causal or p.sizes_equal or _fewer_queries(p),
        on="cuda",
    ),
)


def _fewer_queries(p: Problem) -> bool:
    return p.queries.hi is not None and p.queries.hi <= p.context.lo


FORWARD = Roofline(15.0, 0.7, 0.43)
BACKWARD = Roofline(25.0, 0.3, 0.15)
"""Five products where a forward makes two. Both by direct calls."""


def cost_us(p: Problem) -> float:
    """With a pass that clears padding rows."""
    return (BACKWARD if p.grad else FORWARD)(p) + 5.0 * (p.padded and p.op.startswith("varlen"))
