"""The write of latents (MLA) into their pages, and what both ops on such pages check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail
from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.ops.dense import _packed_last
from attnops.problem import Extent, Problem
from attnops.reference import mla
from attnops.select import key_for

STORED = (torch.float8_e4m3fn, torch.int8)
"""What latents may be quantised to."""


def check_pages(latent_pages: Tensor, latent_dim: Any, rope_dim: Any) -> None:
    """Pages are `[P, page, Dc + Dr]`, of a float dtype or one of STORED."""
    check.tensor("latent_pages", latent_pages, 3, (*check.FLOATS, *STORED), "[P, page, Dc + Dr]")
    check.need(latent_pages.shape[1] >= 1, "latent_pages.shape[1]", latent_pages.shape[1], ">= 1 token a page")
    check.equal("latent_pages.shape[2]", latent_pages.shape[2], latent_dim + rope_dim, "Dc + Dr")
    check.need(latent_dim >= 1, "Dc", latent_dim, ">= 1")
    check.need(rope_dim >= 1, "Dr", rope_dim, ">= 1")


def check_stored(latent_pages: Tensor, kv_scale: Tensor | None, dtype: torch.dtype) -> None:
    """Latents have `dtype`, or a quantised one that comes with its scale."""
    if latent_pages.dtype in STORED:
        if kv_scale is None:
            fail(InvalidInput, "kv_scale", "None", f"a scale, because the latents are {check.name(latent_pages.dtype)}")
    elif latent_pages.dtype != dtype:
        want = f"{check.name(dtype)} | " if dtype in check.FLOATS else ""
        fail(InvalidInput, "latent_pages.dtype", check.name(latent_pages.dtype), want + " | ".join(map(check.name, STORED)))


def _check_write(latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    check.tensor("latent", latent, 2, (*check.FLOATS, *STORED), "[T, Dc]")
    check.tensor("k_pe", k_pe, 2, (latent.dtype,), "[T, Dr]")
    check_pages(latent_pages, latent.shape[1], k_pe.shape[1])
    check.tensor("slots", slots, 1, check.INDEX, "[T]")
    check.same_device(latent, k_pe=k_pe, latent_pages=latent_pages, slots=slots, kv_scale=kv_scale)
    check.equal("k_pe.shape[0]", k_pe.shape[0], latent.shape[0], "as many as latents")
    check.equal("slots.shape[0]", slots.shape[0], latent.shape[0], "one slot a token")
    if latent.dtype in STORED:
        _check_quantised(latent, latent_pages, kv_scale)
    else:
        check_stored(latent_pages, kv_scale, latent.dtype)
    check.scales(1, kv_scale=kv_scale)


def _check_quantised(latent: Tensor, latent_pages: Tensor, kv_scale: Tensor | None) -> None:
    own = check.name(latent.dtype)
    if latent_pages.dtype != latent.dtype:
        fail(InvalidInput, "latent_pages.dtype", check.name(latent_pages.dtype), f"{own}, as the latents, which are stored as they are")
    if kv_scale is not None:
        fail(InvalidInput, "kv_scale", "a tensor", f"None, because the latents are {own} already")


def _problem_write(latent: Any, k_pe: Any, latent_pages: Any, slots: Any, kv_scale: Any = None, **_: Any) -> Problem:
    return Problem(
        op="write_latent",
        target=target_of(latent),
        dtype=latent.dtype,
        kv_dtype=latent_pages.dtype,
        kv_heads=1,
        head_dim=int(latent_pages.shape[2]),
        v_head_dim=int(latent.shape[1]),
        rope_dim=int(k_pe.shape[1]),
        page_size=int(latent_pages.shape[1]),
        kv_scales=kv_scale is not None,
        last_dim_contiguous=all(map(_packed_last, (latent, k_pe, latent_pages))),
        tokens=Extent.of(latent.shape[0]),
    )


WRITE_LATENT = define(
    Op(
        name="write_latent",
        schema='(Tensor latent, Tensor k_pe, Tensor(a!) latent_pages, Tensor slots, Tensor? kv_scale=None, *, str policy="") -> ()',
        check=_check_write,
        fake=lambda *_, **__: None,
        problem=_problem_write,
        reference=mla.write_latent,
        about="write of new latents and rotated keys into pages",
    )
)


def write_latent(
    latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, *, kv_scale: Tensor | None = None, kernel: str | None = None
) -> None:
    """Write new latents and their rotated keys into their slots, in place. No gradient.

    Args:
        latent, k_pe: `[T, Dc]`, `[T, Dr]`, float, the latent after its norm and the key after its rotation. Or float8_e4m3fn/int8,
            quantised already (by `rope_quantize_latent`): stored as they are.
        latent_pages: `[P, page, Dc + Dr]`, written. The latent's dtype, or float8_e4m3fn/int8 with kv_scale for float latents.
        slots: int32 or int64 `[T]`, `page_id * page_size + offset`; a negative slot skips the token. Distinct among written tokens.
        kv_scale: float32 `[1]`; what is stored is divided by it, saturated and rounded. None for latents that are quantised already.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires grad in grad mode.
    """
    torch.ops.attnops.write_latent.default(latent, k_pe, latent_pages, slots, kv_scale, policy=key_for("write_latent", kernel))
