"""The write of latents (MLA) into their pages, and the rules that all ops on such pages share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.call import FLOAT32, FLOATS, INDEX, Call, Sizes, arg, name, need, record
from attnops.errors import InvalidInput, fail
from attnops.ops.op import Op, define
from attnops.ops.rules import key_for
from attnops.reference import mla

STORED = (torch.float8_e4m3fn, torch.int8)
"""The quantised dtypes of latents."""

SIZES = {"head_dim": "Dc + Dr", "v_head_dim": "Dc", "kv_heads": "1", "q_heads": "H"}


def check_sizes(sizes: Sizes) -> None:
    """Pages, latents and rotated keys are not empty."""
    need(sizes["page"] >= 1, "latent_pages.shape[1]", sizes["page"], ">= 1 token a page")
    for dim in ("Dc", "Dr"):
        need(sizes[dim] >= 1, dim, sizes[dim], ">= 1")


def check_stored(latent_pages: Tensor, kv_scale: Tensor | None, dtype: torch.dtype) -> None:
    """Latents have `dtype`, or a quantised one that comes with its scale."""
    if latent_pages.dtype in STORED:
        if kv_scale is None:
            fail(InvalidInput, "kv_scale", "None", f"a scale, because the latents are {name(latent_pages.dtype)}")
    elif latent_pages.dtype != dtype:
        want = f"{name(dtype)} | " if dtype in FLOATS else ""
        fail(InvalidInput, "latent_pages.dtype", name(latent_pages.dtype), want + " | ".join(map(name, STORED)))


def _rules(call: Any, sizes: Sizes) -> None:
    check_sizes(sizes)
    latent, pages, scale = call.latent, call.latent_pages, call.kv_scale
    if latent.dtype not in STORED:
        check_stored(pages, scale, latent.dtype)
        return
    own = name(latent.dtype)
    if pages.dtype != latent.dtype:
        fail(InvalidInput, "latent_pages.dtype", name(pages.dtype), f"{own}, as the latents, which are stored as they are")
    if scale is not None:
        fail(InvalidInput, "kv_scale", "a tensor", f"None, because the latents are {own} already")


@record("write_latent", rules=_rules, stored="latent_pages", problem={n: v for n, v in SIZES.items() if n != "q_heads"})
class WriteLatent(Call):
    """The write of new latents and rotated keys into pages."""

    latent: Tensor = arg("T, Dc", (*FLOATS, *STORED), unit_stride=True)
    k_pe: Tensor = arg("T, Dr", "latent", unit_stride=True)
    latent_pages: Tensor = arg("P, page, Dc + Dr", (*FLOATS, *STORED), written=True, unit_stride=True)
    slots: Tensor = arg("T", INDEX)
    kv_scale: Tensor | None = arg("1", FLOAT32, default=None)


WRITE_LATENT = define(Op(WriteLatent, mla.write_latent, about="write of new latents and rotated keys into pages"))


def write_latent(
    latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, *, kv_scale: Tensor | None = None, kernel: str | None = None
) -> None:
    """Write new latents and their rotated keys into their slots, in place. No gradient.

    Args:
        latent, k_pe: `[T, Dc]`, `[T, Dr]`, float, the latent after its norm and the key after its rotation. Or float8_e4m3fn/int8,
            quantised already (by `rope_quantize_latent`): stored as they are.
        latent_pages: `[P, page, Dc + Dr]`, written. The latent's dtype, or float8_e4m3fn/int8 with kv_scale for float latents.
        slots: int32 or int64 `[T]`, `page_id * page_size + offset`; a negative slot skips the token. Distinct among written tokens.
        kv_scale: float32 `[1]`; the op divides by it, saturates and rounds. None for latents that are quantised already.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires grad in grad mode.
    """
    WRITE_LATENT(WriteLatent(latent, k_pe, latent_pages, slots, kv_scale, policy=key_for("write_latent", kernel)))
