"""Attention over latents picked for each token (sparse MLA), and the write of latents in packed
form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.problem import Extent
from attnops.core.record import (
    FLOATS,
    INDEX,
    INT32,
    KW_ONLY,
    QUERY,
    Call,
    Sizes,
    arg,
    changed,
    need,
    record,
)
from attnops.ops import rules, typical
from attnops.ops.latent.record import (
    LEAST,
    SIZES,
    STORED,
    WRITE_LEAST,
    WRITE_SIZES,
    check_stored,
    facts,
    fresh_output,
    output_dtypes,
    query_rules,
)
from attnops.ops.sparse import reference
from attnops.ops.sparse.packed_format import GROUP, packed_bytes

PACKED = (torch.uint8,)


def _check_packed(latent_pages: Tensor, field: str, sizes: Sizes) -> None:
    latent_dim, rope_dim = sizes["Dc"], sizes["Dr"]
    need(
        latent_dim >= GROUP and latent_dim % GROUP == 0,
        field,
        latent_dim,
        f"a multiple of {GROUP} (pages are packed)",
    )
    want = packed_bytes(latent_dim, rope_dim)
    need(
        latent_pages.shape[2] == want,
        "latent_pages.shape[2]",
        latent_pages.shape[2],
        f"{want} (bytes of a packed latent)",
    )


def _rules(call: Any, sizes: Sizes) -> None:
    query_rules(call)
    pages = call.latent_pages
    if pages.dtype == torch.uint8:
        _check_packed(pages, "q_nope.shape[2]", sizes)
        if call.kv_scale is not None:
            fail(InvalidInput, "kv_scale", "a tensor", "None, because packed pages hold their own")
        return
    want = sizes["Dc"] + sizes["Dr"]
    need(pages.shape[2] == want, "latent_pages.shape[2]", pages.shape[2], f"{want} (Dc + Dr)")
    check_stored(pages, call.kv_scale, call.q_nope.dtype)


def _without_holes(call: Any) -> Any:
    indices, slots = call.indices, call.latent_pages.shape[0] * call.latent_pages.shape[1]
    return changed(
        call, indices=torch.where((indices >= 0) & (indices < slots), indices, -1), holes=False
    )


# uint8 says packed; the head dim is that of the unpacked latents.
@record(
    "sparse_mla_attention",
    least=LEAST,
    rules=_rules,
    facts=facts,
    problem={**SIZES, "context": "topk", "kv_dtype": "latent_pages"},
    sums=True,
)
class SparseMlaAttention(Call):
    """Attention of each token over latents picked for it."""

    q_nope: Tensor = arg("T, H, Dc", QUERY, unit_stride=True, holds="queries")
    q_pe: Tensor = arg("T, H, Dr", "q_nope", unit_stride=True, holds="queries")
    latent_pages: Tensor = arg(
        "P, page, numbers", (*FLOATS, *STORED, *PACKED), unit_stride=True, holds="pages"
    )
    indices: Tensor = arg("T, topk", INT32)
    topk_length: Tensor | None = arg("T", INT32, default=None)
    sinks: Tensor | None = rules.LATENT_SINK_LOGITS
    q_scale: Tensor | None = rules.LATENT_QUERY_SCALE
    kv_scale: Tensor | None = rules.LATENT_SCALE
    plan: Tensor | None = rules.PLAN
    _: KW_ONLY
    scale: float = arg(holds="scale_of_logits")
    holes: bool = arg(default=True, hint=True, facts=rules.HOLES, without=_without_holes)
    output: Tensor = arg("T, H, Dc", output_dtypes, written=True)
    lse: Tensor | None = rules.WRITTEN_LATENT_LSE
    workspace: Tensor | None = rules.WORKSPACE


ABOUT = "attention of each token over latents picked for it (MLA), decode and prefill"
FLOPS = "2 * T * H * topk * (2 * Dc + Dr)"

SPARSE = define(
    Op(
        SparseMlaAttention,
        reference.sparse_mla_attention,
        flops=FLOPS,
        about=ABOUT,
        per_layer=True,
        shown=("float32", "float8 keys", "packed latents"),
        typical=({**typical.DEEPSEEK, **typical.NEW, "context": Extent.of(2048)},),
    )
)


def sparse_mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    indices: Tensor,
    *,
    scale: float,
    topk_length: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    output: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    holes: bool = True,
    kernel: str | None = None,
) -> Tensor:
    """Attention of each token over the latents that a list names for it (MLA, absorbed form;
    DeepSeek Sparse Attention). No gradient.

    As `mla_attention`, but `indices` says which keys a token sees: there are no requests, no
    causality and no window, and decode and prefill are one call. Keys without pages are pages of
    one token. Formula: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1.

    Args:
        q_nope, q_pe: `[T, H, Dc]`, `[T, H, Dr]`, float, or float8_e4m3fn with q_scale. Kernels that
            read one `[T, H, Dc + Dr]` copy nothing where the two are its parts.
        latent_pages: `[P, page, Dc + Dr]`, the query's dtype, or float8_e4m3fn/int8 with kv_scale;
            or packed, uint8 `[P, page, Dc + Dc / 128 * 4 + 2 Dr]`, as `write_latent_packed` writes
            them (656 bytes for 512 + 64).
        indices: int32 `[T, topk]`, slots `page_id * page_size + offset`, in any order; -1: none. A
            slot listed twice counts twice. Other negative values and slots past the pages are not
            seen.
        topk_length: int32 `[T]`, 0 to topk: only this many of a token's entries are read; the rest
            may hold anything. None: all.
        sinks: `[H]`, float, as in `attention`; in lse too.
        scale, q_scale, kv_scale, plan, workspace, output, lse, kernel: as in `mla_attention`.
        holes: False promises that every entry that is read is a slot of the pages or -1.

    Returns:
        `output`. A token without entries gives 0, and lse -inf, or the sink where there are sinks.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    if output is None:
        output = fresh_output(q_nope)
    SPARSE(
        SparseMlaAttention(
            q_nope,
            q_pe,
            latent_pages,
            indices,
            topk_length,
            sinks,
            q_scale,
            kv_scale,
            plan,
            scale=scale,
            holes=holes,
            policy=key_for("sparse_mla_attention", kernel),
            output=output,
            lse=lse,
            workspace=workspace,
        )
    )
    return output


def _write_rules(call: Any, sizes: Sizes) -> None:
    _check_packed(call.latent_pages, "latent.shape[1]", sizes)


@record(
    "write_latent_packed",
    least=WRITE_LEAST,
    rules=_write_rules,
    problem={**WRITE_SIZES, "kv_dtype": "latent_pages"},
)
class WriteLatentPacked(Call):
    """The quantising write of new latents and rotated keys into packed pages."""

    latent: Tensor = arg("T, Dc", FLOATS, unit_stride=True, holds="new_keys")
    k_pe: Tensor = arg("T, Dr", "latent", unit_stride=True, holds="new_keys")
    latent_pages: Tensor = arg("P, page, bytes", PACKED, written=True, holds="pages")
    slots: Tensor = arg("T", INDEX, holds="slots_of_tokens")


ABOUT_WRITE = "quantising write of new latents and rotated keys into packed pages"
WRITE_PACKED = define(
    Op(
        WriteLatentPacked,
        reference.write_latent_packed,
        about=ABOUT_WRITE,
        typical=({**typical.LATENT_WRITE, "kv_dtype": torch.uint8},),
    )
)


def write_latent_packed(
    latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, *, kernel: str | None = None
) -> None:
    """Write new latents and their rotated keys into their slots in packed form, in place. No
    gradient.

    A latent is stored as float8_e4m3fn in groups of 128 numbers. A group's scale is the least power
    of two, 2^-13 or more, that brings its largest magnitude to 448 or less; a number is divided by
    it, rounded and stored. A group that holds a NaN or an infinity reads back as NaN, all of it.
    The rotated key is rounded to bfloat16. The format, FlashMLA's for DeepSeek-V3.2: Dc bytes of
    numbers, the scales as float32, the key.

    Args:
        latent, k_pe: `[T, Dc]`, `[T, Dr]`, float, the latent after its norm and the key after its
            rotation. Dc is a multiple of 128.
        latent_pages: uint8 `[P, page, Dc + Dc / 128 * 4 + 2 Dr]`, written; 656 bytes a token for
            512 + 64.
        slots: int32 or int64 `[T]`, `page_id * page_size + offset`; a negative slot skips the
            token. Distinct among written tokens.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires
            grad in grad mode.
    """
    WRITE_PACKED(
        WriteLatentPacked(
            latent, k_pe, latent_pages, slots, policy=key_for("write_latent_packed", kernel)
        )
    )
