"""Stand-ins for FlashInfer 0.7.2's cascade and page functions: not the kernels.

Their signatures, the argument checks of csrc/cascade.cu and csrc/page.cu, and plain bodies on the CPU. Kept from the real ones:
log-sum-exps are in base 2; an empty part that holds NaN spoils the merge; pages are written wherever a position leads, in the pages' own
bit pattern, and a position that leads nowhere is what the GPU calls an illegal memory access.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CALLS: list[str] = []
"""The functions called, in order."""

HALVES = (torch.float16, torch.bfloat16)
STORED = (*HALVES, torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = (64, 128, 256, 512)


def check(ok: bool, text: str) -> None:
    if not ok:
        raise RuntimeError(text)


def contiguous(**given: Tensor) -> None:
    for name, x in given.items():
        check(x.is_contiguous(), f"Check failed: (x.IsContiguous()) is false: {name} must be contiguous")


def launch(head_dim: int, heads: int, itemsize: int, blocks: int) -> None:
    """DISPATCH_HEAD_DIM, and what CUDA says of a launch of blocks without threads or with too many."""
    check(head_dim in HEAD_DIMS, f"Unsupported head_dim: {head_dim}")
    threads = heads * (head_dim // max(16 // itemsize, head_dim // 32))
    check(0 < threads <= 1024 and blocks > 0, "kernel launch failed: invalid configuration argument")


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append("merge_states")
    s = s.to(torch.float32)
    contiguous(v=v, s=s)
    check(v.dim() == 4 and s.dim() == 3 and v.shape[:3] == s.shape, "Check failed: v.size(i) == s.size(i)")
    check(v.dtype in HALVES, "MergeStates kernel launch failed: unsupported data type.")
    launch(v.shape[3], v.shape[2], v.dtype.itemsize, v.shape[0])
    most = s.amax(1, keepdim=True)
    # max(x, -inf) drops the NaN of two empty parts.
    weights = torch.exp2(torch.nan_to_num(s - most, nan=-float("inf")))
    total = weights.sum(1)
    scale = torch.where(total > 0, 1.0 / total, 0.0)
    merged = (v.float() * weights[..., None]).sum(1) * scale[..., None]
    return merged.to(v.dtype), torch.log2(total) + most[:, 0]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append("merge_state")
    contiguous(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    check(v_a.shape == v_b.shape and s_a.shape == s_b.shape == v_a.shape[:2], "Check failed: shapes differ")
    out = merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
    CALLS.pop()
    return torch.empty_like(v_a).copy_(out[0]), torch.empty_like(s_a).copy_(out[1])


def _place(pages: tuple[Tensor, ...], batch_indices: Tensor, positions: Tensor, indices: Tensor, indptr: Tensor, last: Tensor) -> Any:
    for x in (batch_indices, positions, indices, indptr, last):
        assert x.dtype == torch.int32
        check(x.is_contiguous() and x.dim() == 1, "must be contiguous")
    check(indptr.shape[0] == last.shape[0] + 1, "Check failed: kv_indptr.size(0) == batch_size + 1")
    for x in pages:
        check(x.stride(-1) == 1, "paged cache must be contiguous at last dimension")
        check(x.dtype in STORED, f"failed to dispatch with dtype {x.dtype}")
        assert all(n * x.dtype.itemsize % 16 == 0 for n in (x.storage_offset(), *x.stride()[:-1])), "CUDA error: misaligned address"
    at = indptr.long()[batch_indices.long()] * pages[0].shape[1] + positions
    entry, row = at % pages[0].shape[1], at // pages[0].shape[1]
    check(bool(((row >= 0) & (row < indices.shape[0])).all()), "CUDA error: an illegal memory access was encountered")
    page = indices.long()[row]
    check(bool(((page >= 0) & (page < pages[0].shape[0])).all()), "CUDA error: an illegal memory access was encountered")
    return page, entry


def _put(pages: Tensor, rows: Tensor, at: Any) -> None:
    assert rows.dtype == pages.dtype, "the rows are read in the pages' dtype, whatever theirs"
    check(rows.stride(-1) == 1, "append must be contiguous at last dimension")
    bits = torch.int8 if pages.dtype.itemsize == 1 else torch.int16
    pages.view(bits)[at] = rows.view(bits)


def append_paged_kv_cache(
    append_key: Tensor, append_value: Tensor, batch_indices: Tensor, positions: Tensor, paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    CALLS.append("append_paged_kv_cache")
    assert kv_layout == "NHD" and isinstance(paged_kv_cache, tuple)
    k_pages, v_pages = paged_kv_cache
    check(k_pages.stride() == v_pages.stride(), "k/v strides must be identical")
    check(batch_indices.shape == positions.shape == append_key.shape[:1], "Check failed: batch_indices.size(0) == nnz")
    for rows in (append_key, append_value):
        check(rows.shape[1:] == k_pages.shape[2:], "Check failed: append_key.size(1) == num_heads")
    launch(k_pages.shape[3], k_pages.shape[2], k_pages.dtype.itemsize, append_key.shape[0])
    at = _place(paged_kv_cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    _put(k_pages, append_key, at)
    _put(v_pages, append_value, at)


def append_paged_mla_kv_cache(
    append_ckv: Tensor, append_kpe: Tensor, batch_indices: Tensor, positions: Tensor, ckv_cache: Tensor, kpe_cache: Tensor,
    kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor,
) -> None:  # fmt: skip
    CALLS.append("append_paged_mla_kv_cache")
    check(ckv_cache.shape[2] == 512, "head_dim_ckv must be equal to 512")
    check(kpe_cache.shape[2] == 64, "head_dim_kpe must be equal to 64")
    check(append_ckv.shape[1] == 512 and append_kpe.shape[1] == 64, "Check failed: append_ckv.size(1) == ckv_dim")
    check(batch_indices.shape == positions.shape == append_ckv.shape[:1], "Check failed: batch_indices.size(0) == nnz")
    check(append_ckv.shape[0] > 0, "kernel launch failed: invalid configuration argument")
    at = _place((ckv_cache, kpe_cache), batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    _put(ckv_cache, append_ckv, at)
    _put(kpe_cache, append_kpe, at)
