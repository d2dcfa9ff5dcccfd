"""A stand-in for `aten::_flash_attention_forward` and `_backward` on CUDA: torch's schemas, a
float32 body on CPU. Not the kernel.

Kept from torch's flash_api.cpp because the wrapper must cope with it: rows of no request are left
unwritten (NaN here), lse comes heads first and is +inf for a query without keys, a window as wide
as the longest request counts as none, one query a request means as many tokens as requests, results
take the strides of what they are like, and rows must start at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.standins.body import INF, attend, gradients, logits_of, of_heads, visible
from tests.standins.libraries import noted

NAN = float("nan")
Called = list[str]


@contextmanager
def replaced(**bodies: Any) -> Iterator[Called]:
    """Within the block these ops of aten run on CPU tensors; yields the names of the ops called."""
    calls: Called = []
    library = torch.library.Library("aten", "IMPL")
    for name, body in bodies.items():
        library.impl(name, noted(calls, name, body), "CPU")
    try:
        yield calls
    finally:
        library._destroy()


@contextmanager
def installed() -> Iterator[Called]:
    """As `replaced`, and `aten_flash` takes CPU tensors for CUDA's."""
    from attnops.kernels.torch import aten_flash

    ops = {"_flash_attention_forward": _forward, "_flash_attention_backward": _backward}
    with replaced(**ops) as calls, patch.object(aten_flash, "on_cpu", lambda x: False):
        yield calls


def _check(q: Tensor, k: Tensor, *tensors: Tensor) -> None:
    for x in (q, k, *tensors):
        assert x.dtype == q.dtype and x.dtype in (torch.float16, torch.bfloat16), (
            "FlashAttention only support fp16 and bf16 data type"
        )
        assert x.stride(-1) == 1, "Input tensor must have contiguous last dimension"
        assert not any(
            n % 16 for n in (x.data_ptr(), *(s * x.element_size() for s in x.stride()[:-1]))
        ), "misaligned address"
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.shape[-2] % k.shape[-2] == 0


def _requests(
    q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None
) -> list[tuple[Any, Any]]:
    """(index of the queries, index of the keys) of each request."""
    if cu_q is None or cu_k is None:
        return [(b, b) for b in range(q.shape[0])]
    assert cu_q.is_contiguous() and cu_k.is_contiguous() and cu_q.dtype == cu_k.dtype == torch.int32
    a, b = (x.tolist() for x in (cu_q[:-1], cu_q[1:]))
    c, d = (x.tolist() for x in (cu_k[:-1], cu_k[1:]))
    return [(slice(w, x), slice(y, z)) for w, x, y, z in zip(a, b, c, d, strict=True)]


def _window(
    causal: bool, left: int | None, right: int | None, max_q: int, max_k: int
) -> tuple[int, int]:
    left = -1 if left is None or left >= max_k else left
    right = -1 if right is None or right >= max_k else right
    # Seen on an H100: beside a left side an open right side is one of the longest request's keys,
    # short for a query before the first key.
    return left, 0 if causal else max_k if left >= 0 and right < 0 else right


def _forward(
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    debug,
    *,
    scale,
    window_size_left=None,
    window_size_right=None,
    **_,
):
    _check(q, k, v)
    assert dropout == 0.0 and not debug
    assert cu_q is None or max_q > 1 or q.shape[0] == cu_q.shape[0] - 1, (
        "shape is invalid for input"
    )
    left, right = _window(causal, window_size_left, window_size_right, max_q, max_k)
    out = torch.empty_like(q).fill_(NAN)
    lse = torch.full(
        (q.shape[1], q.shape[0]) if cu_q is not None else (q.shape[0], q.shape[2], q.shape[1]), NAN
    )
    for rows, keys in _requests(q, k, cu_q, cu_k):
        logits = _logits(q[rows], k[keys], scale, left, right)
        found, total, _ = attend(q[rows], v[keys], logits, rounded=q.dtype)
        out[rows] = found.to(q.dtype)
        total = torch.where(total == -INF, INF, total)
        if cu_q is None:
            lse[rows] = total
        else:
            lse[:, rows] = total
    return (
        out,
        lse,
        torch.empty(2, dtype=torch.uint64),
        torch.empty((), dtype=torch.uint64),
        q.new_empty(0),
    )


def _logits(q: Tensor, k: Tensor, scale: float, left: int, right: int) -> Tensor:
    return logits_of(q, k, scale).masked_fill(
        ~visible(q.shape[0], k.shape[0], k.shape[0], left, right), -INF
    )


def _backward(
    g,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    rng_state,
    unused,
    *,
    scale,
    window_size_left=None,
    window_size_right=None,
):
    g, out = g.contiguous(), out.contiguous()
    _check(q, k, v, g, out)
    assert lse.dtype == torch.float32 and lse.is_contiguous() and not (lse == -INF).any()
    left, right = _window(causal, window_size_left, window_size_right, max_q, max_k)
    grads = [torch.empty_like(x).fill_(NAN) for x in (q, k, v)]
    for rows, keys in _requests(q, k, cu_q, cu_k):
        logits = _logits(q[rows], k[keys], scale, left, right)
        stats = lse[:, rows] if cu_q is not None else lse[rows]
        found = gradients(g[rows], q[rows], k[keys], v[keys], out[rows], stats, logits, scale)
        grads[0][rows] = found[0].to(q.dtype)
        for into, by_head in zip(grads[1:], found[1:3], strict=True):
            into[keys] = of_heads(by_head.to(q.dtype), k[keys]).to(q.dtype)
    return tuple(grads)
