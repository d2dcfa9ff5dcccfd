"""A stand-in for `aten::_efficient_attention_forward` and its backward: torch's schemas and checks,
a float32 body on CPU. Not the kernel.

Kept from torch's attention.cu and attention_backward.cu because the wrapper must cope with it: as
many key heads as query heads, an lse of queries rounded up to 32 and inf past them, a bias with
aligned rows, and no word of queries without keys (NaN here).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tests.standins.aten_flash import Called, replaced
from tests.standins.body import INF, attend, gradients, logits_of

NAN = float("nan")


def installed() -> AbstractContextManager[Called]:
    """Within the block the ops run on CPU tensors; gives the names of the ops called."""
    return replaced(_efficient_attention_forward=_forward, _efficient_attention_backward=_backward)


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    assert (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1]
    )
    assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[3] == k.shape[3]
    assert q.dtype == k.dtype == v.dtype and q.dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
    )
    for x in (q, k, v):
        assert (
            x.stride(-1) == 1
            and x.numel()
            and not any(n * x.element_size() % 16 for n in x.stride()[:-1])
            and not x.data_ptr() % 16
        )
    if bias is not None:
        assert bias.dtype == q.dtype, "invalid dtype for bias - should match query's dtype"
        assert bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), (
            "attn_bias: wrong shape"
        )
        assert bias.stride(3) == 1, "attn_bias: wrong alignment (last dimension must be contiguous)"
        assert not any(n * bias.element_size() % 16 for n in bias.stride()[:-1]) and bias.stride(
            2
        ), "attn_bias is not correctly aligned"


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, kind: int, scale: float) -> Tensor:
    """Of one request."""
    assert kind in (0, 2)
    logits = logits_of(q, k, scale) + (0.0 if bias is None else bias.float())
    below = torch.ones(logits.shape[-2:], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    return logits.masked_fill(~below, -INF) if kind == 2 else logits


def _biases(bias: Tensor | None, q: Tensor) -> Any:
    return [None] * q.shape[0] if bias is None else bias


def _forward(
    q,
    k,
    v,
    bias,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    kind,
    with_lse=False,
    *,
    scale,
    seqlen_k=None,
    window_size=None,
):
    _check(q, k, v, bias)
    assert (cu_q, cu_k, max_q, max_k, dropout, seqlen_k, window_size) == (
        None,
        None,
        None,
        None,
        0.0,
        None,
        None,
    )
    found = [
        attend(one, value, _logits(one, key, added, kind, scale), rounded=q.dtype)[:2]
        for one, key, value, added in zip(q, k, v, _biases(bias, q), strict=True)
    ]
    out, stats = (torch.stack(x) for x in zip(*found, strict=True))
    blind = stats == -INF
    out = out.masked_fill(blind.transpose(1, 2)[..., None], NAN).to(q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], -(-q.shape[1] // 32) * 32 if with_lse else 0), INF)
    if with_lse:
        lse[..., : q.shape[1]] = stats.masked_fill(blind, NAN)
    seed = torch.empty((), dtype=torch.int64)
    return out, lse, seed, seed.clone(), q.shape[1], k.shape[1]


def _backward(
    g,
    q,
    k,
    v,
    bias,
    out,
    cu_q,
    cu_k,
    max_q,
    max_k,
    lse,
    dropout,
    seed,
    offset,
    kind,
    bias_grad,
    *,
    scale,
    num_splits_key=None,
    window_size=None,
    shared_storage_dqdkdv=False,
):
    _check(q, k, v, bias)
    assert (
        g.shape == out.shape == (*q.shape[:3], v.shape[3])
        and g.dtype == out.dtype == q.dtype
        and out.is_contiguous()
    )
    assert (cu_q, cu_k, dropout, num_splits_key, window_size, shared_storage_dqdkdv) == (
        None,
        None,
        0.0,
        None,
        None,
        False,
    )
    assert (
        lse.shape == (q.shape[0], q.shape[2], -(-q.shape[1] // 32) * 32)
        and lse.is_contiguous()
        and lse.dtype == torch.float32
    )
    assert (lse[..., q.shape[1] :] == INF).all() and not (lse == -INF).any()
    found = []
    for b, added in enumerate(_biases(bias, q)):
        logits = _logits(q[b], k[b], added, kind, scale)
        found.append(
            gradients(g[b], q[b], k[b], v[b], out[b], lse[b, :, : q.shape[1]], logits, scale)
        )
    *grads, ds = (torch.stack(x) for x in zip(*found, strict=True))
    of_bias = q.new_empty(())
    if bias_grad:
        assert bias is not None
        of_bias = q.new_empty((*bias.shape[:-1], -(-bias.shape[-1] // 16) * 16))[
            ..., : bias.shape[-1]
        ].copy_(ds)
    return *(grad.to(q.dtype).contiguous() for grad in grads), of_bias
