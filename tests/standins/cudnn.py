"""A stand-in for `aten::_scaled_dot_product_cudnn_attention` and its backward: torch's schemas, a
float32 body on CPU. Not the kernel.

Kept from torch's MHA.cpp because the wrapper must cope with it: a causal mask is top-left aligned,
lse is `[B, H, S, 1]`, and results take the strides of what they are like.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tests.standins.aten_flash import Called, replaced
from tests.standins.body import INF, attend, gradients, logits_of, of_heads


def installed() -> AbstractContextManager[Called]:
    """Within the block the ops run on CPU tensors; gives the names of the ops called."""
    return replaced(
        _scaled_dot_product_cudnn_attention=_forward,
        _scaled_dot_product_cudnn_attention_backward=_backward,
    )


def _check(q: Tensor, *tensors: Tensor) -> None:
    for x in (q, *tensors):
        assert x.dtype == q.dtype and x.dtype in (torch.float16, torch.bfloat16) and x.dim() == 4
        assert x.stride(-1) == 1 and not any(
            n % 16 for n in (x.data_ptr(), *(s * x.element_size() for s in x.stride()[:-1]))
        )
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 and x.shape[2] > 1 and x.numel()


def _logits(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    logits = logits_of(q, k, scale)
    return (
        logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -INF)
        if causal
        else logits
    )


def _requests(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tokens first."""
    return zip(*(x.transpose(1, 2) for x in tensors), strict=True)


def _forward(
    q,
    k,
    v,
    bias,
    with_lse,
    dropout=0.0,
    causal=False,
    debug=False,
    *,
    scale,
):
    _check(q, k, v)
    assert bias is None and dropout == 0.0 and not debug
    found = [
        attend(one, value, _logits(one, key, scale, causal), rounded=q.dtype)[:2]
        for one, key, value in _requests(q, k, v)
    ]
    out, stats = (torch.stack(x) for x in zip(*found, strict=True))
    lse, seed = stats[..., None] if with_lse else torch.empty(0), torch.empty((), dtype=torch.int64)
    like = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype).transpose(
        1, 2
    )
    return (
        like.copy_(out.transpose(1, 2)),
        lse,
        seed,
        seed.clone(),
        q.shape[2],
        k.shape[2],
        seed.clone(),
        seed.clone(),
        seed.clone(),
    )


def _backward(
    g,
    q,
    k,
    v,
    out,
    lse,
    seed,
    offset,
    bias,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout,
    causal,
    *,
    scale,
):
    _check(q, k, v, g, out)
    assert (bias, cum_q, cum_k, dropout) == (None, None, None, 0.0) and (max_q, max_k) == (
        q.shape[2],
        k.shape[2],
    )
    assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous() and lse.dtype == torch.float32
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    for b, (one, key, value, dout, result) in enumerate(_requests(q, k, v, g, out)):
        d_q, d_k, d_v, _ = gradients(
            dout, one, key, value, result, lse[b, ..., 0], _logits(one, key, scale, causal), scale
        )
        for into, found in zip(grads, (d_q, of_heads(d_k, key), of_heads(d_v, key)), strict=True):
            into[b] = found.transpose(0, 1)
    return grads
