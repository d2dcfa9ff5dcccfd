"""What stand-ins of attention share: one request in float32, weights rounded to the query's dtype. Their quirks are their own."""

import torch
from torch import Tensor

INF = float("inf")


def wide(x: Tensor, q: Tensor) -> Tensor:
    """`[K, Hkv, D]` -> `[K, Hq, D]`, float32."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def logits_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q `[n, Hq, D]`, k `[K, Hkv, D]` -> `[Hq, n, K]`."""
    return torch.einsum("nhd,khd->hnk", q.float(), wide(k, q)) * scale


def attend(q: Tensor, v: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The output `[n, Hq, D]`, 0 for a query without keys, and the lse `[Hq, n]`, -inf for one."""
    total = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - torch.where(total == -INF, 0.0, total)[..., None])
    return torch.einsum("hnk,khd->nhd", weights.to(q.dtype).float(), wide(v, q)), total


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, logits: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of query, of key and value by query head, and of the logits. lse: `[Hq, n]`."""
    dout, weights = dout.float(), torch.exp(logits - lse[..., None])
    delta = (dout * out.float()).sum(-1).T
    d_logits = weights * (torch.einsum("nhd,khd->hnk", dout, wide(v, q)) - delta[..., None])
    d_q, d_k = torch.einsum("hnk,khd->nhd", d_logits, wide(k, q)), torch.einsum("hnk,nhd->khd", d_logits, q.float())
    return d_q * scale, d_k * scale, torch.einsum("hnk,nhd->khd", weights, dout), d_logits


def of_heads(grad: Tensor, k: Tensor) -> Tensor:
    """`[K, Hq, D]` -> `[K, Hkv, D]`."""
    return grad.unflatten(1, (k.shape[1], -1)).sum(2)
