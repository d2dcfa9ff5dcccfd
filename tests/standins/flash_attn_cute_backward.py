"""A stand-in for `_flash_attn_bwd` of flash-attn-4 4.0.0b36 (flash_attn.cute.interface): its
signature, its assertions, a float32 body on CPU. Not the kernel. `flash_attn_cute.installed` puts
it in place.

Kept from the real one because the wrapper must cope with it: rows of no request are left unwritten;
whole tiles of queries, keys, values and of the output's gradient are loaded, NaN past a request's
end with them, while output and lse are not read there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.standins.body import INF, capped, gradients, logits_of, of_heads, visible
from tests.standins.checks import ALL, LAST, architecture, laid_out

HALVES, I32, F32 = (torch.float16, torch.bfloat16), torch.int32, torch.float32
TILE_Q, TILE_K = 64, 128


def flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    m_block_size=64,
    n_block_size=128,
    num_threads=256,
    pack_gqa=False,
    num_stages_Q=2,
    num_stages_dO=2,
    SdP_swapAB=False,
    dKV_swapAB=False,
    dQ_swapAB=False,
    AtomLayoutMSdP=2,
    AtomLayoutNdKV=2,
    AtomLayoutMdQ=2,
    V_in_regs=False,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    dlse=None,
    learnable_sink=None,
):
    assert softmax_scale is not None and dq is not None and dk is not None and dv is not None, (
        "the stand-in wants these"
    )
    assert not any(x.requires_grad for x in (q, k, v, out, dout, lse)), (
        "the stand-in wants these detached"
    )
    packed, half = cu_seqlens_q is not None, q.dtype
    by_q, by_k = ("total_q", "total_k") if packed else ("batch, seqlen_q", "batch, seqlen_k")
    stats = "heads, total_q" if packed else "batch, heads, seqlen_q"
    s = laid_out(
        sizes={"batch": q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1},
        q=(q, f"{by_q}, heads, d", HALVES, ""),
        k=(k, f"{by_k}, kv_heads, d", half, ""),
        v=(v, f"{by_k}, kv_heads, dv", half, ""),
        out=(out, f"{by_q}, heads, dv", half, ""),
        dout=(dout, f"{by_q}, heads, dv", half, ""),
        lse=(lse, stats, F32, ALL),
        dlse=(dlse, stats, F32, ALL),
        dq=(dq, f"{by_q}, heads, d", half, ALL),
        dk=(dk, f"{by_k}, kv_heads, d", half, ALL),
        dv=(dv, f"{by_k}, kv_heads, dv", half, ALL),
        cu_seqlens_q=(cu_seqlens_q, "batch + 1", I32, LAST),
        cu_seqlens_k=(cu_seqlens_k, "batch + 1", I32, LAST),
        learnable_sink=(learnable_sink, "heads", (*HALVES, F32), ""),
    )
    assert s.heads % s.kv_heads == 0, "num_head must be divisible by num_head_kv"
    if architecture() // 10 == 9:
        assert s.heads == s.kv_heads or s.d == s.dv, "GQA backward requires head_dim == head_dim_v"
        rows = -(-s.d // 32) * 32
        assert s.d > 128 or rows == -(-s.d // 16) * 16, (
            "the sums of a query's gradient are read at other strides than written"
        )
    else:
        assert (s.d <= 128 and s.dv <= 128) or (s.d, s.dv) in ((192, 128), (256, 256)), (
            "is not supported on SM100/SM110"
        )
        assert s.d != 256 or (learnable_sink is None and dlse is None and softcap == 0.0), (
            "SM100 backward with head_dim=256"
        )
    assert window_size_left is None or window_size_left >= 0, (
        "a negative window is read as a number of keys"
    )
    assert window_size_right is None or window_size_right >= 0
    assert not packed or (type(max_seqlen_q) is int and type(max_seqlen_k) is int), (
        "a tensor here compiles anew at every step"
    )
    dsink = None if learnable_sink is None else torch.zeros(s.heads)
    window = window_size_left, 0 if causal else window_size_right
    for b in range(s.batch):
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            (first, end), (start, stop) = (
                x[b : b + 2].tolist() for x in (cu_seqlens_q, cu_seqlens_k)
            )
            tiles = (
                slice(first, first + -(-(end - first) // TILE_Q) * TILE_Q),
                slice(start, start + -(-(stop - start) // TILE_K) * TILE_K),
            )
            assert end - first <= (max_seqlen_q or 0) and stop - start <= (max_seqlen_k or 0)
            n = end - first
            keys = stop - start
            into = (dq[first:end], dk[start:stop], dv[start:stop])
            loaded = q[tiles[0]], k[tiles[1]], v[tiles[1]], dout[tiles[0]]
            read = out[first:end], lse[:, first:end], None if dlse is None else dlse[:, first:end]
        else:
            n = q.shape[1]
            keys = k.shape[1]
            loaded = (q[b], k[b], v[b], dout[b])
            into = (dq[b], dk[b], dv[b])
            read = out[b], lse[b], None if dlse is None else dlse[b]
        sunk = _request(
            n, keys, loaded, read, into, (softmax_scale, softcap, window), learnable_sink
        )
        if dsink is not None:
            dsink += sunk
    grads = dq, dk, dv
    return (
        grads
        if dsink is None or learnable_sink is None
        else (*grads, dsink.to(learnable_sink.dtype))
    )


def _request(
    n: int, keys: int, loaded: Any, read: Any, into: Any, rules: Any, sink: Tensor | None
) -> Tensor:
    """Write the gradients of one request's rows; returns its part of the sinks'. loaded: whole
    tiles. read: the request's rows alone."""
    scale, softcap, (left, right) = rules
    q, k, v, dout = loaded
    out, lse, dlse = read
    past = q.shape[0] - n
    see = visible(
        q.shape[0] - past,
        k.shape[0],
        keys,
        -1 if left is None else left,
        -1 if right is None else right,
    )
    logits = capped(logits_of(q, k, scale), softcap).masked_fill(~pad(see, (0, 0, 0, past)), -INF)
    out, dlse = pad(out, (0, 0, 0, 0, 0, past)), None if dlse is None else pad(dlse, (0, past))
    stat = pad(torch.where(lse == -INF, 0.0, lse), (0, past), value=INF)
    found = gradients(dout, q, k, v, out, stat, logits, scale, dlse, softcap, q.dtype)
    for x, grad in zip(into, (found[0], of_heads(found[1], k), of_heads(found[2], k)), strict=True):
        x.copy_(grad[: x.shape[0]])
    if sink is None:
        return torch.zeros(q.shape[1])
    delta = (out[:n].float() * dout[:n].float()).sum(-1).T
    mass = torch.where(lse == -INF, 1.0, torch.exp(sink.float()[:, None] - lse))
    return -(mass * (delta if dlse is None else delta - dlse[:, :n])).sum(1)
