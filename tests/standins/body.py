"""What stand-ins of attention share: one request in float32, weights rounded to the query's dtype.
Their quirks are their own."""

import torch
from torch import Tensor

INF = float("inf")


def wide(x: Tensor, q: Tensor) -> Tensor:
    """`[K, Hkv, D]` -> `[K, Hq, D]`, float32."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def logits_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q `[n, Hq, D]`, k `[K, Hkv, D]` -> `[Hq, n, K]`."""
    return torch.einsum("nhd,khd->hnk", q.float(), wide(k, q)) * scale


def visible(
    n: int, keys: int, count: int, left: int = -1, right: int = -1, chunk: int = 0
) -> Tensor:
    """bool `[n, keys]`: which keys a query sees. count: the keys of the request, at whose last the
    last query stands."""
    i, j = torch.arange(n)[:, None] + count - n, torch.arange(keys)[None]
    see = j < count
    if left >= 0:
        see = see & (j >= i - left)
    if right >= 0:
        see = see & (j <= i + right)
    return see & (j // chunk == i // chunk) if chunk else see.expand(n, keys)


def capped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits


def attend(
    q: Tensor,
    v: Tensor,
    logits: Tensor,
    sinks: Tensor | None = None,
    rounded: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output `[n, Hq, D]`, 0 for a query without keys; the lse `[Hq, n]` of the keys alone,
    -inf for one, and with sinks `[Hq]`.

    rounded: the dtype of the weights when they meet the values.
    """
    alone = torch.logsumexp(logits, -1)
    total = (
        alone if sinks is None else torch.logaddexp(alone, sinks.float()[:, None].expand_as(alone))
    )
    weights = torch.exp(logits - torch.where(total == -INF, 0.0, total)[..., None])
    weights = weights if rounded is None else weights.to(rounded).float()
    return torch.einsum("hnk,khd->nhd", weights, wide(v, q)), alone, total


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    logits: Tensor,
    scale: float,
    dlse: Tensor | None = None,
    softcap: float = 0.0,
    rounded: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of query, of key and value by query head, and of the logits. lse, dlse: `[Hq, n]`. rounded:
    of what sums are made of."""
    dout, weights = dout.float(), torch.exp(logits - lse[..., None])
    delta = (dout * out.float()).sum(-1).T
    delta = delta if dlse is None else delta - dlse
    d_logits = weights * (torch.einsum("nhd,khd->hnk", dout, wide(v, q)) - delta[..., None])
    if softcap:
        d_logits = d_logits * (1 - (logits.masked_fill(logits == -INF, 0.0) / softcap) ** 2)
    if rounded is not None:
        weights, d_logits = weights.to(rounded).float(), d_logits.to(rounded).float()
    d_q = torch.einsum("hnk,khd->nhd", d_logits, wide(k, q))
    d_k = torch.einsum("hnk,nhd->khd", d_logits, q.float())
    return d_q * scale, d_k * scale, torch.einsum("hnk,nhd->khd", weights, dout), d_logits


def of_heads(grad: Tensor, k: Tensor) -> Tensor:
    """`[K, Hq, D]` -> `[K, Hkv, D]`."""
    return grad.unflatten(1, (k.shape[1], -1)).sum(2)
