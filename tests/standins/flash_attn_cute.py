"""A stand-in for `flash_attn.cute.interface._flash_attn_fwd` of flash-attn-4 4.0.0b36: its
signature, its assertions, a float32 body on CPU. Not the kernel.

Kept from the real one because the wrapper must cope with it: rows of no request are left unwritten;
lse comes heads first, only where it is given a place, and is the sink's for a query without keys;
TMA loads whole tiles, so that NaN in a value past a request's end spoils its queries, while pages
that are no tile are loaded row by row; requires_grad is asked of the inputs whatever the grad mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tests.standins import flash_attn_cute_backward
from tests.standins.checks import ALL, LAST, architecture, laid_out
from tests.standins.sgl_kernel_fa3 import _request

HALVES = (torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
I32 = torch.int32
Called = list[dict[str, Any]]


@contextmanager
def installed() -> Iterator[Called]:
    """Put the stand-ins, of the backward too, where the wrappers look within the block; yields the
    arguments of every call by name."""
    from attnops.kernels.flash_attn4 import backward, fa4

    calls: Called = []

    def noted(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(dict(zip(function.__code__.co_varnames, args, strict=False)) | kwargs)
            return function(*args, **kwargs)

        return lambda: run

    bwd = flash_attn_cute_backward.flash_attn_bwd
    with (
        patch.object(fa4, "interface", noted(_flash_attn_fwd)),
        patch.object(backward, "interface", noted(bwd)),
    ):
        yield calls


def _flash_attn_fwd(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    learnable_sink=None,
    tile_mn=None,
    mma_pv_is_rs=None,
    intra_wg_overlap=None,
    num_threads=384,
    num_splits=1,
    pack_gqa=None,
    _arch=None,
    score_mod=None,
    mask_mod=None,
    block_sparse_tensors=None,
    return_lse=False,
    out=None,
    lse=None,
    aux_tensors=None,
    aux_scalars=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    gather_kv_indices=None,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
):
    assert q is not None and k is not None and out is not None, "the stand-in wants these"
    arch = architecture()
    assert not any(t.requires_grad for t in (q, k, v) if t is not None), (
        "the real one would compile, and keep, what a gradient needs"
    )
    assert page_table is None or cu_seqlens_k is None, (
        "page_table is not supported with cu_seqlens_k"
    )
    unit, float8 = 16 // v.element_size(), v.dtype in FLOAT8
    by_token, by_head = (
        ("total_q", "heads, total_q")
        if cu_seqlens_q is not None
        else ("batch, seqlen_q", "batch, heads, seqlen_q")
    )
    tokens = (
        "pages, page_size"
        if page_table is not None
        else "total_k"
        if cu_seqlens_k is not None
        else "batch, seqlen_k"
    )
    s = laid_out(
        sizes={"batch": q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1},
        v=(v, f"{tokens}, kv_heads, dv", (*HALVES, *FLOAT8), ""),
        k=(k, f"{tokens}, kv_heads, d", v.dtype, ""),
        q=(q, f"{by_token}, heads, d", v.dtype, ""),
        page_table=(page_table, "batch, max_pages", I32, LAST),
        cu_seqlens_q=(cu_seqlens_q, "batch + 1", I32, LAST),
        cu_seqlens_k=(cu_seqlens_k, "batch + 1", I32, LAST),
        seqused_k=(seqused_k, "batch", I32, LAST),
        learnable_sink=(learnable_sink, "heads", (*HALVES, torch.float32), ""),
        out=(out, f"{by_token}, heads, dv", torch.bfloat16 if float8 else v.dtype, ""),
        lse=(lse, by_head, torch.float32, ALL),
        q_descale=(q_descale, "batch, kv_heads", torch.float32, ALL),
        k_descale=(k_descale, "batch, kv_heads", torch.float32, ""),
        v_descale=(v_descale, "batch, kv_heads", torch.float32, ""),
    )
    batch, heads, d, dv = s.batch, s.heads, s.d, s.dv
    assert heads % s.kv_heads == 0, "num_head must be divisible by num_head_kv"
    if arch // 10 == 9:
        assert 8 <= d <= 256 and 8 <= dv <= 256 and d % unit == 0 and dv % unit == 0, (
            "is not supported on SM90"
        )
        assert num_splits <= 1, "SplitKV not supported on SM 9.0"
    else:
        fits = (d <= 128 and dv <= 128) or (d, dv) in ((192, 128), (256, 256))
        assert fits and d % unit == 0 and dv % unit == 0, "is not supported on SM100/SM110"
    assert not float8 or arch // 10 == 10, (
        "FP8 is only supported on SM100 (compute capability 10.x) for FA4 CuTe."
    )
    assert 0 not in out.stride() and (
        out.is_contiguous() or all(s * out.element_size() % 16 == 0 for s in out.stride()[:-1])
    )
    assert float8 or q_descale is k_descale is v_descale is None, "only supported for FP8 inputs"
    assert window_size_left is None or window_size_left >= 0, (
        "a negative window is read as a number of keys"
    )
    assert window_size_right is None or window_size_right >= 0
    if not v.numel() or not q.numel():
        out.zero_()
        if lse is not None:
            lse.copy_(
                torch.full_like(lse, float("-inf"))
                if learnable_sink is None
                else learnable_sink[:, None].expand_as(lse)
            )
        return out, lse, None, None, None
    a: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "softcap": softcap or 0.0,
        "is_causal": causal,
        "attention_chunk": 0,
        "sinks": learnable_sink,
        "window_size_left": -1 if window_size_left is None else window_size_left,
        "window_size_right": -1 if window_size_right is None else window_size_right,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    tile = 128 if d <= 128 else 112
    for b in range(batch):
        at = (
            slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1])) if cu_seqlens_q is not None else b
        )
        if page_table is not None:
            assert seqused_k is not None
            end, page = int(seqused_k[b]), k.shape[1]
            pages = page_table[b, : -(-end // page)].long()
            loaded = slice(None) if page == tile else slice(end)
            key, value = k[pages].flatten(0, 1)[loaded], v[pages].flatten(0, 1)[loaded]
        else:
            first = int(cu_seqlens_k[b]) if cu_seqlens_k is not None else 0
            end = int(cu_seqlens_k[b + 1]) - first if cu_seqlens_k is not None else v.shape[1]
            rows = slice(first, first + -(-end // tile) * tile)
            key, value = (k[rows], v[rows]) if cu_seqlens_k is not None else (k[b], v[b])
        to = torch.empty((heads, q[at].shape[0]))
        _request(q[at], None, key, value, end, a, out[at], to, b=b)
        if lse is not None:
            blind = (
                to
                if learnable_sink is None
                else torch.where(to == float("-inf"), learnable_sink.float()[:, None], to)
            )
            (lse[:, at] if cu_seqlens_q is not None else lse[b]).copy_(blind)
    return out, lse, None, None, None
