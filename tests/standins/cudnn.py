"""A stand-in for `aten::_scaled_dot_product_cudnn_attention` and its backward: torch's schemas, a float32 body on CPU. Not the kernel.

Kept from torch's MHA.cpp because the wrapper must cope with it: a causal mask is top-left aligned, lse is `[B, H, S, 1]`, and results take
the strides of what they are like.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tests.standins.aten_flash import Called, replaced


def installed() -> AbstractContextManager[Called]:
    """Within the block the ops run on CPU tensors; gives the names of the ops called."""
    return replaced(_scaled_dot_product_cudnn_attention=_forward, _scaled_dot_product_cudnn_attention_backward=_backward)


def _check(q: Tensor, *tensors: Tensor) -> None:
    for x in (q, *tensors):
        assert x.dtype == q.dtype and x.dtype in (torch.float16, torch.bfloat16) and x.dim() == 4
        assert x.stride(-1) == 1 and not any(n % 16 for n in (x.data_ptr(), *(s * x.element_size() for s in x.stride()[:-1])))
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 and x.shape[2] > 1 and x.numel()


def _logits(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    logits = torch.einsum("bhnd,bhkd->bhnk", q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), float("-inf")) if causal else logits


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, dropout: float = 0.0, causal: bool = False, debug: bool = False,
    *, scale: float,
) -> tuple[Any, ...]:  # fmt: skip
    _check(q, k, v)
    assert bias is None and dropout == 0.0 and not debug
    logits = _logits(q, k, scale, causal)
    out = torch.softmax(logits, -1).to(q.dtype).float() @ v.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    lse, seed = torch.logsumexp(logits, -1, keepdim=True) if with_lse else torch.empty(0), torch.empty((), dtype=torch.int64)
    like = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype).transpose(1, 2)
    return like.copy_(out), lse, seed, seed.clone(), q.shape[2], k.shape[2], seed.clone(), seed.clone(), seed.clone()


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, bias: Tensor | None,
    cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int, dropout: float, causal: bool, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, g, out)
    assert (bias, cum_q, cum_k, dropout) == (None, None, None, 0.0) and (max_q, max_k) == (q.shape[2], k.shape[2])
    assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous() and lse.dtype == torch.float32
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    p = torch.exp(_logits(q, k, scale, causal) - lse)
    ds = p * (g.float() @ wide_v.mT - (g.float() * out.float()).sum(-1, keepdim=True)) * scale
    found = ds @ wide_k, (ds.mT @ q.float()).unflatten(1, (-1, group)).sum(2), (p.mT @ g.float()).unflatten(1, (-1, group)).sum(2)
    grad_q, grad_k, grad_v = (torch.empty_like(x).copy_(y) for x, y in zip((q, k, v), found, strict=True))
    return grad_q, grad_k, grad_v
