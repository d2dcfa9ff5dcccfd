"""Attention over latents picked for each token (sparse MLA), and the write of latents in packed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail
from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.ops.dense import _packed_last
from attnops.ops.latent import STORED, check_pages, check_stored
from attnops.problem import Extent, Problem
from attnops.reference import sparse
from attnops.reference.latent_format import GROUP, packed_bytes
from attnops.select import key_for


def _check_packed(latent_pages: Tensor, latent_field: str, latent_dim: Any, rope_dim: Any) -> None:
    check.need(rope_dim >= 1, "Dr", rope_dim, ">= 1")
    check.need(latent_dim >= GROUP and latent_dim % GROUP == 0, latent_field, latent_dim, f"a multiple of {GROUP} (pages are packed)")
    check.tensor("latent_pages", latent_pages, 3, (torch.uint8,), "[P, page, bytes]")
    check.need(latent_pages.shape[1] >= 1, "latent_pages.shape[1]", latent_pages.shape[1], ">= 1 token a page")
    check.equal("latent_pages.shape[2]", latent_pages.shape[2], packed_bytes(latent_dim, rope_dim), "bytes of a packed latent")


def _check_sparse(
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
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    check.tensor("q_nope", q_nope, 3, (*check.FLOATS, torch.float8_e4m3fn), "[T, H, Dc]")
    check.tensor("q_pe", q_pe, 3, (q_nope.dtype,), "[T, H, Dr]")
    for dim, meaning in ((0, "the tokens of q_nope"), (1, "the heads of q_nope")):
        check.equal(f"q_pe.shape[{dim}]", q_pe.shape[dim], q_nope.shape[dim], meaning)
    check.tensor("indices", indices, 2, (torch.int32,), "[T, topk]")
    check.equal("indices.shape[0]", indices.shape[0], q_nope.shape[0], "the tokens of q_nope")
    if topk_length is not None:
        check.tensor("topk_length", topk_length, 1, (torch.int32,), "[T]")
        check.equal("topk_length.shape[0]", topk_length.shape[0], q_nope.shape[0], "the tokens of q_nope")
    check.tensor("output", output, 3, check.FLOATS if q_nope.dtype in STORED else (q_nope.dtype,), "[T, H, Dc]")
    check.same_device(
        q_nope, q_pe=q_pe, latent_pages=latent_pages, indices=indices, topk_length=topk_length, sinks=sinks, q_scale=q_scale,
        kv_scale=kv_scale, output=output, lse=lse, workspace=workspace,
    )  # fmt: skip
    check.plan(q_nope.device, plan)
    check.need(q_nope.shape[1] >= 1, "q_nope.shape[1]", q_nope.shape[1], ">= 1 head")
    if q_nope.dtype in STORED and q_scale is None:
        fail(InvalidInput, "q_scale", "None", f"a scale, because the query is {check.name(q_nope.dtype)}")
    if latent_pages.dtype == torch.uint8:
        _check_packed(latent_pages, "q_nope.shape[2]", q_nope.shape[2], q_pe.shape[2])
        if kv_scale is not None:
            fail(InvalidInput, "kv_scale", "a tensor", "None, because packed pages hold their own")
    else:
        check_pages(latent_pages, q_nope.shape[2], q_pe.shape[2])
        check_stored(latent_pages, kv_scale, q_nope.dtype)
    check.scales(1, q_scale=q_scale, kv_scale=kv_scale)
    check.sinks(sinks, q_nope.shape[1])
    check.numbers(scale, -1, -1, 0.0)
    for dim in range(3):
        check.equal(f"output.shape[{dim}]", output.shape[dim], q_nope.shape[dim], "[T, H, Dc]")
    if lse is not None:
        check.tensor("lse", lse, 2, (torch.float32,), "[T, H]")
        for dim in range(2):
            check.equal(f"lse.shape[{dim}]", lse.shape[dim], q_nope.shape[dim], "[T, H]")


def _problem_sparse(
    q_nope: Any,
    q_pe: Any,
    latent_pages: Any,
    indices: Any,
    topk_length: Any = None,
    sinks: Any = None,
    q_scale: Any = None,
    kv_scale: Any = None,
    plan: Any = None,
    *,
    scale: float,
    holes: bool = True,
    output: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> Problem:
    return Problem(
        op="sparse_mla_attention",
        target=target_of(q_nope),
        dtype=q_nope.dtype,
        # uint8 says packed; the head dim is that of what is packed.
        kv_dtype=latent_pages.dtype,
        q_heads=int(q_nope.shape[1]),
        kv_heads=1,
        head_dim=int(q_nope.shape[2]) + int(q_pe.shape[2]),
        v_head_dim=int(q_nope.shape[2]),
        rope_dim=int(q_pe.shape[2]),
        page_size=int(latent_pages.shape[1]),
        sinks=sinks is not None,
        sinks_dtype=None if sinks is None else sinks.dtype,
        kv_scales=q_scale is not None or kv_scale is not None,
        lse=lse is not None,
        plan=check.plan_kind(plan),
        holes=holes,
        last_dim_contiguous=_packed_last(q_nope) and _packed_last(q_pe) and _packed_last(latent_pages),
        pages_packed=latent_pages.stride() == (latent_pages.shape[1] * latent_pages.shape[2], latent_pages.shape[2], 1),
        tokens=Extent.of(q_nope.shape[0]),
        context=Extent.of(indices.shape[1]),
    )


SPARSE = define(
    Op(
        name="sparse_mla_attention",
        schema="(Tensor q_nope, Tensor q_pe, Tensor latent_pages, Tensor indices, Tensor? topk_length=None, Tensor? sinks=None, "
        "Tensor? q_scale=None, Tensor? kv_scale=None, Tensor? plan=None, *, float scale, "
        'bool holes=True, str policy="", Tensor(a!) output, Tensor(b!)? lse=None, Tensor(c!)? workspace=None) -> ()',
        check=_check_sparse,
        fake=lambda *_, **__: None,
        problem=_problem_sparse,
        reference=sparse.sparse_mla_attention,
        about="attention of each token over latents picked for it (MLA), decode and prefill",
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
    """Attention of each token over the latents that a list names for it (MLA, absorbed form; DeepSeek Sparse Attention). No gradient.

    As `mla_attention`, but which keys a token sees is said by `indices`, token by token: there are no requests, no causality and
    no window here, and decode and prefill are one call. Keys without pages are pages of one token. Formula:
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1.

    Args:
        q_nope, q_pe: `[T, H, Dc]`, `[T, H, Dr]`, float, or float8_e4m3fn with q_scale. When they are the two parts of one
            `[T, H, Dc + Dr]`, kernels that want that need not copy it.
        latent_pages: `[P, page, Dc + Dr]`, the query's dtype, or float8_e4m3fn/int8 with kv_scale; or packed, uint8
            `[P, page, Dc + Dc / 128 * 4 + 2 Dr]`, as `write_latent_packed` writes them (656 bytes for 512 + 64).
        indices: int32 `[T, topk]`, slots `page_id * page_size + offset`, in any order; -1: none. A slot listed twice counts twice.
            No other negative value is a slot, nor is one past the pages: they are not seen.
        scale: what the scores are multiplied by, as in `mla_attention`.
        topk_length: int32 `[T]`, 0 to topk: only this many of a token's entries are read; the rest may hold anything. None: all.
        sinks: `[H]`, float, a logit a head that takes its share of the softmax and gives nothing, as in `attention`; in lse too.
        q_scale, kv_scale: float32 `[1]`, what the stored query and the stored latents are multiplied by.
        plan: what a kernel's plan op made for this batch; kernels that do not plan do not read it.
        output: `[T, H, Dc]` to write into, of the query's dtype, or any float dtype for a quantised query; allocated when None
            (bfloat16 for a quantised query). lse: float32 `[T, H]`, natural log, to write into, or None.
        workspace: scratch for kernels that ask for one, owned by the caller.
        holes: False promises that every entry that is read is a slot of the pages or -1, so that no call need look.
        kernel: force a kernel by name for this call.

    Returns:
        `output`. A token without entries gives 0, and lse -inf, or the sink where there are sinks.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    if output is None:
        output = torch.empty(q_nope.shape, dtype=torch.bfloat16 if q_nope.dtype in STORED else q_nope.dtype, device=q_nope.device)
    torch.ops.attnops.sparse_mla_attention.default(
        q_nope, q_pe, latent_pages, indices, topk_length, sinks, q_scale, kv_scale, plan, scale=scale, holes=holes,
        policy=key_for("sparse_mla_attention", kernel), output=output, lse=lse, workspace=workspace,
    )  # fmt: skip
    return output


def _check_write(latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor) -> None:
    check.tensor("latent", latent, 2, check.FLOATS, "[T, Dc]")
    check.tensor("k_pe", k_pe, 2, (latent.dtype,), "[T, Dr]")
    _check_packed(latent_pages, "latent.shape[1]", latent.shape[1], k_pe.shape[1])
    check.tensor("slots", slots, 1, check.INDEX, "[T]")
    check.same_device(latent, k_pe=k_pe, latent_pages=latent_pages, slots=slots)
    check.equal("k_pe.shape[0]", k_pe.shape[0], latent.shape[0], "as many as latents")
    check.equal("slots.shape[0]", slots.shape[0], latent.shape[0], "one slot a token")


def _problem_write(latent: Any, k_pe: Any, latent_pages: Any, slots: Any, **_: Any) -> Problem:
    return Problem(
        op="write_latent_packed",
        target=target_of(latent),
        dtype=latent.dtype,
        kv_dtype=latent_pages.dtype,
        kv_heads=1,
        head_dim=int(latent.shape[1]) + int(k_pe.shape[1]),
        v_head_dim=int(latent.shape[1]),
        rope_dim=int(k_pe.shape[1]),
        page_size=int(latent_pages.shape[1]),
        last_dim_contiguous=_packed_last(latent) and _packed_last(k_pe),
        tokens=Extent.of(latent.shape[0]),
    )


WRITE_PACKED = define(
    Op(
        name="write_latent_packed",
        schema='(Tensor latent, Tensor k_pe, Tensor(a!) latent_pages, Tensor slots, *, str policy="") -> ()',
        check=_check_write,
        fake=lambda *_, **__: None,
        problem=_problem_write,
        reference=sparse.write_latent_packed,
        about="quantising write of new latents and rotated keys into packed pages",
    )
)


def write_latent_packed(latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, *, kernel: str | None = None) -> None:
    """Write new latents and their rotated keys into their slots in packed form, in place. No gradient.

    A latent is stored as float8_e4m3fn in groups of 128 numbers. A group's scale is the least power of two, 2^-13 or more, that
    brings its largest magnitude to 448 or less; what is stored is the number divided by it, rounded. A group that holds a NaN or
    an infinity reads back as NaN, all of it. The rotated key is rounded to bfloat16. The format, FlashMLA's for DeepSeek-V3.2:
    Dc bytes of numbers, the scales as float32, the key.

    Args:
        latent, k_pe: `[T, Dc]`, `[T, Dr]`, float, the latent after its norm and the key after its rotation. Dc is a multiple of 128.
        latent_pages: uint8 `[P, page, Dc + Dc / 128 * 4 + 2 Dr]`, written; 656 bytes a token for 512 + 64.
        slots: int32 or int64 `[T]`, `page_id * page_size + offset`; a negative slot skips the token. Distinct among written tokens.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires grad in grad mode.
    """
    torch.ops.attnops.write_latent_packed.default(latent, k_pe, latent_pages, slots, policy=key_for("write_latent_packed", kernel))
