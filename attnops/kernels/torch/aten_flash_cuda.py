"""How `aten_flash` calls FlashAttention-2 on CUDA: torch's `_flash_attention_forward` and `_flash_attention_backward`.

Both take tokens first, strided, and fewer key heads than query heads; causal and windows are bottom-right aligned. Read from torch's
flash_api.cpp: lse comes heads first, natural, +inf for a query that sees no key; rows of no request are not written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.measured import Roofline
from attnops.package import _installed
from attnops.problem import Problem, Refusal
from attnops.reference.attention import compact

Static = tuple[float, bool, int, int]
"""scale, causal, and the window's left and right."""

Pair = tuple[Tensor, Tensor]
INF = float("inf")
PACK, HALVES = 16, 8
"""Bytes that are moved at a time, and numbers."""


def forward(
    query: Tensor, key: Tensor, value: Tensor, static: Static, cu: Pair | None = None, longest: tuple[int, int] = (0, 0)
) -> tuple[Tensor, Tensor]:
    """(output contiguous, lse heads first). Dense `[B, S, H, D]`, or packed `[T, H, D]` with `cu` and the `longest` request."""
    scale, causal, left, right = static
    cu_q, cu_k, max_q, max_k, right = _lengths(query, key, static, cu, longest)
    q, k, v = (_in_packs(x) for x in (query, key, value))
    output, lse = torch.ops.aten._flash_attention_forward.default(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale, window_size_left=left, window_size_right=right
    )[:2]
    return _plain(output), lse


def row_by_row(query: Tensor, key: Tensor, value: Tensor, static: Static) -> tuple[Tensor, Tensor]:
    """`forward` of dense calls, as packed ones: those never split their keys, where a dense call's splits follow from its rows."""
    batch, queries, heads, _ = query.shape
    at = torch.arange(batch + 1, device=query.device, dtype=torch.int32)
    longest = queries, keys_of(key.shape[1], static)
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    output, lse = forward(q, k, v, static, (at * queries, at * key.shape[1]), longest)
    return output.view(batch, queries, heads, -1), lse.view(heads, batch, queries).transpose(0, 1)


def keys_of(longest: int, static: Static) -> int:
    """The longest request's keys as a deterministic policy has it: a window that reaches past all of them is none to the kernel."""
    return max(longest, static[2] + 2)


def steady(p: Problem) -> Refusal | None:
    """Under a deterministic policy: tiles do not follow from the longest request."""
    if p.target.device != "cuda":
        return Refusal("device", p.target.device, "cuda (policy.deterministic)")
    return Refusal("window", p.window, "none, or causal (policy.deterministic)") if p.windowed and not p.causal else None


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    static: Static,
    cu: Pair | None = None,
    longest: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous. lse as the op keeps it."""
    scale, causal, left, right = static
    cu_q, cu_k, max_q, max_k, right = _lengths(query, key, static, cu, longest)
    g, q, k, v, o = (_in_packs(x) for x in (grad_output.to(query.dtype), query, key, value, output))
    turned = lse.transpose(-1, -2)
    z = torch.nan_to_num(turned, nan=float("nan"), posinf=INF, neginf=INF, out=lse.new_empty(turned.shape))
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # read only where dropout is on
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward.default(
        g, q, k, v, o, z, cu_q, cu_k, max_q, max_k, 0.0, causal, seed, seed, scale=scale, window_size_left=left, window_size_right=right
    )
    return _plain(grad_q), _plain(grad_k), _plain(grad_v)


def _plain(x: Tensor) -> Tensor:
    """`compact`, at less cost for what is so already."""
    return x if x.is_contiguous() and min(x.shape) > 1 else compact(x)


def tokens_first(lse: Tensor) -> Tensor:
    """`[..., Hq, S]` of the kernel -> `[..., S, Hq]` contiguous, -inf where no key is seen."""
    turned = lse.transpose(-1, -2)
    return torch.nan_to_num(turned, nan=float("nan"), posinf=-INF, neginf=-INF, out=lse.new_empty(turned.shape))


def clear(*parts: tuple[Tensor, Tensor, float]) -> None:
    """Set the rows of no request in place, of up to three (cu_seqlens, rows, fill): those from `cu_seqlens[B]` on. rows: contiguous."""
    if parts[0][1].is_cuda and _installed("triton"):
        from attnops.kernels.triton.launch.data import clear_rows

        clear_rows(parts)
        return
    for cu_seqlens, x, fill in parts:
        past = torch.arange(x.shape[0], device=cu_seqlens.device) >= cu_seqlens[-1]
        x.masked_fill_(past.view(-1, *[1] * (x.dim() - 1)), fill)


def _lengths(
    query: Tensor, key: Tensor, static: Static, cu: Pair | None, longest: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None, int, int, int]:
    """(cu_q, cu_k, most queries, most keys, window's right) as aten takes them."""
    _, causal, left, right = static
    if cu is None:
        return None, None, query.shape[1], key.shape[1], right
    max_q, max_k = longest
    if right >= 0 and not causal:
        # aten takes a window as wide as the longest request for none, but a query before the first key does not see through it.
        right = -1 if right >= max_q + max_k else right
        max_k = max(max_k, right + 1)
    if left >= 0 and right < 0 and not causal:
        # aten takes an open right side for a window of the longest request's keys, which ends early for a query before the first key.
        max_k += max_q
    # With one query a request aten counts the requests instead of the tokens, and some may have none.
    return cu[0].contiguous(), cu[1].contiguous(), max(max_q, 2), max_k, right


def _in_packs(x: Tensor) -> Tensor:
    """`x`, or a copy where its rows do not start at multiples of 16 bytes: the kernels move as many at a time and do not look."""
    if x.is_contiguous():  # the head dim is a multiple of 8
        odd: bool | int = x.data_ptr() % PACK
    else:
        *steps, last = x.stride()
        odd = last != 1 or x.data_ptr() % PACK or any(n % HALVES for n in steps)
    return x.clone(memory_format=torch.contiguous_format) if odd else x


def limits(p: Problem) -> Refusal | None:
    """What the CUDA kernels cannot do."""
    if p.target.device != "cuda":
        return None
    if p.target.arch < 80:
        return Refusal("target", p.target, ">= sm80")
    if p.dtype not in (torch.float16, torch.bfloat16):
        return Refusal("dtype", p.dtype, "float16 | bfloat16 (CUDA)")
    if p.head_dim % 8 or p.head_dim > 256:
        return Refusal("head_dim", p.head_dim, "a multiple of 8, <= 256 (CUDA)")
    if p.mask != "none":
        return Refusal("mask", p.mask, "none (CUDA)")
    if p.window != (-1, -1) and not (p.causal or p.sizes_equal) and p.op.startswith("attention") and _more_queries(p):
        return Refusal("window", p.window, "no window with more queries than keys (CUDA)")
    return None


def _more_queries(p: Problem) -> bool:
    return p.queries.hi is None or p.queries.hi > p.context.lo


FORWARD = Roofline(15.0, 0.7, 0.43)
BACKWARD = Roofline(25.0, 0.3, 0.15)
"""Five products where a forward makes two. Both by direct calls."""


def cost_us(p: Problem) -> float:
    """With a pass that clears padding rows."""
    return (BACKWARD if p.grad else FORWARD)(p) + 5.0 * (p.padded and p.op.startswith("varlen"))
