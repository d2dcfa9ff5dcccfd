"""`flashinfer_append`: FlashInfer's kernels that append to pages, told of slots.

They think in requests: token i of request b goes to place `positions[i]` of b's list of pages. Here all tokens are of one request
whose list names each token's own page once, so that `positions[i]` is i pages and the place within the page. They have no way to
skip a token, so that a skipped one is redirected first, which copies keys and values once; see `reference.data.redirected`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernel import Kernel, Need, arch, one_of, register
from attnops.kernels import _flashinfer_pkg as _pkg
from attnops.kernels._rows import aligned
from attnops.problem import Problem, Refusal
from attnops.reference.data import quantise, redirected
from attnops.reference.mla import rows_of

LATENT, ROPE = 512, 64
INT32 = 2**31


def write_kv(
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    policy: str = "",
) -> None:
    """See `attnops.write_kv`. Pages of keys and of values with different strides take two calls."""
    if slots.shape[0] == 0 or k_pages.numel() == 0:
        return
    slot, keys = _rows(k_pages, quantise(key, k_scale, k_pages.dtype), slots)
    _, values = _rows(v_pages, quantise(value, v_scale, v_pages.dtype), slots)
    aligned(k_pages=k_pages, v_pages=v_pages)
    places = _places(slot, k_pages.shape[1])
    append = _pkg.module("page").append_paged_kv_cache
    if k_pages.stride() == v_pages.stride():
        append(keys, values, *places[:2], (k_pages, v_pages), *places[2:])
    else:
        for rows, pages in ((keys, k_pages), (values, v_pages)):
            append(rows, rows, *places[:2], (pages, pages), *places[2:])


def write_latent(
    latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, kv_scale: Tensor | None = None, *, policy: str = ""
) -> None:
    """See `attnops.ops.write_latent`."""
    if slots.shape[0] == 0 or latent_pages.numel() == 0:
        return
    slot, rows = _rows(latent_pages, rows_of(latent, k_pe, kv_scale, latent_pages.dtype), slots)
    aligned(latent_pages=latent_pages)
    places = _places(slot, latent_pages.shape[1])
    _pkg.module("page").append_paged_mla_kv_cache(
        *rows.split([LATENT, ROPE], -1), *places[:2], *latent_pages.split([LATENT, ROPE], -1), *places[2:]
    )


def _rows(pages: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    # Few torch ops know float8; a gather need not.
    bits = torch.uint8 if pages.dtype.itemsize == 1 else pages.dtype
    slot, new = redirected(pages.view(bits), rows.view(bits), slots)
    return slot, new.contiguous().view(pages.dtype)


def _places(slot: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len. Of the last two only a first 0 is read."""
    tokens = slot.shape[0]
    if tokens * page >= INT32:
        raise InvalidInput("slots", f"{tokens} tokens for pages of {page}", f"tokens * page < {INT32}: places are counted in 32 bits")
    zeros = torch.zeros(max(tokens, 2), dtype=torch.int32, device=slot.device)
    positions = torch.arange(tokens, device=slot.device) * page + slot % page
    return zeros[:tokens], positions.int(), (slot // page).int(), zeros[:2], zeros[:1]


def _one_dim(p: Problem) -> Refusal | None:
    return None if p.v_head_dim == p.head_dim else Refusal("v_head_dim", p.v_head_dim, f"{p.head_dim}, the key's")


def _cost_us(p: Problem) -> float:
    """What it takes to redirect skipped tokens, two dozen small launches, then three passes over the rows. benchmarks/data.py times it."""
    numbers = p.head_dim if p.rope_dim else p.kv_heads * (p.head_dim + p.v_head_dim)
    return 60.0 + 3 * max(p.tokens.hint, 1) * numbers / 1e6


NEEDS: tuple[Need, ...] = (
    arch(*_pkg.ARCHS),
    one_of("kv_dtype", torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    one_of("last_dim_contiguous", True),
)
for _op, _run, _shape in (
    ("write_kv", write_kv, (_one_dim, _pkg.one_block("kv_heads", "head_dim", "kv_dtype"))),
    ("write_latent", write_latent, (one_of("v_head_dim", LATENT), one_of("rope_dim", ROPE))),
):
    register(
        Kernel(
            "flashinfer_append",
            _op,
            _run,
            needs=(*NEEDS, *_shape),
            packages=(_pkg.package(),),
            probe=_pkg.missing,
            cost_us=_cost_us,
            batch_invariant=True,
            about="FlashInfer's append to pages",
        )
    )
