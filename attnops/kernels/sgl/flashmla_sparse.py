"""FlashMLA's sparse attention inside the sgl_kernel wheel, for latents of 512 + 64: what `flashmla` calls for `sparse_mla_attention`.

Which of two raw ops answers follows from how the latents lie, not from decode or prefill: `sparse_decode_fwd` reads packed pages
and splits a token's keys among SMs, `sparse_prefill_fwd` reads bfloat16 and gives a token to one SM for every 64 heads. Neither
takes an output, so that there is always one copy; queries in one piece of 64 or 128 heads, and lists of whole tiles, cost no other.
It never ran here on an SM100 device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.errors import InvalidInput
from attnops.kernels.sgl import wheel

LIBRARY = "flashmla_ops.*"
LATENT, ROPE = 512, 64
HEADS = (64, 128)
PACKED_TILE, PLAIN_TILE = 64, 128
"""Lists are whole tiles: an assertion in the kernels."""
LARGEST = 2**31 - 1

PREFILL_LSE_BASE = 2.0
"""Of `sparse_prefill_fwd`, as its docstring says and an H200 showed; tests/gpu/test_sparse.py holds it to that."""

MOST_TOKENS = 512
"""Tokens of one `sparse_decode_fwd`. It makes a float32 output a token and head for splits that there may be, used or not."""


def sparse_mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    scale: float,
    holes: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `attnops.ops.sparse_mla_attention`. Raises InvalidInput when `latent_pages` does not start at a multiple of 16 bytes."""
    if not (output.numel() and indices.numel() and latent_pages.numel()):
        output.zero_()
        if lse is not None:
            lse.copy_(sinks) if sinks is not None else lse.fill_(float("-inf"))
        return
    if latent_pages.data_ptr() % 16:
        raise InvalidInput("latent_pages.data_ptr()", latent_pages.data_ptr(), "a multiple of 16: rows are loaded 16 bytes at a time")
    have = q_nope.shape[1]
    heads = next(h for h in HEADS if h >= have)
    query = _query(q_nope, q_pe, heads)
    if scale <= 0:
        # What a token does not see is -inf before the kernels multiply by the scale.
        query, scale = query * (-1.0 if scale < 0 else 0.0), -scale or 1.0
    logits = None if sinks is None else sinks.float()
    padded = logits
    if logits is not None:
        padded = logits.contiguous() if heads == have else pad(logits, (0, heads - have))
    run = _packed if latent_pages.dtype == torch.uint8 else _plain
    step = MOST_TOKENS if run is _packed else query.shape[0]
    for start in range(0, query.shape[0], step):
        rows = slice(start, start + step)
        length = None if topk_length is None else topk_length[rows]
        out, z = run(query[rows], latent_pages, indices[rows], length, padded, scale, holes)
        output[rows].copy_(out[:, :have])
        if lse is not None:
            natural = z[:, :have] if run is _packed else z[:, :have] * math.log(PREFILL_LSE_BASE)
            _write_lse(lse[rows], natural, logits)


def _query(q_nope: Tensor, q_pe: Tensor, heads: int) -> Tensor:
    """`[T, heads, Dc + Dr]`; what the added heads hold means nothing."""
    tokens, have = q_nope.shape[:2]
    if have == heads:
        whole = _beside(q_nope, q_pe)
        return torch.cat([q_nope, q_pe], -1) if whole is None else whole
    query = q_nope.new_empty((tokens, heads, LATENT + ROPE))
    query[:, :have, :LATENT] = q_nope
    query[:, :have, LATENT:] = q_pe
    return query


def _beside(q_nope: Tensor, q_pe: Tensor) -> Tensor | None:
    """The tensor whose two parts these are, if they are, and it lies as TMA wants it."""
    if q_nope.untyped_storage().data_ptr() != q_pe.untyped_storage().data_ptr() or q_nope.stride() != q_pe.stride():
        return None
    apart = q_pe.storage_offset() - q_nope.storage_offset()
    if apart != LATENT or q_nope.data_ptr() % 16 or q_nope.stride(0) % 8 or q_nope.stride(1) % 8:
        return None
    return q_nope.as_strided((*q_nope.shape[:2], LATENT + ROPE), q_nope.stride())


def _packed(
    query: Tensor, pages: Tensor, indices: Tensor, length: Tensor | None, sinks: Tensor | None, scale: float, holes: bool
) -> tuple[Tensor, Tensor]:
    """(output `[T, heads, Dc]`, lse `[T, heads]`, +inf for none, without sinks). Every token is a request of one query."""
    wheel.load("sparse_decode_fwd", LIBRARY)
    # The kernel asserts that it is given no lengths for this format: what lies past them is named none.
    lists = _lists(indices, length, pages, PACKED_TILE, holes)
    out, z, _, _ = torch.ops.sgl_kernel.sparse_decode_fwd(
        query[:, None], pages[:, :, None], lists[:, None], None, sinks, None, None, None, None, None, LATENT, scale
    )
    return out[:, 0], z[:, :, 0]


def _plain(
    query: Tensor, pages: Tensor, indices: Tensor, length: Tensor | None, sinks: Tensor | None, scale: float, holes: bool
) -> tuple[Tensor, Tensor]:
    """As `_packed`, but lse is to PREFILL_LSE_BASE."""
    wheel.load("sparse_prefill_fwd", LIBRARY)
    length = None if length is None else length.contiguous()
    keys, lists = pages.flatten(0, 1)[:, None], _lists(indices, None, pages, PLAIN_TILE, holes)
    out, _, z = torch.ops.sgl_kernel.sparse_prefill_fwd(query, keys, lists[:, None], scale, LATENT, sinks, length)
    return out, z


def _lists(indices: Tensor, length: Tensor | None, pages: Tensor, tile: int, holes: bool) -> Tensor:
    """The lists in whole tiles, with -1 past their lengths and, if there may be `holes`, for what is no slot of the pages: one launch."""
    if not holes and length is None:
        return _tiles(indices, tile)
    slots = min(pages.shape[0] * pages.shape[1], LARGEST) if holes else LARGEST
    if indices.is_cuda:
        from attnops.kernels.triton.launch.data import make_lists

        out = indices.new_empty((indices.shape[0], -(-indices.shape[1] // tile) * tile))
        make_lists(indices, length, slots, out)
        return out
    real = (indices >= 0) & (indices < slots)
    if length is not None:
        real &= torch.arange(indices.shape[1], device=indices.device) < length[:, None]
    return _tiles(torch.where(real, indices, -1), tile)


def _tiles(indices: Tensor, tile: int) -> Tensor:
    """The lists made whole tiles; they are loaded up to 32 bytes at a time."""
    if missing := -indices.shape[1] % tile:
        return pad(indices, (0, missing), value=-1)
    return indices if indices.is_contiguous() and indices.data_ptr() % 32 == 0 else indices.clone(memory_format=torch.contiguous_format)


def _write_lse(lse: Tensor, z: Tensor, sinks: Tensor | None) -> None:
    # The kernels say +inf where there is no key, and leave the sinks out.
    if sinks is None:
        torch.nan_to_num(z, nan=float("nan"), posinf=float("-inf"), neginf=float("-inf"), out=lse)
    else:
        torch.logaddexp(z.masked_fill(z == float("inf"), float("-inf")), sinks, out=lse)
